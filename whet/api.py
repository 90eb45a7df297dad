"""whet from Python: what ``whet train`` and ``whet resume`` do, for scripts and notebooks.

import whet

result = whet.train(model="smollm2-135m-instruct", data=rows, reward=function)  # your rows, your function
result = whet.start("quickstart", "steps=5", data=MyTasks())                    # a recipe, with parts of yours
"""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from whet.base.errors import ConfigError, WhetError
from whet.base.scratch import Scratch
from whet.config import ConfigIssue, RecipeError, load
from whet.config.component import importing
from whet.config.loading import keys_of_overrides
from whet.config.tree import DEFAULT, from_plain
from whet.config.validation import issues_of
from whet.models.config import check_models
from whet.processes.user_code import check_runs, user_traceback
from whet.run.evaluation import EvaluationConfig
from whet.run.folder import check_free, check_resumable, from_mirror, is_url, new_folder
from whet.run.interrupts import without_loop
from whet.run.log import readers_may_go
from whet.run.recipe import Recipe
from whet.run.signals import StopRequest

if TYPE_CHECKING:
    from whet.run.from_rows import RowData
    from whet.run.open import Opening
    from whet.run.steps import OnStep
    from whet.show.result import Result


def read(recipe: str | Path = "quickstart", *overrides: str, **sections: object) -> Recipe:
    """Return a recipe by name or path, with ``overrides`` as on the command line (``"optimizer.lr=1e-6"``) and whole
    ``sections`` as values (``data=MyTasks()``, ``steps=5``). Raises ``RecipeError`` naming all that is wrong."""
    loaded = load(Recipe, recipe, overrides)
    for number, override in enumerate(overrides, 1):
        section = override.partition("=")[0].partition(".")[0]
        if section in sections:
            why = f"{section} is given as a value, which replaces the section: set this in the value"
            raise RecipeError([ConfigIssue(section, f"override {number} ({override})", why)])
    try:
        inherited = {key: part for key, part in loaded.value if key not in Recipe.replaced_by(sections)}
        value = Recipe.model_validate({**inherited, **sections})
    except ValidationError as error:
        raise RecipeError(issues_of(error, Recipe, from_plain(sections, "given"))) from None
    value, _ = value.with_implied(lambda key: "algorithm" in sections or loaded.origins.get(key, DEFAULT) != DEFAULT)
    unused = {key: why for key, why in value.unused().items() if key.partition(".")[0] in sections}
    if unused:
        raise RecipeError([ConfigIssue(key, "given", why) for key, why in unused.items()])
    return value


def _given(issue: ConfigIssue, written: Path) -> ConfigIssue:
    """Return a mistake in a file that is gone before its name is read as one in the arguments."""
    return replace(issue, where="the arguments of whet.train") if written.parent.name in issue.where else issue


def start(
    recipe: str | Path | Recipe = "quickstart",
    *overrides: str,
    folder: str | Path | None = None,
    on_step: "OnStep | None" = None,
    **sections: object,
) -> "Result":
    """Train from the beginning and return the run, with its report. ``recipe``, ``overrides`` and ``sections`` are the
    arguments of ``read``; ``folder`` must be new, and is by default one under ``runs/``. ``on_step``: a function, sync
    or async, that is called after each step with its number and a dict of its metrics; an exception in it ends the
    run."""
    _check_on_step(on_step)
    value, chosen, name = _planned(recipe, overrides, folder, sections)

    def train(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.start(value, chosen, stop, on_step)

    return _run(f"{name}, {value.duration}, into {chosen}", chosen, train)


def open(
    recipe: str | Path | Recipe = "quickstart", *overrides: str, folder: str | Path | None = None, **sections: object
) -> "Opening":
    """Open a run whose loop is yours; arguments as for ``start``. Nothing is trained by itself.

    async with whet.open("quickstart") as run:  # or plain `with`, where every method blocks
        groups = await run.policy.sample(run.tasks.next(8), n=8)
    """
    value, chosen, name = _planned(recipe, overrides, folder, sections)
    from whet.run.open import Opening  # takes seconds
    from whet.show.heartbeat import Heartbeat
    from whet.show.report import LiveReport

    return Opening(value, chosen, Heartbeat(f"{name}, into {chosen}"), LiveReport(chosen))


def train(
    *overrides: str,
    model: str | os.PathLike[str],
    data: "RowData",
    reward: Callable[..., object] | None = None,
    test: "RowData | None" = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    on_step: "OnStep | None" = None,
    **settings: object,
) -> "Result":
    """Train a model on your rows, and return the run.

        rows = [{"prompt": "What is 2 + 2?", "solution": "4"}, ...]
        whet.train(model="smollm2-135m-instruct", data=rows, reward=lambda answer, solution: solution in answer)

    ``model``: a folder, a Hub id or a built-in name. ``data``: a list of dicts, a ``datasets.Dataset``, a DataFrame or
    the path of a data file; each row has a ``prompt``, a text or messages. ``reward``: a function, sync or async, of
    the model's answer and, by their names, of columns of the row (or of all of them: ``row``); it returns a number, a
    bool, or a dict of scores with the key ``reward``. The model then learns by GRPO. Without a reward, rows with
    ``messages`` or ``prompt`` and ``completion`` are learned by SFT, with a ``label`` that is true or false by KTO,
    ``chosen`` and ``rejected`` by DPO.

    ``steps``: 20 by default; ``epochs=3`` in its place: passes over the rows.
    ``test``: rows to evaluate on; by default a tenth of ``data``, at most 100 rows, is held out. No prompt is in both.
    ``settings``: ``lr``, ``group_size``, ``prompts_per_step``, ``max_new_tokens``, ``temperature``, ``batch_size``, or
    sections of the recipe (``algorithm="dapo"``, ``sampling={"top_p": 0.9}``); ``overrides`` as in ``read``.
    ``folder`` and ``on_step`` as in ``start``.

    Raises ``DataError`` naming the row and field that are wrong, ``RecipeError`` naming all wrong settings."""
    from whet.run.from_rows import RowFiles

    _check_importing()
    _check_on_step(on_step)
    files = RowFiles(data, test, reward)
    chosen = new_folder("train") if folder is None else Path(folder)
    check_free(chosen)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__}; it must be a folder, a Hub id or a built-in name. Save a model in "
            "memory with save_pretrained, and give the folder; set its settings as in 'model.lora.rank=16', in front"
        )
    length = {"steps": 20 if steps is None else steps}
    base = {**length, "model": {"path": os.fspath(model)}, "optimizer": {"lr": 1e-5}, **files.recipe(chosen)}
    sections = {key: value for key, value in settings.items() if not _is_plain(value)}
    plain = {name: value for name, value in settings.items() if name not in sections}
    written_out = {name: f"{_SHORT.get(name, name)}={json.dumps(value)}" for name, value in plain.items()}
    arguments = {"model": model, "data": data, "reward": reward, "test": test, "steps": steps}
    _check_given_once([name for name in arguments if arguments[name] is not None], written_out, overrides)
    with Scratch("recipe") as scratch:
        written = scratch / "train.yaml"
        written.write_text(json.dumps(base), encoding="utf-8")  # JSON is YAML
        try:
            value = read(written, *sorted(written_out.values()), *overrides, **sections)
        except RecipeError as error:
            raise RecipeError([_given(issue, written) for issue in error.issues]) from None
    nothing = EvaluationConfig(enabled=False)
    if base.get("evaluation") and value.evaluation != nothing:
        raise ConfigError("evaluation: fewer than ten rows, so none is held out to evaluate on; give test=, other rows")
    check_models(value)
    files.write(chosen)
    return start(value, folder=chosen, on_step=on_step)


def _check_given_once(names: list[str], settings: dict[str, str], overrides: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` for a setting that an argument of ``train`` and another one, or an override, give.
    ``names``: the arguments that have one key; ``settings``: the others, each written as an override."""
    given = [(f"{name}=", {_KEYS[name]}) for name in names]
    given += [(f"{name}=", keys_of_overrides(Recipe, [text])) for name, text in settings.items()]
    first = dict[str, str]()
    for name, keys in given:
        for key in sorted(map(_or_steps, keys)):
            if key in first:
                raise ConfigError(f"{first[key]} and {name} both set {key}; leave one out")
            first[key] = name
    for text in overrides:  # as on the command line, of two the last one counts
        for key in sorted(map(_or_steps, keys_of_overrides(Recipe, [text]))):
            if key in first:
                raise ConfigError(f"{first[key]} and {text!r} both set {key}; leave one out")


def _or_steps(key: str) -> str:
    """Return the key, of ``epochs`` that of ``steps``, which it replaces."""
    return "steps" if key == "epochs" else key


_KEYS = {
    "model": "model.path",
    "data": "data.path",
    "reward": "data.reward",
    "test": "data.test_path",
    "steps": "steps",
}

_SHORT = {
    "lr": "optimizer.lr",
    "group_size": "algorithm.group_size",
    "prompts_per_step": "rollouts.prompts_per_step",
    "max_new_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "batch_size": "data.batch_size",
}


def _is_plain(value: object) -> bool:
    """Return whether a setting can be written into a recipe: it is not a part such as a loss."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def resume(folder: str | os.PathLike[str], *overrides: str, on_step: "OnStep | None" = None) -> "Result":
    """Resume a run from its newest complete checkpoint and return it. For the URL of its mirror
    (``checkpoints.mirror``) it is downloaded first, into ``runs/``."""
    _check_on_step(on_step)
    path = from_mirror(str(folder)) if is_url(str(folder)) else Path(folder)
    check_resumable(path)

    def train(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.resume(path, overrides, stop, on_step)

    return _run(f"resuming {path}", path, train)


def result(folder: str | os.PathLike[str]) -> "Result":
    """Return a run by its folder: its metrics, report and model. Raises ``ConfigError`` if it is not a run folder."""
    from whet.show.result import Result

    if not (Path(folder) / "recipe.yaml").is_file():
        raise ConfigError(f"{os.fspath(folder)} is not a run folder: it has no recipe.yaml")
    return Result(folder)


def finished(title: str, folder: Path, train: Callable[[StopRequest], Path]) -> Path:
    """Train into the folder while showing the progress, write the report, print a summary, and return the folder."""
    from whet.show.report import shown
    from whet.show.summary import print_summary  # takes a while

    with readers_may_go():
        with shown(title, folder):
            folder = without_loop(train)
        print_summary(folder)
    return folder


def _planned(
    recipe: str | Path | Recipe, overrides: tuple[str, ...], folder: str | Path | None, sections: dict[str, object]
) -> tuple[Recipe, Path, str]:
    """Return the recipe, a free folder and the run's name. Raises ``WhetError`` for everything that can be found wrong
    before something heavy is loaded."""
    _check_importing()
    if isinstance(recipe, Recipe):
        if overrides or sections:
            given = ", ".join([*map(str, overrides), *(f"{key}=..." for key in sections)])
            raise ConfigError(f"the recipe is a value with all its settings: give {given} to whet.read, which makes it")
        value, name = recipe, "run"
    else:
        value, name = read(recipe, *overrides, **sections), Path(recipe).stem
    check_models(value)
    chosen = new_folder(name) if folder is None else Path(folder)
    check_free(chosen)
    return value, chosen, name


def _check_on_step(on_step: object) -> None:
    """Raise ``ConfigError`` if it can't be called after a step: the first one may take long."""
    if on_step is None:
        return
    if not callable(on_step):
        raise ConfigError(f"on_step is {on_step!r}; it must be a function of a step and a dict of its metrics")
    check_runs(on_step, f"on_step: {getattr(on_step, '__name__', type(on_step).__name__)}")
    try:
        signature = inspect.signature(on_step)
    except ValueError:  # a function in C without a signature
        return
    try:
        signature.bind(1, {})
    except TypeError as error:
        name = getattr(on_step, "__name__", type(on_step).__name__)
        raise ConfigError(
            f"on_step is called with a step and a dict of its metrics, and {name}{signature} can't be: {error}"
        ) from None


def _check_importing() -> None:
    if importing():
        raise ConfigError("this file starts a run while it is imported; put that under: if __name__ == '__main__':")


def _run(title: str, folder: Path, train: Callable[[StopRequest], Path]) -> "Result":
    """Train. Errors are raised without the lines of whet: an exception of the user's code with the user's lines."""
    from whet.show.result import Result

    try:
        return Result(finished(title, folder, train))
    except KeyboardInterrupt:
        saved = (folder / "checkpoints").is_dir()
        hint = f"Resume with: whet.resume({str(folder)!r})" if saved else f"Nothing is saved in {folder} yet"
        print(f"interrupted. {hint}", flush=True)
        raise KeyboardInterrupt(hint) from None
    except WhetError as error:
        raise error.with_traceback(None) from None
    except Exception as error:
        error.__traceback__ = user_traceback(error)
        raise
