"""The account of a run: the seconds that speculation cost, with everything that exists because of it, and saved.

Always holds: if every action is taken only when `affords` allows its worst case, a run takes at no moment more
than 1 + `SHARE` times its plain time and `PROMISED_TICKS` plain ticks. Start-up comes on top and is reported by itself.
Seconds in which nothing waits are never charged. Knows seconds only: no shapes, no drafters, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum

SHARE = 0.008  # fraction of the plain time so far that may be spent without return: below 1 %, as measured times err
TRY_SHARE = 0.005  # fraction of the time so far that tries of drafters may lose
PROMISED_TICKS = 256  # plain ticks for which an expected saving is credited in advance
PAYBACK = 2.0  # least ratio of expected savings to cost for graphs and for drafter training
_SPENDABLE = 0.1  # fraction of the plain time so far; savings beyond it are never spent


class CostKind(StrEnum):
    """Kinds of work that exist only because of speculation, beside the ticks that speculate."""

    CAPTURES = "captures"  # in a rollout: graphs of drafters and of trees, and runs without one
    CATCHING_UP = "catching up"  # in a rollout: draft-extends over text written while a drafter was not used
    STATES = "states"  # in a rollout: hidden states are kept in all ticks
    TRAINING = "training"  # micro-steps of the drafter that the step waited for
    MEASURING = "measuring"  # accept lengths on held-out completions
    SWAPPING = "swapping"  # handing a new drafter to the engine
    AHEAD = "writing ahead"  # in a rollout: completions of the next step, written beside those of this one


_IN_ROLLOUTS = (CostKind.CAPTURES, CostKind.CATCHING_UP, CostKind.STATES, CostKind.AHEAD)


@dataclass(slots=True)
class Budget:
    """Call `affords` before every action, `ran` and `charge` after it."""

    plain_s: float = 0.0  # seconds that the run so far would have taken without speculation
    saved_s: float = 0.0  # seconds saved by speculation; negative: lost
    spent: dict[CostKind, float] = field(default_factory=lambda: dict.fromkeys(CostKind, 0.0))
    tried_s: float = 0.0  # seconds lost by tries; never below 0
    tick_s: float = 0.0  # seconds of a recent plain tick
    longest: int = 0  # token limit of the longest completion: bounds the time for which savings are credited
    nothing_waits: bool = False  # present ticks are not part of a step, and not counted

    def ran(self, took_s: float, plain_s: float) -> None:
        """Adds a tick or a step of `took_s` seconds without charged work. `plain_s`: its time without speculation."""
        if not self.nothing_waits:
            self.plain_s += plain_s
            self.saved_s += plain_s - took_s

    def correct(self, seconds: float) -> None:
        """Adds to the plain time, and thus to the savings, of ticks that were passed to `ran`."""
        if not self.nothing_waits:
            self.plain_s += seconds
            self.saved_s += seconds

    def charge(self, kind: CostKind, seconds: float) -> None:
        """Charges seconds of blocking work of this kind."""
        if not self.nothing_waits:
            self.spent[kind] += max(0.0, seconds)

    def tried(self, lost_s: float) -> None:
        """Adds the seconds that a try lost; negative: gained."""
        if not self.nothing_waits:
            self.tried_s = max(0.0, self.tried_s + lost_s)

    def shared(self, seconds: float) -> None:
        """Moves seconds of a tick passed to `ran` to the cost of writing ahead: the rows written ahead took them."""
        self.plain_s -= seconds
        self.charge(CostKind.AHEAD, seconds)

    @property
    def took_s(self) -> float:
        """Seconds of all ticks and steps, and of work charged in rollouts."""
        return self.plain_s - self.saved_s + sum(self.spent[kind] for kind in _IN_ROLLOUTS)

    @property
    def balance_s(self) -> float:
        returned_s = min(self.saved_s, _SPENDABLE * self.plain_s)
        return SHARE * self.plain_s + returned_s - sum(self.spent.values())

    def affords(self, worst_s: float, gain: float = 0.0) -> bool:
        """Whether the budget affords an action that costs at most `worst_s`.

        `gain`: its expected saving, as a fraction of the remaining time. The remaining time is assumed to be as long as
        the time so far: the run may be short.
        """
        promised_s = gain * min(self.plain_s, PROMISED_TICKS * self.tick_s)
        return worst_s <= self.balance_s + max(self._first_tries_s, promised_s)

    def affords_try(self, worst_s: float) -> bool:
        """The same for a try, without an expected saving."""
        left_s = max(TRY_SHARE * (self.plain_s - self.saved_s), self._first_tries_s) - self.tried_s
        return worst_s <= left_s and self.affords(worst_s)

    @property
    def _first_tries_s(self) -> float:
        """Seconds that tries may lose before any saving."""
        return TRY_SHARE * min(PROMISED_TICKS, self.longest) * self.tick_s

    def state(self) -> dict[str, float]:
        """Seconds by name, for `restore`."""
        totals = {"plain_s": self.plain_s, "saved_s": self.saved_s, "tried_s": self.tried_s}
        return totals | {str(kind): seconds for kind, seconds in self.spent.items()}

    @classmethod
    def mean(cls, saved: Sequence[Mapping[str, float]]) -> "Budget":
        """The mean of the workers' accounts, of which each is a `state`."""
        budget = cls()
        budget.restore(saved)
        return budget

    def restore(self, saved: Sequence[Mapping[str, float]]) -> None:
        """Restores the mean of the workers' accounts, whatever their order: they share each rollout."""
        mean = {name: fsum(one.get(name, 0.0) for one in saved) / len(saved) for name in self.state()}
        self.plain_s, self.saved_s, self.tried_s = mean["plain_s"], mean["saved_s"], mean["tried_s"]
        self.spent = {kind: mean[kind] for kind in CostKind}
