"""How much a learned drafter has not taken in yet, as far as the host knows: bounds, without asking the device.

What always holds: no row has more than `most`, and all rows together have no more than is said, but where others have
just left and those who stay had more than the average: such a row goes without drafts until it was taken in. Knows no
tensors.
"""

import math

TAKEN_IN = (3, 5, 9, 17, 64)  # positions of a row taken in by one pass: the fewest that suffice …
ROOM = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)  # … and, where rows have fewer on average, room for so many of each
MUCH_ROOM = (2.0, 8.0, 32.0)  # the same where some have many: the prompts of those who have just come


class Backlog:
    def __init__(self, window: int, at_once: int) -> None:
        """Up to `at_once` positions of each row are taken in with the first guess; only a window of them counts."""
        self._window = window
        self._at_once = at_once
        self.arrived = 0  # positions that newcomers ever brought
        self.clear()

    def clear(self) -> None:
        """All is taken in."""
        self.most = 0  # of any row
        self._each = 0.0  # of all rows on average …
        self._new = 0  # … and beside that, of all who have come in since

    def fill(self) -> None:
        """Nothing is taken in."""
        self.most, self._each = self._window, math.inf

    def wrote(self, most: int, each: float) -> None:
        """A tick wrote at most so many tokens of a row, and on average."""
        self.most += most
        self._each += each

    def came(self, rows: int, positions: int) -> None:
        """So many rows, each with so many positions of its prompt."""
        self.most = max(self.most, positions)
        self._new += rows * positions
        self.arrived += rows * positions

    def late(self, rows: int) -> bool:
        """Whether so much is to be taken in that it is a piece of work of its own. A few who have just come are none:
        that happens all the time, and is part of what drafting costs."""
        return self._on_average(rows) > self._at_once

    @property
    def passes(self) -> int:
        """Of the largest kind."""
        return math.ceil(min(self.most, self._window) / TAKEN_IN[-1])

    def room(self, rows: int, most: int) -> float:
        """So many positions of each of so many rows suffice for a pass that takes in at most `most` of any."""
        each, rooms = self._on_average(rows), MUCH_ROOM if most == TAKEN_IN[-1] else ROOM
        return next((room for room in rooms if each <= room < most), most)

    def before(self, rows: int) -> int:
        """Positions of each of so many rows, on average, that would be computed before anything is guessed."""
        return math.ceil(self.passes * self.room(rows, TAKEN_IN[-1])) if self.late(rows) else 0

    def _on_average(self, rows: int) -> float:
        return self._each + self._new / max(1, rows)
