"""Plans drafter training for which a step waits: the forecast says whether it pays, the account whether to afford it.

What always holds: a step waits for drafter training only as long as the account allows, worst case included, and only
if the forecast expects larger savings; time in which nothing waits is used and never charged. `Cadence` decides whether
training still gains. Pure: numbers in, a decision out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.config import DraftingSettings
from tlt.drafting.forecast import (
    Choices,
    Costs,
    Forecast,
    LearningCurve,
    Situation,
    chance_of,
    forecast,
    makespan,
    ranks_of,
    ticks_by_size,
)
from tlt.spec.acceptance import Acceptance
from tlt.spec.budget import Budget, CostKind
from tlt.spec.shape import OFF, Shape

ExpectedTick = Callable[[Shape, int], tuple[float, float | None]]  # accept length, and seconds if known
_SURE = 1e6  # weight of an assumed chance, in verifies: it is not mixed with a prior
_NEWEST = 0.25  # weight of the newest rollout in means over rollouts
_REALIZED = 0.7  # fraction of the expected savings that rollouts show, before one of them has shown it
_REALIZED_FROM = 0.15  # expected savings, as a fraction of a rollout, from which it shows it


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """The drafter in training, as its trainer sees it."""

    accept_length: float  # last measured, on held-out answers
    due: bool  # training may gain
    micro_tokens: int  # of a micro-step
    micro_s: float  # of a micro-step
    look_s: float  # of a measurement
    least_s: float  # for which training is worth beginning


@dataclass(frozen=True, slots=True)
class Decision:
    """The time that a step may spend on drafter training."""

    seconds: float  # for which other work may wait
    forecast: Forecast | None  # None: costs are not known yet
    worst_s: float  # for which other work waits if it becomes ready during a micro-step and its measurement

    @property
    def trains(self) -> bool:
        return self.seconds > 0.0


class DraftShapes:
    """Costs of the learned drafter's shapes, and their accept lengths for an assumed chance."""

    def __init__(self, shapes: Iterable[Shape], learned: str, expected: ExpectedTick) -> None:
        known = tuple(
            shape for shape in shapes if not shape.share
        )  # shapes with a shared budget double their number, for little gain
        self._learned = tuple(shape for shape in known if shape.drafters == (learned,))
        self._others = tuple({OFF, *(shape for shape in known if learned not in shape.drafters)})
        self._name, self._expected = learned, expected
        self._lengths: dict[float, Sequence[float]] = {}  # by chance

    def choices(self, size: int) -> Choices | None:
        """None until plain decoding has been measured."""
        plain_s = self._expected(OFF, size)[1]
        if not plain_s:
            return None
        others = [self._expected(shape, size) for shape in self._others]
        each_s = [seconds / length for length, seconds in others if seconds]
        return Choices(min(each_s), tuple(self._expected(shape, size)[1] or plain_s for shape in self._learned))

    def accept_lengths(self, chance: float) -> Sequence[float]:
        rounded = round(chance, 2)
        if rounded not in self._lengths:
            supposed = Acceptance(self._learned, _SURE)
            if self._learned:
                depth, width = (max(getattr(one, name) for one in self._learned) for name in ("depth", "width"))
                supposed.load_prior(self._name, ranks_of(rounded, depth, width), _SURE)
                supposed.refresh()
            self._lengths[rounded] = supposed.lengths()
        return self._lengths[rounded]


class TrainingPlanner:
    """Call `rolled_out` after each rollout, then `decide`; charge `account` with what was spent."""

    def __init__(
        self,
        settings: DraftingSettings,
        steps: int,
        unroll: int,
        rows: int,
        pad: Callable[[int], int],
        shapes: DraftShapes | None,
        account: Budget | None = None,
    ) -> None:
        """`shapes`: None if there is no cost model; then there is no forecast.

        `account`: the account to which ticks are charged; None: ticks are not charged.
        """
        self._settings, self._steps, self._unroll, self._shapes = settings, steps, unroll, shapes
        self._rows, self._pad = rows, pad
        self.account = account or Budget()
        self._counted = self.account.took_s, self.account.saved_s  # by the end of the last rollout
        self._curve = LearningCurve()
        self._lengths: Sequence[int] = ()
        self._ticks: dict[int, float] = {}  # plain ticks by batch size of a rollout: mean of the last few
        self._rollout_s = self._step_s = self._seconds = 0.0  # of the last rollout, of the last step; of all steps
        self._estimated_s, self._trust = 0.0, 1.0  # savings of the last rollout; fraction that replays confirm
        self._realized = _REALIZED
        self._chance = 0.0  # of the drafter in the last rollout

    def rolled_out(
        self, lengths: Sequence[int], rollout_s: float, step_s: float, saved_s: float, *, first: bool = True
    ) -> None:
        """Books a rollout. `step_s`: seconds since the one before it, without charged work and replays.

        If a step has several rollouts, `lengths` and `rollout_s` cover all of them so far. `first`: this is the step's
        first rollout.
        """
        self._lengths, self._rollout_s = lengths, rollout_s
        self._step_s = step_s if first else self._step_s + step_s
        self._estimated_s = saved_s if first else self._estimated_s + saved_s
        self._seconds += step_s
        took_s, ticks_saved_s = (
            now - before for now, before in zip((self.account.took_s, self.account.saved_s), self._counted, strict=True)
        )
        other_s = step_s - took_s
        self.account.ran(other_s, other_s + min(saved_s, self._trust * saved_s) - ticks_saved_s)
        self._counted = self.account.took_s, self.account.saved_s

    def replayed(self, plain_s: float) -> None:
        """Corrects estimated savings by a replay: plain decoding of the last rollout took `plain_s`."""
        if self._estimated_s > 0.0:
            self._trust = min(1.0, max(0.0, plain_s - self._rollout_s) / self._estimated_s)

    def trained(self, before: float, tokens: int, after: float) -> None:
        """Adds a measured training to the learning curve: accept lengths before and after `tokens` tokens."""
        self._curve.see(chance_of(before, self._unroll), tokens, chance_of(after, self._unroll))

    def state(self) -> dict[str, Any]:
        """State for `restore`, without the account."""
        words = {"curve": self._curve.state(), "seconds": self._seconds, "trust": self._trust}
        return words | {"realized": self._realized}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Call after the account is restored."""
        self._curve.restore(state["curve"])
        self._seconds, self._trust = state["seconds"], state["trust"]
        self._realized = state.get("realized", _REALIZED)
        self._counted = self.account.took_s, self.account.saved_s

    def decide(self, step: int, status: DrafterStatus) -> Decision:
        """`step`: the step whose rollout has just ended; the first is 1."""
        costs = Costs(status.micro_s, status.micro_tokens, status.look_s, self._settings.check)
        found = self._forecast(step, status, costs)
        seconds = self._forced_s
        if status.due and (found is None or found.pays):
            wanted_s = found.cost_s if found else costs.of(costs.check)
            if self.account.affords(min(wanted_s, status.least_s)):
                seconds = max(seconds, min(wanted_s, self.account.balance_s))
        return Decision(seconds, found, costs.micro_s + costs.look_s)

    @property
    def _forced_s(self) -> float:
        """Seconds spent whether they pay or not, by `drafting.forced_share`."""
        spent = self.account.spent
        whole_s = self._settings.forced_share * (self._seconds + sum(spent.values()))
        return max(0.0, whole_s - sum(spent[kind] for kind in (CostKind.TRAINING, CostKind.MEASURING)))

    def _forecast(self, step: int, status: DrafterStatus, costs: Costs) -> Forecast | None:
        if self._shapes is None:
            return None
        last = ticks_by_size(self._lengths, self._rows, self._pad)
        before = self._ticks or last
        ticks = self._ticks = {
            size: before.get(size, 0.0) * (1 - _NEWEST) + last.get(size, 0.0) * _NEWEST
            for size in sorted({*before, *last})
        }
        choices = {size: found for size in ticks if (found := self._shapes.choices(size))}
        if len(choices) < len(ticks):
            return None
        self._compare(last, choices)
        self._chance = chance_of(status.accept_length, self._unroll)
        now = Situation(
            ticks=ticks,
            choices=choices,
            accept_lengths=self._shapes.accept_lengths,
            chance=self._chance,
            costs=costs,
            steps_left=self._steps - step,
            step_s=self._step_s,
            realized=self._realized,
        )
        return forecast(now, self._curve)

    def _compare(self, ticks: Mapping[int, float], choices: Mapping[int, Choices]) -> None:
        """Compares what the last rollout saved with what its drafter was expected to save."""
        if self._shapes is None:
            return
        plain_s = makespan(ticks, choices, ())
        expected_s = plain_s - makespan(ticks, choices, self._shapes.accept_lengths(self._chance))
        if expected_s > _REALIZED_FROM * plain_s:
            shown = min(1.0, max(0.0, self._trust * self._estimated_s / expected_s))
            self._realized += (shown - self._realized) * _NEWEST
