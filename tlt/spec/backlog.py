"""The drafter's backlog: upper bounds, on the host, of the positions that a learned drafter has not processed yet.

Always holds: no row has more than `most` positions. The sum over all rows is within its bound too, except after
requests with a backlog below the mean have left. Then a row may get no drafts until it is processed. Knows no tensors
and does not ask the device.
"""

import math

# A draft-extend pass has two fixed sizes: the most positions of any row, and the mean over all rows.
PASS_SIZES = (3, 5, 9, 17, 64)  # most positions of a row in one pass; the smallest sufficient size is used
MEAN_SIZES = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)  # mean positions per row of a small pass
PROMPT_MEAN_SIZES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)  # of a pass of the largest size


class Backlog:
    def __init__(self, window: int, at_once: int) -> None:
        """`at_once`: positions per row, on average, that are processed together with the first level of the trees.

        `window`: positions that the drafter attends to; older ones are never processed.
        """
        self._window = window
        self._at_once = at_once
        self.arrived = 0  # prompt positions of all new requests so far
        self.clear()

    def clear(self) -> None:
        """Everything is processed."""
        self.most = 0  # of any row
        self._written_mean, self._written_max = 0.0, 0  # positions that ticks wrote: mean over rows, most of any row
        self._prompt_total = 0  # prompt positions of new requests, all together
        self._prompts_by_pass: list[int] = []  # the same, by the pass of the largest size that processes them
        self._rows_by_pass = [0]  # new requests, then those with prompt positions in pass 0, 1, …

    def fill(self) -> None:
        """Nothing is processed: every row has a full window to process."""
        self.most = self._written_max = self._window
        self._written_mean = math.inf

    def add_written(self, most: int, each: float) -> None:
        """Adds a tick that writes at most `most` tokens per row, and at most `each` on average."""
        self.most += most
        self._written_max += most
        self._written_mean += each

    def add_prompts(self, rows: int, positions: int) -> None:
        """Adds `rows` new requests with `positions` prompt positions each."""
        self.most = max(self.most, positions)
        self._prompt_total += rows * positions
        self.arrived += rows * positions
        for number in range(math.ceil(positions / PASS_SIZES[-1])):
            if number == len(self._prompts_by_pass):
                self._prompts_by_pass.append(0)
                self._rows_by_pass.append(0)
            self._prompts_by_pass[number] += rows * min(positions - number * PASS_SIZES[-1], PASS_SIZES[-1])
            self._rows_by_pass[number + 1] += rows
        self._rows_by_pass[0] += rows

    def needs_passes(self, rows: int) -> bool:
        """Whether the backlog must be processed in passes of its own, before the trees are started.

        A few new requests do not require that: their cost is part of the cost of drafting.
        """
        return self._on_average(rows) > self._at_once

    @property
    def passes(self) -> int:
        """Number of passes of the largest size that process the whole backlog."""
        return math.ceil(min(self.most, self._window) / PASS_SIZES[-1])

    def pass_sizes(self, rows: int) -> list[float]:
        """Mean positions per row of each such pass, in order."""
        most = PASS_SIZES[-1]
        return [_mean_size(self._at_most(rows, number) / rows, most) for number in range(self.passes)]

    def pass_size(self, rows: int, most: int) -> float:
        """Mean positions per row of a single pass that processes at most `most` positions of any row."""
        return _mean_size(self._on_average(rows), most)

    def lag(self, rows: int) -> int:
        """Mean positions per row that passes of their own must process before trees are started; 0: none."""
        return math.ceil(sum(self.pass_sizes(rows))) if self.needs_passes(rows) else 0

    def prompt_positions(self, rows: int) -> float:
        """Mean prompt positions per row that new requests have added since `clear`."""
        return self._prompt_total / rows

    def _at_most(self, rows: int, number: int) -> float:
        """Bound of the positions of all rows in pass `number`.

        A new request may also have written tokens behind its prompt. The pass in which its prompt ends processes them,
        or the next one.
        """
        most = PASS_SIZES[-1]
        prompts = self._prompts_by_pass[number] if number < len(self._prompts_by_pass) else 0
        ending = (
            self._rows_by_pass[min(number, len(self._rows_by_pass) - 1)]
            if self._written_max <= most
            else self._rows_by_pass[0]
        )
        written = rows * min(max(0, self._written_max - number * most), most) + ending * min(self._written_max, most)
        return prompts + min(rows * self._written_mean, written)

    def _on_average(self, rows: int) -> float:
        return self._written_mean + self._prompt_total / max(1, rows)


def _mean_size(each: float, most: int) -> float:
    rooms = PROMPT_MEAN_SIZES if most == PASS_SIZES[-1] else MEAN_SIZES
    return next((room for room in rooms if each <= room < most), most)
