"""``whet eval``: the score of a run's model, or of any model on a recipe's tasks."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from whet.cli.words import AsJson, Overrides


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="Run folder (its best or newest checkpoint) or a recipe.")
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to score instead: a folder or a name on the Hugging Face hub.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Tasks to pose: train or test.")] = "test",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Pose only the first tasks.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers per task.")] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the tasks of a run or recipe."""
    from whet.config import load
    from whet.recipe import Recipe

    run = Path(target) if (Path(target) / "recipe.yaml").is_file() else None
    settings = load(Recipe, target, overrides or []).value

    from whet.evaluate import evaluate as score

    report = score(
        settings,
        model=model,
        run=run if model is None else None,
        split=split,
        limit=limit,
        samples=samples,
        temperature=temperature,
    )
    if as_json:
        import json

        print(json.dumps(_plain(report), indent=2, ensure_ascii=False, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model or target}, {split}", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in _rows(_plain(report)):
        table.add_row(name, value)
    Console(file=sys.stdout).print(table)


def _plain(report: object) -> dict[str, object]:
    import dataclasses

    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        return dataclasses.asdict(report)
    dump = getattr(report, "model_dump", None)
    return dict(dump(mode="json")) if dump else dict(vars(report))


def _rows(values: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Numbers and words of the report, nested mappings flattened; lists (every answer) are only for --json."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:.4g}"))
        elif isinstance(value, str | int) or value is None:
            rows.append((prefix + name, "-" if value is None else str(value)))
    return rows
