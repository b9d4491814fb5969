"""How much a learned drafter has not taken in yet, as far as the host knows: bounds, without asking the device.

What always holds: no row has more than `most`, and all rows together have no more than is said, but where others have
just left and those who stay had more than the average: such a row goes without drafts until it was taken in. Knows no
tensors.
"""

import math

TAKEN_IN = (3, 5, 9, 17, 64)  # positions of a row taken in by one pass: the fewest that suffice …
ROOM = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)  # … and, where rows have fewer on average, room for so many of each
MUCH_ROOM = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)  # where some have many: prompts of those who have just come


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
        self._each, self._wrote = 0.0, 0  # what ticks wrote: of all rows on average, of any at most …
        self._new = 0  # … and beside that, of all who have come in since: together, …
        self._new_by_pass: list[int] = []  # … by the pass of the largest kind that takes it in …
        self._coming = [0]  # … and how many they are, and how many of them have something in each pass

    def fill(self) -> None:
        """Nothing is taken in."""
        self.most = self._wrote = self._window
        self._each = math.inf

    def wrote(self, most: int, each: float) -> None:
        """A tick wrote at most so many tokens of a row, and on average."""
        self.most += most
        self._wrote += most
        self._each += each

    def came(self, rows: int, positions: int) -> None:
        """So many rows, each with so many positions of its prompt."""
        self.most = max(self.most, positions)
        self._new += rows * positions
        self.arrived += rows * positions
        for number in range(math.ceil(positions / TAKEN_IN[-1])):
            if number == len(self._new_by_pass):
                self._new_by_pass.append(0)
                self._coming.append(0)
            self._new_by_pass[number] += rows * min(positions - number * TAKEN_IN[-1], TAKEN_IN[-1])
            self._coming[number + 1] += rows
        self._coming[0] += rows

    def late(self, rows: int) -> bool:
        """Whether so much is to be taken in that it is a piece of work of its own. A few who have just come are none:
        that happens all the time, and is part of what drafting costs."""
        return self._on_average(rows) > self._at_once

    @property
    def passes(self) -> int:
        """Of the largest kind."""
        return math.ceil(min(self.most, self._window) / TAKEN_IN[-1])

    def rooms(self, rows: int) -> list[float]:
        """So many positions of each of so many rows suffice for one such pass after the other."""
        most = TAKEN_IN[-1]
        return [_room(self._at_most(rows, number) / rows, most) for number in range(self.passes)]

    def room(self, rows: int, most: int) -> float:
        """The same for the only pass, which takes in at most `most` of any row."""
        return _room(self._on_average(rows), most)

    def before(self, rows: int) -> int:
        """Positions of each of so many rows, on average, that would be computed before anything is guessed."""
        return math.ceil(sum(self.rooms(rows))) if self.late(rows) else 0

    def newly(self, rows: int) -> float:
        """Positions of each of so many rows, on average, that newcomers brought since all was taken in."""
        return self._new / rows

    def _at_most(self, rows: int, number: int) -> float:
        """Positions of all rows in one of the passes. Whoever has just come may have written something too, behind all
        of its prompt: that is taken in by the pass in which the prompt ends, or by the next."""
        most = TAKEN_IN[-1]
        prompts = self._new_by_pass[number] if number < len(self._new_by_pass) else 0
        ending = self._coming[min(number, len(self._coming) - 1)] if self._wrote <= most else self._coming[0]
        written = rows * min(max(0, self._wrote - number * most), most) + ending * min(self._wrote, most)
        return prompts + min(rows * self._each, written)

    def _on_average(self, rows: int) -> float:
        return self._each + self._new / max(1, rows)


def _room(each: float, most: int) -> float:
    rooms = MUCH_ROOM if most == TAKEN_IN[-1] else ROOM
    return next((room for room in rooms if each <= room < most), most)
