"""What a tuner thinks of one batch size, whom it lets wait, and what it has counted. No decisions."""

from collections import Counter
from dataclasses import dataclass, field

from tlt.spec.shape import OFF, Shape


@dataclass(slots=True)
class Stand:
    """What is thought best at one batch size."""

    shape: Shape = OFF
    rate: float = 0.0  # tokens per second and request expected of it
    since: int = -(10**9)  # tick of the last change of mind
    reviews: int = 0  # since something changed
    until: int = 0  # tick of the next review
    probe: Shape | None = None  # what would be worth trying …
    worst: float = 0.0  # … and the seconds it loses if nothing is accepted, but for catching up
    gain: float = 0.0  # promised over plain decoding, as a share
    plain: int = 0  # ticks still to come of a comparison with plain decoding
    spent: float = 0.0  # seconds, with so many requests
    check: int = 0  # tick of the next one, if little is promised
    checks: int = 0  # there have been, with this shape


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
