"""``whet validate``: whether a task set grades answers as it should."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.words import AsJson, Overrides, print_json

if TYPE_CHECKING:
    from whet.tasks.validate import Graded


def validate(
    target: Annotated[
        str, typer.Argument(metavar="TASKSET|RECIPE", help="A task set (its settings follow: path=...) or a recipe.")
    ],
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=0, help="How many of the data's own right answers to grade.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grade answers whose reward is known. Exit code 1 if any is graded wrongly."""
    from whet.cli.targets import recipe_of
    from whet.processes.compute import run_computing
    from whet.tasks.validate import validate as grade
    from whet.tasks.validate import wrong

    settings = recipe_of(target, overrides or [])
    graded = run_computing(grade(settings.taskset, settings.validation.samples if samples is None else samples))
    found = wrong(graded)
    if as_json:
        print_json([dataclasses.asdict(one) | {"wrong": one in found} for one in graded])
    else:
        _print(graded, found)
    if found:
        raise typer.Exit(1)


def _print(graded: "list[Graded]", found: "list[Graded]") -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls

    table = Table("answers", "graded", "as expected")
    counts, right = Counter(one.kind for one in graded), Counter(one.kind for one in graded if one.right)
    for kind, count in counts.items():
        table.add_row(kind, str(count), str(right[kind]))
    Console().print(table)
    for one in found:
        print(escape_controls(f"WRONG  {one.kind}, {one.name}: expected {one.expected:g}, but: {one.outcome}"))
    print(f"{len(found)} of {len(graded)} answers are graded wrongly" if found else "all as expected")
