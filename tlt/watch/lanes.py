"""A timeline as SVG text: a lane for each of several, and on it coloured spans of time.

Drawn to scale on the frame of the other plots, with the page's style sheet; a span is read off by hovering. Knows
nothing of workers or runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tlt.watch.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Frame, svg, tick_words

_FILLED = 0.72  # of a lane's height
_LEAST_WIDTH = 0.4  # of a span that would be too narrow to see


@dataclass(frozen=True, slots=True)
class LaneSpan:
    start: float
    length: float
    colour: str  # a class
    title: str  # what hovering shows


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: Sequence[LaneSpan]


def lane_chart(lanes: Sequence[Lane], x: Axis) -> str:
    """Lanes from top to bottom, in the order given."""
    ends = [span.start + span.length for lane in lanes for span in lane.spans]
    frame = Frame.around([(0.0, 0.0), (max(ends, default=1.0), float(len(lanes)))], x, Axis(""))
    inside = [*_time_axis(frame, x)]
    for index, lane in enumerate(lanes):
        inside += _drawn(frame, lane, index, len(lanes))
    return svg(inside, f"{len(lanes)} timelines over {x.label}")


def _time_axis(frame: Frame, x: Axis) -> Iterator[str]:
    bottom, say = HEIGHT - BOTTOM, tick_words(frame.x_ticks)
    for tick in frame.x_ticks:
        at = f"{frame.x(tick):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="axis" x="{at}" y="{bottom + 17}" text-anchor="middle">{say(tick)}</text>'
    yield f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x.label)}</text>'


def _drawn(frame: Frame, lane: Lane, index: int, lanes: int) -> Iterator[str]:
    each = (HEIGHT - TOP - BOTTOM) / lanes
    top, height = TOP + index * each + each * (1 - _FILLED) / 2, each * _FILLED
    middle = f"{top + height / 2:.1f}"
    yield f'<text class="axis" x="{LEFT - 8}" y="{middle}" dy="4" text-anchor="end">{escape(lane.name)}</text>'
    for span in lane.spans:
        left, right = frame.x(span.start), frame.x(span.start + span.length)
        size = f'x="{left:.1f}" y="{top:.1f}" width="{max(_LEAST_WIDTH, right - left):.1f}" height="{height:.1f}"'
        yield f'<g><title>{escape(span.title)}</title><rect class="{span.colour} bar" {size}/></g>'
