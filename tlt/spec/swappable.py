"""A shape policy that can be replaced while its engine lives.

Measurements run several shape policies in one engine: graphs and compiled kernels are then the same for all of them.
"""

from collections.abc import Iterable, Sequence

from tlt.spec.ahead import Prices
from tlt.spec.alarm import Alarm
from tlt.spec.costs import Measured
from tlt.spec.fixed import Fixed
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy, TunerReport


class SwappableShapePolicy:
    """A shape policy that delegates every call to `now`, which the caller replaces between rollouts."""

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

    def drafter_changed(self, drafter: str) -> None:
        self.now.drafter_changed(drafter)

    def prices(self, batch: int) -> Prices | None:
        return self.now.prices(batch)

    def report(self) -> TunerReport | None:
        return self.now.report()
