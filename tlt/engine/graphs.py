"""The pool of CUDA graphs: one per (role, padded size), captured when it pays, all in one memory pool.

A captured function reads and writes fixed tensors, so a replay costs the host one call. Runs without a graph (prefill,
a size beyond the largest bucket, the first runs of a role) are eager, and counted. Knows nothing of the captured work.
"""

import gc
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Waste = Callable[[int], float]  # padded size of a larger graph → seconds that a run in it wastes
Key = tuple[Hashable, int]  # role, padded size

_EAGER_COST = 0.4  # cost of an eager run, as a fraction of a capture: the host launches its kernels one by one
_TIMED_RUNS = 3  # replays per timing; the fastest counts
_CAPTURE_S = 0.03  # seconds of a capture, until one was timed
_ROOM = 4 << 30  # free bytes on the device below which cached memory is released before a capture
_STALL_S = 0.1  # seconds; a longer run or capture has compiled kernels


@dataclass(frozen=True, slots=True)
class PoolReport:
    graphs: int
    memory_bytes: int  # of the memory pool that the graphs share
    capture_s: float  # seconds of captures, timings, kernel compilation, and first runs without a graph
    replays: int
    eager: int  # runs of work that never gets a graph
    first: int = 0  # eager runs of work that may get a graph later
    usual_capture_s: float = 0.0  # median seconds of one capture, of the kind of work with the largest median
    stalls: tuple[tuple[Key, float], ...] = ()  # runs or captures that compiled kernels; seconds
    spent: Mapping[str, float] = field(default_factory=dict)  # kind of work → seconds of `capture_s`


class CapturePolicy:
    """Decides which graphs pay for their capture.

    A capture takes as long as several ticks, and in a rollout's tail a batch size may last no longer. A run without its
    own graph uses a larger graph of its role, with idle rows, or runs eagerly, whichever wastes less time. A graph is
    captured once the accumulated waste of its runs exceeds the cost of a capture. Always holds: a capture costs no more
    than the waste that preceded it.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, list[int]] = {}  # role → sizes, ascending
        self._wasted: dict[tuple[Hashable, int], float] = {}

    def captured(self, role: Hashable, size: int) -> None:
        """Registers a captured graph."""
        insort(self._captured.setdefault(role, []), size)

    def serve(self, role: Hashable, size: int, capture_s: float, waste: Waste | None) -> int:
        """The size of the graph for the next run; 0: it runs eagerly.

        The result is `size` (captured first if it is missing) or, if `waste` is given, a larger captured size.
        `capture_s`: seconds of a capture.
        """
        larger = self._larger(role, size)
        if larger == size:
            return size
        bare_s = _EAGER_COST * capture_s
        more = waste(larger) if waste is not None and larger else bare_s
        if waste is None or more > bare_s:
            larger, more = 0, bare_s
        wasted = self._wasted.get((role, size), 0.0) + max(0.0, more)
        if wasted > capture_s:
            return size
        self._wasted[role, size] = wasted
        return larger

    def _larger(self, role: Hashable, size: int) -> int:
        """The smallest captured size ≥ `size`; 0: there is none."""
        sizes = self._captured.get(role, [])
        at = bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else 0


class GraphPool(Generic[T]):
    def __init__(self, device: torch.device, on_replay: Callable[[Key], None] = lambda key: None) -> None:
        """`on_replay` is called before every replay."""
        self._device, self._on_replay = device, on_replay
        self.recording = False  # a capture is in progress: work is recorded, not executed
        self._side: Any = None  # the stream of all captures: each stream has its own workspace memory
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._capture_policy = CapturePolicy()
        self._settled: set[Key] = set()  # ran eagerly before: compiled and loaded
        self._pool: Any = None  # memory pool of the first graph, shared by the others
        self._seconds: dict[Key, float] = {}
        self._memory = self._replays = self._eager = self._first = 0
        self.capture_s = 0.0
        self._spent_on: dict[str, float] = defaultdict(float)  # by kind of work
        self._captures_s: dict[Hashable, list[float]] = {}  # by kind of work
        self._stalls: list[tuple[Key, float]] = []

    def has(self, key: Key) -> bool:
        return key in self._graphs

    def serve(self, key: Key, waste: Waste | None) -> Key | None:
        """The graph for a run of this role and size; None: it runs eagerly.

        The graph may be larger if `waste` is given. If it does not exist, the caller captures it now.
        """
        role, size = key
        served = self._capture_policy.serve(role, size, self._usual_capture_s(_kind(role)), waste)
        return (role, served) if served else None

    def _usual_capture_s(self, kind: Hashable) -> float:
        """Per kind of work: a capture of the policy takes about ten times as long as one of a drafter."""
        return _middle(self._captures_s.get(kind) or [self._dearest_capture_s])

    @property
    def _dearest_capture_s(self) -> float:
        """Median seconds of a capture, of the kind of work with the largest median."""
        return max(map(_middle, self._captures_s.values()), default=_CAPTURE_S)

    def run_first(self, key: Key, function: Callable[[], T]) -> T:
        """Runs the function eagerly. The recorded time is host time: launches and compilation."""
        started = time.perf_counter()
        result = function()
        self._settled.add(key)
        self._first += 1
        self._spent(key, time.perf_counter() - started)
        return result

    def _spent(self, key: Key, seconds: float) -> None:
        self.capture_s += seconds
        self._spent_on[str(_kind(key[0]))] += seconds
        if seconds > _STALL_S:
            self._stalls.append((key, seconds))

    def capture(self, key: Key, function: Callable[[], T], *, settled: bool = False) -> None:
        """Captures the function, which must have no side effect now.

        A function that never ran is run once before, which compiles its kernels. `settled`: the caller has run it.
        """
        torch.cuda.synchronize(self._device)  # earlier launches do not count as capture time
        started = time.perf_counter()
        settled = settled or (key in self._settled and self._side is not None)
        self._side = self._side or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._side):
            if not settled:
                function()
            torch.cuda.synchronize(self._device)
            if torch.cuda.mem_get_info(self._device)[0] < _ROOM:
                torch.cuda.empty_cache()  # during a capture the allocator cannot release cached memory
            before = torch.cuda.memory_reserved(self._device)
            graph, result = self._recorded(function)
        torch.cuda.synchronize(self._device)
        self._memory += torch.cuda.memory_reserved(self._device) - before
        self._graphs[key] = (graph, result)
        self._capture_policy.captured(*key)
        took = time.perf_counter() - started
        self._captures_s.setdefault(_kind(key[0]), []).append(took)
        self._spent(key, took)

    def _recorded(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Captures without `torch.cuda.graph`, which collects garbage and empties the cache each time: 0.1 s and more.

        Garbage collection is disabled instead: objects that it frees during a capture could disturb it.
        """
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may be writing checkpoints
            self.recording = True
            try:
                result = function()
            finally:
                self.recording = False
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph, result

    def seconds(self, key: Key) -> float:
        """Seconds of a replay. Timed on the first call, when a replay must have no side effect.

        Most graphs are never timed: timing would delay their requests.
        """
        if key not in self._seconds:
            started = time.perf_counter()
            self._seconds[key] = self._timed(key)
            self._spent(key, time.perf_counter() - started)
        return self._seconds[key]

    def _timed(self, key: Key) -> float:
        """Seconds of the fastest of `_TIMED_RUNS` replays."""
        runs, graph = [], self._graphs[key][0]
        for _ in range(_TIMED_RUNS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            self._on_replay(key)
            graph.replay()
            ended.record()
            ended.synchronize()
            runs.append(float(begun.elapsed_time(ended)) / 1e3)
        return min(runs)

    def replay(self, key: Key) -> T:
        """Replays the graph. Returns the captured function's result: fixed tensors that the next replay overwrites."""
        graph, result = self._graphs[key]
        self._on_replay(key)
        graph.replay()
        self._replays += 1
        return result

    def count_eager(self) -> None:
        self._eager += 1

    def report(self) -> PoolReport:
        counts = (self._replays, self._eager, self._first, self._dearest_capture_s)
        return PoolReport(
            len(self._graphs), self._memory, self.capture_s, *counts, tuple(self._stalls), dict(self._spent_on)
        )


def _middle(seconds: list[float]) -> float:
    """Median without stalls; if all are stalls, the median of all."""
    return median([one for one in seconds if one <= _STALL_S] or seconds)


def _kind(role: Hashable) -> Hashable:
    """The kind of work: the first element of a role, without sizes and settings."""
    return role[0] if isinstance(role, tuple) else role


def buckets(largest: int) -> tuple[int, ...]:
    """Padded batch sizes up to `largest`. Beyond 32 each step is between an eighth and a half of the size."""
    sizes = [1, 2, 4, 8, 16, 24, 32]
    while sizes[-1] < largest:
        step = max(16, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return (*(size for size in sizes if size < largest), largest)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Padded batch sizes for which draft trees get graphs: beyond 64 powers of two, which serve down to their half."""
    return tuple(size for size in buckets(largest) if size <= 64 or size == largest or not size & (size - 1))


def bucket(size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest padded size that holds `size`; None beyond the largest."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def padding(rows: int) -> Callable[[int], int]:
    """A cached function: number of requests → padded batch size. It is called several times per tick."""
    sizes = buckets(rows)
    return cache(lambda requests: bucket(requests, sizes) or sizes[-1])
