"""The shape policy protocol, the record of a tick that it observes, and the shapes that it chooses from.

`Fixed` always has one shape; `SwappableShapePolicy` delegates. `candidates` lists the useful shapes of a configuration.
Always holds: shapes are excluded here by structure only; measured costs decide which pays. Knows numbers only.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Protocol

from tlt.spec.acceptance import AcceptResult, Alarm
from tlt.spec.ahead import Prices
from tlt.spec.costs import INDEX, INGEST, UNTIMED, Measured, TickTimes
from tlt.spec.shape import OFF, Shape


def infinite_ticks() -> float:
    return inf


def zero_seconds() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measured result of one tick."""

    shape: Shape
    batch: int  # requests that decoded
    results: Sequence[AcceptResult] = ()  # one per request; none when off
    times: TickTimes = UNTIMED
    lag: float = 0.0  # positions per row that the draft-extend processed first, after ticks without the drafter
    ingested: float = 0.0  # prompt positions per row that it processed first, for new requests alone
    arrived: int = 0  # prompt positions of requests that are new since the last outcome
    context: float = 0.0  # mean context length of a row, in positions
    remaining_ticks: Callable[[], float] = infinite_ticks  # upper bound of the plain ticks that all requests need
    host_extend_s: Callable[[], float] = zero_seconds  # of indexing that is due before drafters on the host can draft

    @property
    def draft_extend_s(self) -> float:
        """Seconds of draft-extends after ticks without the drafter, on host and device."""
        parts = self.times.parts
        return parts.get(INDEX, 0.0) + (parts.get(INGEST, 0.0) if self.lag else 0.0)

    @property
    def one_off_s(self) -> float:
        """Seconds of one-off work for the shape: draft-extends and captures."""
        return self.times.one_off_s + self.draft_extend_s


@dataclass(frozen=True, slots=True)
class TunerReport:
    ticks: int
    verifies: int
    accepted: int
    accept_length: float  # pooled: 1 + accepted / verifies
    by_depth: Mapping[str, tuple[float, ...]]  # drafter → at depth 1, 2, …: accepted / reached
    ticks_by_shape: Mapping[tuple[int, Shape], int]  # (padded batch, shape) → ticks
    seconds: float
    saved_s: float  # against plain ticks for the same tokens, by measured costs; `explored_s` is subtracted
    explored_ticks: int
    explored_s: float  # seconds lost by exploration
    switches: int  # changes of the shape at one batch size
    alarms: int

    def since(self, before: "TunerReport") -> "TunerReport":
        """The part after an earlier report of the same tuner."""
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
    """Chooses the shape of each tick. Calls need not alternate: a tick may be chosen before the last is observed.

    The defaults are those of a policy that learns nothing.
    """

    def choose(self, batch: int, lag: int = 0) -> Shape:
        """The next shape. `lag`: mean positions per row that a learned drafter would have to process first."""

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        """Learns from a tick. Returns alarms once, when a collapse shows."""
        return ()

    def load_costs(self, costs: Iterable[Measured]) -> None:
        """Adds costs of runs, measured at startup."""
        return

    def set_max_len(self, ticks: int) -> None:
        """A request was submitted that may run for `ticks` plain ticks."""
        return

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        """Adds the hit rates that this drafter had when it was trained: by depth, by rank."""
        return

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        """Shapes and batch sizes that it may use. Their graphs are captured at startup."""
        return ()

    def rollout_ended(self, lengths: Sequence[int] | None) -> None:
        """No request is left. `lengths`: tokens of each, in the order of admission; None: some came during ticks."""
        return

    def drafter_changed(self, drafter: str) -> None:
        """Another version of this drafter's weights is used from the next tick on."""
        return

    def prices(self, batch: int) -> Prices | None:
        """Prices for the decision to verify written-ahead text; None: costs are unknown."""
        return None

    def report(self) -> TunerReport | None:
        """Its counts; None if it keeps none."""
        return None


class Fixed(ShapePolicy):
    """Always the same shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, batch: int, lag: int = 0) -> Shape:
        return self._shape

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        return [] if self._shape.off else [(self._shape, size) for size in sizes]


class SwappableShapePolicy(ShapePolicy):
    """A shape policy that delegates every call to `now`, which the caller replaces between rollouts.

    Measurements run several shape policies in one engine: graphs and compiled kernels are the same for all of them.
    """

    def __init__(self) -> None:
        self.now: ShapePolicy = Fixed(OFF)

    def choose(self, batch: int, lag: int = 0) -> Shape:
        return self.now.choose(batch, lag)

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        return self.now.observe(outcome)

    def load_costs(self, costs: Iterable[Measured]) -> None:
        self.now.load_costs(costs)

    def set_max_len(self, ticks: int) -> None:
        self.now.set_max_len(ticks)

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        self.now.load_prior(drafter, ranks)

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        return self.now.precapture(sizes)

    def rollout_ended(self, lengths: Sequence[int] | None) -> None:
        self.now.rollout_ended(lengths)

    def drafter_changed(self, drafter: str) -> None:
        self.now.drafter_changed(drafter)

    def prices(self, batch: int) -> Prices | None:
        return self.now.prices(batch)

    def report(self) -> TunerReport | None:
        return self.now.report()


_FILLED = 1.25  # largest ratio of verify size to nodes that the drafter can build
_SHARED_WIDTH = 2  # largest width with a shared verify budget
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.75  # bounds of the shared budget per request, as a fraction of the buildable nodes


def candidates(
    drafters: Iterable[Iterable[str]],
    depths: Iterable[int],
    widths: Iterable[int],
    verifies: Iterable[int],
    shares: Sequence[float] = (),
) -> tuple[Shape, ...]:
    """Off, and every useful shape. The verify size holds one branch of full depth, and exceeds the nodes only slightly.

    `shares`: shared verify budgets, in mean nodes per request; for shapes of one drafter. Then a tree can hold all
    nodes that the drafter builds, the budget is a medium fraction of them, and the width is at most 2: a third
    candidate is not among the likeliest nodes. The verify size is rounded up to a power of two, which costs nothing and
    lets shapes with the same budget use the same graph.
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
