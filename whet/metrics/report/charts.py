"""Charts as inline SVG. Numbers and our own labels come in, markup goes out; colours are the style sheet's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from whet.metrics.catalog import duration

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 26
_MOST = 300  # points per line: more can't be told apart at this size


@dataclass(slots=True)
class Line:
    """One curve, in order of ``x``. ``band`` is (low, high) per point; ``broken`` are steps without a finite value."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str  # a class of the style sheet: c1, c2 ...
    band: Sequence[tuple[float, float]] | None = None
    dots: bool = False
    smooth: bool = False
    broken: Sequence[float] = field(default_factory=list)


def line_chart(
    lines: Sequence[Line], show: Callable[[float], str], limits: Sequence[float] = (), percent: bool = False
) -> str:
    """The curves over one pair of axes. ``limits`` are drawn where they lie within the range."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return '<p class="none">not reported</p>'
    xs = [x for line in lines for x in (*line.x, *line.broken)]
    ys = [y for line in lines for y in line.y] + [v for line in lines for pair in line.band or () for v in pair]
    frame = _Frame(min(xs), max(xs), *_padded(min(ys), max(ys), percent))
    parts = [frame.axes(show)]
    parts += [
        f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{frame.y(v):.1f}" y2="{frame.y(v):.1f}"/>'
        for v in limits
        if frame.low < v < frame.high
    ]
    for line in lines:
        x, y = _thin(line.x, line.y)
        if line.band:
            around = [(a, h) for a, (_, h) in zip(line.x, line.band, strict=True)]
            around += [(a, b) for a, (b, _) in reversed(list(zip(line.x, line.band, strict=True)))]
            parts.append(f'<polygon class="band {line.colour}" points="{frame.points(around)}"/>')
        raw = list(zip(x, y, strict=True))
        if line.smooth and len(raw) >= 12:
            parts.append(f'<polyline class="raw {line.colour}" points="{frame.points(raw)}"/>')
            raw = list(zip(x, _smoothed(y), strict=True))
        parts.append(f'<polyline class="line {line.colour}" points="{frame.points(raw)}"/>')
        if line.dots or len(raw) == 1:
            parts += [
                f'<circle class="{line.colour}" cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}" r="3"/>' for a, b in raw
            ]
        parts += [
            f'<path class="broken" d="M{frame.x(a) - 4:.1f} {_TOP}l8 8m0-8l-8 8">'
            f"<title>step {a:g}: not finite</title></path>"
            for a in line.broken[:_MOST]
        ]
    return frame.svg(parts, [(line.name, *_thin(line.x, line.y), line.colour) for line in lines], show)


def stacked_chart(x: Sequence[float], layers: Mapping[str, Sequence[float]]) -> str:
    """Seconds per step as stacked bars, one layer per phase. Neighbouring steps are averaged where there are many."""
    if not x:
        return '<p class="none">not reported</p>'
    size = math.ceil(len(x) / 120)
    starts = range(0, len(x), size)
    binned = {name: [sum(v[i : i + size]) / len(v[i : i + size]) for i in starts] for name, v in layers.items()}
    width, totals = 960, [sum(values) for values in zip(*binned.values(), strict=True)]
    frame = _Frame(x[0] - 0.5, x[-1] + 0.5, 0.0, 1.05 * max(totals) or 1.0, width)
    parts = [frame.axes(duration)]
    for number, i in enumerate(starts):
        left = frame.x(x[i] - 0.5)
        right = frame.x(x[min(i + size, len(x)) - 1] + 0.5)
        below = 0.0
        for name, values in binned.items():
            top = below + values[number]
            parts.append(
                f'<rect class="p-{name}" x="{left:.1f}" width="{max(0.5, 0.9 * (right - left)):.1f}" '
                f'y="{frame.y(top):.1f}" height="{max(0.0, frame.y(below) - frame.y(top)):.1f}"/>'
            )
            below = top
    middles = [x[min(i + size // 2, len(x) - 1)] for i in starts]
    return frame.svg(parts, [(name, middles, values, f"p-{name}") for name, values in binned.items()], duration)


class _Frame:
    """Where a value lies in the picture."""

    def __init__(self, x_low: float, x_high: float, low: float, high: float, width: int = WIDTH) -> None:
        self.x_low, self.x_high, self.low, self.high, self.width = x_low, x_high, low, high, width

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return _LEFT + (self.width - _LEFT - _RIGHT) * ((value - self.x_low) / span if span else 0.5)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - self.low) / (self.high - self.low)

    def points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)

    def axes(self, show: Callable[[float], str]) -> str:
        parts = []
        for value in _ticks(self.low, self.high, 4):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(show(value))}</text>'
            )
        for value in _ticks(self.x_low, self.x_high, self.width // 90):
            if value == int(value):
                x = self.x(value)
                parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:g}</text>')
        return "".join(parts)

    def svg(
        self,
        parts: Sequence[str],
        series: Sequence[tuple[str, Sequence[float], Sequence[float], str]],
        show: Callable[[float], str],
    ) -> str:
        """The picture, with what a pointer over it should say: per series the steps and the values as text."""
        hints = "".join(
            f'<desc data-name="{escape(name)}" data-colour="{colour}" data-x="{",".join(f"{v:g}" for v in x)}" '
            f'data-y="{escape("|".join(show(v) for v in y))}"></desc>'
            for name, x, y, colour in series
        )
        wide = " wide" if self.width > WIDTH else ""
        return (
            f'<svg class="chart{wide}" viewBox="0 0 {self.width} {HEIGHT}" role="img" data-low="{self.x_low:g}" '
            f'data-high="{self.x_high:g}" data-left="{_LEFT}" data-right="{_RIGHT}">{"".join(parts)}'
            f'<line class="cross" x1="0" x2="0" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>{hints}</svg>'
        )


def _padded(low: float, high: float, percent: bool) -> tuple[float, float]:
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    bottom, top = low - pad, high + pad
    if low >= 0:
        bottom = max(0.0, bottom)
    if percent and high <= 1:
        top = min(1.0, top)
    return bottom, top


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within the range, roughly ``about`` of them."""
    span = high - low
    if not span:
        return [low]
    size = 10 ** math.floor(math.log10(span / about))
    step = next(size * k for k in (1, 2, 5, 10) if size * k * about >= span)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    size = math.ceil(len(x) / _MOST)
    starts = range(0, len(x), size)
    return (
        [x[min(i + size // 2, len(x) - 1)] for i in starts],
        [sum(y[i : i + size]) / len(y[i : i + size]) for i in starts],
    )


def _smoothed(y: Sequence[float]) -> list[float]:
    """A centred mean over about a fifteenth of the curve."""
    half = max(1, len(y) // 30)
    return [sum(window) / len(window) for i in range(len(y)) if (window := y[max(0, i - half) : i + half + 1])]
