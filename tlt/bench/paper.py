"""Figures of the TLT paper, beside measured ones.

"Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive Drafter" (arXiv 2511.16665, ASPLOS 2026). GPUs,
policies and completion lengths differ, so the figures are not directly comparable.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PaperComparison:
    what: str
    here: str
    paper: str
    where: str  # on what the paper measured it
    source: str = "TLT paper, arXiv 2511.16665: its own hardware, policies and lengths"


_ROLLOUT = PaperComparison("speed-up of a rollout", "", "2.44 ×", "Qwen2.5-32B, 128 requests, from 32 on speculating")
_TAIL = PaperComparison(
    "… of its last 32 answers", "", "1.7 to 3.6 ×", "32B, batches of 32 to 1, depth 10, verifying 16 to 64"
)
_LENGTH = PaperComparison(
    "accept length", "", "6.53", "adaptive EAGLE drafter on the RL-trained policy; left alone 4.59"
)
_REALISED = PaperComparison(
    "… of which becomes speed (S/AL)", "", "0.34 to 0.42", "its speed-ups over its accept lengths"
)


def beside_the_paper(
    *, speedup: float, last_32: float | None, accept_length: float | None, realised: float | None
) -> Iterator[PaperComparison]:
    """Pairs of figures; those that were not measured here are left out."""
    found = (
        (_ROLLOUT, f"{speedup:.2f} ×"),
        (_TAIL, last_32 and f"{last_32:.2f} ×"),
        (_LENGTH, accept_length and f"{accept_length:.2f}"),
        (_REALISED, realised and f"{realised:.2f}"),
    )
    for row, here in found:
        if here:
            yield replace(row, here=here)
