"""The pool of CUDA graphs: one per (role, padded size), captured when first needed, all in one memory pool.

A captured function reads and writes fixed tensors, so replaying it costs the host one call whatever it contains. What
has no graph (prefill, a size beyond the largest bucket) is run eagerly and counted. Knows nothing of what they do.
"""

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_TIMED_RUNS = 3
_ROOM = 4 << 30  # bytes of a device that should be free when a capture begins


@dataclass(frozen=True, slots=True)
class PoolReport:
    graphs: int
    memory_bytes: int  # of the pool the graphs share
    capture_s: float  # spent capturing, warm-up runs (and kernel compilation) included, and timing
    replays: int
    eager: int  # runs that found no graph


class GraphPool(Generic[T]):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = None  # the stream on which everything is captured: each has memory of its own
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._pool: Any = None  # of the first graph; the others join it
        self._seconds: dict[Hashable, float] = {}
        self._memory = self._replays = self._eager = 0
        self._capture_s = 0.0

    def has(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, function: Callable[[], T]) -> None:
        """Runs the function once to compile and settle it, then records it. It must have no effect while captured."""
        torch.cuda.synchronize(self._device)  # what was launched before is not the capture's
        started = time.perf_counter()
        self._side = self._side or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._side):
            function()
            torch.cuda.synchronize(self._device)
            if torch.cuda.mem_get_info(self._device)[0] < _ROOM:
                torch.cuda.empty_cache()  # while it captures, the allocator hands nothing back, however much it keeps
            before = torch.cuda.memory_reserved(self._device)
            graph, result = self._recorded(function)
        torch.cuda.synchronize(self._device)
        self._memory += torch.cuda.memory_reserved(self._device) - before
        self._graphs[key] = (graph, result)
        self._capture_s += time.perf_counter() - started

    def _recorded(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """`torch.cuda.graph` would collect garbage and hand all cached memory back first, each time: a tenth of a
        second and more. Only what is collected meanwhile could disturb, so nothing is."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may be writing checkpoints
            try:
                result = function()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph, result

    def seconds(self, key: Hashable) -> float:
        """What a run takes: timed when first asked for, and then it must have no effect either. Most are never asked
        for, and their requests are waiting."""
        if key not in self._seconds:
            started = time.perf_counter()
            self._seconds[key] = self._timed(self._graphs[key][0])
            self._capture_s += time.perf_counter() - started
        return self._seconds[key]

    def _timed(self, graph: torch.cuda.CUDAGraph) -> float:
        """The fastest of a few runs."""
        runs = []
        for _ in range(_TIMED_RUNS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            runs.append(float(begun.elapsed_time(ended)) / 1e3)
        return min(runs)

    def replay(self, key: Hashable) -> T:
        """What the captured function returned: fixed tensors that the next replay overwrites."""
        graph, result = self._graphs[key]
        graph.replay()
        self._replays += 1
        return result

    def count_eager(self) -> None:
        self._eager += 1

    def report(self) -> PoolReport:
        return PoolReport(len(self._graphs), self._memory, self._capture_s, self._replays, self._eager)


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
