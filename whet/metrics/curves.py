"""Curves in a terminal: braille dots, two by four to a character, with labelled axes. Knows numbers and a size only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from whet.metrics.catalog import Style, show

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row] of a braille character


@dataclass(slots=True)
class Curve:
    """Points in order of ``x``; ``marker`` is drawn at each of them, for curves of few points."""

    x: Sequence[float]
    y: Sequence[float]
    style: str
    marker: str = ""


def plot(curves: Sequence[Curve], width: int, height: int, style: Style = "number") -> list[Text]:
    """``height`` lines of ``width`` characters: the curves over a common range, y labels on the left, x below.

    Where there are more points than dots, neighbours are averaged."""
    curves = [c for c in curves if len(c.x)]
    if not curves:
        blank = [Text(" " * width) for _ in range(height)]
        blank[height // 2] = Text("nothing yet".center(width), style="dim")
        return blank
    x_low, x_high = min(c.x[0] for c in curves), max(c.x[-1] for c in curves)
    low, high = _range([y for c in curves for y in c.y], style)
    rows = height - 1
    marks = (0, rows // 2, rows - 1) if rows >= 5 else (0, rows - 1)
    labels = {r: _label(high - (high - low) * r / (rows - 1), high - low, style) for r in marks}
    margin = max(len(text) for text in labels.values())
    columns = max(4, width - margin - 1)

    dots = [[0] * columns for _ in range(rows)]
    colour = [[""] * columns for _ in range(rows)]
    markers: dict[tuple[int, int], str] = {}
    for curve in curves:
        points = [
            (
                _scale(x, x_low, x_high, 2 * columns - 1),
                4 * rows - 1 - _scale(y, low, high, 4 * rows - 1),
            )
            for x, y in _thin(curve.x, curve.y, 2 * columns)
        ]
        for a, b in zip(points, points[1:] or points, strict=False):
            for px, py in _segment(a, b):
                dots[py // 4][px // 2] |= _DOTS[px % 2][py % 4]
                colour[py // 4][px // 2] = curve.style
        if curve.marker:
            for px, py in points:
                markers[py // 4, px // 2] = curve.marker
                colour[py // 4][px // 2] = curve.style
    lines = []
    for r in range(rows):
        line = Text(no_wrap=True).append(labels.get(r, "").rjust(margin), style="dim")
        line.append("┤" if r in labels else "│", style="dim")
        for c in range(columns):
            character = markers.get((r, c)) or (chr(0x2800 + dots[r][c]) if dots[r][c] else " ")
            line.append(character, style=colour[r][c] or "none")
        lines.append(line)
    first, last = show(x_low, "count"), show(x_high, "count")
    gap = max(1, columns - len(first) - len(last) - 5)
    lines.append(Text(" " * (margin + 1) + first + " " * gap + f"step {last}", style="dim", no_wrap=True))
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def _label(value: float, spread: float, style: Style) -> str:
    """Just precise enough to tell the labels of one axis apart."""
    if style == "percent":
        return f"{100 * value:.{0 if spread > 0.1 else 1 if spread > 0.01 else 2}f}%"
    if style == "count" or not 1e-4 < spread < 1e5 or abs(value) >= 1e6:
        return show(value, style)
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero


def _range(values: Sequence[float], style: Style) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    bottom, top = low - pad, high + pad
    if low >= 0:
        bottom = max(0.0, bottom)
    if style == "percent" and high <= 1:
        top = min(1.0, top)
    return bottom, top


def _thin(x: Sequence[float], y: Sequence[float], most: int) -> list[tuple[float, float]]:
    size = math.ceil(len(x) / most)
    return [
        (sum(x[i : i + size]) / len(x[i : i + size]), sum(y[i : i + size]) / len(y[i : i + size]))
        for i in range(0, len(x), size)
    ]


def _scale(value: float, low: float, high: float, most: int) -> int:
    return round((value - low) / (high - low) * most) if high > low else 0


def _segment(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [
        (round(a[0] + (b[0] - a[0]) * i / steps), round(a[1] + (b[1] - a[1]) * i / steps)) for i in range(steps + 1)
    ]
