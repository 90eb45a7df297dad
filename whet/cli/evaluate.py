"""``whet eval``: scores runs, models and endpoints on a recipe's tasks or on benchmarks."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whet.base.strict_json import JsonObject
from whet.cli.arguments import AsJson, SamplingOverrides, print_json, warn_of_unread

if TYPE_CHECKING:
    from whet.run.evaluation import EvaluationSet
    from whet.run.recipe import Recipe
    from whet.run.scores import Report

log = logging.getLogger(__name__)

_FOR_MODELS: JsonObject = {
    "sampling": {"max_prompt_tokens": 2048, "max_new_tokens": 2048},
    "evaluation": {"temperature": 0},
    "learner": {"max_tokens": 10_000_000},  # nothing is learned, so the learner limits no answer
}
_OF_MODEL = ("model", "chat_template", "template_arguments", "tools_as_text", "checkpoints")  # sections of a recipe


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE|MODEL|URL",
            help="Run folder (its best or newest checkpoint), a recipe, a model (folder or Hub id) or an endpoint "
            "(http://HOST:PORT/v1#MODEL).",
        ),
    ],
    overrides: SamplingOverrides = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to score instead: a run, a folder, a Hub id or an endpoint.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Score a second model on the same tasks; print the difference with its interval."
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on", help="Sets to score on, instead of the recipe's tasks: benchmarks, task sets; as in gsm8k,aime24."
        ),
    ] = None,
    split: Annotated[
        Literal["test", "train"] | None, typer.Option("--split", help="Split to score on, instead of the recipe's.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first tasks of each set.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per task.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option("--key-env", help="Environment variable with the key of an endpoint, instead of OPENAI_API_KEY."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on tasks, held-out rows or benchmarks. For example: whet eval Qwen/Qwen3-0.6B --on gsm8k"""
    from whet.base.errors import ConfigError
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.run.remote_model import split_address
    from whet.show.evaluation import as_values, print_reports
    from whet.show.heartbeat import Heartbeat
    from whet.tasks.base import TaskSet

    for name in (target, model, against):
        if name is not None and _is_url(name):
            split_address(name)
    settings = _settings(target, overrides or [], bool(on))
    scored = [name for name in (model or target, against) if name is not None]
    given = all(_is_url(name) or (run_of(name) is not None and name != target) for name in scored)
    warn_of_unread(overrides or [], ("validation", *(_OF_MODEL if given else ())))
    _warn_of_sampling(overrides or [])
    options = {"split": split, "limit": limit, "samples": samples, "temperature": temperature}
    changes: JsonObject = {name: value for name, value in options.items() if value is not None}
    if not on and not isinstance(settings.data, TaskSet):
        for_tasks = {
            "--model": model, "--against": against, "--samples": samples, "--temperature": temperature,
            "--key-env": key_env,
        }  # fmt: skip
        with Heartbeat(f"evaluating {target}", sys.stderr):
            refused = [name for name, value in for_tasks.items() if value is not None]
            values = _rows(settings, changes, refused, run_of(target))
        evaluated = changes.get("split", settings.evaluation.split)
        _show_rows(f"{target}: {values['n']:.0f} rows of the {evaluated} split", values, as_json)
        return
    if not on and _is_model(target):
        what = (
            f"{target} is not a folder here, so it names a model of the Hub"
            if _on_hub(target)
            else f"{target} is a model"
        )
        raise ConfigError(f"{what}, and a model has no tasks: name sets, as in --on gsm8k")
    settings = settings.evaluated_with(changes)
    config = settings.evaluation
    names = [name.strip() for words in on or () for name in words.split(",") if name.strip()]
    if on and not names:
        raise ConfigError("--on names no set; name one, as in --on gsm8k")
    addresses = _addresses([model or target, against], key_env)
    for name in (model, against):
        _check_there(name)
    sets = {name: _set(name, settings, split) for name in names}

    def measure(name: str) -> "dict[str, Report]":
        from whet.processes.compute import run_computing
        from whet.run.evaluate_model import evaluate_model, evaluate_on
        from whet.run.evaluation import EvaluationSet
        from whet.tasks.listing import tasks_of

        run, address = run_of(name), addresses.get(name)
        recipe = settings if run is None or name == target else _with_model(settings, load(Recipe, run).value)
        other = None if run or address or name == target else name
        if address is None and not sets:
            report = run_computing(evaluate_model(recipe, model=other, run=run))
            return {"": report} if report.n else report.sets
        evaluated = sets or config.sets
        if not sets and (not evaluated or tasks_of(settings.taskset, config.split)):
            tasks = EvaluationSet(data=settings.taskset, split=config.split, limit=config.limit)
            evaluated = {"": tasks, **config.sets}
        reports = run_computing(evaluate_on(recipe, evaluated, model=other, run=run, address=address))
        if "" in reports:  # the additional sets belong to the report of the recipe's tasks, as in ``evaluate_model``
            reports[""].sets |= {key: report for key, report in reports.items() if key}
            return {"": reports[""]}
        return reports

    with Heartbeat(f"evaluating {model or target}", sys.stderr):
        reports = measure(model or target)
        from whet.run.evaluate import telling_finished

        with telling_finished({f"{model or target} {name}".strip(): report for name, report in reports.items()}):
            others = measure(against) if against is not None else None
    if as_json:
        print_json(as_values(model or target, reports, against, others))
    else:
        print_reports(model or target, reports, against, others)


def run_of(name: str) -> Path | None:
    """Return the path if it is a run folder, else None."""
    return Path(name) if (Path(name) / "recipe.yaml").is_file() else None


def recipe_of_model(model: str, overrides: list[str], defaults: JsonObject | None = None) -> "Recipe":
    """Return the quickstart's settings, changed by ``defaults``, with another model and no adapter. Raises
    ``ConfigError`` for an override that names a model, too."""
    _refuse_another(model, overrides)
    return _quickstart(overrides, {**(defaults or {}), "model": {"path": model, "lora": None}})


def _warn_of_sampling(overrides: list[str]) -> None:
    from whet.config.loading import keys_of_overrides
    from whet.run.recipe import Recipe

    filters = {f"sampling.{name}" for name in ("temperature", "top_k", "top_p", "min_p")}
    names = sorted(filters & keys_of_overrides(Recipe, overrides))
    if names:
        log.warning(
            "%s %s no effect on an evaluation, which samples from all tokens at evaluation.temperature (--temperature)",
            " and ".join(names),
            "has" if len(names) == 1 else "have",
        )


def _refuse_another(model: str, overrides: list[str]) -> None:
    """Raise ``ConfigError`` for an override that names a model, too."""
    from whet.base.errors import ConfigError
    from whet.config.loading import keys_of_overrides
    from whet.run.recipe import Recipe

    if {"model", "model.path"} & keys_of_overrides(Recipe, overrides):
        raise ConfigError(f"{model} is the model already; name the other one in its place, and no model.path")


def recipe_of_rows(target: str, overrides: list[str], defaults: JsonObject | None = None) -> "Recipe":
    """Return the quickstart's settings, changed by ``defaults``, with the model of a recipe that learns from rows, and
    so has no generator. Each override changes the recipe from which its setting is read."""
    from whet.config import load
    from whet.run.recipe import Recipe

    of_model = [text for text in overrides if text.partition("=")[0].partition(".")[0] in _OF_MODEL]
    others = [text for text in overrides if text not in of_model]
    return _with_model(_quickstart(others, defaults or {}), load(Recipe, target, of_model).value)


def _quickstart(overrides: list[str], defaults: JsonObject) -> "Recipe":
    from whet.config import load
    from whet.config.tree import from_plain
    from whet.run.recipe import Recipe

    return load(Recipe, "quickstart", overrides, settings=from_plain(defaults, "this command")).value


def _with_model(settings: "Recipe", recipe: "Recipe") -> "Recipe":
    """Return ``settings`` with the model of another recipe, because a checkpoint fits only its own run's model."""
    return settings.model_copy(update={name: recipe.value_of(name) for name in _OF_MODEL})


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _is_model(name: str) -> bool:
    """Return whether a target is a model, not a run or a recipe."""
    from whet.fetch.adapter import is_adapter
    from whet.fetch.artifacts import PREFIX
    from whet.fetch.smollm2 import NAME

    return (
        name == NAME
        or name.startswith(PREFIX)
        or _is_url(name)
        or (Path(name) / "config.json").is_file()
        or is_adapter(Path(name))
        or _on_hub(name)
    )


def _addresses(names: "list[str | None]", key_env: str | None) -> dict[str, tuple[str, str, str | None]]:
    """Return the URL, the model and the key of each name that is an endpoint."""
    from whet.base.errors import ConfigError
    from whet.run.remote_model import parse_address

    urls = [name for name in names if name is not None and _is_url(name)]
    if key_env is not None and not urls:
        raise ConfigError(f"--key-env {key_env} names the key of an endpoint, and no model is one; leave it out")
    return {url: parse_address(url, key_env) for url in urls}


def _check_there(name: str | None) -> None:
    """Raise ``WhetError`` if there is no such model, before another one is scored for hours."""
    from whet.fetch.model import check_model

    if name is not None and not _is_url(name) and run_of(name) is None:
        check_model(name)


def _on_hub(name: str) -> bool:
    """Return whether a target can only be a model of the Hugging Face Hub."""
    from whet.config.loading import MODEL_ID

    return not Path(name).exists() and bool(MODEL_ID.fullmatch(name))


def _settings(target: str, overrides: list[str], on_sets: bool) -> "Recipe":
    """Return the recipe of a target. A model, and a recipe that learns from rows and is to be scored on sets of tasks,
    get one with room for long answers."""
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.tasks.base import TaskSet

    if _is_url(target):
        _refuse_another(target, overrides)
        return _quickstart(overrides, _FOR_MODELS)
    if run_of(target) is None and _is_model(target):
        return recipe_of_model(target, overrides, _FOR_MODELS)
    if on_sets and not isinstance(load(Recipe, target).value.data, TaskSet):
        return recipe_of_rows(target, overrides, _FOR_MODELS)
    return load(Recipe, target, overrides).value


def _set(name: str, settings: "Recipe", split: Literal["test", "train"] | None) -> "EvaluationSet":
    """Return a set by its name: one of the recipe's ``evaluation.sets``, with the options of the command in
    ``settings``, a benchmark or a task set."""
    from whet.base.errors import ConfigError
    from whet.cli.arguments import recipe_of
    from whet.run.evaluation import EvaluationSet
    from whet.tasks.base import TASK_SETS
    from whet.tasks.benchmarks import BENCHMARKS, benchmark

    limit = settings.evaluation.limit
    if name in settings.evaluation.sets:
        additional = settings.evaluation.sets[name]
        return additional if split is None else additional.model_copy(update={"split": split})
    if name in BENCHMARKS and split is not None:
        raise ConfigError(f"{name} is a benchmark, which has no splits: all its rows are used; leave --split out")
    if name not in BENCHMARKS and (name in TASK_SETS or ":" in name):
        return EvaluationSet(data=recipe_of(name, []).taskset, split=split or "test", limit=limit)
    return EvaluationSet(data=benchmark(name), split="train", limit=limit)


def _rows(settings: "Recipe", changes: JsonObject, refused: list[str], run: Path | None) -> dict[str, float]:
    """Score a model on held-out rows by the loss that training minimises."""
    from whet.base.errors import ConfigError
    from whet.processes.compute import run_computing
    from whet.run.rows_feed import measure_rows

    if refused:
        raise ConfigError(
            f"{refused[0]}: this recipe learns from rows, so its evaluation samples no answers; leave the option out, "
            "or name sets of tasks with --on"
        )
    evaluation = settings.evaluation.model_copy(update=changes)
    values = run_computing(measure_rows(settings.model_copy(update={"evaluation": evaluation}), run))
    return {name.removeprefix("evaluation/"): value for name, value in values.items()}


def _show_rows(title: str, measures: dict[str, float], as_json: bool) -> None:
    from whet.show.evaluation import print_measures

    if as_json:
        print_json(measures)
    else:
        print_measures(title, measures)
