"""What learning and one-off work may cost: time spent, what it earned, and what was lost or invested.

What always holds: what is being tried counts as lost, at its worst, until it was seen; more is lost than was earned by
a comparison or two at most, which had a reason and could not wait, and then nothing is until it is earned; no more is
invested than was saved, and what the promise at hand would have saved of late. Knows shapes and seconds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from tlt.spec.shape import Shape

_LENT = 0.1  # of what learning may lose: if comparisons that had a reason lost less, the next one need not wait
_FORESEEN = 256  # plain ticks: no promise is trusted for longer


@dataclass(frozen=True, slots=True)
class Probe:
    shape: Shape
    rate: float  # of the shape it stood in for
    worst: float
    tick: int


@dataclass(slots=True)
class Budget:
    """Time spent, and how much of it was lost by learning."""

    share: float
    loan_ticks: float = 0.0
    tick_s: float = 0.0  # of a plain tick, of late
    spent: float = 0.0
    lost: float = 0.0  # a probe that paid off gives back, but never below 0
    compared: float = 0.0  # of it, by comparisons that had a reason
    open: list[Probe] = field(default_factory=list)  # chosen, not yet observed: booked at their worst
    saved: float = 0.0  # by speculating, one-off work left out; may be negative
    invested: float = 0.0  # one-off work: captures, drafters catching up

    @property
    def left(self) -> float:
        earned = max(self.share * self.spent, self.loan_ticks * self.tick_s)  # what was lent is paid back
        return earned - self.lost - sum(probe.worst for probe in self.open)

    def lends(self, loss: float) -> bool:
        """Whether a comparison that has a reason may be made: before it is earned too, if those before it lost little
        of all that was."""
        return loss <= self.left or self.compared <= _LENT * self.share * self.spent

    def book(self, lost: float, for_a_reason: bool) -> None:
        """What a comparison lost, or less than nothing if it turns out to have lost less than was booked."""
        self.lost = max(0.0, self.lost + lost)
        if for_a_reason:
            self.compared = max(0.0, self.compared + lost)

    def affords(self, one_off_s: float, gain: float) -> bool:
        """Whether one-off work is worth a promise to need this share less time. As much time is taken to come as has
        passed, for a rollout that has just begun may be a short one, up to a limit: beyond it, earlier promises should
        have been kept, and what was saved pays for what is invested."""
        to_come = min(self.spent, _FORESEEN * self.tick_s)
        earned = gain * to_come + self.share * self.spent + max(0.0, self.saved)
        return one_off_s <= 0.0 or self.invested + one_off_s <= earned

    def close(self, shape: Shape, tick: int) -> Probe | None:
        """The probe this tick was, if it was one. One that never ran is dropped."""
        found = next((probe for probe in self.open if probe.shape == shape), None)  # it may run at another size
        self.open = [probe for probe in self.open if probe is not found and tick - probe.tick < 16]
        return found


_RECENT = 15 / 16  # of the weight of earlier ones is left after another
_MOST_CAPTURES = 8  # that a tick may need
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
