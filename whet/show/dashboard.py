"""The live display of a run in a terminal. It collects the metrics that the console sink writes and draws them at any
size.

Drawing is a pure function of the metrics, the size and the time; the sink owns the thread and the terminal.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from whet.base.escaping import escape_controls
from whet.base.progress import PROGRESS, Progress
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.base import Kind, Value, numbers
from whet.show.curves import Curve, Plot
from whet.show.facts import RunFacts
from whet.show.metric_catalog import CATALOG, ENTRIES, PHASES, Entry, drawn, duration, environments, phases, show

_CURVES = {*ENTRIES, *(entry.held_out for entry in CATALOG)}
_TRAIN, _EVALUATION = "#5b9cf5", "#4fc3a1"


class Dashboard:
    """A rich renderable that fills the terminal except for one line; at least 60 x 18."""

    def __init__(self, folder: Path, recipe: JsonObject, progress: Progress = PROGRESS) -> None:
        self._folder, self._recipe, self._progress = folder, recipe, progress
        self._history: dict[str, tuple[list[float], list[float]]] = {}
        self._last: JsonObject = {}
        self._split: dict[str, float] = {}
        self._broken: set[str] = set()
        self._lock = threading.Lock()  # one thread adds metrics, another draws the display
        self._since = progress.now()
        self.step = 0
        self.ended = False  # nothing is in progress any more
        self.facts = RunFacts.of(folder, recipe)

    @property
    def empty(self) -> bool:
        return not self._last

    def add(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        """Add the metrics of a step; later values replace earlier ones."""
        with self._lock:
            self._last.update(values)
            finite = numbers(values)
            numeric = {n for n, value in values.items() if not isinstance(value, str) and not n.startswith("run/")}
            self._broken = (self._broken - values.keys()) | (numeric - finite.keys())
            for name in finite.keys() & _CURVES:
                xs, ys = self._history.setdefault(name, ([], []))
                xs.append(step)
                ys.append(finite[name])
            if any(name.startswith("run/") for name in values):
                self.facts = RunFacts.of(self._folder, self._recipe, self._last)
            if kind == "train":
                self.step, self._since = max(self.step, step), self._progress.now()
                self._split = phases(finite)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = (options.height or console.size.height) - 1
        with self._lock:
            drawn = list(console.render(self._layout(options.max_width, height), options.update(height=height)))
        yield from drawn

    def _layout(self, width: int, height: int) -> Layout:
        across, down = 3 if width >= 120 else 2, 2 if height >= 31 else 1
        shown = self._chosen(across * down)
        rows = [shown[i : i + across] for i in range(0, len(shown), across)]
        whole = Layout()
        whole.split_column(
            Layout(self._header(), size=1),
            Layout(
                Text(
                    f" {self.facts.line()}",
                    style="bold red" if self.facts.sandbox else "dim",
                    no_wrap=True,
                    overflow="ellipsis",
                ),
                size=1,
            ),
            *(Layout(name=f"plots {i}", minimum_size=3) for i in range(len(rows))),
            Layout(self._time(), size=4),
            Layout(self._values((width - 4) // 18, shown), size=4),
            Layout(self._bottom(width), size=1),
        )
        for i, row in enumerate(rows):
            cells = [self._plot(entry) for entry in row] + [Text()] * (min(across, len(shown)) - len(row))
            whole[f"plots {i}"].split_row(*(Layout(cell) for cell in cells))
        return whole

    def _header(self) -> Table:
        line = Table.grid(expand=True)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(justify="right", no_wrap=True)
        steps = f"{self.step}/{self.facts.steps}" if self.facts.steps else str(self.step)
        name = Text.assemble((" whet ", "bold black on #4fc3a1"), "  ", (self.facts.name, "bold"))
        line.add_row(name, Text.assemble(("step ", "dim"), (steps, "bold"), " "))
        return line

    def _chosen(self, most: int) -> list[Entry]:
        """Choose the plots that have data; before the first step, the ones that most runs have."""
        entries = drawn({name: ys for name, (_, ys) in self._history.items()})
        return (entries or [ENTRIES["reward/mean"], ENTRIES["accuracy"]])[:most]

    def _curves(self, entry: Entry) -> list[tuple[str, Curve]]:
        """Return the curves of a plot, each with its name in the title."""
        keys = [(entry.key, "", _TRAIN, "")]
        if entry.held_out:
            keys.append((entry.held_out, "◆ evaluation ", _EVALUATION, "◆"))
        return [
            (name, Curve(*self._history[key], colour, mark)) for key, name, colour, mark in keys if key in self._history
        ]

    def _plot(self, entry: Entry) -> Panel:
        curves = self._curves(entry)
        title = Text(entry.label, style="bold")
        for name, curve in curves:
            value = None if entry.key in self._broken else curve.y[-1]
            title.append(f"  {name}{entry.text(value)}", style="bold red" if entry.worrying(value) else curve.style)
        return _panel(Plot([curve for _, curve in curves], entry.style), title)

    def _time(self) -> Panel:
        total = sum(self._split.values())
        rate = self._last.get("time/tokens_per_second")
        title = Text.assemble(("time of a step", "bold"), f"  {duration(total)}" if total else "")
        if isinstance(rate, int | float):
            title.append(f"  {show(rate, 'count')} tokens/s", style=_EVALUATION)
        return _panel(TimeBar(self._split), title)

    def _values(self, per_row: int, skip: Sequence[Entry]) -> Panel:
        """Draw the last values of metrics that are not plotted."""
        others = [entry for entry in CATALOG if entry.key in self._last and entry not in skip]
        entries = [*environments(self._last), *others][: per_row * 2]
        table = Table.grid(expand=True)
        for _ in range(per_row):
            table.add_column(ratio=1, no_wrap=True)
        for r in range(0, len(entries), per_row):
            table.add_row(*(self._value(e) for e in entries[r : r + per_row]))
        return _panel(table, Text("last step", style="bold"))

    def _value(self, entry: Entry) -> Text:
        value = None if entry.key in self._broken else self._last[entry.key]
        cell = Text(entry.short.ljust(9) + " ", style="dim")
        return cell.append(entry.text(value), style="not dim bold red" if entry.worrying(value) else "not dim bold")

    def _bottom(self, width: int) -> Text:
        waited = self._progress.now() - self._since
        left = None if self.ended else self._last.get("time/eta")
        now = "" if self.ended else escape_controls(self._progress.text())
        whole = f"  {duration(max(0.0, left - waited))} left in all" if isinstance(left, int | float) else ""
        room = max(6, width - len(now) - len(whole) - 4)
        line = Text(" ", no_wrap=True, overflow="crop")
        if self.facts.steps:
            full = round(min(1.0, self.step / self.facts.steps) * room)
            line.append("━" * full, style=_EVALUATION).append("━" * (room - full), style="bright_black")
        return line.append(whole, style="bold").append(f"  {now}", style="dim")


class TimeBar:
    """A bar divided in proportion to the seconds of the phases, and its legend."""

    def __init__(self, split: Mapping[str, float]) -> None:
        self._split = split

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total, width = sum(self._split.values()), options.max_width
        if not total:
            yield Text("nothing yet".center(width), style="dim")
            return
        bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
        passed = 0.0
        for name, seconds in self._split.items():
            passed += seconds
            bar.append("█" * (round(passed / total * width) - len(bar)), style=PHASES[name])
            legend.append("■ ", style=PHASES[name]).append(f"{name} ", style="dim")
            legend.append(f"{100 * seconds / total:.0f}%   ")
        yield bar
        yield legend


def _panel(content: RenderableType, title: Text) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, border_style="bright_black")
