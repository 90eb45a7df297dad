"""``whet validate``: checks that a task set grades answers correctly."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, TaskOverrides, print_json

if TYPE_CHECKING:
    from whet.tasks.validate import Graded


def validate(
    target: Annotated[
        str, typer.Argument(metavar="TASKSET|RECIPE", help="A task set (its settings follow: path=...) or a recipe.")
    ],
    overrides: TaskOverrides = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=0, help="How many reference answers of the data to grade.")
    ] = None,
    cases: Annotated[
        str | None, typer.Option("--cases", metavar="FILE", help="Grade the cases of a file, too (see: whet attack).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grade answers whose correct reward is known. Exit code 1 if any is graded wrongly."""
    from whet.cli.arguments import recipe_of
    from whet.processes.compute import run_computing
    from whet.tasks.case_files import read_cases
    from whet.tasks.validate import validate as grade
    from whet.tasks.validate import wrong

    settings = recipe_of(target, overrides or [])
    further = [] if cases is None else read_cases(cases, settings.taskset)
    count = settings.validation.samples if samples is None else samples
    graded = run_computing(grade(settings.taskset, count, further), prepared=False)
    errors = wrong(graded)
    if as_json:
        print_json([dataclasses.asdict(answer) | {"wrong": answer in errors} for answer in graded])
    else:
        _print(graded, errors)
    if errors:
        raise typer.Exit(1)


def _print(graded: "list[Graded]", errors: "list[Graded]") -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls

    table = Table("answers", "graded", "as expected")
    counts, right = Counter(each.kind for each in graded), Counter(each.kind for each in graded if each.right)
    for kind, count in counts.items():
        table.add_row(kind, str(count), str(right[kind]))
    Console().print(table)
    for error in errors:
        print(escape_controls(f"WRONG  {error.kind}, {error.name}: expected {error.expected:g}, but: {error.outcome}"))
    print(f"{len(errors)} of {len(graded)} answers are graded wrongly" if errors else "all as expected")
