"""What a tick costs: seconds of each (role, size) as measured, and a tick's of any shape from them.

What always holds: an estimate never falls as the size grows, and is there as soon as one size of its role was measured.
Knows nothing of acceptance, of who measures, or of what a role does.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

from tlt.spec.residuals import SETTLED, TRUSTED, CostResiduals, IngestCost, clipped
from tlt.spec.shape import OFF, Shape

POLICY = "policy"  # one run of the policy; size = tokens, those of rows that no request has too
EXTEND = "extend"  # a learned drafter takes in what was accepted and names its first candidates; size = such tokens
DRAFT = "draft"  # one level more of a learned drafter's tree; size = padded requests · width
CATCH_UP = "catch up"  # a learned drafter left out takes in a position of every request; size = padded requests
CAPTURE = "capture"  # of a graph, compiling included; size = 1
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
        self._changes: dict[str, int] = {}  # role → how often it was recorded or forgotten

    def record(self, role: str, size: int, seconds: float) -> None:
        if size < 1 or not 0.0 <= seconds < float("inf"):
            raise ValueError(f"{role} of size {size} took {seconds} s; expected a size ≥ 1 and finite seconds ≥ 0")
        self._measured.setdefault(role, {}).setdefault(size, deque(maxlen=_WINDOW)).append(seconds)
        self._curves.pop(role, None)
        self._changes[role] = self._changes.get(role, 0) + 1

    def forget(self, role: str) -> None:
        self._measured.pop(role, None)
        self._curves.pop(role, None)
        self._changes[role] = self._changes.get(role, 0) + 1

    def changes(self, roles: Iterable[str]) -> tuple[int, ...]:
        """The same as before: so are their estimates."""
        return tuple(self._changes.get(role, 0) for role in roles)

    def spans(self, role: str, size: int) -> bool:
        """Whether this size lies among those ever measured."""
        sizes = self._measured.get(role)
        return sizes is not None and min(sizes) <= size <= max(sizes)

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


_FADE = 512  # ticks in which what was learned of shapes that are not in use loses half its weight
_DRIFT = 1 / 16  # weight of a tick in what all shapes share …
_COMPARED = 1 / 4  # … and of a plain one just after others: what is tried next is compared with it
_LOOKS = 3  # plain ticks just after others; if they are quicker than foreseen …
_MISTAKEN = 0.12  # … by this share, what all seemed to share was the other shape's own
_LEAST = 0.1  # of what the table says a tick costs, whatever the corrections
_IDLE = 8.0  # times as long as over idle rows a GPU may need for live ones when it catches up: 6 were seen
_LOOKUP_S = 3e-5  # of a request, before any was timed
_STRANGE = 0.25  # a tick counts there as at most this much dearer or cheaper than foreseen


class TickCosts:
    """Seconds of a whole tick: the table's sum, corrected by how long ticks really took.

    Two corrections. What all shapes share cancels when they are compared: contexts that grow, a busy host. It is a
    factor where every node of a tree computes its own attention (a CPU); where a tree reads its context once however
    many nodes it has (a GPU), it is so many seconds: as a factor, large trees would be charged for it many times.
    What a shape costs beyond that is its own, by batch size: learned in the few ticks after a switch, when the shape
    before ran in the same conditions. A shape that never ran is taken to be as dear beyond the table as its like.
    Ticks of one shape that become dearer do not tell whether others would too. They are taken to, until plain ticks
    show that they are as quick as before: then what was known of that shape and its like is out of date.
    No single tick is believed: one that is read late makes the next one seem short, and only their sum is true.
    Sizes outside those measured are learned from their first plain ticks; what a model-free drafter takes, from every
    tick that says so.
    """

    def __init__(
        self,
        table: CostTable,
        pad: Callable[[int], int],
        learned: Collection[str] = (),
        *,
        context_read_once: bool = False,
    ) -> None:
        self._table = table
        self.pad = pad  # of requests: the rows of the graph that would run
        self._learned = frozenset(learned)  # drafters that run on the device; the others only cost the host a lookup
        self._read_once = context_read_once
        self._drift = 1.0  # what all shapes share: a factor …
        self._shared_s = 0.0  # … or seconds
        self._own = CostResiduals()
        self._idle = CostTable()  # of catching up, measured beforehand
        self._caught_up = False  # ever
        self._ingest_cost = IngestCost()
        self._last: Shape | None = None
        self._like = False  # the kind of the shape before …
        self._in_use = 0  # … and the ticks it ran …
        self._since = 0  # … before those since the shape changed …
        self._ticks = 0  # … and those ever
        self._at = self._alike = 0  # the size of late, and ticks of it in a row
        self._then = 1.0, 0.0  # what all shapes seemed to share when the shape changed
        self._looks: list[float] = []  # times as long as foreseen then, plain ticks since; if they took far longer …
        self._disturbed_until = 0  # … whoever is in use but briefly is not compared with them: something is going on
        self._plain: dict[int, int] = {}  # size → plain ticks recorded of it, where nobody measured it
        self._kept_of: dict[int, _Kept] = {}  # by size

    def load_costs(self, measured: Measured) -> None:
        """Measured beforehand."""
        self._table.record(measured.role, measured.size, measured.seconds)
        if measured.role == CATCH_UP:
            self._ingest_cost.changed()
            self._idle.record(CATCH_UP, measured.size, measured.seconds)

    def seconds(self, shape: Shape, batch: int) -> float | None:
        """Expected of one tick; None as long as no run of the policy was ever measured."""
        expected = self._expected(shape, batch)
        if expected is None:
            return None
        own = 0.0 if shape.off else self._own.of(self._kind(shape), shape, self.pad(batch))
        return max(_LEAST * expected, expected + own + self._shared_s) * self._drift

    def seconds_of(self, shapes: Sequence[Shape], index: Mapping[Shape, int], batch: int) -> list[float]:
        """`seconds` of each, for less; 0 where they cannot be told. `index`: where among them each shape stands."""
        size = self.pad(batch)
        kept = self._kept(shapes, size)
        lookup_s, shared_s, drift = self._lookup_s(size), self._shared_s, self._drift
        found = []
        for (runs_s, lookups), own_s in zip(kept.runs, self._own.of_all(kept.kinds, index, size), strict=True):
            expected = runs_s + lookups * lookup_s
            found.append(max(_LEAST * expected, expected + own_s + shared_s) * drift)
        if OFF in index:
            found[index[OFF]] = self.seconds(OFF, size) or 0.0
        return found

    def _kept(self, shapes: Sequence[Shape], size: int) -> "_Kept":
        """Until the table changes."""
        changes, kept = self._table.changes((POLICY, EXTEND, DRAFT)), self._kept_of.get(size)
        if kept is None or kept.changes != changes or kept.shapes is not shapes:
            kinds = [self._kind(shape) for shape in shapes]
            lookups = [len(shape.drafters) - kind for shape, kind in zip(shapes, kinds, strict=True)]
            runs_s = [self._run_s(shape, size) or 0.0 for shape in shapes]
            kept = self._kept_of[size] = _Kept(changes, shapes, kinds, [*zip(runs_s, lookups, strict=True)])
        return kept

    def catching_up(self, shape: Shape, before: Shape, batch: int, lag: int) -> float:
        """Seconds that learned drafters need before they can be asked, where the shape before left them out."""
        return 0.0 if self._kind(before) else self._taking_in(shape, batch, lag)

    def looks_up_anew(self, shape: Shape, before: Shape) -> bool:
        """Whether somebody on the host is asked whom the shape before left out."""
        return any(name not in self._learned and name not in before.drafters for name in shape.drafters)

    def entering(self, shape: Shape, batch: int, positions: float) -> float:
        """Seconds that learned drafters need for what newcomers bring: so many positions of a request, on average."""
        return self._kind(shape) * positions * self._newcomer_s(batch) if positions else 0.0

    def _newcomer_s(self, batch: int) -> float:
        """Of one position of every request, if a learned drafter takes part."""
        return self._ingest_cost.times(self._idle_times, self._position_s) * self._position_s(self.pad(batch))

    def _taking_in(self, shape: Shape, batch: int, positions: float) -> float:
        """The same if all requests have as many."""
        return self._kind(shape) * positions * self._idle_times * self._position_s(self.pad(batch))

    @property
    def _idle_times(self) -> float:
        return _IDLE if self._read_once and not self._caught_up else 1.0

    def _position_s(self, size: int) -> float:
        """Of every row, when all of them take in many."""
        return self._table.estimate(CATCH_UP, size) or 0.0

    def entered(self, shape: Shape, batch: int, positions: float, seconds: float) -> None:
        """A tick in which newcomers' positions were taken in took so long: what is beyond the tick is theirs."""
        beyond = seconds - (self.seconds(shape, batch) or seconds)  # less than nothing, if the one before was read late
        self._ingest_cost.see(beyond, positions, self.pad(batch))

    def caught_up(self, batch: int, lag: int, seconds: float) -> None:
        """So long it took, all rows and so many positions: what was measured over idle rows counts no more."""
        self._ingest_cost.changed()
        if not self._caught_up:
            self._table.forget(CATCH_UP)
        self._caught_up = True
        idle = self._idle.estimate(CATCH_UP, self.pad(batch))
        most = _IDLE * idle if idle else inf  # or whoever stood still for a moment would never be asked again
        self._table.record(CATCH_UP, self.pad(batch), min(most, seconds / lag))

    def observe(self, shape: Shape, batch: int, seconds: float, drafts_s: Sequence[float] = ()) -> None:
        """A tick took this long, one-off work left out; each of the shape's drafters so much of it, if told."""
        self._count(shape, self.pad(batch))
        if self._ticks % _FADE == 0:
            self._own.fade(shape)
            self._ingest_cost.fade()
        if not shape.off:
            for drafter, spent in zip(shape.drafters, drafts_s, strict=False):
                if drafter not in self._learned:
                    self._table.record(LOOKUP, self.pad(batch), spent)
        expected = self.seconds(shape, batch)
        if shape.off and (expected is None or self._learns(self.pad(batch))):
            self._own.close()
            alone = seconds / self._drift - self._shared_s
            self._table.record(POLICY, self.pad(batch), max(_LEAST * seconds, alone))
        elif expected is not None and (shape.off or self._since > SETTLED or self._in_a_bad_moment):
            self._own.close()
            self._see_shared(clipped(seconds - expected, _STRANGE * expected), expected, shape.off)
            if shape.off and self._since <= _LOOKS:
                self._look_back(self.pad(batch), seconds)
        elif expected is not None:
            beyond = seconds / self._drift - self._shared_s - (self._expected(shape, batch) or 0.0)
            self._own.see(self._kind(shape), shape, self.pad(batch), beyond)

    def _count(self, shape: Shape, size: int) -> None:
        if self._last != shape:
            self._like, self._in_use = self._last is not None and self._kind(self._last), self._since
            self._last, self._since = shape, 0
            self._then, self._looks = (self._drift, self._shared_s), []
        if self._at != size:
            self._at, self._alike = size, 0
        self._since, self._alike, self._ticks = self._since + 1, self._alike + 1, self._ticks + 1

    def ticks_of(self, shape: Shape, batch: int) -> int:
        """Of its own, on which the estimate rests."""
        return self._own.ticks(shape, self.pad(batch))

    def _see_shared(self, surprise: float, expected: float, plain: bool) -> None:
        weight = _COMPARED if plain and self._since <= SETTLED else _DRIFT
        if self._read_once:  # contexts and busy hosts only add: what seems to be less is little, or an error
            self._shared_s = max(self._least_shared_s, self._shared_s + weight * surprise)
        else:
            self._drift *= 1.0 + weight * surprise / expected

    @property
    def _in_a_bad_moment(self) -> bool:
        return self._ticks < self._disturbed_until and self._in_use <= SETTLED

    @property
    def _least_shared_s(self) -> float:
        return -_STRANGE * (self._table.estimate(POLICY, 1) or 0.0)

    def _look_back(self, size: int, seconds: float) -> None:
        """Plain ticks just after a shape that was in use may show that its ticks had become dearer, and no others. They
        are believed if they are quick: what seems slow may be a bad moment, which is followed little by little."""
        drift, shared_s = self._then
        expected = self._expected(OFF, size) or seconds
        expected = max(_LEAST * expected, expected + shared_s) * drift
        self._looks.append(seconds / expected)
        if not len(self._looks) == self._since == _LOOKS or not self._in_use:  # nothing came before, or some were odd
            return
        took = median(self._looks)
        self._disturbed_until = self._ticks + 8 * _FADE if took > 1.0 + _STRANGE else 0
        if (
            took > 1.0 - _MISTAKEN
            or self._in_use <= SETTLED + TRUSTED  # hardly any of its own was ever taken to be shared
            or self._alike <= self._since  # other ticks are compared with others
        ):
            return
        now = self.seconds(OFF, size) or took * expected
        if self._read_once:
            self._shared_s = max(self._least_shared_s, self._shared_s + took * expected - now)
        else:
            self._drift *= took * expected / now
        self._own.forget(self._like, self._kind, size)

    def _learns(self, size: int) -> bool:
        """The first ticks of a size beyond all that were measured tell what it costs; later ones, how costs drift."""
        seen = self._plain.get(size, 0)
        if seen == _WINDOW or (not seen and self._table.spans(POLICY, size)):
            return False
        self._plain[size] = seen + 1
        return True

    def _kind(self, shape: Shape) -> bool:
        """Whether a learned drafter takes part."""
        return not self._learned.isdisjoint(shape.drafters)

    def _expected(self, shape: Shape, batch: int) -> float | None:
        """By the table alone."""
        size = self.pad(batch)  # graphs compute rows that no request has too, and nothing beyond them
        runs_s, lookups = self._run_s(shape, size), len(shape.drafters) - self._kind(shape)
        return None if runs_s is None else runs_s + lookups * self._lookup_s(size)

    def _lookup_s(self, size: int) -> float:
        """Of one drafter on the host, for all requests."""
        return self._table.estimate(LOOKUP, size) or _LOOKUP_S * size

    def _run_s(self, shape: Shape, size: int) -> float | None:
        """What runs on the device."""
        total = self._table.estimate(POLICY, shape.tokens(size))
        if total is not None and self._kind(shape):
            taken_in = ceil(size * shape.most_tokens)
            total += self._run(EXTEND, taken_in) + (shape.depth - 1) * self._run(DRAFT, size * shape.width)
        return total

    def _run(self, role: str, size: int) -> float:
        """A drafter's run nobody has measured is taken to cost what the policy's would: the safe side."""
        known = self._table.estimate(role, size)
        return known if known is not None else self._table.estimate(POLICY, size) or 0.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the table says of some shapes at one size, as long as it stays as it is."""

    changes: tuple[int, ...]
    shapes: Sequence[Shape]
    kinds: list[bool]
    runs: list[tuple[float, int]]  # seconds of runs on the device, and how many drafters look things up
