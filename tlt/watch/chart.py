"""The data of a figure as plain values: axes, and lines, bars or lanes. The page's `draw.js` draws it.

A line has its own points or names a column of the run's metrics. Colours are names of the page's style sheet: c1 to c6.
Does not depend on runs or on drawing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Label, required values and format of an axis."""

    label: str  # with its unit
    include: tuple[float, ...] = ()  # values that are shown whatever the data
    whole: bool = False  # ticks at whole numbers only
    percent: bool = False  # values are fractions
    names: tuple[tuple[float, str], ...] = ()  # ticks by name instead of numbers (x only)
    scale: float = 1.0  # values are shown divided by it


STEPS = Axis("step", whole=True)


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or in a stack a layer of bars."""

    label: str
    colour: str
    metric: str = ""  # a column of the run; without one, `points`
    points: tuple[Point, ...] = ()
    stepwise: bool = False  # constant up to the next point, as counts are


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from x to x + width, its parts stacked in the order of the figure's series."""

    x: float
    width: float
    parts: tuple[float, ...]
    title: str  # what hovering shows


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at x: a small triangle at the top."""

    x: float
    title: str


@dataclass(frozen=True, slots=True)
class LaneSpan:
    start: float
    length: float
    colour: str
    title: str  # what hovering shows


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: tuple[LaneSpan, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    words: str  # the caption
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()  # the legend, and of lines the data
    stacked: bool = False  # the series are drawn as stacked bars
    bars: tuple[Bar, ...] = ()
    lanes: tuple[Lane, ...] = ()
    marks: tuple[Mark, ...] = ()
    rule: float | None = None  # a line to compare with
    between: tuple[int, ...] = ()  # two series whose gap is shaded
    topic: str = ""  # the section of the page that the figure belongs to

    @property
    def metrics(self) -> list[str]:
        """Columns that the figure draws."""
        return [series.metric for series in self.series if series.metric]


def to_json(figure: Figure) -> dict[str, Any]:
    return asdict(figure)


def lines(*given: tuple[str, str, str]) -> tuple[Series, ...]:
    """Lines from (label, colour, metric)."""
    return tuple(Series(label, colour, metric) for label, colour, metric in given)


def points(x: Sequence[float], y: Sequence[float]) -> tuple[Point, ...]:
    return tuple(zip(x, y, strict=True))
