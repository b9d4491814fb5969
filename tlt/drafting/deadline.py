"""Until when to train the drafter: told to stop, and after what of the step's time may be spent on it.

Owns a clock and one question, asked before every micro-step. Knows nothing of drafters.
"""

import time
from collections.abc import Callable


class Deadline:
    """When to stop: told so, and not before `extra_s` seconds have passed. Remembers since when others wait."""

    def __init__(self, until: Callable[[], bool], extra_s: float) -> None:
        self._until, self._extra_s = until, extra_s
        self._started = time.perf_counter()
        self._asked = False
        self._waited_from = self._started  # unless it turns out that nobody waits yet
        self._waited_for = True

    def over(self, ahead_s: float) -> bool:
        """Asks, once. `ahead_s`: what would have to be done yet if it were not."""
        waited_for = self._until()
        if waited_for and not self._waited_for:
            self._waited_from = time.perf_counter()
        self._waited_for, self._asked = waited_for, True
        return self.near(ahead_s)

    def near(self, ahead_s: float) -> bool:
        """Whether it will be over in so many seconds, as far as is known."""
        known = self._waited_for and self._asked
        return known and time.perf_counter() - self._started + ahead_s >= self._extra_s

    @property
    def waited_s(self) -> float:
        """How long everything else has waited."""
        return time.perf_counter() - self._waited_from if self._waited_for else 0.0
