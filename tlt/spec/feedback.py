"""A tick on its way to the tuner: what was proposed in it, and what its verification taught.

What always holds: of every row it is known how far it walked, of a few what each drafter had named. Knows nobody who
chooses, and no seconds but those it is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt.spec.acceptance import AcceptResult, rank_hits_of
from tlt.spec.drafter import StartedTrees
from tlt.spec.shape import MOST_NODES, Draft, Shape
from tlt.types import Key

_LOOKED_INTO = 8  # rows of a tick whose walks are compared with what each drafter named


def looked_into(rows: int, verifies: int) -> range:
    """Which of so many, others every time: looking takes the host a while."""
    stride = -(-rows // _LOOKED_INTO)
    return range(verifies % stride, rows, stride)


@dataclass(frozen=True, slots=True)
class Proposed:
    """The drafts of a tick, row by row, one per drafter."""

    keys: Sequence[Key]
    drafts_s: list[float]  # what each drafter took on the host …
    caught_up: tuple[float, int, float]  # … and on catching up before: seconds, positions, seconds of it on the host
    ingest_tokens: (
        float | None
    )  # if some of the tick's time on the device was taking in much: what newcomers had brought a row
    version: int  # of the learned drafter
    parts: Sequence[tuple[Draft, ...]] = ()
    started_trees: StartedTrees | None = None  # instead of the parts: one drafter's, on the device

    def of(self, row: int) -> tuple[Draft, ...]:
        return (self.started_trees.draft(self.keys[row]),) if self.started_trees else self.parts[row]


@dataclass(frozen=True, slots=True)
class TickFeedback:
    """A verified tick that nobody has looked into yet: tokens, and seconds if it did nothing else."""

    shape: Shape
    proposed: Proposed
    emitted: Sequence[Sequence[int]]
    completions: Mapping[int, int | None]  # row to look into → its answer's number; None: nobody said when it began
    seconds: float | None
    one_off_s: float

    def results(self) -> list[AcceptResult]:
        """Of all rows that had a request."""
        results = [_UNSEEN[len(tokens)] for tokens in self.emitted]
        for row in self.completions:
            results[row] = self._looked_into(row)
        return [walked for walked in results if walked.accepted >= 0]

    def _looked_into(self, row: int) -> AcceptResult:
        tokens = self.emitted[row]
        rank_hits = tuple(rank_hits_of(draft, tokens, self.shape) for draft in self.proposed.of(row))
        return AcceptResult(len(tokens) - 1, rank_hits, self.completions[row])


# what is said of a walk nobody looks into, by its tokens: there are hundreds in a tick; without any it was none
_UNSEEN = tuple(AcceptResult(tokens - 1, ()) for tokens in range(MOST_NODES + 1))
