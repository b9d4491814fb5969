"""Times each part of a tick: by pairs of CUDA events, read with the tick's output; on a CPU by the host's clock.

Always holds: nothing here waits for the device. A part has no time if a graph was captured during it, or if it ran
without its graph. A tick's time is from the end of the previous tick on the device to its own end. Knows no shapes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tlt.spec.costs import TickTimes

Mark = Any  # seconds of the host's clock, or a CUDA event


@dataclass(frozen=True, slots=True)
class TickMarks:
    """The marks of a launched tick: around its parts and at its end."""

    parts: tuple[tuple[str, Mark, Mark], ...] = ()
    end: Mark = None  # None: the tick has no output
    one_off_s: float = 0.0  # seconds of captures since the launch before


class TickTimer:
    """Work runs inside `part`; `launched` follows the last part, and `read` when the output is on the host."""

    def __init__(self, device: torch.device, capture_s: Callable[[], float]) -> None:
        """`capture_s` returns the seconds of captures and of runs without a graph so far."""
        self._on_gpu = device.type == "cuda"
        self._capture_s = capture_s
        self._captured_s = 0.0  # `capture_s()` at the last launch
        self._parts: list[tuple[str, Mark, Mark]] = []  # since the last launch
        self._spare: list[torch.cuda.Event] = []  # events for reuse
        self._ended: Mark = None  # end of the last tick read; None: the next tick has no predecessor

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The seconds of the work inside count towards this part of the tick that is launched next."""
        captured_s, began = self._capture_s(), self._mark()
        yield
        ended = self._mark()
        if self._capture_s() == captured_s:
            self._parts.append((name, began, ended))

    def launched(self, end: Mark) -> TickMarks:
        """Makes the parts since the last launch a tick. `end`: the event behind its output; unused on a CPU."""
        parts, self._parts = tuple(self._parts), []
        captured_s, self._captured_s = self._captured_s, self._capture_s()
        return TickMarks(parts, end if self._on_gpu else time.perf_counter(), self._captured_s - captured_s)

    def read(self, tick: TickMarks) -> TickTimes:
        """The times of a tick whose output is on the host: all of its events have completed."""
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
        """Excludes the time until the next tick: it has no predecessor."""
        self._ended = None

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, began: Mark, ended: Mark) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._on_gpu else ended - began
