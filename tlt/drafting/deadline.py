"""When drafter training stops: once other work waits for it and the seconds granted to it are used up.

Owns a clock and one question, asked before every micro-step. Does not know drafters.
"""

import time
from collections.abc import Callable


class Deadline:
    """Over once `until` is True and `extra_s` seconds have passed. Records since when other work waits."""

    def __init__(self, until: Callable[[], bool], extra_s: float) -> None:
        self._until, self._extra_s = until, extra_s
        self._started = time.perf_counter()
        self._asked = False
        self._waited_from = self._started  # moved by `over` if nothing waits yet
        self._waited_for = True

    def over(self, ahead_s: float) -> bool:
        """Asks `until` once. `ahead_s`: seconds that the next micro-step and its measurement would take."""
        waited_for = self._until()
        if waited_for and not self._waited_for:
            self._waited_from = time.perf_counter()
        self._waited_for, self._asked = waited_for, True
        return self.near(ahead_s)

    def near(self, ahead_s: float) -> bool:
        """Whether training will be over in `ahead_s` seconds, by the last answer of `until`."""
        known = self._waited_for and self._asked
        return known and time.perf_counter() - self._started + ahead_s >= self._extra_s

    @property
    def waited_s(self) -> float:
        """Seconds for which other work has waited."""
        return time.perf_counter() - self._waited_from if self._waited_for else 0.0
