"""``whet eval``: the score of a run's model, or of any model on a recipe's tasks."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.words import AsJson, Overrides

if TYPE_CHECKING:
    from whet.recipe import Recipe


class Split(StrEnum):
    """Which tasks are posed."""

    TEST = "test"
    TRAIN = "train"


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="Run folder (its best or newest checkpoint) or a recipe.")
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to score instead: a folder or a name on the Hugging Face hub.")
    ] = None,
    split: Annotated[Split | None, typer.Option("--split", help="Tasks to pose, instead of the recipe's.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Pose only the first tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per task.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the tasks, or the held-out rows, of a run or recipe."""
    from whet.config import load
    from whet.environments.base import TaskSet
    from whet.recipe import Recipe

    run = Path(target) if (Path(target) / "recipe.yaml").is_file() else None
    settings = load(Recipe, target, overrides or []).value
    wanted = {"split": split.value if split else None, "limit": limit, "samples": samples, "temperature": temperature}
    asked: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if isinstance(settings.data, TaskSet):
        from whet.evaluate import evaluate as score

        report = score(settings, model=model, run=run if model is None else None, **asked)
        title = f"{model or target}: {report.n} tasks, {report.samples} per task"
        last = f"accuracy {report.accuracy:.1%}, 95% interval {report.low:.1%} to {report.high:.1%} (over tasks)"
        _show(title, report.metrics(), last, as_json)
    else:
        values = _rows(settings, asked, model, run)
        _show(f"{target}: {values['evaluation/n']:.0f} held-out rows", values, "", as_json)


def _rows(settings: "Recipe", asked: dict[str, Any], model: str | None, run: Path | None) -> dict[str, float]:
    """Rows are not answered, but read by what was trained on such rows."""
    import asyncio

    from whet.errors import ConfigError
    from whet.feed import measure_rows

    refused = [f"--{name}" for name in ("samples", "temperature") if name in asked] + ["--model"] * (model is not None)
    if refused:
        raise ConfigError(f"{refused[0]}: this recipe learns from rows, and no model answers them")
    evaluation = settings.evaluation.model_copy(update=asked)
    return asyncio.run(measure_rows(settings.model_copy(update={"evaluation": evaluation}), run))


def _show(title: str, values: dict[str, float], last: str, as_json: bool) -> None:
    measures = {name.removeprefix("evaluation/"): value for name, value in values.items()}
    if as_json:
        import json

        print(json.dumps(measures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    if last:
        print(last)
