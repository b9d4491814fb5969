"""One shape for ever: what choosers are measured against."""

from collections.abc import Iterable, Sequence

from tlt.spec.alarm import Alarm
from tlt.spec.costs import Measured
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Outcome


class Fixed:
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
