"""What the TLT paper reports, beside what was measured here.

"Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive Drafter" (arXiv 2511.16665, ASPLOS 2026). Not on
one scale: other cards, policies and lengths of answers. What is compared is what both have a figure for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Timed(Protocol):
    """Of one way to write the rollout."""

    @property
    def variant(self) -> str: ...

    @property
    def speedup(self) -> float: ...

    @property
    def last_32_speedup(self) -> float | None: ...


class Drafted(Protocol):
    @property
    def variant(self) -> str: ...

    @property
    def accept_length(self) -> float | None: ...

    @property
    def speedup_per_accept(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Beside:
    what: str
    here: str
    paper: str
    where: str  # it was measured, in the paper


_ROLLOUT = Beside("speed-up of a rollout", "", "2.44 ×", "Qwen2.5-32B, 128 requests, from 32 on speculating")
_TAIL = Beside("… of its last 32 answers", "", "1.7 to 3.6 ×", "32B, batches of 32 to 1, depth 10, verifying 16 to 64")
_LENGTH = Beside("accept length", "", "6.53", "adaptive EAGLE drafter on the RL-trained policy; left alone 4.59")
_REALISED = Beside("… of which becomes speed (S/AL)", "", "0.34 to 0.42", "its speed-ups over its accept lengths")


def beside_the_paper(timed: Sequence[Timed], drafted: Sequence[Drafted], variant: str) -> Iterator[Beside]:
    """Of the variant that stands for TLT here; what nobody measured is left out."""
    time = next((one for one in timed if one.variant == variant), None)
    drafts = next((one for one in drafted if one.variant == variant), None)
    found = (
        (_ROLLOUT, time and f"{time.speedup:.2f} ×"),
        (_TAIL, time and time.last_32_speedup and f"{time.last_32_speedup:.2f} ×"),
        (_LENGTH, drafts and drafts.accept_length and f"{drafts.accept_length:.2f}"),
        (_REALISED, drafts and drafts.speedup_per_accept and f"{drafts.speedup_per_accept:.2f}"),
    )
    for row, here in found:
        if here:
            yield Beside(row.what, here, row.paper, row.where)
