"""What a tick costs: seconds of each (role, size) as measured, and a tick's of any shape from them.

What always holds: an estimate never falls as the size grows, and is there as soon as one size of its role was measured.
Knows nothing of acceptance, of who measures, or of what a role does.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from tlt.spec.shape import Shape

POLICY = "policy"  # one run of the policy; size = padded tokens
EXTEND = "extend"  # a learned drafter takes in what was accepted and names its first candidates; size = padded requests
DRAFT = "draft"  # one level more of a learned drafter's tree; size = padded requests · width
CATCH_UP = "catch up"  # a learned drafter left out takes in a position of every request; size = padded requests
LOOKUP = "lookup"  # a model-free drafter's proposals for the batch, on the host; size = padded requests

_WINDOW = 9  # measurements kept of a (role, size): their median shrugs off four outliers and forgets the capture


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of one role and size took so long."""

    role: str
    size: int
    seconds: float


class CostTable:
    """Seconds by role and size, first from capture, then refreshed by every run that is recorded."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, deque[float]]] = {}
        self._curves: dict[str, tuple[list[int], list[float]]] = {}  # role → sizes, seconds; built when asked for

    def record(self, role: str, size: int, seconds: float) -> None:
        if size < 1 or not 0.0 <= seconds < float("inf"):
            raise ValueError(f"{role} of size {size} took {seconds} s; expected a size ≥ 1 and finite seconds ≥ 0")
        self._measured.setdefault(role, {}).setdefault(size, deque(maxlen=_WINDOW)).append(seconds)
        self._curves.pop(role, None)

    def knows(self, role: str, size: int) -> bool:
        """Whether this very size was ever measured."""
        return size in self._measured.get(role, ())

    def estimate(self, role: str, size: int) -> float | None:
        """Straight lines between measured sizes; below the smallest as dear as that one; beyond the largest in
        proportion to the size, which is the safe side. None if nothing of the role was measured."""
        if role not in self._measured:
            return None
        if role not in self._curves:
            self._curves[role] = self._curve(role)
        sizes, seconds = self._curves[role]
        right = bisect_left(sizes, size)
        if right == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if right == 0 or sizes[right] == size:
            return seconds[right]
        part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])

    def _curve(self, role: str) -> tuple[list[int], list[float]]:
        measured = sorted(self._measured[role].items())
        return [size for size, _ in measured], never_falling([median(window) for _, window in measured])


def never_falling(values: list[float]) -> list[float]:
    """The closest sequence that never falls: neighbours in the wrong order share their mean."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


_PRIOR_TICKS = 2  # of agreement with the table that drafting is credited with before it ever ran
_KNOWN_TICKS = 32  # that a correction rests on at most, so that a change is followed
_BOUNDARY = 8  # ticks after a switch in which the new shape is compared with the one before: one busy moment of the
# machine must not outvote the rest of _KNOWN_TICKS
_DRIFT = 1 / 16  # weight of a tick in what all shapes share
_STRANGE = 0.25  # a tick counts there as at most this much dearer or cheaper than foreseen
_TOO_DEAR = 0.7  # a whole tick at this share of what the policy's part was to cost is no chance: that cost was wrong
_LEAST_DRAFT_S = 20e-6  # of a tick that drafts: something to correct where the table knows of nothing


class TickCosts:
    """Seconds of a whole tick: the table's sum, corrected by how long ticks really took.

    Two corrections, both factors. `drift` is shared by all shapes (contexts grow, the host is busy) and cancels when
    shapes are compared. What drafting, and verifying instead of plain decoding, costs beyond the table is learned only
    in the few ticks after a switch, when the shape before ran in the same conditions.
    Sizes that capture did not measure are learned from their first plain ticks; what a model-free drafter takes, from
    every tick that says so.
    """

    def __init__(self, table: CostTable, pad: Callable[[int], int], learned: Collection[str] = ()) -> None:
        self._table = table
        self.pad = pad  # of tokens, and of requests: the size of the graph that would run
        self._learned = frozenset(learned)  # drafters that run on the device; the others only cost the host a lookup
        self._drift = 1.0
        self._drafting = {True: _Factor(), False: _Factor()}  # with a learned drafter, with model-free ones only
        self._last: Shape | None = None
        self._since = 0  # ticks since the shape changed
        self._plain: dict[int, int] = {}  # size → plain ticks recorded of it, where capture did not measure it

    def know(self, measured: Measured) -> None:
        """Measured beforehand."""
        self._table.record(measured.role, measured.size, measured.seconds)

    def seconds(self, shape: Shape, batch: int) -> float | None:
        """Expected of one tick; None as long as no run of the policy was ever measured."""
        policy = self._table.estimate(POLICY, self.pad(batch * shape.verify))
        if policy is None:
            return None
        beside = 0.0 if shape.off else self._draft(shape, batch) * self._factor(shape).value
        return (policy + beside) * self._drift

    def catching_up(self, shape: Shape, before: Shape, batch: int, behind: int) -> float:
        """Seconds that learned drafters need before they can be asked, where the shape before left them out."""
        new = self._learned.intersection(shape.drafters).difference(before.drafters)
        return len(new) * behind * (self._table.estimate(CATCH_UP, self.pad(batch)) or 0.0)

    def observe(self, shape: Shape, batch: int, seconds: float, drafts_s: Sequence[float] = ()) -> None:
        """A tick took this long, one-off work left out; each of the shape's drafters so much of it, if told."""
        self._since = self._since + 1 if self._last == shape else 1
        self._last = shape
        if shape.off:
            self._observe_plain(self.pad(batch), seconds)
            return
        for drafter, spent in zip(shape.drafters, drafts_s, strict=False):
            if drafter not in self._learned:
                self._table.record(LOOKUP, self.pad(batch), spent)
        policy = self._table.estimate(POLICY, self.pad(batch * shape.verify))
        if policy is None:
            return
        if self._since > _BOUNDARY:
            self._see_drift(seconds, self.seconds(shape, batch) or seconds)
        else:
            self._see_drafting(shape, batch, seconds / self._drift, policy)

    def _see_drafting(self, shape: Shape, batch: int, seconds: float, policy: float) -> None:
        """What drafting takes beyond the table; or, where all of it took much less than the policy's run alone was
        foreseen to take, that this was foreseen too dear: whoever believed it would not use the shape again."""
        if seconds < _TOO_DEAR * policy:
            self._table.record(POLICY, self.pad(batch * shape.verify), seconds)
        else:
            self._factor(shape).see((seconds - policy) / self._draft(shape, batch))

    def _observe_plain(self, size: int, seconds: float) -> None:
        """The first ticks of a size that nobody measured tell what it costs; later ones, how all costs drift."""
        policy = self._table.estimate(POLICY, size)
        if policy is None or self._learns(size):
            self._table.record(POLICY, size, seconds / self._drift)
        else:
            self._see_drift(seconds, policy * self._drift or seconds)

    def _see_drift(self, seconds: float, expected: float) -> None:
        surprise = seconds / expected - 1.0
        self._drift *= 1.0 + min(max(surprise, -_STRANGE), _STRANGE) * _DRIFT

    def _learns(self, size: int) -> bool:
        seen = self._plain.get(size, 0)
        if seen == _WINDOW or (not seen and self._table.knows(POLICY, size)):
            return False
        self._plain[size] = seen + 1
        return True

    def _factor(self, shape: Shape) -> "_Factor":
        return self._drafting[not self._learned.isdisjoint(shape.drafters)]

    def _draft(self, shape: Shape, batch: int) -> float:
        """By the table alone."""
        requests = self.pad(batch)
        total = _LEAST_DRAFT_S
        for drafter in shape.drafters:
            if drafter in self._learned:
                total += self._run(EXTEND, requests) + (shape.depth - 1) * self._run(DRAFT, requests * shape.width)
            else:
                total += self._table.estimate(LOOKUP, requests) or 0.0
        return total

    def _run(self, role: str, size: int) -> float:
        """A drafter's run nobody has measured is taken to cost what the policy's would: the safe side."""
        known = self._table.estimate(role, size)
        return known if known is not None else self._table.estimate(POLICY, size) or 0.0


class _Factor:
    """How many times dearer than foreseen: the median of what ticks say."""

    def __init__(self) -> None:
        self.value = 1.0
        self._said = deque([1.0] * _PRIOR_TICKS, maxlen=_KNOWN_TICKS)

    def see(self, times: float) -> None:
        self._said.append(times)
        self.value = max(0.0, median(self._said))
