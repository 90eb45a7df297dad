"""``whet eval``: scores a run's model, or any model, on a recipe's tasks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from whet.cli.arguments import AsJson, Overrides, print_json

if TYPE_CHECKING:
    from whet.run.evaluate import Report
    from whet.run.recipe import Recipe


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="Run folder (its best or newest checkpoint) or a recipe.")
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to score instead: a run, a folder or a Hub id.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Score a second model on the same tasks; print the difference with its interval."
        ),
    ] = None,
    split: Annotated[
        Literal["test", "train"] | None, typer.Option("--split", help="Split to score on, instead of the recipe's.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per task.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the tasks, or the held-out rows, of a run or recipe."""
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.show.heartbeat import Heartbeat
    from whet.tasks.base import TaskSet

    settings = load(Recipe, target, overrides or []).value
    options = {"split": split, "limit": limit, "samples": samples, "temperature": temperature}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if not isinstance(settings.data, TaskSet):
        for_tasks = {"--model": model, "--against": against, "--samples": samples, "--temperature": temperature}
        with Heartbeat(f"evaluating {target}", sys.stderr):
            refused = [name for name, value in for_tasks.items() if value is not None]
            values = _rows(settings, changes, refused, run_of(target))
        evaluated = changes.get("split", settings.evaluation.split)
        _show(f"{target}: {values['n']:.0f} rows of the {evaluated} split", values, [], as_json)
        return

    def measure(name: str) -> "Report":
        from whet.run.evaluate import evaluate as score

        run = run_of(name)
        recipe = settings if run is None or name == target else with_model_of(settings, run)
        return score(recipe, model=None if run or name == target else name, run=run, **changes)

    with Heartbeat(f"evaluating {model or target}", sys.stderr):
        report = measure(model or target)
        other = measure(against) if against is not None else None
    measures = _measures(report.metrics())
    lines = [f"accuracy {report.accuracy:.1%}, 95% interval {report.low:.1%} to {report.high:.1%} (over tasks)"]
    if other is not None:
        difference = report.compare(other)
        measures |= {f"against/{name}": value for name, value in _measures(other.metrics()).items()} | difference
        points, low, high = (100 * difference[name] for name in ("difference", "difference_low", "difference_high"))
        lines.append(f"against {against}: {points:+.1f} points, 95% interval {low:+.1f} to {high:+.1f} (same tasks)")
    _show(f"{model or target}: {report.n} tasks, {report.samples} per task", measures, lines, as_json)


def run_of(name: str) -> Path | None:
    """Return the path if it is a run folder, else None."""
    return Path(name) if (Path(name) / "recipe.yaml").is_file() else None


def with_model_of(settings: "Recipe", run: Path) -> "Recipe":
    """Return ``settings`` with the model of another run, because a checkpoint fits only its own run's model."""
    from whet.config import load
    from whet.run.recipe import Recipe

    recipe = load(Recipe, run).value
    parts = ("model", "chat_template", "template_arguments", "tools_as_text", "checkpoints")
    return settings.model_copy(update={name: getattr(recipe, name) for name in parts})


def _rows(settings: "Recipe", changes: dict[str, Any], refused: list[str], run: Path | None) -> dict[str, float]:
    """Score a model on held-out rows by the loss that training minimises."""
    from whet.base.errors import ConfigError
    from whet.processes.compute import run_computing
    from whet.run.feed import measure_rows

    if refused:
        raise ConfigError(
            f"{refused[0]}: this recipe learns from rows, so its evaluation samples no answers; leave the option out"
        )
    evaluation = settings.evaluation.model_copy(update=changes)
    return _measures(run_computing(measure_rows(settings.model_copy(update={"evaluation": evaluation}), run)))


def _measures(values: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("evaluation/"): value for name, value in values.items()}


def _show(title: str, measures: dict[str, float], lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(measures)
        return
    from rich.console import Console
    from rich.table import Table

    print(title)  # not the table's title, which rich wraps to the table's width
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    for line in lines:
        print(line)
