"""The charts of a page as data. ``assets/charts.js`` draws them.

Curves of many steps are reduced to the mean, lowest and highest value of neighbouring steps, so that a page costs the
same after 100 steps and after 100,000.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from whet.base.strict_json import JsonObject
from whet.show.facts import Measured
from whet.show.history import Floats, History
from whet.show.metric_catalog import CATALOG, ENTRIES, PHASES, Entry, drawn, of_roles, scores

MOST = 500  # points of a curve
_BARS = 120
_MOST_BROKEN = 200  # marks of steps without a finite value
_WAITS = ("idle/generator", "idle/learner", "tokens/goodput")
_EVERYTHING = (-math.inf, math.inf)

Range = tuple[float, float]


def chosen(history: History) -> tuple[list[Entry], list[str]]:
    """Return the entries to draw, and the labels and last values of metrics that stayed below their threshold."""
    train, series = history.train, {}
    for entry in CATALOG:
        values = present(train.column(entry.key))
        series[entry.key] = [values.max()] if len(values) else []
        if entry.held_out:
            series[entry.held_out] = [1.0 for line in history.evaluations if entry.held_out in line][:1]
    entries = drawn(series)
    silent = [entry for entry in CATALOG if entry.silent is not None and series[entry.key] and entry not in entries]
    names = [name for name in train.names if name.startswith("scores/")]
    ranges = [(name, present(train.column(name))) for name in names]
    ends = [{name: end(values) for name, values in ranges if len(values)} for end in (np.min, np.max)]
    return entries + of_roles(train.names) + scores(ends), [
        f"{entry.label} {entry.text(last(history, entry.key))}" for entry in silent
    ]


def charts(history: History, within: Range = _EVERYTHING) -> Mapping[str, object]:
    """Return all charts of a run as values of JSON, for the steps of a range."""
    sets = sorted({key.split("/")[1] for line in history.evaluations for key in line if _is_of_set(key)})
    learning = [_chart(history, entry, within) for entry in chosen(history)[0]]
    of_sets = [_chart(history, Entry(f"env/{name}/pass_rate", name, style="percent"), within, name) for name in sets]
    return {
        "learning": [chart for chart in learning if chart],
        "sets": [chart for chart in of_sets if chart],
        "phases": _phases(history, within),
        "waits": _waits(history, within),
    }


def present(values: Floats) -> Floats:
    """Return the numbers that are not missing."""
    return values[~np.isnan(values)]


def last(history: History, key: str) -> float | None:
    """Return the last number of a training metric, None without any."""
    values = present(history.train.column(key))
    return float(values[-1]) if len(values) else None


def _chart(history: History, entry: Entry, within: Range, name: str = "") -> dict[str, object] | None:
    """Return the chart of a metric; ``name`` is a set of held-out tasks. None without anything to draw."""
    lines = [_line(history, entry.key, "training", within)]
    if name or entry.held_out == "evaluation/accuracy":
        measured = [m for line in history.evaluations if (m := Measured.of(line, name))]
        points = [(m.step, m.accuracy, m.low, m.high) for m in measured]
        lines.append(_dots(points, within, band=all(m.n for m in measured)))
    elif entry.held_out:
        held_out = [(line["step"], line.get(entry.held_out)) for line in history.evaluations]
        lines.append(_dots([(step, v, v, v) for step, v in held_out if v is not None], within, band=False))
    lines = [line for line in lines if line["x"] or line["broken"]]
    if not any(line["x"] for line in lines):
        return None
    value = last(history, entry.key) if lines[0]["name"] == "training" else lines[-1]["y"][-1]
    return {
        "key": entry.key, "label": entry.label, "style": entry.style, "lines": lines,
        "limits": [limit for limit in (entry.low, entry.high) if limit is not None],
        "last": "" if value is None else entry.text(value), "hot": entry.worrying(value),
    }  # fmt: skip


def _line(history: History, key: str, name: str, within: Range) -> JsonObject:
    steps, values = _cut(history.train.steps, history.train.column(key), within)
    finite = np.isfinite(values)
    broken = steps[np.isinf(values)].tolist()
    x, mean, low, high = reduced(steps[finite], values[finite], MOST)
    spread = {"low": _short(low), "high": _short(high)} if len(x) < finite.sum() else {}
    return {"name": name, "x": x.tolist(), "y": _short(mean), "broken": broken[-_MOST_BROKEN:], **spread}


def _dots(points: Sequence[tuple[float, ...]], within: Range, band: bool) -> dict[str, object]:
    """Return the curve of an evaluation from (step, value, low, high)."""
    steps, values, lows, highs = np.array(points, dtype=float).reshape(-1, 4).T
    inside = (steps >= within[0]) & (steps <= within[1])
    steps = steps[inside].astype(np.int64)
    x, y, _, _ = reduced(steps, values[inside], MOST)
    around = [_short(reduced(steps, end[inside], MOST)[1]) for end in (lows, highs)]
    interval = {"low": around[0], "high": around[1], "interval": True} if band else {}
    return {"name": "evaluation", "x": x.tolist(), "y": _short(y), "broken": [], "dots": True, **interval}


def _phases(history: History, within: Range) -> dict[str, object]:
    """Return the mean seconds per phase of neighbouring steps, and over all steps of the range the sums by phase."""
    train = history.train
    steps, whole = _cut(train.steps, train.column("time/step"), within)
    timed = whole > 0
    seconds = {n: _cut(train.steps, train.column(f"time/{n}"), within)[1][timed] for n in PHASES if n != "other"}
    seconds = {name: np.where(np.isfinite(values), values, 0.0) for name, values in seconds.items()}
    seconds["other"] = np.maximum(0.0, whole[timed] - sum(seconds.values()))
    seconds = {name: values for name, values in seconds.items() if values.sum() > 1e-9}
    x = reduced(steps[timed], whole[timed], _BARS)[0]
    layers = {name: _short(reduced(steps[timed], values, _BARS)[1]) for name, values in seconds.items()}
    return {"x": x.tolist(), "layers": layers, "sums": {name: float(values.sum()) for name, values in seconds.items()}}


def _waits(history: History, within: Range) -> dict[str, object] | None:
    """Return the idle shares and the goodput as one chart; None with fewer than two steps."""
    lines = [_line(history, key, ENTRIES[key].label, within) for key in _WAITS]
    lines = [line for line in lines if len(line["x"]) > 1]
    if not lines:
        return None
    return {"key": "idle", "label": "share of each step", "style": "percent", "lines": lines, "limits": [], "last": ""}


def reduced(x: np.ndarray, y: Floats, most: int) -> tuple[np.ndarray, Floats, Floats, Floats]:
    """Reduce a curve to at most ``most`` points: the x in the middle, and the mean, lowest and highest value of
    neighbouring points."""
    size = math.ceil(len(x) / most)
    if size <= 1:
        return x, y, y, y
    starts = np.arange(0, len(x), size)
    counts = np.diff([*starts, len(x)])
    mean = np.add.reduceat(y, starts) / counts
    return x[starts + counts // 2], mean, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _cut(steps: np.ndarray, values: Floats, within: Range) -> tuple[np.ndarray, Floats]:
    first, end = np.searchsorted(steps, within[0], "left"), np.searchsorted(steps, within[1], "right")
    return steps[first:end], values[first:end]


def _short(values: Floats) -> list[float]:
    """Round to six digits, which is finer than a pixel."""
    return [float(f"{value:.6g}") for value in values]


def _is_of_set(key: str) -> bool:
    return key.startswith("evaluation/") and key.count("/") == 2 and key.endswith("/accuracy")
