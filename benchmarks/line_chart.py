"""A line chart as SVG text, for pictures in the docs. Colours are classes of a style sheet: `c1`, `c2`, ….

What is drawn is what was given: no smoothing, no cutting.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 24, 38  # room around the plotting area, in the same units
_MOST_DOTS = 40  # points of a line that are marked one by one

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says, and what it must include."""

    label: str  # with its unit
    include: tuple[float, ...] = ()  # values that are shown whatever the data
    whole: bool = False  # ticks at whole numbers only
    percent: bool = False  # values are shares
    names: tuple[tuple[float, str], ...] = ()  # ticks by name instead of numbers (x only)


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points, in order of x."""

    label: str
    points: Sequence[Point]
    colour: str  # a class
    faint: bool = False  # the raw values behind a mean
    steps: bool = False  # constant up to the next point, as counts are


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
) -> str:
    """Lines over a common x."""
    points = [point for line in lines for point in line.points]
    frame = Frame.around(points, x, y)
    inside = [
        *frame.axes(x, y),
        *(part for line in lines for part in _draw(frame, line)),
    ]
    return svg(inside, f"{y.label} over {x.label}")


def svg(inside: Sequence[str], label: str) -> str:
    body = "".join(inside)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'


STYLE = """
svg { background: #fff; font-family: system-ui, sans-serif; }
text { font-size: 11.5px; fill: #5f6368; } .key { font-size: 12.5px; fill: #202124; }
.grid { stroke: #e8eaed; } .base, .tick { stroke: #9aa0a6; } .hit { fill: transparent; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.faint { stroke-width: 1; opacity: 0.4; } .dot { fill: currentColor; }
.c1 { color: #80868b; } .c2 { color: #1967d2; } .c3 { color: #e37400; } .c4 { color: #188038; }
"""


def standalone(chart: str, keys: Sequence[tuple[str, str]], *, at_bottom: bool = False) -> str:
    """A chart as an SVG file of its own. `keys`: colour and label of each line, at the top right or bottom right."""
    first = HEIGHT - BOTTOM - 8 - 18 * len(keys) if at_bottom else TOP + 16
    said = "".join(
        f'<g class="{colour}"><path class="line" d="M{WIDTH - 200} {first + 18 * number}h22"/></g>'
        f'<text class="key" x="{WIDTH - 172}" y="{first + 4 + 18 * number}">{escape(label)}</text>'
        for number, (colour, label) in enumerate(keys)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    body = chart.replace("<svg", head, 1).replace("</svg>", f"{said}</svg>")
    start = body.index(">") + 1
    return f"{body[:start]}<style>{STYLE}</style>{body[start:]}\n"


# ---- scales


@dataclass(frozen=True, slots=True)
class Frame:
    """Data to page: where a value stands in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]

    @classmethod
    def around(cls, points: Sequence[Point], x: Axis, y: Axis) -> "Frame":
        """Holds all points. The y axis ends at ticks, the x axis with the data."""
        xs = [*(point[0] for point in points), *x.include] or [0.0, 1.0]
        ys = [*(point[1] for point in points), *y.include] or [0.0, 1.0]
        y_ticks = ticks(min(ys), max(ys), 5, y.whole)
        x_ticks = ticks(min(xs), max(xs), 7, x.whole)
        x0, x1 = min(xs), max(xs)
        if x0 == x1:
            x0, x1 = x0 - 0.5, x1 + 0.5
        return cls(x0, x1, y_ticks[0], y_ticks[-1], tuple(t for t in x_ticks if x0 <= t <= x1), y_ticks)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x: Axis, y: Axis) -> Iterator[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        say_x, say_y = tick_words(self.x_ticks, x.percent), tick_words(self.y_ticks, y.percent)
        for tick in self.y_ticks:
            at = f"{self.y(tick):.1f}"
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
            yield f'<text class="axis" x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end">{say_y(tick)}</text>'
        for tick, said in x.names or [(tick, say_x(tick)) for tick in self.x_ticks]:
            at = f"{self.x(tick):.1f}"
            yield f'<line class="tick" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 4}"/>'
            yield f'<text class="axis" x="{at}" y="{bottom + 17}" text-anchor="middle">{escape(said)}</text>'
        yield f'<line class="base" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        yield f'<text class="name" x="{right}" y="{HEIGHT - 4}" text-anchor="end">{escape(x.label)}</text>'
        yield f'<text class="name" x="{LEFT - 42}" y="12">{escape(y.label)}</text>'


def ticks(low: float, high: float, about: int, whole: bool = False) -> tuple[float, ...]:
    """Round numbers, evenly spaced, from at or below `low` to at or above `high`."""
    if high - low < 1e-9 * max(1.0, abs(low), abs(high)):  # all the same, but for round-off
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    size = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    if whole:
        size = max(1.0, float(ceil(size)))
    first, last = floor(low / size + 1e-9), ceil(high / size - 1e-9)
    return tuple(round(size * n, 12) for n in range(first, last + 1))


def tick_words(values: Sequence[float], percent: bool = False) -> Callable[[float], str]:
    """How ticks are written: all with the same number of decimals, thousands as k."""
    shown = [value * 100 for value in values] if percent else list(values)
    largest = max((abs(value) for value in shown), default=0.0)
    scale, unit = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "%" if percent else "")
    decimals = next((d for d in range(6) if all(abs(round(v / scale, d) - v / scale) < 1e-9 for v in shown)), 6)

    def say(value: float) -> str:
        number = (value * 100 if percent else value) / scale
        return f"{number:,.{decimals}f}{unit if number or percent else ''}".replace("-", "−")

    return say


# ---- shapes


def _draw(frame: Frame, line: Line) -> Iterator[str]:
    if not line.points:
        return
    style = f"{line.colour} line{' faint' if line.faint else ''}"
    yield f'<path class="{style}" d="{_path(frame, line)}"/>'
    if len(line.points) <= _MOST_DOTS and not line.faint and not line.steps:
        for x, y in line.points:
            yield f'<circle class="{line.colour} dot" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.4"/>'


def _path(frame: Frame, line: Line) -> str:
    parts: list[str] = []
    for x, y in line.points:
        at_x, at_y = f"{frame.x(x):.1f}", f"{frame.y(y):.1f}"
        if not parts:
            parts.append(f"M{at_x} {at_y}")
        elif line.steps:
            parts.append(f"H{at_x}V{at_y}")
        else:
            parts.append(f"L{at_x} {at_y}")
    return "".join(parts)
