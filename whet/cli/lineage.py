"""``whet lineage``: shows what something was made from, and what was made from it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from whet.cli.arguments import AsJson, print_json


def lineage(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A run, an export, prepared data, a checkpoint, a file, or an artifact."),
    ],
    within: Annotated[
        list[Path] | None,
        typer.Option("--within", help="Look for things made from it among the folders in this one; may be repeated."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a file is missing or was changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw what a run or a model was made from, back to raw files, and what was made from it."""
    from whet.base.escaping import escape_controls
    from whet.fetch.artifacts import PREFIX, artifact_folder
    from whet.lineage.graph import records_near, target_record
    from whet.show.heartbeat import Heartbeat
    from whet.show.lineage import as_json as as_values
    from whet.show.lineage import print_lineage, problems_of

    with Heartbeat(f"reading the files of {target}", sys.stderr):
        record = target_record(artifact_folder(target) if target.startswith(PREFIX) else Path(target))
        near = records_near(record, within or ())
        problems = problems_of(record)
    if as_json:
        print_json(as_values(record, near))
    else:
        print_lineage(record, near)
    if problems and not as_json:
        print(f"{len(problems)} file{'s are' if len(problems) > 1 else ' is'} missing or changed", file=sys.stderr)
    if problems and check:
        for line in problems:
            print(escape_controls(line), file=sys.stderr)
        raise typer.Exit(1)
