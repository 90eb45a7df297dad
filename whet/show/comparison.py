"""Two runs side by side, in the terminal and as a page: the settings in which they differ, their results with the
interval of the difference, and their curves in the same charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from whet.base.escaping import escape_controls
from whet.base.files import write_atomically
from whet.base.strict_json import JsonObject
from whet.show.charts import chosen
from whet.show.curves import Curve, Plot
from whet.show.facts import Change, Measured
from whet.show.history import History
from whet.show.metric_catalog import Entry, show
from whet.show.page import page
from whet.show.report import run_data
from whet.show.runs import RunState, accuracies, losses

_ELSEWHERE = {"description"}  # settings that change no result
_FINAL = (
    "loss",
    "reward/mean",
    "answer/length_mean",
    "entropy/approximate",
    "gradient_norm",
    "time/step",
)  # of the last step
_COLOURS = ("#4fc3a1", "#e0a458")
_PLOTS = 4
_HEIGHT = 8


def compare(first: RunState, second: RunState) -> JsonObject:
    """Return the differing settings, the last metrics and the final accuracies of two runs as values of JSON."""
    keys = sorted(first.settings.keys() | second.settings.keys())
    values = {key: (first.settings.get(key), second.settings.get(key)) for key in keys if key not in _ELSEWHERE}
    ends, change = [_final(run) for run in (first, second)], _difference(first, second)
    return {
        "settings": {key: pair for key, pair in values.items() if pair[0] != pair[1]},
        "accuracy": [end and end.accuracy for end in ends],
        "interval": [[end.low, end.high] if end and end.n else None for end in ends],
        "difference": change and {"mean": change.mean, "low": change.low, "high": change.high},
        "last step": {name: (first.last.get(name), second.last.get(name)) for name in _FINAL
                      if name in first.last or name in second.last},
    }  # fmt: skip


def print_comparison(first: RunState, second: RunState, console: Console | None = None) -> None:
    """Print two runs side by side."""
    console = console or Console()
    heads, *settings = _settings(first, second)
    table = Table(*(Column(escape_controls(head), overflow="fold") for head in heads))  # two keys may begin alike
    for rows in (settings, _results(first, second)):
        table.add_section()
        for row in rows:
            table.add_row(*map(escape_controls, row))
    console.print(table)
    for line in _verdicts(first, second):
        console.print(escape_controls(line), markup=False)
    for plot in _plots(first, second):
        console.print(plot)


def write_comparison(first: RunState, second: RunState, path: Path) -> None:
    """Write a page of both runs, with all their curves in the same charts. It needs no network. Raises ``DataError``
    for a run without metrics."""
    runs = [run_data(run.folder) for run in (first, second)]
    table = _settings(first, second) + _results(first, second)
    data: dict[str, object] = {"runs": runs, "comparison": {"table": table, "lines": _verdicts(first, second)}}
    title = f"{first.folder.resolve().name} and {second.folder.resolve().name}"
    write_atomically(path, page(data, title).encode("utf-8", "replace"))


def _settings(first: RunState, second: RunState) -> list[list[str]]:
    """Return the names of the runs, and the rows of the settings in which they differ."""
    rows = [[key, *map(_text, pair)] for key, pair in compare(first, second)["settings"].items()]
    return [["", *(run.folder.resolve().name for run in (first, second))], *rows]


def _results(first: RunState, second: RunState) -> list[list[str]]:
    runs = (first, second)
    rows = [["trained steps", *(str(run.summary.steps) for run in runs)], ["accuracy", *map(_measured, runs)]]
    if first.summary.losses or second.summary.losses:
        rows.append(["held-out loss", *map(losses, runs)])
    for name, pair in compare(first, second)["last step"].items():
        rows.append([f"{name} (last step)", *("" if value is None else show(value) for value in pair)])
    return rows


def _verdicts(first: RunState, second: RunState) -> list[str]:
    lines = [] if compare(first, second)["settings"] else ["the settings are the same"]
    if (change := _difference(first, second)) is not None:
        verdict = "" if change.style else "; the difference may be chance"
        lines.append(f"accuracy of {second.folder.name} minus {first.folder.name}: {change.points} "
                     f"(95% {change.interval}, as of different tasks){verdict}")  # fmt: skip
    return lines


def _plots(first: RunState, second: RunState) -> list[Panel]:
    """Return the first metrics that either run has, each with the curves of both."""
    histories = [(run.folder.resolve().name, History(run.folder)) for run in (first, second)]
    for _, history in histories:
        history.read()
    entries = dict.fromkeys(entry for _, history in histories for entry in chosen(history)[0])
    return [_plot(entry, histories) for entry in list(entries)[:_PLOTS]]


def _plot(entry: Entry, histories: Sequence[tuple[str, History]]) -> Panel:
    title, curves = Text(entry.label, style="bold"), []
    for (name, history), colour in zip(histories, _COLOURS, strict=True):
        steps, values = history.train.steps, history.train.column(entry.key)
        there = np.isfinite(values)
        curve = Curve(steps[there].tolist(), values[there].tolist(), colour)
        held_out = [(line["step"], line[entry.held_out]) for line in history.evaluations
                    if entry.held_out and line.get(entry.held_out) is not None]  # fmt: skip
        ends = [*curve.y[-1:], *([held_out[-1][1]] if held_out else [])]
        if held_out:
            curves.append(Curve([x for x, _ in held_out], [y for _, y in held_out], colour, "◆"))
        curves.append(curve)
        if ends:
            title.append(f"  {escape_controls(name)} {' ◆ '.join(entry.text(end) for end in ends)}", style=colour)
    return Panel(Plot(curves, entry.style), title=title, title_align="left", height=_HEIGHT)


def _final(run: RunState) -> Measured | None:
    return run.summary.whole.after or run.summary.whole.before


def _difference(first: RunState, second: RunState) -> Change | None:
    a, b = _final(first), _final(second)
    return a.until(b) if a and b else None


def _measured(run: RunState) -> str:
    """Return the accuracies, the last one with its interval."""
    end = _final(run)
    return accuracies(run) + (f" ({end.interval})" if end and end.n else "")


def _text(value: Any) -> str:
    return "default" if value is None else str(value)
