"""Time limits for work in units: ticks, measured batches, optimizer steps.

Always holds: no unit runs for timing only. A unit starts only if one of the previous unit's duration would end in time.
A started unit finishes. Does not know the kind of work.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TypeVar

Unit = TypeVar("Unit")
Clock = Callable[[], float]  # seconds, from any origin


class TimeLimit:
    """Runs from its creation until `end_s` on the clock. Infinity: no limit."""

    def __init__(self, end_s: float = inf, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._end_s = end_s
        self._whole_s = end_s - clock()

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    @property
    def progress(self) -> float:
        """Elapsed fraction of the time, from 0 to 1. Always 0 without a limit."""
        if self._whole_s == inf:
            return 0.0
        return min(1.0, 1.0 - self.left_s / self._whole_s) if self._whole_s > 0.0 else 1.0

    def fitting(self, units: Iterable[Unit], size: Callable[[], float] = lambda: 1.0) -> Iterator[Unit]:
        """Yields units while another one fits. A unit's duration includes producing it and the consumer's work on it.

        `size`: size of the next unit, if the duration is proportional to a size.
        """
        iterator, begun_s, pace_s = iter(units), self._clock(), 0.0
        while begun_s < self._end_s:
            next_size = size()
            if begun_s + pace_s * next_size > self._end_s:
                return
            try:
                unit = next(iterator)
            except StopIteration:
                return
            yield unit
            now = self._clock()
            begun_s, pace_s = now, (now - begun_s) / next_size


class Spent:
    """Seconds spent, by kind of work, and time limits cut from what remains of a total limit."""

    def __init__(self, clock: Clock, seconds: float, began_s: float | None = None) -> None:
        """`seconds`: the total limit; 0: none. It counts from `began_s`, or from now."""
        self.clock = clock
        self._limit_s = seconds or inf
        self._began_s = self._since = clock() if began_s is None else began_s
        self._seconds: dict[str, float] = {}

    def on(self, what: str) -> float:
        """Books the seconds since the last call on `what`, and returns them."""
        now = self.clock()
        seconds, self._since = now - self._since, now
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        return seconds

    def until(self, share: float, less_s: float = 0.0) -> TimeLimit:
        """Ends `less_s` seconds before the fraction `share` of the total limit has elapsed."""
        return TimeLimit(self._began_s + share * self._limit_s - less_s, self.clock)

    def within(self, share: float) -> TimeLimit:
        """Ends when the fraction `share` of the remaining time has elapsed."""
        now = self.clock()
        return TimeLimit(now + share * (self._began_s + self._limit_s - now), self.clock)

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._seconds.items())
