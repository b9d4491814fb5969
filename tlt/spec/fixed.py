"""Shape policies of measurements: one shape always, and one that delegates to another, which can be replaced.

Measurements run several shape policies in one engine: graphs and compiled kernels are then the same for all of them.
"""

from collections.abc import Iterable, Sequence

from tlt.spec.acceptance import Alarm
from tlt.spec.ahead import Prices
from tlt.spec.costs import Measured
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy, TunerReport


class Fixed:
    """Always the same shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, batch: int, lag: int = 0) -> Shape:
        return self._shape

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        return ()

    def load_costs(self, costs: Iterable[Measured]) -> None:
        pass

    def set_max_len(self, ticks: int) -> None:
        pass

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        pass

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        return [] if self._shape.off else [(self._shape, size) for size in sizes]

    def drafter_changed(self, drafter: str) -> None:
        pass

    def prices(self, batch: int) -> None:
        """Knows no costs."""

    def report(self) -> None:
        """Keeps no books."""


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
