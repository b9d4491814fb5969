"""The tick clock: seconds of single ticks, graph captures left out.

A tick lasts from the read of the tick before to its own read, because on a GPU it is launched before that read. What
always holds: a capture counts as one-off time, and a tick whose time it may have disturbed has none.
"""

import time
from collections.abc import Callable


class TickClock:
    def __init__(self, capture_s: Callable[[], float]) -> None:
        """`capture_s`: seconds of captures so far."""
        self._capture_s = capture_s
        self._read_s: float | None = None  # when the last tick was read; None: unknown
        self._read_capture_s = 0.0  # captures by then
        self._begun_capture_s = 0.0  # captures when the last verification began
        self._disturbed = False  # the last verification's launch captured a graph, or ran without one
        self.begun_s = 0.0  # when the last verification began

    def begin(self) -> None:
        """A verification begins."""
        self.begun_s, self._begun_capture_s = time.perf_counter(), self._capture_s()
        if self._read_s is None:
            self._read_s, self._read_capture_s = self.begun_s, self._begun_capture_s

    def launched(self, *, late: bool, prefill: bool) -> tuple[bool, float]:
        """The verification is launched. Whether it can be timed, and the seconds of captures in its launch.

        A capture waits for the device. A tick that is read late then seems to take as long as the tick behind it as
        well, and the tick after it seems short: the device had a start.
        """
        one_off_s = self._capture_s() - self._begun_capture_s
        timed = not one_off_s and not (late and (prefill or self._disturbed))
        self._disturbed = one_off_s > 0.0
        return timed, one_off_s

    def read(self, begun_s: float | None = None) -> float | None:
        """A tick was read. Its seconds since the read before, or since it began; None: neither is known."""
        now, captured = time.perf_counter(), self._capture_s()
        since = self._read_s if self._read_s is not None else begun_s
        one_off_s = captured - self._read_capture_s if self._read_s is not None else 0.0
        self._read_s, self._read_capture_s = now, captured
        return None if since is None else now - since - one_off_s

    def restart(self) -> None:
        """The next tick's time cannot be told from the last read."""
        self._read_s = None
