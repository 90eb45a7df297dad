"""``whet eval``: the score of a run's model, or of any model on a recipe's tasks."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.words import AsJson, Overrides

if TYPE_CHECKING:
    from whet.evaluate import Report


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
    against: Annotated[
        str | None,
        typer.Option("--against", help="Score a second model on the same tasks, and say how sure the difference is."),
    ] = None,
    split: Annotated[Split | None, typer.Option("--split", help="Tasks to pose, instead of the recipe's.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Pose only the first tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per task.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the tasks of a run or recipe."""
    from whet.config import load
    from whet.recipe import Recipe

    settings = load(Recipe, target, overrides or []).value

    from whet.evaluate import evaluate as score

    def measured(name: str) -> "Report":
        run = (Path(name) / "recipe.yaml").is_file()
        return score(
            settings,
            model=None if run or name == target else name,
            run=Path(name) if run else None,
            split=split.value if split else None,
            limit=limit,
            samples=samples,
            temperature=temperature,
        )

    report = measured(model or target)
    measures = _measures(report)
    if against is not None:
        other = measured(against)
        measures |= {f"against/{name}": value for name, value in _measures(other).items()} | report.compare(other)
    if as_json:
        import json

        print(json.dumps(measures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model or target}: {report.n} tasks, {report.samples} per task", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    print(f"accuracy {report.accuracy:.1%}, 95% interval {report.low:.1%} to {report.high:.1%} (over tasks)")
    if against is not None:
        low, high = 100 * measures["difference_low"], 100 * measures["difference_high"]
        points = f"{100 * measures['difference']:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"
        print(f"against {against}: {points} (same tasks)")


def _measures(report: "Report") -> dict[str, float]:
    return {name.removeprefix("evaluation/"): value for name, value in report.metrics().items()}
