"""``whet audit``: was each prompt trained exactly once, and what became of the others?"""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.words import AsJson, RunArgument, print_json, run_folder

if TYPE_CHECKING:
    from whet.rollouts.audit import Audit


def audit(
    run: RunArgument,
    n: Annotated[int, typer.Option("-n", min=0, help="How many violations and dropped prompts to list; 0: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Prove that each prompt a run drew was trained exactly once, or show which were dropped and why. Exit code 1 where
    that is not so."""
    from whet.rollouts.audit import audit as audited

    found = audited(run_folder(run))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        _print(found, n or None)
    if found.violations:
        raise typer.Exit(1)


def _print(found: "Audit", most: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls

    outcomes = ("trained", "filtered", "failed")
    table = Table("epoch", *outcomes, title=f"prompts up to step {found.step}")
    for epoch, counts in sorted(found.by_epoch().items(), key=lambda item: item[0] or 0):
        table.add_row("curriculum" if epoch is None else str(epoch), *(str(counts[outcome]) for outcome in outcomes))
    Console().print(table)
    for (outcome, why), count in found.dropped().most_common(most):
        print(f"{count} {outcome}" + (f": {escape_controls(why)}" if why else ""))
    dropped = [entry for entry in found.entries if entry.outcome != "trained"]
    for entry in dropped[:most]:
        print(f"  step {entry.step}: {escape_controls(entry.uid)} (ticket {entry.ticket}) {entry.outcome}")
    if len(dropped) > (most or len(dropped)):
        print(f"  and {len(dropped) - (most or 0)} more; -n 0 lists all")
    if found.unknown:
        print(f"{found.unknown} were drawn before there was a ledger: nothing is known of them")
    if found.later:
        print(f"{found.later} later ones are not in a checkpoint yet: a resumed run does them again")
    for violation in found.violations[:most]:
        print(f"VIOLATION: {escape_controls(violation)}")
    ended = len(found.entries)
    said = f"{len(found.violations)} violations" if found.violations else "each exactly once"
    print(f"{found.drawn} drawn = {ended} trained or dropped + {found.under_way} under way: {said}")
