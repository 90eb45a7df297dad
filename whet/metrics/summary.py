"""What a finished run amounts to: accuracy before and after, the time it took, and what to do next. Read from the run
folder, so that it can be printed again at any time."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from whet.metrics.catalog import duration, show
from whet.metrics.rollout_file import rollout_steps
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.metrics.statistics import newcombe, wilson


@dataclass(frozen=True, slots=True)
class Measured:
    """An accuracy, of ``n`` answers, with its 95% interval. ``n`` is 0 and the interval (0, 1) where n is unknown."""

    step: int
    accuracy: float
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self | None:
        """From an evaluation line; Wilson's interval where the line has none. None without an accuracy."""
        accuracy = line.get("evaluation/accuracy")
        if accuracy is None:
            return None
        n = int(line.get("evaluation/n") or 0)
        low, high = wilson(min(n, max(0.0, accuracy * n)), n)
        told_low, told_high = line.get("evaluation/low"), line.get("evaluation/high")
        return cls(
            line["step"], accuracy, n, low if told_low is None else told_low, high if told_high is None else told_high
        )

    def text(self) -> str:
        size = f" of {self.n}" if self.n else ""
        return f"{show(self.accuracy, 'percent')}{size}   95%: {100 * self.low:.1f} to {100 * self.high:.1f}%"


@dataclass(frozen=True, slots=True)
class Summary:
    """See the module. ``before`` is the first evaluation, ``after`` the last one, if it is another."""

    steps: int
    seconds: float  # sum of the steps' times, evaluations included where they are phases
    before: Measured | None
    after: Measured | None

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Self:
        """From the lines of a metrics file (see ``read_metrics``)."""
        train = [line for line in lines if line.get("kind", "train") == "train"]
        measured = [m for line in lines if line.get("kind") == "evaluation" and (m := Measured.of(line))]
        return cls(
            steps=max((line["step"] for line in train), default=0),
            seconds=sum(line.get("time/step") or 0.0 for line in train),
            before=measured[0] if measured else None,
            after=measured[-1] if len(measured) > 1 else None,
        )

    def difference(self) -> tuple[float, float, float] | None:
        """after - before with a 95% interval, as if on different tasks (wider than need be): (mean, low, high)."""
        if not (self.before and self.after and self.before.n and self.after.n):
            return None
        a, b = self.before, self.after
        return newcombe(a.accuracy * a.n, a.n, b.accuracy * b.n, b.n)


def commands(run_folder: Path) -> dict[str, str]:
    """What one can do with a run folder, as shell commands that can be pasted."""
    folder = shlex.quote(str(run_folder))
    out = shlex.quote(str(run_folder / "export"))
    sampled = bool(rollout_steps(run_folder))
    measured = any(line.get("kind") == "evaluation" for line in read_metrics(run_folder / FILE))
    found = {"resume": f"whet resume {folder}"}
    if sampled or measured:  # rows of which none is held out can't be measured
        found["evaluate"] = f"whet eval {folder}"
    if sampled:
        found["view"] = f"whet view {folder}"
    return found | {"export": f"whet export {folder} --out {out}"}


def print_summary(
    run_folder: Path, console: Console | None = None, next_steps: Mapping[str, str] | None = None
) -> None:
    """Print the panel that ends a run. ``next_steps`` are commands by name, by default those of ``commands``.

    The commands are printed unboxed and unwrapped, so that they can be copied whole."""
    console = console or Console()
    summary = Summary.of(read_metrics(run_folder / FILE))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("run folder", Text(str(run_folder), style="bold", overflow="fold"))
    table.add_row("trained", f"{summary.steps} steps in {duration(summary.seconds)}")
    if summary.before:
        table.add_row("accuracy before" if summary.after else "accuracy", summary.before.text())
    if summary.after:
        table.add_row("accuracy after", Text(summary.after.text(), style="bold"))
    if difference := summary.difference():
        table.add_row("difference", _difference(*difference))
    console.print(Panel(Group(table), title="whet", title_align="left", box=box.ROUNDED, border_style="#4fc3a1"))
    for name, command in (next_steps or commands(run_folder)).items():
        line = Text.assemble((f"  {name:<10}", "dim"), command)
        console.print(line, soft_wrap=True, highlight=False)


def _difference(mean: float, low: float, high: float) -> Text:
    sure = low > 0 or high < 0
    style = "" if not sure else "bold green" if mean > 0 else "bold red"
    text = Text(f"{100 * mean:+.1f} points   95%: {100 * low:+.1f} to {100 * high:+.1f}", style=style)
    return text if sure else text.append("   (may be chance)", style="dim")
