"""``whet doctor``: is everything here that a run needs, and how fast is this machine?"""

from typing import Annotated

import typer

from whet.cli import checks
from whet.cli.words import AsJson


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Check this recipe instead of those of the package.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation and machine. Exit code 1 if something needed is broken."""
    from whet.config import list_recipes

    found: list[checks.Finding] = []
    for check in (
        checks.packages(),
        checks.machine(),
        checks.threads(),
        checks.matmul_speed(),
        checks.model_cache(),
        checks.recipes_validate([recipe] if recipe else list(list_recipes())),
    ):
        for finding in check:
            found.append(finding)
            if not as_json:
                _print(finding)
    broken = [finding for finding in found if finding.state == "broken"]
    if as_json:
        import dataclasses
        import json

        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2, ensure_ascii=False))
    else:
        names = ", ".join(finding.subject for finding in broken)
        print(f"\nbroken: {names}" if broken else "\nnothing that a run needs is broken")
    if broken:
        raise typer.Exit(1)


def _print(finding: checks.Finding) -> None:
    mark = {"good": "ok    ", "advice": "advice", "broken": "BROKEN"}[finding.state]
    print(f"{mark}  {finding.subject:<16}  {finding.value}", flush=True)
    if finding.advice:
        print(f"        {'':<16}  -> {finding.advice}", flush=True)
