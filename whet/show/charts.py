"""The geometry of charts: curves, bars and ticks in SVG units. ``assets/chart.svg.j2`` draws them; colours are classes
of the style sheet."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from whet.show.metric_catalog import Style, axis_label, duration, seconds_label

WIDTH, WIDE, HEIGHT = 460, 960, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26
_MOST = 300  # points per line: more are not visible at this size
_BARS = 120

Numbers = Sequence[float]
Show = Callable[[float], str]


@dataclass(slots=True)
class Line:
    """One curve, in order of ``x``. ``band``: (low, high) per point. ``broken``: steps without a finite value."""

    name: str
    x: Numbers
    y: Numbers
    colour: str  # c1, c2 ...
    band: Sequence[tuple[float, float]] | None = None
    dots: bool = False
    smooth: bool = False
    broken: Numbers = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Frame:
    """The axes, which map a step and a value to coordinates."""

    x_low: float
    x_high: float
    low: float
    high: float
    width: int = WIDTH

    def x(self, step: float) -> float:
        span = self.x_high - self.x_low
        return round(LEFT + (self.width - LEFT - RIGHT) * ((step - self.x_low) / span if span else 0.5), 1)

    def y(self, value: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        return round(HEIGHT - BOTTOM - height * (value - self.low) / (self.high - self.low), 1)

    def path(self, x: Numbers, y: Numbers) -> str:
        """Return the ``points`` of a polyline."""
        return " ".join(f"{self.x(a)},{self.y(b)}" for a, b in zip(x, y, strict=True))

    def steps(self) -> list[float]:
        return [value for value in ticks(self.x_low, self.x_high, self.width // 90) if value == int(value)]

    def values(self) -> list[float]:
        return ticks(self.low, self.high, 4)


@dataclass(slots=True)
class Chart:
    """The marks of a chart, from back to front. ``hints`` are shown at the mouse pointer: (name, colour, steps, values
    as text)."""

    frame: Frame
    label: Show  # of a value on the axis
    limits: Numbers = ()
    bars: list[tuple[str, float, float, float, float]] = field(default_factory=list)  # colour, x, y, width, height
    bands: list[tuple[str, str]] = field(default_factory=list)  # colour, points
    curves: list[tuple[str, str]] = field(default_factory=list)  # classes, points
    dots: list[tuple[str, float, float]] = field(default_factory=list)
    broken: Numbers = ()
    hints: list[tuple[str, str, list[float], list[str]]] = field(default_factory=list)


def line_chart(lines: Sequence[Line], show: Show, limits: Numbers = (), style: Style = "number") -> Chart | None:
    """Draw curves on one pair of axes; return None without points. ``limits`` within the range are drawn too."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return None
    steps = [step for line in lines for step in (*line.x, *line.broken)]
    values = [y for line in lines for y in line.y] + [v for line in lines for pair in line.band or () for v in pair]
    frame = Frame(min(steps), max(steps), *padded(values, style))
    label = partial(axis_label, spread=frame.high - frame.low, style=style)
    chart = Chart(frame, label, [v for v in limits if frame.low < v < frame.high])
    for line in lines:
        if line.band:
            low, high = zip(*line.band, strict=True)
            around = [*line.x, *reversed(line.x)], [*high, *reversed(low)]
            chart.bands.append((line.colour, frame.path(*around)))
        x, y = thinned(line.x, line.y, _MOST)
        chart.hints.append((line.name, line.colour, x, [show(value) for value in y]))
        if line.smooth and len(x) >= 12:
            chart.curves.append((f"raw {line.colour}", frame.path(x, y)))
            y = _smoothed(y)
        chart.curves.append((f"line {line.colour}", frame.path(x, y)))
        if line.dots or len(x) == 1:
            chart.dots += [(line.colour, frame.x(a), frame.y(b)) for a, b in zip(x, y, strict=True)]
    chart.broken = [step for line in lines for step in line.broken][:_MOST]
    return chart


def stacked_chart(x: Numbers, layers: Mapping[str, Numbers]) -> Chart | None:
    """Draw seconds per step as stacked bars, one layer per phase. With many steps, neighbours are averaged."""
    if not x:
        return None
    size = math.ceil(len(x) / _BARS)
    means = {name: thinned(x, seconds, _BARS)[1] for name, seconds in layers.items()}
    highest = max(sum(bar) for bar in zip(*means.values(), strict=True))
    frame = Frame(x[0] - 0.5, x[-1] + 0.5, 0.0, 1.05 * highest or 1.0, WIDE)
    chart = Chart(frame, partial(seconds_label, spread=frame.high))
    for i, bar in enumerate(zip(*means.values(), strict=True)):
        left, right = frame.x(x[i * size] - 0.5), frame.x(x[min(i * size + size, len(x)) - 1] + 0.5)
        below = 0.0
        for name, seconds in zip(means, bar, strict=True):
            top, bottom = frame.y(below + seconds), frame.y(below)
            width = round(max(0.5, 0.9 * (right - left)), 1)
            chart.bars.append((f"p-{name}", left, top, width, round(bottom - top, 1)))
            below += seconds
    middles = thinned(x, x, _BARS)[0]
    chart.hints = [(n, f"p-{n}", middles, [duration(s) for s in seconds]) for n, seconds in means.items()]
    return chart


def padded(values: Numbers, style: Style) -> tuple[float, float]:
    """Return the range of an axis: the values with a margin, clipped at 0 and 100%."""
    low, high = min(values), max(values)
    flat = high - low < 1e-3 * abs(high)  # the labels of a narrower axis would look the same
    pad = (0.05 * abs(high) or 0.5) if flat else 0.06 * (high - low) or 0.5
    bottom = max(0.0, low - pad) if low >= 0 else low - pad
    return bottom, min(1.0, high + pad) if style == "percent" and high <= 1 else high + pad


def thinned(x: Numbers, y: Numbers, most: int) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most ``most`` points: the mean of neighbouring points, at the middle one's x."""
    size = math.ceil(len(x) / most)
    starts = range(0, len(x), size)
    return (
        [x[min(i + size // 2, len(x) - 1)] for i in starts],
        [sum(part) / len(part) for i in starts if (part := y[i : i + size])],
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about ``about`` round numbers within the range."""
    span = high - low
    if not span:
        return [low]
    size = 10 ** math.floor(math.log10(span / about))
    step = next(size * k for k in (1, 2, 5, 10) if size * k * about >= span)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _smoothed(y: Numbers) -> list[float]:
    """Return the centred mean over about a fifteenth of the curve."""
    half = max(1, len(y) // 30)
    return [sum(window) / len(window) for i in range(len(y)) if (window := y[max(0, i - half) : i + half + 1])]
