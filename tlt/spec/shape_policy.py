"""Shape policies: what the engine asks them, what it tells them of a tick, and which shapes they choose from.

`candidates` lists the sensible shapes of a configuration. `precapture_plan` names those whose graphs are captured
before the first request. Pure numbers: whether a shape pays is measured.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Protocol

from tlt.spec.acceptance import AcceptResult
from tlt.spec.ahead import Prices
from tlt.spec.alarm import Alarm
from tlt.spec.costs import INDEX, INGEST, UNTIMED, Measured, TickTimes
from tlt.spec.shape import OFF, Shape


def forever() -> float:
    return inf


def nothing() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One tick as it went."""

    shape: Shape
    batch: int  # requests that decoded
    results: Sequence[AcceptResult] = ()  # one per request; none when off
    times: TickTimes = UNTIMED
    lag: float = 0.0  # positions per row that a learned drafter ingested first, because it had been left out
    ingested: float = 0.0  # positions per row that it ingested first because new requests brought them
    arrived: int = 0  # positions that requests which have just come bring a learned drafter
    context: float = 0.0  # positions that a row looks back on, on average
    to_come: Callable[[], float] = forever  # plain ticks until all are answered, at most, whenever it is asked …
    due_s: Callable[[], float] = nothing  # … and seconds that drafters on the host need before they can be asked

    @property
    def caught_up_s(self) -> float:
        """What comes again whenever a drafter was left out for a while."""
        parts = self.times.parts
        return parts.get(INDEX, 0.0) + (parts.get(INGEST, 0.0) if self.lag else 0.0)

    @property
    def one_off_s(self) -> float:
        """One-off work because of the shape: a drafter that catches up, a capture."""
        return self.times.one_off_s + self.caught_up_s


@dataclass(frozen=True, slots=True)
class TunerReport:
    ticks: int
    verifies: int
    accepted: int
    accept_length: float  # pooled: 1 + accepted / verifies
    by_depth: Mapping[str, tuple[float, ...]]  # drafter → share accepted at depth 1, 2, … of what got there
    ticks_by_shape: Mapping[tuple[int, Shape], int]  # (padded batch, shape) → ticks
    seconds: float
    saved_s: float  # against plain ticks for the same tokens, by the measured costs; what learning lost is taken off
    explored_ticks: int
    explored_s: float  # lost by learning, as it went
    switches: int  # changes of mind at one batch size
    alarms: int

    def since(self, before: "TunerReport") -> "TunerReport":
        """What came after an earlier report of the same tuner."""
        verifies, accepted = self.verifies - before.verifies, self.accepted - before.accepted
        return TunerReport(
            ticks=self.ticks - before.ticks,
            verifies=verifies,
            accepted=accepted,
            accept_length=1.0 + accepted / max(1, verifies),
            by_depth=self.by_depth,
            ticks_by_shape=dict(Counter(self.ticks_by_shape) - Counter(before.ticks_by_shape)),
            seconds=self.seconds - before.seconds,
            saved_s=self.saved_s - before.saved_s,
            explored_ticks=self.explored_ticks - before.explored_ticks,
            explored_s=self.explored_s - before.explored_s,
            switches=self.switches - before.switches,
            alarms=self.alarms - before.alarms,
        )


class ShapePolicy(Protocol):
    """What the engine asks. Calls need not alternate: a tick may be chosen before the last one is observed."""

    def choose(self, batch: int, lag: int = 0) -> Shape:
        """`lag`: positions of a request that a learned drafter would have to take in first, on average."""

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]: ...

    def load_costs(self, costs: Iterable[Measured]) -> None:
        """What runs cost, measured beforehand."""

    def set_max_len(self, ticks: int) -> None:
        """A request has come that may run for so many ticks."""

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        """What was measured of this drafter when it was trained: by depth, how often each of its guesses is right."""

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        """What it may use for so many requests, as far as it can tell: their graphs will be captured beforehand."""

    def drafter_changed(self, drafter: str) -> None:
        """Another version of this drafter is in place from the next tick on."""

    def prices(self, batch: int) -> Prices | None:
        """What a chunk of written-ahead text is compared with; None if it knows no costs."""

    def report(self) -> TunerReport | None:
        """Its books; None if it keeps none."""


_FILLED = 1.25  # a tree may have a little more room than nodes come to be
_SHARED_WIDTH = 2
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.75  # of the nodes that a tree may have


def candidates(
    drafters: Iterable[Iterable[str]],
    depths: Iterable[int],
    widths: Iterable[int],
    verifies: Iterable[int],
    shares: Sequence[float] = (),
) -> tuple[Shape, ...]:
    """Off, and every sensible shape: a tree can hold one branch of full depth, and has no room it could never fill.

    Where the requests of one drafter share what is verified, a tree can hold all that is grown, and on average holds
    clearly less, but no small part; and the third guess of a token is none of the likeliest. Such trees have room for a
    power of two, which costs nothing: what verifies them then serves all that share as much.
    """
    found, most = {OFF}, max(verifies := tuple(verifies), default=1)
    sets = {tuple(sorted(names)) for names in drafters}
    for names, depth, width in product(sets, depths, widths):
        room = 1 + width * depth * len(names)  # a level keeps `width` nodes
        if names and width >= 1:
            fitting = [verify for verify in verifies if depth < verify <= _FILLED * room]
            found.update(Shape(names, depth, width, verify) for verify in fitting)
        padded = 1 << (room - 1).bit_length()
        if len(names) == 1 and 1 <= width <= _SHARED_WIDTH and padded <= most:
            sensible = [share for share in shares if _LEAST_SHARE * room <= share <= _MOST_SHARE * room]
            found.update(Shape(names, depth, width, padded, float(share)) for share in sensible)
    return tuple(sorted(found))


SUPPOSED = (0.88, 0.76)  # times as many guesses that are right
_NEAR = 0.03  # that what is named already may lose


def precapture_plan(
    shapes: Sequence[Shape],
    known: Sequence[int],
    seconds: Mapping[int, Sequence[float]],
    lengths: Sequence[Sequence[float]],
) -> list[tuple[Shape, int]]:
    """Shapes and batch sizes, what is likeliest first. `known`: places of those something is known about; `seconds` of
    a tick of each shape, by size; `lengths`: its accept lengths as they are known, then as they are supposed."""
    named: dict[int, list[int]] = {size: [] for size in seconds}
    found = []
    for supposed in lengths:
        for size, costs in seconds.items():
            rates = {place: supposed[place] / costs[place] for place in known}
            best = max(rates, key=rates.__getitem__)
            near = any(rates[place] >= (1.0 - _NEAR) * rates[best] for place in named[size])
            if not shapes[best].off and not near:
                named[size].append(best)
                found.append((shapes[best], size))
    return found
