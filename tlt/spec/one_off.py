"""What comes beside ticks: graphs of shapes that never ran at a batch size, and prompts that new requests bring.

What always holds: one-off work that took far longer than usual has compiled kernels, and counts no more than graphs do.
Knows shapes, sizes and seconds.
"""

from dataclasses import dataclass, field
from math import inf

from tlt.spec.shape import Shape

_RECENT = 15 / 16  # of the weight of earlier ones is left after another
_MOST_CAPTURES = 4  # that a tick may need
_TRIAL, _WHOLE = 0.5, 2.0  # captures that a first run without graphs, and all graphs of a shape, are taken to cost


@dataclass(slots=True)
class FirstRuns:
    """Where shapes ever ran, and one-off work where one had not: of its first tick there, and in all. Of late.

    A first tick runs without graphs, and so may the next ones. Whoever is to stay with a shape, for which `whole_s` is
    weighed, is not kept from it by what is left of that after one; who tries it pays for the tick alone, and what the
    last one took the next may take too: until one took nothing beside, or all of them together what graphs cost.
    """

    capture_s: float = 0.0  # of a graph, measured beforehand: counts as one more of them
    ran: dict[Shape, dict[int, float]] = field(default_factory=dict)  # by size: what the next tick may take beside
    _taken: dict[tuple[Shape, int], float] = field(default_factory=dict)  # beside all ticks there
    _count: float = 0.0
    _first: float = 0.0
    _whole: float = 0.0

    def ready(self, shape: Shape, size: int) -> bool:
        """Whether graphs serve it, or soon will: what ran for up to twice as many requests is mostly served by theirs
        at first."""
        return shape.off or bool(self._beside(shape, size))

    def made(self, shape: Shape, size: int) -> None:
        """Its graphs were captured before anybody waited."""
        self.ran.setdefault(shape, {})[size] = 0.0

    def see(self, shape: Shape, size: int, one_off_s: float) -> None:
        one_off_s = self.baseline(one_off_s)
        if not self.ready(shape, size):
            self._count = self._count * _RECENT + 1
            self._first = self._first * _RECENT + one_off_s
            self._whole *= _RECENT
        self._whole += one_off_s
        taken = self._taken[shape, size] = self._taken.get((shape, size), 0.0) + one_off_s
        again_s = min(one_off_s, self.capture_s)  # what took longer has compiled
        self.ran.setdefault(shape, {})[size] = again_s if taken < _WHOLE * self.capture_s else 0.0

    def baseline(self, one_off_s: float) -> float:
        """Kernels compile once, and that may take seconds: no more counts than many graphs take."""
        most = _MOST_CAPTURES * self.capture_s if self.capture_s else inf
        return min(max(0.0, one_off_s), most)

    def tried(self, one_off_s: float, foreseen_s: float) -> float:
        """What counts of a try: no more than all graphs of a shape are taken to cost, unless that was foreseen.
        Whatever took longer has compiled kernels."""
        return min(max(0.0, one_off_s), max(foreseen_s, _WHOLE * self.capture_s))

    def trial_s(self, shape: Shape, size: int) -> float:
        """That one tick of it takes beside, most likely. Of its own size it is known best."""
        own_s = self.ran.get(shape, {}).get(size)
        if own_s is not None:
            return own_s
        return min(self._beside(shape, size), default=(_TRIAL * self.capture_s + self._first) / (1.0 + self._count))

    def whole_s(self, shape: Shape, size: int) -> float:
        """Until graphs serve it."""
        return 0.0 if self.ready(shape, size) else (_WHOLE * self.capture_s + self._whole) / (1.0 + self._count)

    def _beside(self, shape: Shape, size: int) -> list[float]:
        return [one_off_s for ran, one_off_s in self.ran.get(shape, {}).items() if size <= ran <= 2 * size]


_REMEMBERED = 1 << 16  # tokens after which what arrived counts 1/e


@dataclass(slots=True)
class Arrivals:
    """How many positions newcomers bring, for each token that is emitted: a drafter in use has to take them in.

    At first many come at once and little was written: answers are taken to become as long as what came before them.
    """

    _positions: float = 0.0
    _tokens: float = 0.0

    def see(self, positions: int, tokens: int) -> None:
        kept = max(0.0, 1.0 - tokens / _REMEMBERED)
        self._positions, self._tokens = self._positions * kept + positions, self._tokens * kept + tokens

    @property
    def per_token(self) -> float:
        return self._positions / max(self._tokens, self._positions, 1.0)
