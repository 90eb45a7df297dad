"""``whet view``: what the model wrote during a run, and how it was graded."""

from enum import StrEnum
from typing import Annotated

import typer

from whet.cli.words import RunArgument, run_folder


class Order(StrEnum):
    """What the answers are sorted by."""

    ORDER = "order"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    LENGTH = "length"
    MISMATCH = "mismatch"


class Kept(StrEnum):
    """Which answers are shown."""

    CORRECT = "correct"
    WRONG = "wrong"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"


def view(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Without it: the last recorded step.")] = None,
    n: Annotated[int, typer.Option("-n", min=0, help="How many to show; 0 shows all.")] = 8,
    sort: Annotated[Order, typer.Option("--sort", help="What comes first (the largest).")] = Order.ORDER,
    only: Annotated[Kept | None, typer.Option("--only", help="Only those graded so, or that ended so.")] = None,
    html: Annotated[bool, typer.Option("--html", help="Write the run's report.html instead.")] = False,
) -> None:
    """Read the answers that were sampled in a step of a run."""
    if html:
        from whet.show.report import write_report

        print(f"written: {write_report(run_folder(run))}")
        return
    from whet.show.view import view as show

    show(run_folder(run), step=step, n=n or None, sort=sort.value, only=only.value if only else None)
