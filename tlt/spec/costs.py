"""The cost model: predicts the seconds of a tick as the sum of its parts, and of one-off work beside ticks.

The cost of a part is its baseline, measured before the first request, times the ratio of its recent times to the
baseline. Always holds: no single time decides an estimate; the baseline replaces outdated times; no part is free. Knows
nothing of acceptance or of timers.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median
from types import MappingProxyType

from tlt.spec.shape import OFF, Shape

# Baselines, measured at startup over idle rows and an empty KV cache:
POLICY = "policy"  # one run of the policy; size = tokens, idle rows included
EXTEND = "extend"  # draft-extend over accepted tokens, and the first level of the trees; size = tokens
DRAFT = "draft"  # one more level of a learned drafter's tree; size = padded requests · width
CATCH_UP = "catch up"  # draft-extend over a long backlog, per position of every request; size = padded requests
# Parts of a tick, as timers name them. EXTEND and DRAFT (all levels together) are parts too:
DECODE = "decode"  # the policy's run in a plain tick; size = padded requests
VERIFY = "verify"  # the policy's run over draft trees; size = their nodes
KEEP = "keep"  # storing hidden states for a drafter, within the policy's run; a baseline only; size = rows
PRUNE = "prune"  # pruning of the trees to the verify size; size = padded requests
INGEST = "ingest"  # draft-extend passes of their own: over prompts, or positions written while the drafter was not used
LOOKUP = "lookup"  # drafts of model-free drafters for the batch, on the host; size = padded requests
INDEX = "index"  # model-free drafters index text written while they were not used
_GAPS = (
    "gap off",
    "gap host",
    "gap device",
)  # the rest of a tick: plain, with trees from the host, with trees from the device

_WINDOW = 9  # recent times of a part at a size; their median counts, so up to four outliers do not
_AWAY_TICKS = 64  # ticks without a part after which its earlier times are dropped
_FADE_TICKS = 1024  # age in ticks at which a time no longer counts
_LEAST = 0.1  # least cost of a part, as a fraction of its baseline
_LOOKUP_S = 3e-5  # seconds of a lookup per request, until lookups were timed
_SLOPE_MEMORY = 1 - 1 / 512  # decay per tick of the regression of seconds on context
_LIVE_ROWS = 8.0  # cost of a draft-extend on a GPU over live rows relative to idle ones, until timed (measured: 6)
_OUTLIER = 4.0  # multiple of the estimate; a longer draft-extend includes a stall and is cut there
_MEMORY = 7 / 8  # decay of earlier draft-extends with each new one
_ARRIVALS_TOKENS = 1 << 16  # emitted tokens after which arrived prompt positions count 1/e


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured seconds of one run of a role and size."""

    role: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TickTimes:
    """The time of one tick."""

    parts: Mapping[str, float] = field(default_factory=dict)  # part → seconds of all its runs, if timed
    seconds: float | None = None  # of the whole tick without captures; None: unknown, or it included other work
    one_off_s: float = 0.0  # seconds of captures, and of runs without a graph


UNTIMED = TickTimes(MappingProxyType({}))


class CostTable:
    """Measured seconds by role and size."""

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
        """Whether this size is within the range of measured sizes."""
        sizes = self._measured.get(role)
        return sizes is not None and min(sizes) <= size <= max(sizes)

    def estimate(self, role: str, size: int) -> float | None:
        """Linear interpolation between measured sizes. None if the role was not measured.

        Below the smallest size: its seconds. Beyond the largest: in proportion to the size, which is the safe side.
        """
        if role not in self._measured:
            return None
        if role not in self._curves:
            measured = sorted(self._measured[role].items())
            self._curves[role] = [size for size, _ in measured], never_falling([median(each) for _, each in measured])
        sizes, seconds = self._curves[role]
        right = bisect_left(sizes, size)
        if right == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if right == 0 or sizes[right] == size:
            return seconds[right]
        part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])


def never_falling(values: list[float]) -> list[float]:
    """Isotonic regression: the closest non-decreasing sequence. Neighbours in the wrong order share their mean."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class _Recent:
    """Recent times of a part: at one size, or as ratios to the baseline at all sizes."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._middle = 0.0  # median of the times
        self._load = 0.0  # the newest context load: contexts change slowly
        self._tick = -_FADE_TICKS  # tick of the newest time
        self.change = 1.0  # the part's accumulated change at that tick

    def __len__(self) -> int:
        return len(self._times)

    @property
    def full(self) -> bool:
        return len(self._times) == _WINDOW

    def see(self, tick: int, seconds: float, load: float, expected: float) -> None:
        """`expected`: estimate that fills the window up to three times."""
        if tick - self._tick >= _AWAY_TICKS:
            self._times.clear()
        self._times.append(seconds)
        self._middle = median([*self._times, expected, expected][: max(3, len(self._times))])
        self._tick, self._load = tick, load

    def seconds(self, tick: int, load: float = 0.0, slope: float = 0.0) -> float | None:
        """Seconds at this context load; None: the times are outdated, or there are none."""
        return self._middle + slope * (load - self._load) if tick - self._tick < _FADE_TICKS else None


class _ContextSlope:
    """Seconds of the policy's run per position of context: a regression over runs of equal size."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], tuple[float, float]] = {}  # part, size → load, seconds
        self._squares = self._products = 0.0
        self.slope = 0.0

    def see(self, key: tuple[str, int], load: float, seconds: float) -> None:
        mean_load, mean_s = self._means.get(key, (load, seconds))
        more, later_s = load - mean_load, min(max(seconds - mean_s, -mean_s / 4), mean_s / 4)
        self._means[key] = mean_load + more / 32, mean_s + later_s / 32
        self._squares = self._squares * _SLOPE_MEMORY + more * more
        self._products = self._products * _SLOPE_MEMORY + more * later_s
        self.slope = max(0.0, self._products / self._squares) if self._squares else 0.0


class _IngestRate:
    """Seconds of draft-extends relative to the baseline. A ratio of sums: small passes cost most per position."""

    def __init__(self) -> None:
        self._took_s = self._measured_s = 0.0

    def see(self, seconds: float, measured_s: float, before: float) -> None:
        """`before`: the prior ratio, with the weight of the first draft-extend."""
        if measured_s <= 0.0:
            return
        if not self._measured_s:
            self._took_s, self._measured_s = before * measured_s, measured_s
        seconds = min(seconds, _OUTLIER * self.ratio(before) * measured_s)
        self._took_s = self._took_s * _MEMORY + seconds
        self._measured_s = self._measured_s * _MEMORY + measured_s

    def ratio(self, before: float) -> float:
        return self._took_s / self._measured_s if self._measured_s else before


_Keys = tuple[list[tuple[str, int]], list[list[tuple[int, int]]]]  # (part, size); by shape: (index of a part, runs)


class CostModel:
    """Predicts seconds of ticks and of one-off work.

    `pad`: batch size → padded batch size. `learned`: names of the drafters on the device.
    """

    def __init__(
        self, pad: Callable[[int], int], *, learned: Collection[str] = (), context_read_once: bool = False
    ) -> None:
        """`context_read_once`: a tree's nodes share one read of the context (a GPU); otherwise each reads it."""
        self.pad = pad
        self.table = CostTable()
        self._learned, self._read_once = frozenset(learned), context_read_once
        self._recent: dict[tuple[str, int], _Recent] = {}
        self._changes: dict[str, float] = {}  # part → product of the changes of its times, over all sizes
        self._ratios: dict[str, _Recent] = {}  # part → recent ratios of its times to the baseline, over all sizes
        self._slope = _ContextSlope()
        self._caught_up, self._ingested = _IngestRate(), _IngestRate()
        self._arrived = self._emitted = 0.0  # prompt positions of new requests, emitted tokens; both decay
        self._ticks, self._context = 0, 0.0  # ticks; mean context length of a row
        self._parts_of: dict[tuple[Shape, int], list[tuple[str, int, int]]] = {}
        self._keys: dict[int, tuple[Sequence[Shape], _Keys]] = {}  # by padded size
        self._baselines: dict[tuple[str, int], float] = {}
        self._looked_up = 0  # `table.changes` for which `_baselines` is valid

    # ---- learning

    def load_costs(self, measured: Measured) -> None:
        self.table.record(measured.role, measured.size, measured.seconds)

    def observe(self, shape: Shape, batch: int, times: TickTimes, context: float = 0.0, positions: float = 0.0) -> None:
        """Adds a tick's times. `positions`: prompt positions per row that were processed for new requests.

        A CPU computes no padding rows, so its times are scaled to padded sizes.
        """
        size, rows = self.pad(batch), max(1, batch)
        self._ticks, self._context = self._ticks + 1, context
        for (part, of, runs), (_, ran, _) in zip(self._parts(shape, size), self._parts(shape, rows), strict=True):
            if part in times.parts:
                seconds = times.parts[part] / runs + self._padding_s(part, of, ran)
                self._see(part, of, seconds, self._load(part, ran, rows))
        if times.seconds is not None and not times.one_off_s:
            self._see(self._gap(shape), size, max(0.0, times.seconds - sum(times.parts.values())), 0.0)
        if positions and INGEST in times.parts:
            before = self._caught_up.ratio(self._live_rows)
            self._ingested.see(times.parts[INGEST], positions * self._position_s(size), before)

    def _padding_s(self, part: str, padded: int, size: int) -> float:
        """Seconds by which a part of the padded size is dearer than what a CPU computes."""
        if self._read_once or size == padded:
            return 0.0
        return max(0.0, self._baseline(part, padded) - self._baseline(part, size))

    def caught_up(self, batch: int, lag: float, seconds: float) -> None:
        """Adds a draft-extend over `lag` positions per row, after ticks without the drafter."""
        self._caught_up.see(seconds, lag * self._position_s(self.pad(batch)), self._live_rows)

    def arrived(self, positions: int, tokens: float) -> None:
        """Adds prompt positions of new requests, and tokens emitted in the same time."""
        kept = max(0.0, 1.0 - tokens / _ARRIVALS_TOKENS)
        self._arrived, self._emitted = self._arrived * kept + positions, self._emitted * kept + tokens

    def _see(self, part: str, size: int, seconds: float, load: float) -> None:
        if part in (DECODE, VERIFY):
            if not self.table.spans(POLICY, size):
                self.table.record(POLICY, size, seconds)
            self._slope.see((part, size), load, seconds)
        baseline, expected = self._baseline(part, size), self._expected(part, size, load)
        recent = self._recent.setdefault((part, size), _Recent())
        settled = recent.full
        recent.see(self._ticks, max(seconds, _LEAST * baseline), load, expected or seconds)
        if len(recent) >= 3 or not expected:
            now = recent.seconds(self._ticks, load, self._slope.slope) or 0.0
            if settled and expected and now > 0.0:
                self._changes[part] = self._changes.get(part, 1.0) * now / expected
            bare_s = (recent.seconds(self._ticks) or 0.0) - self._slope.slope * load
            ratio = max(_LEAST, bare_s / baseline) if baseline else bare_s
            self._ratios.setdefault(part, _Recent()).see(self._ticks, ratio, 0.0, ratio)
        recent.change = self._changes.get(part, 1.0)

    # ---- a tick

    def seconds(self, shape: Shape, batch: int) -> float | None:
        """Expected seconds of a tick; None until a run of the policy was measured."""
        if self.table.estimate(POLICY, 1) is None:
            return None
        return sum(self.parts(shape, batch).values()) + self._expected(self._gap(shape), self.pad(batch), 0.0)

    def plain_s(self, batch: int) -> float:
        """Expected seconds of a plain tick of exactly so many requests; 0 until a run of the policy was measured."""
        return max(0.0, (self.seconds(OFF, batch) or 0.0) - self._padding_s(DECODE, self.pad(batch), batch))

    def parts(self, shape: Shape, batch: int) -> dict[str, float]:
        """Expected seconds of each part of a tick, without the gap."""
        size = self.pad(batch)
        return {
            part: runs * self._expected(part, of, self._load(part, of, batch))
            for part, of, runs in self._parts(shape, size)
        }

    def seconds_of(self, shapes: Sequence[Shape], batch: int) -> list[float]:
        """`seconds` of each shape; 0 if unknown. Computes each distinct part once."""
        if self.table.estimate(POLICY, 1) is None:
            return [0.0] * len(shapes)
        keys, sums = self._all_keys(shapes, self.pad(batch))
        seconds = [self._expected(part, of, self._load(part, of, batch)) for part, of in keys]
        return [sum([runs * seconds[place] for place, runs in parts]) for parts in sums]

    def measured_s(self, shape: Shape, batch: int) -> float:
        """Baseline seconds of the parts of a tick."""
        return sum(runs * self._baseline(part, of) for part, of, runs in self._parts(shape, self.pad(batch)))

    def ticks_of(self, shape: Shape, batch: int) -> int:
        """Number of recent times of the shape's policy run at this size."""
        part, of, _ = self._parts(shape, self.pad(batch))[0]
        return len(self._recent.get((part, of), ()))

    def _all_keys(self, shapes: Sequence[Shape], size: int) -> _Keys:
        known, found = self._keys.get(size, ((), ([], [])))
        if known is not shapes:
            places, sums = dict[tuple[str, int], int](), list[list[tuple[int, int]]]()
            for shape in shapes:
                parts = [*self._parts(shape, size), (self._gap(shape), size, 1)]
                sums.append([(places.setdefault((part, of), len(places)), runs) for part, of, runs in parts])
            found = list(places), sums
            self._keys[size] = shapes, found
        return found

    def _expected(self, part: str, size: int, load: float) -> float:
        """Expected seconds: recent times at this size, or else the baseline times the part's ratio at other sizes."""
        recent, slope = self._recent.get((part, size)), self._slope.slope
        baseline = self._baseline(part, size)
        seconds = recent.seconds(self._ticks, load, slope) if recent else None
        if recent and seconds is not None:
            seconds *= self._changes.get(part, 1.0) / recent.change
        else:
            ratio = self._ratio(part)
            if ratio is None and part == VERIFY:
                ratio = self._ratio(DECODE)
            seconds = ((1.0 if ratio is None else ratio) * baseline if baseline else ratio or 0.0) + slope * load
        return max(_LEAST * baseline, seconds)

    def _ratio(self, part: str) -> float | None:
        recent = self._ratios.get(part)
        return recent.seconds(self._ticks) if recent else None

    def _baseline(self, part: str, size: int) -> float:
        """Baseline seconds; 0: not measured."""
        if self._looked_up != self.table.changes:
            self._baselines.clear()
            self._looked_up = self.table.changes
        found = self._baselines.get((part, size))
        if found is None:
            found = self._baselines[part, size] = self._measured(part, size)
        return found

    def _measured(self, part: str, size: int) -> float:
        """Baseline seconds from the table. An unmeasured drafter run counts like one of the policy, the safe side."""
        policy_s = self.table.estimate(POLICY, size) or 0.0
        if part in (EXTEND, DRAFT):
            known = self.table.estimate(part, size)
            return known if known is not None else policy_s
        return _LOOKUP_S * size if part == LOOKUP else policy_s if part in (DECODE, VERIFY) else 0.0

    def _load(self, part: str, of: int, batch: int) -> float:
        """Context load: positions of context that a run of the policy reads."""
        if part not in (DECODE, VERIFY):
            return 0.0
        return self._context * (batch if self._read_once else of)

    def _parts(self, shape: Shape, size: int) -> list[tuple[str, int, int]]:
        """(part, size, runs) of a tick; the policy's part first."""
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
        """Whether the shape uses a drafter on the device."""
        return not self._learned.isdisjoint(shape.drafters)

    # ---- one-off work

    def indexes(self, shape: Shape, before: Shape) -> bool:
        """Whether a drafter on the host must index text first, because the shape before did not use it."""
        return any(name not in self._learned and name not in before.drafters for name in shape.drafters)

    def catching_up(self, shape: Shape, before: Shape, batch: int, lag: float) -> float:
        """Seconds of the draft-extend that is due first, because the shape before did not use the drafter."""
        if not lag or self._drafts(before) or not self._drafts(shape):
            return 0.0
        return lag * self._caught_up.ratio(self._live_rows) * self._position_s(self.pad(batch))

    def entering(self, shape: Shape, batch: int, positions: float) -> float:
        """Seconds of a draft-extend over this many prompt positions per row, for new requests."""
        if not positions or not self._drafts(shape):
            return 0.0
        before = self._caught_up.ratio(self._live_rows)
        return positions * self._ingested.ratio(before) * self._position_s(self.pad(batch))

    @property
    def arrived_per_token(self) -> float:
        """Prompt positions of new requests per emitted token.

        Initially completions are assumed to be as long as their prompts.
        """
        return self._arrived / max(self._emitted, self._arrived, 1.0)

    @property
    def _live_rows(self) -> float:
        return _LIVE_ROWS if self._read_once else 1.0

    def _position_s(self, size: int) -> float:
        """Baseline seconds of a draft-extend per position of every row."""
        return self.table.estimate(CATCH_UP, size) or 0.0
