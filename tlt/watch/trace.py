"""The trace of a worker's rollout: spans of requests and draft shapes, tick costs, memory.

Plain numbers that workers send to the run. Times are seconds since 1970, so that workers on several machines share one
axis as far as their clocks agree. Always holds: the number of requests and `MOST_SPANS` bound the size of a trace.
"""

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tlt.types import Completion

MOST_SPANS = 4096  # newest changes of shape that a worker keeps


class RequestSpan(NamedTuple):
    """Times of one request."""

    request: int  # `Key.request`
    submitted: float
    first: float  # time of its first token
    finished: float


class ShapeSpan(NamedTuple):
    """Ticks have this shape from `start` until the next span. An empty shape: no request runs."""

    start: float
    running: int  # requests in the first of these ticks
    shape: str


class TickCost(NamedTuple):
    """Measured and expected seconds of the ticks of one shape."""

    running: int  # requests in a tick, rounded up to a power of two
    shape: str
    ticks: int  # timed ticks
    measured_s: float  # mean per tick
    expected_s: float  # mean per tick, estimated by the cost model after the rollout; 0: no estimate


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    worker: int = 0  # its rank
    requests: tuple[RequestSpan, ...] = ()
    shapes: tuple[ShapeSpan, ...] = ()
    costs: tuple[TickCost, ...] = ()
    host_bytes: int = 0  # resident memory of the worker's process
    device_bytes: int = 0  # most that torch has reserved on its device so far


def request_spans(completions: Iterable[Completion]) -> Iterable[RequestSpan]:
    """Spans of completions that have just finished."""
    now = time.time()
    for completion in completions:
        submitted = now - completion.timing.finished_s
        yield RequestSpan(completion.key.request, submitted, submitted + completion.timing.first_token_s, now)


def wall_time_of(counter_s: float) -> float:
    """Converts a reading of `time.perf_counter` to seconds since 1970."""
    return time.time() - time.perf_counter() + counter_s


def host_bytes() -> int:
    """Resident memory of this process; the peak where the system reports only that."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
