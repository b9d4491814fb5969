"""A time limit, kept by work that consists of pieces: ticks, batches to measure on, optimizer steps.

What always holds: every piece is real work, none is done to be timed only; a piece is begun only if one that takes as
long as the one before it ends in time; a piece that was begun is finished. Knows nothing of what a piece is.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TypeVar

Piece = TypeVar("Piece")
Clock = Callable[[], float]  # seconds, from any origin


class TimeLimit:
    """From now until `end_s` by the clock; without a limit that is infinity."""

    def __init__(self, end_s: float = inf, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._end_s = end_s
        self._whole_s = end_s - clock()

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    @property
    def progress(self) -> float:
        """Share of the time that is over, from 0 to 1; always 0 without a limit."""
        if self._whole_s == inf:
            return 0.0
        return min(1.0, 1.0 - self.left_s / self._whole_s) if self._whole_s > 0.0 else 1.0

    def fitting(self, pieces: Iterable[Piece], size: Callable[[], float] = lambda: 1.0) -> Iterator[Piece]:
        """The pieces, as long as another one fits. A piece's time is that of making it and of what its taker does.

        `size`: how large the next piece is, where the time that pieces take is in proportion to that.
        """
        iterator, begun_s, pace_s = iter(pieces), self._clock(), 0.0
        while begun_s < self._end_s:
            units = size()
            if begun_s + pace_s * units > self._end_s:
                return
            try:
                piece = next(iterator)
            except StopIteration:
                return
            yield piece
            now = self._clock()
            begun_s, pace_s = now, (now - begun_s) / units


class Spent:
    """Seconds, by what they were spent on; and what is left of a limit, if there is one."""

    def __init__(self, clock: Clock, seconds: float, began_s: float | None = None) -> None:
        """`seconds`: the limit; 0: none. It counts from `began_s`, or from now."""
        self.clock = clock
        self._limit_s = seconds or inf
        self._began_s = self._since = clock() if began_s is None else began_s
        self._seconds: dict[str, float] = {}

    def on(self, what: str) -> float:
        """Since the last call; counted together with what was spent on it before."""
        now = self.clock()
        seconds, self._since = now - self._since, now
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        return seconds

    def until(self, share: float, less_s: float = 0.0) -> TimeLimit:
        """Ends when such a share of the whole limit is over, less so many seconds."""
        return TimeLimit(self._began_s + share * self._limit_s - less_s, self.clock)

    def within(self, share: float) -> TimeLimit:
        """Ends when such a share of what is left of the limit has passed."""
        now = self.clock()
        return TimeLimit(now + share * (self._began_s + self._limit_s - now), self.clock)

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._seconds.items())
