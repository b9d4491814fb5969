"""One shape for ever: what choosers are measured against."""

from collections.abc import Iterable, Sequence

from tlt.spec.alarm import Alarm
from tlt.spec.chooser import Outcome
from tlt.spec.costs import Measured
from tlt.spec.shape import Shape


class Fixed:
    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, batch: int, behind: int = 0) -> Shape:
        return self._shape

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        return ()

    def know(self, costs: Iterable[Measured]) -> None:
        pass

    def expect(self, ticks: int) -> None:
        pass

    def recall(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        pass

    def likely(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        return [] if self._shape.off else [(self._shape, size) for size in sizes]

    def drafter_changed(self, drafter: str) -> None:
        pass

    def report(self) -> None:
        """Keeps no books."""
