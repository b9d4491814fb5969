"""The one account of a run: everything that exists because of speculation, and what it brought back.

What always holds: if every action is taken only when `affords` allows its worst case, a run takes at no moment more
than 1 + `SHARE` times its plain time and `PROMISED_TICKS` plain ticks. Start-up comes on top and is reported by itself.
Seconds in which nothing waits are never charged. Knows seconds only: no shapes, no drafters, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SHARE = 0.008  # of the plain time so far that may be spent without any return: below 1 %, as measured times err
TRY_SHARE = 0.005  # of the time so far that tries of drafters may lose
PROMISED_TICKS = 256  # plain ticks for which an expected saving is trusted before it was made
PAYBACK = 2.0  # savings expected of graphs or of drafter training, relative to their cost, from which they are worth it
_SPENDABLE = 0.1  # of the plain time so far: savings beyond that are never spent


class CostKind(StrEnum):
    """Kinds of work that exist only because of speculation, beside the ticks that speculate."""

    CAPTURES = "captures"  # in a rollout: graphs of drafters and of trees, and runs without one
    CATCHING_UP = "catching up"  # in a rollout: drafters ingest text written while they were not used
    STATES = "states"  # in a rollout: hidden states are kept in all ticks
    TRAINING = "training"  # micro-steps of the drafter that the step waited for
    MEASURING = "measuring"  # accept lengths on held-out completions
    SWAPPING = "swapping"  # handing a new drafter to the engine
    AHEAD = "writing ahead"  # in a rollout: completions of the next step, written beside those of this one


_IN_ROLLOUTS = (CostKind.CAPTURES, CostKind.CATCHING_UP, CostKind.STATES, CostKind.AHEAD)


@dataclass(slots=True)
class Budget:
    """`affords` before every action; `ran` and `charge` after it."""

    plain_s: float = 0.0  # that everything so far would have taken without speculation
    saved_s: float = 0.0  # by speculation; negative if it lost
    spent: dict[CostKind, float] = field(default_factory=lambda: dict.fromkeys(CostKind, 0.0))
    tried_s: float = 0.0  # lost by tries; never below 0
    tick_s: float = 0.0  # of a recent plain tick
    longest: int = 0  # tokens of any completion, at most: no promise is for longer than that
    nothing_waits: bool = False  # ticks of now are no part of a step

    def ran(self, took_s: float, plain_s: float) -> None:
        """A tick or a step took so long, charged work left out; without speculation it would have taken `plain_s`."""
        if not self.nothing_waits:
            self.plain_s += plain_s
            self.saved_s += plain_s - took_s

    def charge(self, kind: CostKind, seconds: float) -> None:
        """Work of this kind made everything else wait so long."""
        if not self.nothing_waits:
            self.spent[kind] += max(0.0, seconds)

    def tried(self, lost_s: float) -> None:
        """A try lost so much, or gained if it is negative."""
        if not self.nothing_waits:
            self.tried_s = max(0.0, self.tried_s + lost_s)

    def shared(self, seconds: float) -> None:
        """A tick that `ran` was told of would have been so much shorter without the rows that were written ahead."""
        self.plain_s -= seconds
        self.charge(CostKind.AHEAD, seconds)

    @property
    def took_s(self) -> float:
        """All ticks and steps, and what was charged in rollouts."""
        return self.plain_s - self.saved_s + sum(self.spent[kind] for kind in _IN_ROLLOUTS)

    @property
    def balance_s(self) -> float:
        returned_s = min(self.saved_s, _SPENDABLE * self.plain_s)
        return SHARE * self.plain_s + returned_s - sum(self.spent.values())

    def affords(self, worst_s: float, gain: float = 0.0) -> bool:
        """Whether an action fits that costs so much at worst. `gain`: the expected saving, as a fraction of the time to
        come. The time to come is taken to be as long as the time so far: the run may be a short one."""
        promised_s = gain * min(self.plain_s, PROMISED_TICKS * self.tick_s)
        return worst_s <= self.balance_s + max(self._first_tries_s, promised_s)

    def affords_try(self, worst_s: float) -> bool:
        """The same for a try, of which nothing is expected."""
        left_s = max(TRY_SHARE * (self.plain_s - self.saved_s), self._first_tries_s) - self.tried_s
        return worst_s <= left_s and self.affords(worst_s)

    @property
    def _first_tries_s(self) -> float:
        """May be lost before anything was earned."""
        return TRY_SHARE * min(PROMISED_TICKS, self.longest) * self.tick_s

    def state(self) -> dict[str, float]:
        """Seconds by name, for a run that goes on later."""
        totals = {"plain_s": self.plain_s, "saved_s": self.saved_s, "tried_s": self.tried_s}
        return totals | {str(kind): seconds for kind, seconds in self.spent.items()}

    def restore(self, saved: Sequence[Mapping[str, float]]) -> None:
        """Goes on from the mean of the workers' accounts: they share each rollout, and their number may change."""
        mean = {name: sum(one.get(name, 0.0) for one in saved) / len(saved) for name in self.state()}
        self.plain_s, self.saved_s, self.tried_s = mean["plain_s"], mean["saved_s"], mean["tried_s"]
        self.spent = {kind: mean[kind] for kind in CostKind}
