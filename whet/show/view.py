"""A viewer of a run's rollouts in the terminal. Model output is shown unchanged, except that control characters are
escaped; it is never interpreted as markup."""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from whet.base.errors import DataError
from whet.base.escaping import escape_controls
from whet.base.strict_json import JsonObject
from whet.core.types import Status
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_path, rollout_steps
from whet.show.facts import rollout_rows
from whet.show.transcript import task_data, transcript

Sort = Literal["order", "reward", "advantage", "length", "mismatch"]
Only = Literal["correct", "wrong", "completed", "truncated", "failed"]

ORDERS: dict[str, Callable[[RolloutRecord], float | None]] = {
    "reward": lambda record: record.reward,
    "advantage": lambda record: record.advantage,
    "length": lambda record: len(record.tokens),
    "mismatch": lambda record: record.mismatch,
}
# Colours by |learner - sampler| log-prob; orange if the learner gives the token a higher probability.
_LEVELS = (0.05, 0.2, 0.5, 1.0)
_LIKELIER = ("", "white on #3a2f1c", "white on #5c4319", "white on #8a5a12", "white on #c2750a")
_LESS_LIKELY = ("", "white on #1c2c3f", "white on #1d4166", "white on #1c5a96", "white on #1878cf")


def view(
    run: Path,
    step: int | None = None,
    n: int | None = 8,
    sort: Sort = "order",
    only: Only | None = None,
    console: Console | None = None,
    page: bool | None = None,
) -> None:
    """Show up to ``n`` rollouts (None: all) of one step, by default the last recorded one.

    ``sort`` puts the largest first; ``only`` filters by grade or status. ``page`` uses a pager, by default in a
    terminal. Raises DataError if nothing was recorded."""
    console = console or Console()
    step = last_step(run) if step is None else step
    everything = list(read_rollouts(run, step))
    chosen = select(everything, sort, only)[:n]
    head = Text.assemble(
        (f"step {step}", "bold"), f"   {len(chosen)} of {len(everything)} rollouts",
        f"   sorted by {sort}" if sort in ORDERS else "", f"   only {only}" if only else "",
    )  # fmt: skip
    shown = [render(record) for record in chosen] or [Text("No rollout matches.", style="dim")]
    os.environ.setdefault("LESS", "-FRX")  # like git: colours, and no pager if it fits on one screen
    page = console.is_terminal if page is None else page
    with console.pager(styles=True) if page else nullcontext():
        console.print(head, *shown, sep="\n")


def last_step(run: Path) -> int:
    """Return the last step whose rollouts were recorded. Raises DataError if there is none."""
    steps = rollout_steps(run)
    if not steps:
        raise DataError(
            f"no rollouts in {run / 'rollouts'}: the run learns from rows, has not sampled yet or does not record "
            f"its rollouts; its curves: whet watch {run}"
        )
    return steps[-1]


def as_json(run: Path, step: int | None, n: int | None, sort: Sort, only: Only | None) -> list[JsonObject]:
    """Return the rollouts that ``view`` shows as values of JSON, with their tokens and log-probs."""
    records = read_rollouts(run, last_step(run) if step is None else step)
    return [asdict(record) for record in select(records, sort, only)[:n]]


def select(records: Iterable[RolloutRecord], sort: Sort = "order", only: Only | None = None) -> list[RolloutRecord]:
    """Return the records that match ``only``, sorted. Records without a value to sort by come last."""
    if only == "correct" or only == "wrong":
        chosen = [record for record in records if record.correct is (only == "correct")]
    else:
        chosen = [record for record in records if only is None or record.status == only]
    if key := ORDERS.get(sort):
        valued = [(record, value) for record in chosen if (value := key(record)) is not None]
        rest = [record for record in chosen if key(record) is None]
        chosen = [record for record, _ in sorted(valued, key=lambda pair: -pair[1])] + rest
    return chosen


def render(record: RolloutRecord) -> RenderableType:
    """Render one rollout: headline, prompt, and the answer with each token coloured by learner - sampler log-prob."""
    grade = verdict(record)
    style = {"correct": "bold green", "wrong": "bold red", "": ""}[grade]
    head = Text.assemble((escape_controls(record.task), "bold"), (f" {number(record)}  ", "dim"), (grade, style))
    rows = [row for rows in rollout_rows(record) for row in rows]
    line = Text("   ".join(f"{escape_controls(name)} {value}" for name, value in rows), style="dim")
    if record.status != Status.COMPLETED:
        line.append(f"   {escape_controls(ending(record))}", style="not dim bold yellow")
    parts: list[RenderableType] = [Rule(head, align="left", style="bright_black"), line, Text()]
    earlier = [part for part in transcript(record) if part.folded]
    if earlier:
        words = f"{len(earlier)} earlier messages, {sum(len(part.text) for part in earlier)} characters"
        parts += [Text(f"{words}: in {rollout_path(Path(), record.step)} of the run", style="dim"), Text()]
    for part in transcript(record):
        if part.folded:
            continue
        text = Text(escape_controls(part.text), style="" if part.label in ("answer", "user", "prompt") else "dim")
        label = Text.assemble((escape_controls(part.label), "bold underline"), (f"   {part.facts}".rstrip(), "dim"))
        content = text if part.tokens is None else _sampled(record, part.tokens)
        parts += [label, Padding(content, (0, 0, 0, 2)), Text()]
    if data := task_data(record):
        values = "   ".join(f"{escape_controls(name)}: {escape_controls(value)}" for name, value in data)
        parts += [Text.assemble(("task data  ", "bold"), values), Text()]
    if record.error:
        parts += [Text(f"error: {escape_controls(record.error)}", style="bold red"), Text()]
    return Lines(*parts)


def verdict(record: RolloutRecord) -> str:
    """Return "correct", "wrong", or an empty string if it was not graded."""
    return {True: "correct", False: "wrong", None: ""}[record.correct]


def number(record: RolloutRecord) -> str:
    """Return the number of the episode in its group, and of the branch if it is not the first."""
    return f"#{record.sample}" + (f".{record.branch}" if record.branch else "")


def ending(record: RolloutRecord) -> str:
    """Return the status, with the exhausted budget."""
    return f"{record.status} ({record.limit})" if record.limit else record.status


def level(difference: float | None) -> int:
    """Return a level from 0 to 4 for the difference of a token's log-probs."""
    return 0 if difference is None else sum(abs(difference) >= limit for limit in _LEVELS)


def _sampled(record: RolloutRecord, tokens: range) -> Text:
    text, differences = Text(), record.differences
    for piece, difference in ((record.texts[i], differences[i]) for i in tokens):
        styles = _LIKELIER if (difference or 0) > 0 else _LESS_LIKELY
        text.append(escape_controls(piece), style=styles[level(difference)])
    return text
