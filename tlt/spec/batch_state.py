"""What a tuner thinks of one batch size, whom it lets wait, and what it has counted.

And by which figures it goes: when the shape in use is to be compared with plain ticks follows from these alone. No
other decisions.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from tlt.spec.shape import OFF, Shape


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
