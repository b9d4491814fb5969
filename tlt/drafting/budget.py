"""The time account of a run: drafter training and everything else that speculation costs outside the rollout.

What always holds: if every action is taken only when `affords` allows its worst case, and rollouts lose no more than
`SHARE` of their plain time, a run takes at no moment more than 1 + `SHARE` times as long as without speculation.
Start-up is not included and reported separately. Seconds in which nothing waits are never charged. Knows seconds only:
no drafters, no clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum

SHARE = 0.01  # of the plain time so far that may be spent without any return
_MOST_SAVED = 10 * SHARE  # fraction of the plain time so far: savings above it are never spent


class CostKind(StrEnum):
    """Kinds of work that exist only because of speculation."""

    TRAINING = "training"  # micro-steps of the drafter that the step waited for
    MEASURING = "measuring"  # accept lengths on held-out answers
    SWAPPING = "swapping"  # handing a new drafter to the engine


@dataclass(slots=True)
class RunBudget:
    """Call `finished` after every step, `affords` before every action and `charge` after it."""

    plain_s: float = 0.0  # of the steps so far, without speculation
    saved_s: float = 0.0  # by speculation in their rollouts; negative if it lost
    spent: dict[CostKind, float] = field(default_factory=lambda: dict.fromkeys(CostKind, 0.0))

    def finished(self, step_s: float, saved_s: float) -> None:
        """Books a step. `step_s`: seconds without charged work; `saved_s`: what speculation saved in its rollout."""
        plain_s = step_s + saved_s
        self.plain_s += plain_s
        self.saved_s += saved_s

    def charge(self, kind: CostKind, seconds: float) -> None:
        """Books seconds in which the step waited for work of this kind."""
        self.spent[kind] += max(0.0, seconds)

    @property
    def balance_s(self) -> float:
        returned_s = min(self.saved_s, _MOST_SAVED * self.plain_s)
        return SHARE * self.plain_s + returned_s - sum(self.spent.values())

    def affords(self, worst_s: float) -> bool:
        return worst_s <= self.balance_s
