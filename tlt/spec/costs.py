"""What a tick costs: the sum of its parts, each as it was measured beforehand and as it was timed in ticks of late.

What always holds: no single tick is believed; what was timed long ago gives way to what was measured beforehand, so
that a shape that seemed dear is tried again in the end; no part is ever free. Knows nothing of acceptance or of who
measures.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median
from types import MappingProxyType

from tlt.spec.shape import Shape

# What is measured beforehand, over idle rows and an empty cache:
POLICY = "policy"  # one run of the policy; size = tokens, those of rows that no request has too
EXTEND = "extend"  # a learned drafter ingests what was accepted and names its first candidates; size = such tokens
DRAFT = "draft"  # one level more of a learned drafter's tree; size = padded requests · width
CATCH_UP = "catch up"  # a learned drafter left out ingests a position of every request; size = padded requests
CAPTURE = "capture"  # of a graph, compiling included; size = 1
# The parts of a tick, by which its time is told; those of a tree are EXTEND, DRAFT (all levels together) and
DECODE = "decode"  # the policy's run in a plain tick; size = padded requests
VERIFY = "verify"  # the policy's run over draft trees; size = their nodes
KEEP = "keep"  # within the policy's run, its hidden states are kept for a drafter; timed beforehand; size = rows
PRUNE = "prune"  # trees are cut down to what is verified; size = padded requests
INGEST = "ingest"  # passes of their own in which a learned drafter ingests prompts, or what it was left out of
LOOKUP = "lookup"  # a model-free drafter's proposals for the batch, on the host; size = padded requests
INDEX = "index"  # such drafters index what was written while they were left out
_GAPS = "gap off", "gap host", "gap device"  # beside all parts, in plain ticks; where trees come from host or device

_WINDOW = 9  # times kept of a part at a size: their median shrugs off four outliers
_AWAY = 64  # ticks without a part, after which it is timed anew
_FADE = 1024  # ticks after which a time no longer counts
_LEAST = 0.1  # of what is expected: no part takes less, whatever a clock says
_LOOKUP_S = 3e-5  # of a request, before a lookup was timed
_SLOPE_MEMORY = 1 - 1 / 512  # per tick, of how the policy's runs followed their contexts
_IDLE = 8.0  # times as long as over idle rows a GPU may need to ingest for live ones: 6 were seen
_DEAREST = 32.0  # times as dear as many a new request's position may be: beyond that the machine stood still
_TRUSTED = 4  # ingests on which their cost stands alone


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of one role and size took so long."""

    role: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TickTimes:
    """What one tick took."""

    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of all runs of a part, where they are known
    seconds: float | None = None  # of the whole tick, captures left out; None: it followed no other, or did other work
    one_off_s: float = 0.0  # captures, and runs without a graph


UNTIMED = TickTimes(MappingProxyType({}))


class CostTable:
    """Seconds by role and size, as measured."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, deque[float]]] = {}
        self._curves: dict[str, tuple[list[int], list[float]]] = {}  # role → sizes, seconds; built when asked for
        self.changes = 0

    def record(self, role: str, size: int, seconds: float) -> None:
        if size < 1 or not 0.0 <= seconds < inf:
            raise ValueError(f"{role} of size {size} took {seconds} s; expected a size ≥ 1 and finite seconds ≥ 0")
        self._measured.setdefault(role, {}).setdefault(size, deque(maxlen=_WINDOW)).append(seconds)
        self._curves.pop(role, None)
        self.changes += 1

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


class _Recent:
    """The last few times of a part at one size, and the contexts they came with."""

    def __init__(self, prior: float, load: float) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._prior = prior  # what was expected before them: it is one of three as long as they are fewer
        self._middle = prior, load  # their median, and the newest load: contexts change slowly
        self.seen = -_FADE  # tick of the newest
        self.index = 1.0  # of the part, then

    def __len__(self) -> int:
        return len(self._times)

    def restart(self, expected: float) -> None:
        """What was seen before is no more than what is expected."""
        self._times.clear()
        self._prior = expected

    def see(self, tick: int, seconds: float, load: float) -> None:
        self._times.append(seconds)
        self.seen, known = tick, len(self._times)
        times = sorted(self._times) if known >= 3 else sorted([*self._times, self._prior, self._prior][:3])
        self._middle = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2, load

    def seconds(self, load: float, slope: float) -> float:
        return self._middle[0] + slope * (load - self._middle[1])


class _ContextSlope:
    """Seconds of the policy's run per position looked back on: from how runs of one size followed their contexts."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], tuple[float, float]] = {}  # part, size → load, seconds
        self._squares = self._products = 0.0
        self.slope = 0.0

    def see(self, key: tuple[str, int], load: float, seconds: float) -> None:
        usual_load, usual_s = self._means.get(key, (load, seconds))
        more, later_s = load - usual_load, min(max(seconds - usual_s, -usual_s / 4), usual_s / 4)
        self._means[key] = usual_load + more / 32, usual_s + later_s / 32
        self._squares = self._squares * _SLOPE_MEMORY + more * more
        self._products = self._products * _SLOPE_MEMORY + more * later_s
        self.slope = max(0.0, self._products / self._squares) if self._squares else 0.0


class _IngestRate:
    """How many times as dear as measured beforehand ingesting is.

    Passes have room in steps, so that by the position they are dearest where they ingest least: what some took
    together is compared with what was expected of them together, without the strangest ones.
    """

    def __init__(self, most: float) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # seconds, and those expected
        self._most = most

    def see(self, seconds: float, expected: float) -> None:
        if expected > 0.0:
            self._seen.append((min(seconds, self._most * expected), expected))

    def fade(self) -> None:
        if self._seen:
            self._seen.popleft()

    def times(self, believed: float) -> float:
        """`believed`: before anything was seen, and less and less of it until enough was."""
        pairs = sorted(self._seen, key=lambda pair: pair[0] / pair[1])
        cut, known = len(pairs) // 4, min(len(pairs), _TRUSTED)
        middle = pairs[cut : len(pairs) - cut]
        ratio = sum(took for took, _ in middle) / sum(expected for _, expected in middle) if middle else 0.0
        return (ratio * known + believed * (_TRUSTED - known)) / _TRUSTED


_Plan = tuple[list[tuple[str, int]], list[list[tuple[int, int]]]]


class CostModel:
    """Seconds of a tick in any shape: the sum of its parts, and the gap beside them.

    A part that was timed at a size of late costs what it took there; what changes at one size, changes at all sizes.
    Where it was never timed it costs what was measured beforehand, times what the part took of that elsewhere. The
    policy's runs grow with their contexts, by one slope: where a tree reads its context once however many nodes it has
    (a GPU) as much for any tree, else for every node.
    """

    def __init__(
        self, pad: Callable[[int], int], learned: Collection[str] = (), *, context_read_once: bool = False
    ) -> None:
        self.pad = pad  # of requests: the rows of the graph that would run
        self.table = CostTable()  # measured beforehand; sizes beyond those, by the first ticks
        self._learned = frozenset(learned)  # drafters that run on the device; the others only cost the host a lookup
        self._read_once = context_read_once
        self._recent: dict[tuple[str, int], _Recent] = {}  # part, size → seconds
        self._timed: dict[str, list[int]] = {}  # part → sizes of it that are there
        self._ratios: dict[str, tuple[float, int]] = {}  # part → seconds over those measured beforehand, and the tick
        self._indices: dict[str, float] = {}  # part → how its times changed at sizes that ran, one after the other
        self._beyond: dict[int, int] = {}  # sizes of the policy's runs that nobody measured → times that tell
        self._slope = _ContextSlope()
        self._context = 0.0  # positions that a row looks back on, of late
        self._ticks = 0
        self._ingests = {CATCH_UP: _IngestRate(_IDLE), INGEST: _IngestRate(_DEAREST)}
        self._parts_of: dict[tuple[Shape, int], list[tuple[str, int, int]]] = {}
        self._plans: dict[int, tuple[Sequence[Shape], _Plan]] = {}  # by size; made once for the same shapes
        self._baselines: dict[tuple[str, int], float] = {}  # part, size → seconds as measured beforehand …
        self._looked_up = -1  # … when the table had changed so often

    # ---- learning

    def load_costs(self, measured: Measured) -> None:
        """Measured beforehand."""
        self.table.record(measured.role, measured.size, measured.seconds)

    def observe(self, shape: Shape, batch: int, times: TickTimes, context: float = 0.0, positions: float = 0.0) -> None:
        """A tick took this long; `positions` of every row were ingested because they were new.

        A CPU computes no rows that no request has: what they would take is added, as estimates are of padded sizes.
        """
        size, rows = self.pad(batch), max(1, batch)
        self._ticks, self._context = self._ticks + 1, context
        if self._ticks % (_FADE // 2) == 0:
            self._ingests[INGEST].fade()
        for (part, of, runs), (_, ran, _) in zip(self._parts(shape, size), self._parts(shape, rows), strict=True):
            if part in times.parts:
                idle_s = 0.0 if self._read_once or ran == of else self._baseline(part, of) - self._baseline(part, ran)
                self._see(part, of, times.parts[part] / runs + max(0.0, idle_s), self._load(part, ran, rows))
        if times.seconds is not None and not times.one_off_s:
            self._see(self._gap(shape), size, max(0.0, times.seconds - sum(times.parts.values())), 0.0)
        if positions and INGEST in times.parts:
            self._ingests[INGEST].see(times.parts[INGEST], positions * self._position_s(size))

    def caught_up(self, batch: int, lag: float, seconds: float) -> None:
        """So long it took to ingest so many positions of every row at once."""
        self._ingests[CATCH_UP].see(seconds, lag * self._position_s(self.pad(batch)))

    def forget(self, shape: Shape) -> None:
        """What was timed of its parts counts no more: something has changed for good."""
        parts = {part for part, _, _ in self._parts(shape, 1)}
        self._recent = {key: recent for key, recent in self._recent.items() if key[0] not in parts}
        self._ratios = {part: ratio for part, ratio in self._ratios.items() if part not in parts}
        self._timed = {part: sizes for part, sizes in self._timed.items() if part not in parts}

    def _see(self, part: str, size: int, seconds: float, load: float) -> None:
        if part in (DECODE, VERIFY):
            seen = self._beyond.get(size, 0)
            if 0 < seen < _WINDOW or not (seen or self.table.spans(POLICY, size)):
                self._beyond[size] = seen + 1
                self.table.record(POLICY, size, seconds)
            self._slope.see((part, size), load, seconds)
        baseline, expected = self._baseline(part, size), self._expected(part, size, load)
        recent, slope = self._recent.get((part, size)), self._slope.slope
        if recent is None:
            recent = self._recent[part, size] = _Recent(expected or seconds, load)
            self._timed.setdefault(part, []).append(size)
        elif self._ticks - recent.seen >= _AWAY:
            recent.restart(expected)
        recent.see(self._ticks, max(seconds, _LEAST * baseline), load)
        now = recent.seconds(load, slope)
        if len(recent) >= 3:
            change = now / expected if expected > 0.0 and now > 0.0 else 1.0
            self._indices[part] = self._indices.get(part, 1.0) * change
            if baseline > 0.0:
                self._ratios[part] = max(_LEAST, (now - slope * load) / baseline), self._ticks
        recent.index = self._indices.get(part, 1.0)

    # ---- what a tick costs

    def seconds(self, shape: Shape, batch: int) -> float | None:
        """Expected of one tick; None as long as no run of the policy was ever measured."""
        if self.table.estimate(POLICY, 1) is None:
            return None
        size = self.pad(batch)
        gap_s = self._expected(self._gap(shape), size, 0.0)
        return gap_s + sum(
            runs * self._expected(part, of, self._load(part, of, batch)) for part, of, runs in self._parts(shape, size)
        )

    def parts(self, shape: Shape, batch: int) -> dict[str, float]:
        """Seconds expected of each part of a tick."""
        size, found = self.pad(batch), dict[str, float]()
        for part, of, runs in self._parts(shape, size):
            found[part] = runs * self._expected(part, of, self._load(part, of, batch))
        return found

    def seconds_of(self, shapes: Sequence[Shape], batch: int) -> list[float]:
        """`seconds` of each, for less; 0 where they cannot be told."""
        if self.table.estimate(POLICY, 1) is None:
            return [0.0] * len(shapes)
        keys, sums = self._plan(shapes, self.pad(batch))
        seconds = [self._expected(part, of, self._load(part, of, batch)) for part, of in keys]
        return [sum([runs * seconds[place] for place, runs in parts]) for parts in sums]

    def _plan(self, shapes: Sequence[Shape], size: int) -> _Plan:
        """Of so many requests: the different parts of all shapes, and which of them each shape runs how often."""
        known, plan = self._plans.get(size, ((), ([], [])))
        if known is not shapes:
            keys, sums = dict[tuple[str, int], int](), list[list[tuple[int, int]]]()
            for shape in shapes:
                parts = [*self._parts(shape, size), (self._gap(shape), size, 1)]
                sums.append([(keys.setdefault((part, of), len(keys)), runs) for part, of, runs in parts])
            plan = list(keys), sums
            self._plans[size] = shapes, plan
        return plan

    def context_s(self, shape: Shape, batch: int) -> float:
        """Of a tick, what its contexts take."""
        size = self.pad(batch)
        part, of, _ = self._parts(shape, size)[0]
        return self._slope.slope * self._load(part, of, batch)

    def dearness(self, shape: Shape, batch: int) -> float:
        """How many times as long a tick takes as was measured beforehand, next to a plain one."""
        size, taken, table = self.pad(batch), 0.0, 0.0
        for part, of, runs in self._parts(shape, size):
            taken += runs * self._expected(part, of, 0.0)
            table += runs * self._baseline(part, of)
        return taken / table / max(1.0, self._ratio(DECODE)) if table else 1.0

    def ticks_of(self, shape: Shape, batch: int) -> int:
        """Of its own size, on which the estimate of its largest part rests."""
        part, of, _ = self._parts(shape, self.pad(batch))[0]
        return len(self._recent.get((part, of), ()))

    def _expected(self, part: str, size: int, load: float) -> float:
        """As it was timed at this size, and as the part's times at other sizes changed since."""
        recent = self._recent.get((part, size))
        if recent is None or self._ticks - recent.seen >= _FADE:
            return self._prior(part, size) + self._slope.slope * load
        seconds = recent.seconds(load, self._slope.slope) * self._indices.get(part, 1.0) / recent.index
        return max(_LEAST * self._baseline(part, size), seconds)

    def _prior(self, part: str, size: int) -> float:
        """What it costs by other sizes."""
        baseline = self._baseline(part, size)
        if baseline > 0.0:
            return baseline * self._ratio(part)
        known = [of for of in self._timed.get(part, ()) if of != size]
        if not known:
            return 0.0
        return self._recent[part, min(known, key=lambda of: abs(of - size))].seconds(0.0, 0.0)

    def _ratio(self, part: str) -> float:
        ratio, seen = self._ratios.get(part, (1.0, -_FADE))
        if self._ticks - seen < _FADE:
            return ratio
        return self._ratio(DECODE) if part == VERIFY else 1.0

    def _baseline(self, part: str, size: int) -> float:
        """As measured beforehand; looked up once."""
        if self._looked_up != self.table.changes:
            self._baselines.clear()
            self._looked_up = self.table.changes
        found = self._baselines.get((part, size))
        if found is None:
            found = self._baselines[part, size] = self._measured(part, size)
        return found

    def _measured(self, part: str, size: int) -> float:
        """A drafter's run nobody measured is taken to cost what the policy's would: the safe side; what little beside
        that nobody measured, nothing."""
        if part == LOOKUP:
            return _LOOKUP_S * size
        if part in (EXTEND, DRAFT):
            known = self.table.estimate(part, size)
            return known if known is not None else self.table.estimate(POLICY, size) or 0.0
        return self.table.estimate(POLICY, size) or 0.0 if part in (DECODE, VERIFY) else 0.0

    def _load(self, part: str, of: int, batch: int) -> float:
        """Of the policy's run, what grows with the positions that it looks back on."""
        if part not in (DECODE, VERIFY):
            return 0.0
        return self._context * (batch if self._read_once else of)

    def _parts(self, shape: Shape, size: int) -> list[tuple[str, int, int]]:
        """Part, its size, and its runs; the policy's first."""
        parts = self._parts_of.get((shape, size))
        if parts is None:
            parts = [(DECODE, size, 1)] if shape.off else [(VERIFY, shape.tokens(size), 1)]
            learned = self._drafts(shape)
            if learned:
                parts += [(EXTEND, ceil(size * shape.most_tokens), 1), (PRUNE, size, 1)]
                parts += [(DRAFT, size * shape.width, shape.depth - 1)] if shape.depth > 1 else []
            parts += [(LOOKUP, size, 1)] if len(shape.drafters) > learned else []
            self._parts_of[shape, size] = parts
        return parts

    def _gap(self, shape: Shape) -> str:
        return _GAPS[0 if shape.off else 1 + self._drafts(shape)]

    def _drafts(self, shape: Shape) -> bool:
        """Whether a learned drafter takes part."""
        return not self._learned.isdisjoint(shape.drafters)

    # ---- what comes before it

    def looks_up_anew(self, shape: Shape, before: Shape) -> bool:
        """Whether somebody on the host is asked whom the shape before left out."""
        return any(name not in self._learned and name not in before.drafters for name in shape.drafters)

    def catching_up(self, shape: Shape, before: Shape, batch: int, lag: float) -> float:
        """Seconds that learned drafters need before they can be asked, where the shape before left them out."""
        if not lag or self._drafts(before) or not self._drafts(shape):
            return 0.0
        return lag * self._ingests[CATCH_UP].times(self._believed) * self._position_s(self.pad(batch))

    def entering(self, shape: Shape, batch: int, positions: float) -> float:
        """Seconds that learned drafters need for what new requests bring: so many positions of a row, on average."""
        if not positions or not self._drafts(shape):
            return 0.0
        believed = self._ingests[CATCH_UP].times(self._believed)
        return positions * self._ingests[INGEST].times(believed) * self._position_s(self.pad(batch))

    @property
    def _believed(self) -> float:
        return _IDLE if self._read_once else 1.0

    def _position_s(self, size: int) -> float:
        """Of a position of every row, when all of them ingest many."""
        return self.table.estimate(CATCH_UP, size) or 0.0
