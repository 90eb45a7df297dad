"""Curves in a terminal, drawn with braille dots (two by four per character) and labelled axes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from whet.show.metric_catalog import Style, axis_label, show

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row] of a braille character
_BRAILLE = 0x2800


@dataclass(slots=True)
class Curve:
    """Points in order of ``x``. ``marker`` is drawn at each point, for curves with few points."""

    x: Sequence[float]
    y: Sequence[float]
    style: str
    marker: str = ""


@dataclass(slots=True)
class Plot:
    """A renderable of curves that fills the available space."""

    curves: Sequence[Curve]
    style: Style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from plot(self.curves, options.max_width, max(3, options.height or 3), self.style)


def plot(curves: Sequence[Curve], width: int, height: int, style: Style = "number") -> list[Text]:
    """Draw curves over a common range in ``height`` lines of ``width`` characters, y labels on the left, x below.

    If there are more points than dots, neighbours are averaged."""
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return [Text(("nothing yet" if r == height // 2 else "").center(width), style="dim") for r in range(height)]
    x_low, x_high = min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)
    low, high = padded([y for curve in curves for y in curve.y], style)
    rows = height - 1
    marks = (0, rows // 2, rows - 1) if rows >= 5 else (0, rows - 1)
    labels = {r: axis_label(high - (high - low) * r / (rows - 1), high - low, style) for r in marks}
    margin = max(map(len, labels.values()))
    columns = max(4, width - margin - 1)

    cells = [[(" ", "")] * columns for _ in range(rows)]  # character and style
    for curve in curves:
        xs, ys = thinned(curve.x, curve.y, 2 * columns)
        right = [_scale(x, x_low, x_high, 2 * columns - 1) for x in xs]
        down = [4 * rows - 1 - _scale(y, low, high, 4 * rows - 1) for y in ys]
        points = list(zip(right, down, strict=True))
        for x, y in _joined(points):
            before, _ = cells[y // 4][x // 2]
            dots = ord(before) - _BRAILLE if _BRAILLE <= ord(before) < _BRAILLE + 256 else 0
            cells[y // 4][x // 2] = chr(_BRAILLE + (dots | _DOTS[x % 2][y % 4])), curve.style
        for x, y in points if curve.marker else ():
            cells[y // 4][x // 2] = curve.marker, curve.style
    lines = []
    for r, row in enumerate(cells):
        line = Text.assemble((labels.get(r, "").rjust(margin) + ("┤" if r in labels else "│"), "dim"), *row)
        lines.append(line)
    first, last = show(x_low, "count"), f"step {show(x_high, 'count')}"
    lines.append(Text(" " * (margin + 1) + first + last.rjust(max(len(last) + 1, columns - len(first))), style="dim"))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, pad=True)
    return lines


def padded(values: Sequence[float], style: Style) -> tuple[float, float]:
    """Return the range of an axis: the values with a margin, clipped at 0 and 100%."""
    low, high = min(values), max(values)
    flat = high - low < 1e-3 * abs(high)  # the labels of a narrower axis would look the same
    pad = (0.05 * abs(high) or 0.5) if flat else 0.06 * (high - low) or 0.5
    bottom = max(0.0, low - pad) if low >= 0 else low - pad
    return bottom, min(1.0, high + pad) if style == "percent" and high <= 1 else high + pad


def thinned(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most ``most`` points: the mean of neighbouring points, at the middle one's x."""
    size = math.ceil(len(x) / most)
    starts = range(0, len(x), size)
    return (
        [x[min(i + size // 2, len(x) - 1)] for i in starts],
        [sum(part) / len(part) for i in starts if (part := y[i : i + size])],
    )


def _scale(value: float, low: float, high: float, most: int) -> int:
    return round((value - low) / (high - low) * most) if high > low else 0


def _joined(points: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of the lines between neighbouring points."""
    for (x, y), (to_x, to_y) in zip(points, [*points[1:], points[-1]], strict=True):
        count = max(abs(to_x - x), abs(to_y - y), 1)
        yield from ((round(x + (to_x - x) * i / count), round(y + (to_y - y) * i / count)) for i in range(count + 1))
