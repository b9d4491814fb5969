"""Small plots as SVG text: lines and stacked bars on common axes, to stand inside an HTML page.

Nothing is fetched and nothing runs: a value is read off by hovering, where the browser shows a column's <title>.
Colours and fonts come from the page's style sheet, by class: `c1` … `c6` for series, `axis`, `grid`, `rule`, `hit`.
What is drawn is what was given: no smoothing, no cutting. Knows nothing of runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 24, 38  # room around the plotting area, in the same units
_MOST_COLUMNS = 400  # places to hover over: more are too narrow to hit
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


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from x to x + width, its parts stacked in the order of the colours."""

    x: float
    width: float
    parts: Sequence[float]
    title: str  # what hovering shows


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at x: a small triangle at the top."""

    x: float
    title: str


@dataclass(frozen=True, slots=True)
class Column:
    """What hovering at x shows."""

    x: float
    title: str


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    columns: Sequence[Column] = (),
    marks: Sequence[Mark] = (),
    between: tuple[int, int] | None = None,
    rule: float | None = None,
) -> str:
    """Lines over a common x. `between`: indices of two lines whose gap is shaded; `rule`: a line to compare with."""
    points = [point for line in lines for point in line.points]
    frame = Frame.around(points, x, y)
    inside = [
        *frame.axes(x, y),
        *([frame.horizontal(rule)] if rule is not None else []),
        *([_shade(frame, lines[between[0]], lines[between[1]])] if between else []),
        *(part for line in lines for part in _draw(frame, line)),
        *(frame.mark(mark) for mark in marks),
        *frame.columns(columns),
    ]
    return svg(inside, f"{y.label} over {x.label}")


def bar_chart(bars: Sequence[Bar], colours: Sequence[str], x: Axis, y: Axis) -> str:
    """Stacked bars."""
    points = [(edge, total) for bar in bars for total in (0.0, sum(bar.parts)) for edge in (bar.x, bar.x + bar.width)]
    frame = Frame.around(points, x, y)
    inside = [*frame.axes(x, y), *(part for bar in bars for part in _stack(frame, bar, colours))]
    return svg(inside, f"{y.label} over {x.label}")


def svg(inside: Sequence[str], label: str) -> str:
    body = "".join(inside)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'


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

    def horizontal(self, value: float) -> str:
        at = f"{self.y(value):.1f}"
        return f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'

    def mark(self, mark: Mark) -> str:
        path = f"M{self.x(mark.x):.1f} {TOP + 1}l-4 -7h8z"
        return f'<path class="mark" d="{path}"><title>{escape(mark.title)}</title></path>'

    def columns(self, columns: Sequence[Column]) -> Iterator[str]:
        """Invisible places to hover over, each as wide as the way to its neighbours."""
        shown = columns[:: max(1, ceil(len(columns) / _MOST_COLUMNS))]
        half = (WIDTH - LEFT - RIGHT) / max(1, len(shown) - 1) / 2
        for column in shown:
            left = max(LEFT, self.x(column.x) - half)
            right = min(WIDTH - RIGHT, self.x(column.x) + half)
            # marks stay reachable above
            size = f'x="{left:.1f}" y="{TOP + 2}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM - 2}"'
            yield f'<rect class="hit" {size}><title>{escape(column.title)}</title></rect>'


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


def _shade(frame: Frame, upper: Line, lower: Line) -> str:
    around = [*upper.points, *reversed(lower.points)]
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in around)
    return f'<path class="shade" d="M{path}Z"/>'


def _stack(frame: Frame, bar: Bar, colours: Sequence[str]) -> Iterator[str]:
    left, right = frame.x(bar.x), frame.x(bar.x + bar.width)
    gap = min(1.0, (right - left) * 0.15)
    yield f"<g><title>{escape(bar.title)}</title>"
    floor_ = 0.0
    for part, colour in zip(bar.parts, colours, strict=True):
        top, bottom = frame.y(floor_ + part), frame.y(floor_)
        floor_ += part
        if bottom - top >= 0.05:
            size = (
                f'x="{left + gap / 2:.1f}" y="{top:.1f}" width="{right - left - gap:.1f}" height="{bottom - top:.1f}"'
            )
            yield f'<rect class="{colour} bar" {size}/>'
    yield "</g>"
