"""Work in turns, by the machine's clock, until somebody ends it: what another's ticks are measured beside.

What always holds: it ends at the latest when the work looks up; an end that is told before the beginning counts.
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
        """Works whenever it is its turn; says when it did."""
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
    """Keeps a core busy with nothing."""
    while not over():
        pass
