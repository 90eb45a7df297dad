"""``whet audit``: checks that each prompt was trained exactly once, and lists the dropped ones."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, RunArgument, print_json, run_folder

if TYPE_CHECKING:
    from whet.rollouts.audit import Audit


def audit(
    run: RunArgument,
    n: Annotated[int, typer.Option("-n", min=0, help="How many violations and dropped prompts to list; 0: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Check that each prompt a run drew was trained exactly once, and show which prompts were dropped and why. Exit
    code 1 if there is a violation."""
    from whet.rollouts.audit import audit as audit_run

    result = audit_run(run_folder(run))
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        _print(result, n or None)
    if result.violations:
        raise typer.Exit(1)


def _print(audit: "Audit", most: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls

    outcomes = ("trained", "filtered", "failed")
    table = Table("epoch", *outcomes, title=f"prompts up to step {audit.step}")
    for epoch, counts in sorted(audit.by_epoch().items(), key=lambda item: item[0] or 0):
        table.add_row("curriculum" if epoch is None else str(epoch), *(str(counts[outcome]) for outcome in outcomes))
    Console().print(table)
    for (outcome, why), count in audit.dropped().most_common(most):
        print(f"{count} {outcome}" + (f": {escape_controls(why)}" if why else ""))
    dropped = [entry for entry in audit.entries if entry.outcome != "trained"]
    for entry in dropped[:most]:
        print(f"  step {entry.step}: {escape_controls(entry.uid)} (ticket {entry.ticket}) {entry.outcome}")
    if len(dropped) > (most or len(dropped)):
        print(f"  and {len(dropped) - (most or 0)} more; -n 0 lists all")
    if audit.unknown:
        print(f"{audit.unknown} prompts were drawn before the run kept a ledger; their outcomes are unknown")
    if audit.later:
        print(f"{audit.later} later prompts are not in a checkpoint yet: a resumed run repeats them")
    for violation in audit.violations[:most]:
        print(f"VIOLATION: {escape_controls(violation)}")
    ended = len(audit.entries)
    verdict = f"{len(audit.violations)} violations" if audit.violations else "each exactly once"
    print(f"{audit.drawn} drawn = {ended} trained or dropped + {audit.in_flight} in flight: {verdict}")
