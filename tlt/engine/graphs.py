"""The pool of CUDA graphs: one per (role, padded size), captured when they are worth it, all in one memory pool.

A captured function reads and writes fixed tensors, so replaying it costs the host one call whatever it contains. What
has no graph (prefill, a size beyond the largest bucket, the first runs of a role) is run eagerly and counted. Knows
nothing of what they do.
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
Waste = Callable[[int], float]  # seconds that a run wastes in a graph of this larger size
Key = tuple[Hashable, int]  # role, padded size

_BARE = 0.4  # of a capture: what an eager run wastes, because the host launches its kernels one by one
_TIMED_RUNS = 3
_CAPTURE_S = 0.03  # before there was one
_ROOM = 4 << 30  # bytes of a device that should be free when a capture begins
_STALL_S = 0.1  # what takes longer has compiled kernels


@dataclass(frozen=True, slots=True)
class PoolReport:
    graphs: int
    memory_bytes: int  # of the pool the graphs share
    capture_s: float  # spent capturing and timing, compiling kernels, and on the first runs, which have no graph yet
    replays: int
    eager: int  # runs of what gets no graph
    first: int = 0  # runs of what may get one later
    usual_capture_s: float = 0.0  # of one graph, in the middle of the kind that takes longest
    stalls: tuple[tuple[Key, float], ...] = ()  # what took far longer, for it compiled kernels, and its seconds
    spent: Mapping[str, float] = field(default_factory=dict)  # kind of work → seconds of `capture_s`


class CapturePolicy:
    """Which graphs are worth capturing.

    A capture takes as long as several ticks, and in a rollout's tail a batch size may last no longer. A run without a
    graph of its own is served by a larger one of its role, idle rows included, or runs eagerly, whichever wastes less.
    A graph is captured when what its runs have wasted exceeds the cost of a capture. What always holds: captures cost
    no more than doing without them had wasted before.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, list[int]] = {}  # role → sizes, ascending
        self._wasted: dict[tuple[Hashable, int], float] = {}

    def captured(self, role: Hashable, size: int) -> None:
        """A graph of it exists from now on."""
        insort(self._captured.setdefault(role, []), size)

    def serve(self, role: Hashable, size: int, capture_s: float, waste: Waste | None) -> int:
        """The size of the graph that one more run gets: its own, which may have to be captured first, or a larger one
        if `waste` is given; 0: it runs eagerly. A capture takes `capture_s`."""
        larger = self._larger(role, size)
        if larger == size:
            return size
        bare_s = _BARE * capture_s
        more = waste(larger) if waste is not None and larger else bare_s
        if waste is None or more > bare_s:
            larger, more = 0, bare_s
        wasted = self._wasted.get((role, size), 0.0) + max(0.0, more)
        if wasted > capture_s:
            return size
        self._wasted[role, size] = wasted
        return larger

    def _larger(self, role: Hashable, size: int) -> int:
        """The smallest captured one that holds it; 0: none does."""
        sizes = self._captured.get(role, [])
        at = bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else 0


class GraphPool(Generic[T]):
    def __init__(self, device: torch.device, on_replay: Callable[[Key], None] = lambda key: None) -> None:
        """`on_replay` is told of every replay before it."""
        self._device, self._on_replay = device, on_replay
        self.recording = False  # what runs now is only written down, in a graph
        self._side: Any = None  # the stream on which everything is captured: each has memory of its own
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._capture_policy = CapturePolicy()
        self._settled: set[Key] = set()  # what ran without a graph: compiled, and all it needs is loaded
        self._pool: Any = None  # of the first graph; the others join it
        self._seconds: dict[Key, float] = {}
        self._memory = self._replays = self._eager = self._first = 0
        self.capture_s = 0.0
        self._spent_on: dict[str, float] = defaultdict(float)  # by kind of work
        self._captures_s: dict[Hashable, list[float]] = {}  # by kind of work
        self._stalls: list[tuple[Key, float]] = []

    def has(self, key: Key) -> bool:
        return key in self._graphs

    def serve(self, key: Key, waste: Waste | None) -> Key | None:
        """Which graph serves a run of this role and size: perhaps a larger one, if it may be (`waste`). One that is not
        there is worth capturing now; None: not yet."""
        role, size = key
        served = self._capture_policy.serve(role, size, self._usual_capture_s(_kind(role)), waste)
        return (role, served) if served else None

    def _usual_capture_s(self, kind: Hashable) -> float:
        """A policy's graph takes ten times as long as a drafter's."""
        return _middle(self._captures_s.get(kind) or [self._dearest_capture_s])

    @property
    def _dearest_capture_s(self) -> float:
        """Of the kind that usually takes longest."""
        return max(map(_middle, self._captures_s.values()), default=_CAPTURE_S)

    def run_first(self, key: Key, function: Callable[[], T]) -> T:
        """Without a graph. Its time is the launching of it, and compiling: far more than a replay takes."""
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
        """Records the function, which must have no effect while captured; one that never ran is run once before, to
        compile and settle it, unless the caller has done so (`settled`)."""
        torch.cuda.synchronize(self._device)  # what was launched before is not the capture's
        started = time.perf_counter()
        settled = settled or (key in self._settled and self._side is not None)
        self._side = self._side or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._side):
            if not settled:
                function()
            torch.cuda.synchronize(self._device)
            if torch.cuda.mem_get_info(self._device)[0] < _ROOM:
                torch.cuda.empty_cache()  # while it captures, the allocator hands nothing back, however much it keeps
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
        """`torch.cuda.graph` would collect garbage and hand all cached memory back first, each time: a tenth of a
        second and more. Only what is collected meanwhile could disturb, so nothing is."""
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
        """What a run takes: timed when first asked for, and then it must have no effect either. Most are never asked
        for, and their requests are waiting."""
        if key not in self._seconds:
            started = time.perf_counter()
            self._seconds[key] = self._timed(key)
            self._spent(key, time.perf_counter() - started)
        return self._seconds[key]

    def _timed(self, key: Key) -> float:
        """The fastest of a few runs."""
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
        """What the captured function returned: fixed tensors that the next replay overwrites."""
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
    """Of those that did not wait for a compiler, or for the device; if all did, of all."""
    return median([one for one in seconds if one <= _STALL_S] or seconds)


def _kind(role: Hashable) -> Hashable:
    """Of work: what a role begins with, sizes and settings left out."""
    return role[0] if isinstance(role, tuple) else role


def buckets(largest: int) -> tuple[int, ...]:
    """Padded sizes: every power of two up to 32, then steps of a quarter to an eighth, so that little is padded."""
    sizes = [1, 2, 4, 8, 16, 24, 32]
    while sizes[-1] < largest:
        step = max(16, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return (*(size for size in sizes if size < largest), largest)


def bucket(size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest padded size that holds `size`; None beyond the largest."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def padding(rows: int) -> Callable[[int], int]:
    """The padded size of so many requests; asked for several times a tick."""
    sizes = buckets(rows)
    return cache(lambda requests: bucket(requests, sizes) or sizes[-1])
