"""Times the parts of a tick, each by itself: by pairs of CUDA events that are read with the tick's output, or on a CPU
by the clock around them.

What always holds: nothing here waits for the device; a part during which a graph was captured, or that ran without its
graph, has no time. A tick lasts from the end of the tick before, on the device, to its own end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tlt.spec.costs import TickTimes

T = TypeVar("T")
Mark = Any  # seconds of the host's clock, or a CUDA event


@dataclass(frozen=True, slots=True)
class TickMarks:
    """A launched tick: the marks around its parts, where it ends, and the captures on the way."""

    parts: tuple[tuple[str, Mark, Mark], ...] = ()
    end: Mark = None  # None: nothing ran that anybody waits for
    one_off_s: float = 0.0


class TickTimer:
    """`time` every part, `launched` behind the last one, `read` when the output is on the host."""

    def __init__(self, device: torch.device, capture_s: Callable[[], float]) -> None:
        """`capture_s`: seconds of captures, and of runs without a graph, so far."""
        self._on_gpu = device.type == "cuda"
        self._capture_s = capture_s
        self._captured_s = 0.0  # by the last launch
        self._parts: list[tuple[str, Mark, Mark]] = []  # since the last launch
        self._spare: list[torch.cuda.Event] = []  # events are made once: in flight are those of two ticks
        self._ended: Mark = None  # the last tick that was read; None: the next one follows no tick

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Runs the work; its seconds count towards this part of the tick that is launched next."""
        captured_s, began = self._capture_s(), self._mark()
        result = work()
        ended = self._mark()
        if self._capture_s() == captured_s:
            self._parts.append((part, began, ended))
        return result

    def launched(self, end: Mark) -> TickMarks:
        """The parts since the last launch are a tick's. `end`: the event behind its output; on a CPU it has run."""
        parts, self._parts = tuple(self._parts), []
        captured_s, self._captured_s = self._captured_s, self._capture_s()
        return TickMarks(parts, end if self._on_gpu else time.perf_counter(), self._captured_s - captured_s)

    def read(self, tick: TickMarks) -> TickTimes:
        """The tick's output is on the host, and so all of its marks have passed."""
        before, self._ended = self._ended, tick.end
        if tick.end is None:
            return TickTimes(one_off_s=tick.one_off_s)
        parts: dict[str, float] = {}
        for part, began, ended in tick.parts:
            parts[part] = parts.get(part, 0.0) + self._between(began, ended)
            if self._on_gpu:
                self._spare += (began, ended)
        seconds = None if before is None else max(0.0, self._between(before, tick.end) - tick.one_off_s)
        return TickTimes(parts, seconds, tick.one_off_s)

    def restart(self) -> None:
        """The next tick does not follow the last one: what lies between them is no tick's time."""
        self._ended = None

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, began: Mark, ended: Mark) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._on_gpu else ended - began
