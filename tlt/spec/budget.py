"""The tuner's accounts: its settings, its state per batch size, its counters, and what learning may cost.

What always holds: no decisions are made here beyond when a shape in use is compared with plain ticks.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from tlt.spec.shape import OFF, Shape

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


@dataclass(frozen=True, slots=True)
class TunerSettings:
    exploration: float = 0.005  # share of all time that may be lost by learning …
    loan: float = 2.0  # … and before that is earned so many plain ticks, if they are no larger a share of what may come
    margin: float = 0.01  # a shape must promise this much more than the one in use …
    doubt: float = 0.3  # … and doubt / √verifies more on top, as long as little is known of its drafters …
    cost_doubt: float = 0.04  # … and over plain decoding cost_doubt / √ticks, until it has shown what it costs there
    unused: float = 0.03  # a shape that never ran at such a batch size counts less: its graphs are yet to be captured
    least_gain: float = 0.005  # a shape that promises less than this over plain decoding is given up
    settle_ticks: int = 16  # between two switches at one batch size; switching off need not wait
    review_ticks: int = 128  # between two looks at a batch size; the first come sooner
    horizon: float = 1000.0  # verifies after which an observation counts 1/e
    probe_pause: int = 64  # ticks until a drafter found wanting is tried again; doubles every time
    longest_pause: int = 4096
    check_ticks: int = 6  # plain ones at a time, with which the shape in use is compared now and then
    check_pause: int = 64  # ticks until the first such comparison at a batch size; doubles every time
    check_gain: float = 0.25  # a shape that promises more over plain decoding is compared more rarely …
    check_rarely: int = 8  # … by this factor
    slower: float = 0.125  # so much longer than since it was last compared a shape's ticks must take …
    slower_ticks: int = 12  # … so many times, nearly in a row, to be compared at once …
    slower_check: int = 4  # … with so many plain ticks …
    slower_pause: int = 512  # … but no sooner than so many ticks after the last time, if there were many
    prior_weight: float = 128.0  # verifies that what was measured of a drafter elsewhere is worth
    swap_worth: float = 3.0  # verifies that the old version's record is worth for a new one: so few that it is tried


@dataclass(slots=True)
class BatchSizeState:
    """What is thought best at one batch size."""

    shape: Shape = OFF
    rate: float = 0.0  # tokens per second and request expected of it
    since: int = -(10**9)  # tick of the last change of mind
    reviews: int = 0  # since something changed
    until: int = 0  # tick of the next review …
    later: int = 0  # … and of the one after it, at the earliest
    probe: Shape | None = None  # what would be worth trying …
    worst: float = 0.0  # … and the seconds it loses if nothing is accepted, but for catching up
    gain: float = 0.0  # promised over plain decoding, as a share
    plain: int = 0  # ticks still to come of a comparison with plain decoding
    spent: float = 0.0  # seconds, with so many requests
    check: int = 0  # tick of the next one, if little is promised
    checks: int = 0  # there have been, with this shape
    looked: int = 0  # plain ticks of the last one …
    for_a_reason: bool = False  # … which the shape's slow ticks gave, or it had its turn …
    charged: float = 0.0  # … and the seconds that they were taken to lose, until it is known what they did
    usual_s: float = inf  # of a tick of this shape since it was last compared, when it was quickest
    slower: int = 0  # ticks of late that took clearly longer, less those that did not …
    wary: int = 0  # … and the tick before which they are no reason for another comparison
    alarms: int = 0  # how often they were, with this shape

    def change(self, shape: Shape, tick: int) -> None:
        self.shape, self.since, self.reviews = shape, tick, 1
        self.plain = self.checks = self.alarms = self.wary = 0
        self.charged = 0.0
        self.forget_usual()

    def look_at(self, tick: int) -> None:
        """Then it is seen whether the shape keeps its promise. The review that was to come comes none the sooner."""
        if tick < self.until:
            self.later, self.reviews = self.until, self.reviews - 1
        self.until = tick

    def forget_usual(self) -> None:
        self.usual_s, self.slower = inf, 0

    def took(self, seconds: float, settings: TunerSettings) -> None:
        """A tick of the shape in use. No single one says anything: only if nearly all of late were slow did something
        change that lasts. Whether for plain ticks too, these cannot tell."""
        slow = seconds > (1.0 + settings.slower) * self.usual_s
        self.slower = min(self.slower + 1, settings.slower_ticks) if slow else max(self.slower - 1, 0)

    def is_slower(self, tick: int, settings: TunerSettings) -> bool:
        return self.slower >= settings.slower_ticks and tick >= self.wary

    def suspects(self, tick: int, settings: TunerSettings) -> bool:
        """Whether it may soon be slower."""
        return 2 * self.slower > settings.slower_ticks and tick >= self.wary

    def loss(self, plain_s: float) -> float:
        """By so many seconds of plain ticks, if the shape in use is as good as it seems."""
        return plain_s * max(0.0, 1.0 - 1.0 / (1.0 + self.gain))

    def has_its_turn(self, tick: int, settings: TunerSettings) -> bool:
        rarely = settings.check_rarely * self.check_pause(settings)  # a large promise may be wrong too
        return tick >= self.check + (rarely if self.gain > settings.check_gain else 0)

    def check_pause(self, settings: TunerSettings) -> int:
        return min(settings.check_pause << self.checks, settings.longest_pause)

    def compare(self, tick: int, ticks: int, loss: float, slower: bool, settings: TunerSettings) -> None:
        """A comparison begins. What comes after it is the new measure."""
        self.charged, self.plain, self.looked, self.for_a_reason = loss, ticks, ticks, slower
        self.checks += 1
        self.check = tick + self.check_pause(settings)
        self.forget_usual()
        if slower:
            self.alarms += 1
            self.wary = tick + min(settings.check_pause << self.alarms, settings.slower_pause)


@dataclass(slots=True)
class Pause:
    wait: int
    until: int | None = None  # tick; None: no reason to wait yet


@dataclass(slots=True)
class Tally:
    plain: Counter[int] = field(default_factory=Counter)
    ticks: Counter[tuple[int, Shape]] = field(default_factory=Counter)  # but for the plain ones counted above
    verifies: int = 0
    accepted: int = 0
    explored: int = 0
    switches: int = 0
    alarms: int = 0
