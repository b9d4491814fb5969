"""Work in alternating turns on the machine's clock, beside which the ticks of another worker are measured.

What always holds: `take` ends as soon as the work checks `over` after `end`, also if `end` was called before `take`.
"""

import time
from collections.abc import Callable
from threading import Event

from tlt.cluster.interference import Interval, is_work_turn

Over = Callable[[], bool]


class Turns:
    def __init__(self) -> None:
        self._ended = Event()

    def take(self, turn_s: float, work: Callable[[Over], None]) -> list[Interval]:
        """Works in every working turn until `end` is called. Returns the intervals of work."""
        shifts: list[Interval] = []

        def over() -> bool:
            return self._ended.is_set() or not is_work_turn(time.perf_counter(), turn_s)

        try:
            while not self._ended.is_set():
                began = time.perf_counter()
                if is_work_turn(began, turn_s):
                    work(over)
                    shifts.append((began, time.perf_counter()))
                self._ended.wait(turn_s / 50)
        finally:
            self._ended.clear()
        return shifts

    def end(self) -> None:
        self._ended.set()


def count(over: Over) -> None:
    """Keeps a core busy without memory traffic."""
    while not over():
        pass
