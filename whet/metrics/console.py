"""The live display of a run in a terminal. Gathers what the console sink is told and draws it at any size.

Drawing is a pure function of what was gathered, the size and the time; the thread and the terminal are the sink's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from whet.metrics.catalog import CATALOG, ENTRIES, PHASES, Entry, duration, phases, show
from whet.metrics.clock import Pace
from whet.metrics.curves import Curve, plot
from whet.metrics.facts import RunFacts
from whet.metrics.sinks.base import Kind, Value, numbers

_TRAIN, _EVALUATION = "#5b9cf5", "#4fc3a1"


class Dashboard:
    """A rich renderable that fills the terminal it is drawn in; at least 60 x 18."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._recipe, self._now = folder, recipe, now
        self._history: dict[str, tuple[list[float], list[float]]] = {}
        self._last: dict[str, Any] = {}
        self._split: dict[str, float] = {}
        self._broken: set[str] = set()
        self._pace = Pace()
        self._lock = threading.Lock()  # the display is drawn by another thread than the one that adds
        self._since = now()
        self.step = 0
        self.facts = RunFacts.of(folder, recipe)
        self.status = ""  # what is being done now; anybody may set it

    def add(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        with self._lock:
            self._add(step, values, kind)

    def _add(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        self._last.update(values)
        found = numbers(values)
        self._broken = (self._broken - values.keys()) | {
            name for name, value in values.items() if not isinstance(value, str) and not name.startswith("run/")
        } - found.keys()
        for name, value in found.items():
            if name in ENTRIES or name == "evaluation/accuracy":
                xs, ys = self._history.setdefault(name, ([], []))
                xs.append(step)
                ys.append(value)
        if any(name.startswith("run/") for name in values):
            self.facts = RunFacts.of(self._folder, self._recipe, self._last)
        if kind == "train":
            self.step, self._since = max(self.step, step), self._now()
            self._split = phases(found)
            if "time/step" in found:
                self._pace.add(found["time/step"], 0)

    def eta(self) -> float | None:
        """Seconds to go, less what has passed since the last step ended."""
        told = self._last.get("time/eta")
        eta = told if isinstance(told, int | float) else None
        if eta is None and self.facts.steps:
            eta = self._pace.eta(self.facts.steps - self.step)
        return None if eta is None else max(0.0, eta - (self._now() - self._since))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options.max_width, (options.height or console.size.height) - 1)

    def draw(self, width: int, height: int) -> Group:
        """The display in exactly ``width`` x ``height`` characters."""
        with self._lock:
            shown = self._chosen((3 if width >= 120 else 2) * (2 if height >= 31 else 1))
            return Group(
                self._header(width),
                self._facts(),
                *self._plots(shown, width, height - 11),
                self._time(width),
                self._values(width, shown),
                self._progress(width),
            )

    def _header(self, width: int) -> Table:
        line = Table.grid(expand=True)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(justify="right", no_wrap=True)
        steps = f"{self.step}/{self.facts.steps}" if self.facts.steps else str(self.step)
        name = Text.assemble((" whet ", "bold black on #4fc3a1"), "  ", (self.facts.name, "bold"))
        line.add_row(name, Text.assemble(("step ", "dim"), (steps, "bold"), " "))
        return line

    def _facts(self) -> Text:
        return Text(" " + " · ".join(self.facts.line()), style="dim", no_wrap=True, overflow="ellipsis")

    def _plots(self, shown: Sequence[Entry], width: int, height: int) -> list[Table]:
        across = min(3 if width >= 120 else 2, len(shown))
        down = -(-len(shown) // across)
        heights = [height // down + (1 if r < height % down else 0) for r in range(down)]
        widths = [width // across + (1 if c < width % across else 0) for c in range(across)]
        rows = []
        for r in range(down):
            row = Table.grid()
            cells = []
            for c in range(across):
                row.add_column(width=widths[c])
                entry = shown[r * across + c] if r * across + c < len(shown) else None
                cells.append(self._plot(entry, widths[c], heights[r]) if entry else Text())
            row.add_row(*cells)
            rows.append(row)
        return rows

    def _chosen(self, most: int) -> list[Entry]:
        """The plots with something to show, then those that most runs have, so that the picture doesn't jump."""
        known = [e for e in CATALOG if e.plotted and self._curves(e)]
        usual = known or [ENTRIES["reward/mean"], ENTRIES["accuracy"]]
        return usual[:most]

    def _curves(self, entry: Entry) -> list[Curve]:
        curves = []
        if entry.key in self._history:
            curves.append(Curve(*self._history[entry.key], style=_TRAIN))
        if entry.key == "accuracy" and "evaluation/accuracy" in self._history:
            curves.append(Curve(*self._history["evaluation/accuracy"], style=_EVALUATION, marker="◆"))
        return curves

    def _plot(self, entry: Entry, width: int, height: int) -> Panel:
        title = Text(entry.label, style="bold")
        for key, name, style in (
            (entry.key, "", _TRAIN),
            ("evaluation/accuracy" if entry.key == "accuracy" else "", "◆ evaluation ", _EVALUATION),
        ):
            if key in self._history:
                title.append("  " + name + entry.text(self._history[key][1][-1]), style=style)
        lines = plot(self._curves(entry), width - 4, max(3, height - 2), entry.style)
        return Panel(
            Group(*lines), title=title, title_align="left", box=box.ROUNDED, border_style="bright_black",
            width=width, height=height,
        )  # fmt: skip

    def _time(self, width: int) -> Panel:
        total = sum(self._split.values())
        rate = self._last.get("time/tokens_per_second")
        title = Text.assemble(("time of a step", "bold"), f"  {duration(total)}" if total else "")
        if isinstance(rate, int | float):
            title.append(f"  {show(rate, 'count')} tokens/s", style=_EVALUATION)
        return _panel(Group(*time_bar(self._split, width - 4)), title, width, 4)

    def _values(self, width: int, skip: Sequence[Entry]) -> Panel:
        """The last values of what isn't drawn as a curve."""
        per_row = (width - 4) // 18
        known = [e for e in CATALOG if e.key in self._last and e not in skip][: per_row * 2]
        table = Table.grid(expand=True)
        for _ in range(per_row):
            table.add_column(ratio=1, no_wrap=True)
        for r in range(0, len(known), per_row):
            table.add_row(*(self._value(e) for e in known[r : r + per_row]))
        return _panel(table, Text("last step", style="bold"), width, 4)

    def _value(self, entry: Entry) -> Text:
        value = None if entry.key in self._broken else self._last[entry.key]
        cell = Text(entry.short.ljust(9) + " ", style="dim")
        return cell.append(entry.text(value), style="not dim bold red" if entry.worrying(value) else "not dim bold")

    def _progress(self, width: int) -> Text:
        waited = f"{self.status or 'working'} {duration(self._now() - self._since)}"
        eta = self.eta()
        right = f"{duration(eta)} left" if eta is not None else ""
        room = max(10, width - len(waited) - len(right) - 6)
        line = Text(" ", no_wrap=True, overflow="crop")
        if self.facts.steps:
            done = min(1.0, self.step / self.facts.steps)
            full = round(done * room)
            line.append("━" * full, style=_EVALUATION).append("━" * (room - full), style="bright_black")
        line.append(f"  {waited}", style="dim").append(f"  {right}", style="bold")
        return line


def time_bar(split: Mapping[str, float], width: int) -> list[Text]:
    """A bar of ``width`` characters divided as the seconds are, and its legend."""
    total = sum(split.values())
    bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
    if not total:
        return [Text("nothing yet".center(width), style="dim"), legend]
    used, passed = 0, 0.0
    for name, seconds in split.items():
        passed += seconds
        end = round(passed / total * width)
        bar.append("█" * (end - used), style=PHASES[name][0])
        used = end
        legend.append("■ ", style=PHASES[name][0]).append(f"{name} ", style="dim")
        legend.append(f"{100 * seconds / total:.0f}%   ")
    return [bar, legend]


def plain_line(step: int, steps: int | None, values: Mapping[str, Value], kind: Kind = "train") -> str:
    """One step in one line, for logs: no colour, nothing but ASCII."""
    head = f"step {step}/{steps}" if steps else f"step {step}"
    return "  ".join([head, *(_plain_evaluation(values) if kind == "evaluation" else _plain_train(values))])


def _plain_train(values: Mapping[str, Value]) -> Iterable[str]:
    for entry in CATALOG:
        if entry.plotted and not isinstance(value := values.get(entry.key), str | None):
            yield f"{entry.label} {entry.text(value)}"
    for key, text in (("time/step", duration), ("time/tokens_per_second", _rate), ("time/eta", _left)):
        if not isinstance(value := values.get(key), str | None):
            yield text(value)


def _plain_evaluation(values: Mapping[str, Value]) -> Iterable[str]:
    found = numbers(values)
    if "evaluation/accuracy" in found:
        interval = ""
        if {"evaluation/n", "evaluation/low", "evaluation/high"} <= found.keys():
            low, high = 100 * found["evaluation/low"], 100 * found["evaluation/high"]
            interval = f" (n={found['evaluation/n']:.0f}, 95% {low:.1f}-{high:.1f}%)"
        yield f"evaluation: accuracy {show(found['evaluation/accuracy'], 'percent')}{interval}"
    else:
        yield "evaluation:"
    for name, value in found.items():
        short = name.removeprefix("evaluation/")
        if name != short and short not in ("accuracy", "n", "low", "high"):
            yield f"{short} {show(value)}"


def _panel(content: Any, title: Text, width: int, height: int) -> Panel:
    return Panel(
        content,
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="bright_black",
        width=width,
        height=height,
    )


def _rate(value: float) -> str:
    return f"{show(value, 'count')} tokens/s"


def _left(value: float) -> str:
    return f"{duration(value)} left"
