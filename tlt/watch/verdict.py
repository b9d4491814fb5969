"""Comparison of replayed steps with plain decoding: speed, and whether differing tokens are rounding.

Pure: events in, numbers and sentences out. In half precision rounding depends on the batch size, so plain decoding
differs from itself at another batch size. Differences that are no more frequent than those are rounding; in exact mode
and in float64 every difference is a fault.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from tlt.watch.events import CheckpointsPlanned, DrafterSwapped, Event, ReplayCompared, StepFinished

# "few": plain decoding was not seen to differ from itself, and too few tokens were compared to say that it does not
Verdict = Literal["identical", "uncounted", "few", "rounding", "more", "fault"]
_SIGMAS = 3.0  # standard errors by which two rates of differences differ


@dataclass(frozen=True, slots=True)
class Replayed:
    """Rollouts that were generated twice with the same seeds, with and without speculation. Sums over the replays."""

    count: int
    tokens: int
    tlt_s: float
    plain_s: float
    identical: bool  # all of them, token for token
    exact: bool  # no token may differ
    compared: int  # tokens, each completion's up to and including its first difference
    differing: int  # first differences among them
    at_once: int  # requests, at most
    sample_at_once: int  # plain decoding of fewer requests at once, against the replay; 0: not measured
    sample_compared: int
    sample_differing: int
    sample_s: float

    @classmethod
    def of(cls, replays: Sequence[ReplayCompared]) -> "Replayed":
        return cls(
            count=len(replays),
            tokens=sum(replay.tokens for replay in replays),
            tlt_s=sum(replay.tlt_s for replay in replays),
            plain_s=sum(replay.plain_s for replay in replays),
            identical=all(replay.identical for replay in replays),
            exact=any(replay.exact for replay in replays),
            compared=sum(replay.compared for replay in replays),
            differing=sum(replay.differing for replay in replays),
            at_once=max(replay.at_once for replay in replays),
            sample_at_once=max(replay.sample_at_once for replay in replays),
            sample_compared=sum(replay.sample_compared for replay in replays),
            sample_differing=sum(replay.sample_differing for replay in replays),
            sample_s=sum(replay.sample_s for replay in replays),
        )

    @property
    def speedup(self) -> float:
        return self.plain_s / self.tlt_s if self.tlt_s else 1.0

    @property
    def verdict(self) -> Verdict:
        if self.identical:
            return "identical"
        if self.exact:
            return "fault"
        if not self.compared:
            return "uncounted"  # by an earlier version
        if self.sample_compared and self._more_than_plain():
            return "more"
        return "rounding" if self.sample_differing else "few"

    def _more_than_plain(self) -> bool:
        """Whether tokens differ significantly more often than those of plain decoding at another batch size."""
        ours, plain = self.differing / self.compared, self.sample_differing / self.sample_compared
        seen = max(1, self.sample_differing)  # none seen does not mean that there are none
        error = sqrt(self.differing / self.compared**2 + seen / self.sample_compared**2)
        return ours - plain > _SIGMAS * error


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """Whole steps compared with the same steps without speculation."""

    beside_s: float  # in all steps: training, publishing and saving the drafter
    steps_s: float  # of all steps
    curve: tuple[tuple[int, float], ...]  # replayed step; plain time over actual time, of all replayed steps so far

    @property
    def measured(self) -> float | None:
        """Whole-step ratio of the replayed steps; None without replays."""
        return self.curve[-1][1] if self.curve else None

    def estimated(self, saved_s: float) -> float:
        """Whole-step ratio of all steps, given the estimated seconds saved."""
        return (self.steps_s - self.beside_s + saved_s) / self.steps_s if self.steps_s else 1.0


def whole_steps(events: Iterable[Event]) -> WholeSteps:
    """The drafter is not trained in every step, so a replayed step is charged the mean drafter cost of all steps so
    far."""
    steps: dict[int, StepFinished] = {}
    replays: dict[int, ReplayCompared] = {}
    swaps_s: defaultdict[int, float] = defaultdict(float)
    part = 0.0  # of a checkpoint, the drafter's
    for event in events:
        match event:
            case StepFinished():
                steps[event.step] = event
            case ReplayCompared():
                replays[event.step] = event
            case DrafterSwapped():
                swaps_s[event.step] += event.seconds
            case CheckpointsPlanned():
                part = event.drafter_bytes / max(1, event.weights_bytes + event.optimizer_bytes)
            case _:
                pass
    beside_s = tlt_s = plain_s = 0.0
    curve: list[tuple[int, float]] = []
    for taken, step in enumerate(sorted(steps), start=1):
        told = steps[step]
        own_s = told.drafting_s + swaps_s[step] + part * told.checkpoint_s
        beside_s += own_s
        if replay := replays.get(step):
            others_s = told.step_s - own_s
            plain_s += others_s - replay.tlt_s + replay.plain_s
            tlt_s += others_s
            charged_s = (len(curve) + 1) * beside_s / taken
            curve.append((step, plain_s / max(1e-9, tlt_s + charged_s)))
    return WholeSteps(beside_s, sum(told.step_s for told in steps.values()), tuple(curve))


def both_ratios(rollout: float, whole: float | None) -> str:
    """Rollout ratio and whole-step ratio; the first is never shown alone."""
    return f"rollout {rollout:.2f} ×, whole step {'not known yet' if whole is None else f'{whole:.2f} ×'}"


def verdict_in_words(replayed: Replayed) -> str:
    """The token comparison in one or two sentences."""
    match replayed.verdict:
        case "identical":
            return "Tokens identical: yes."
        case "fault":
            which = f"{replayed.differing} completions differ" if replayed.differing else "some completions differ"
            return (
                f"Tokens identical: NO, {which}, and in exact mode or float64 nothing may: this is a fault of tlt, "
                "please report it with the run's events.jsonl."
            )
        case "uncounted":
            return "Tokens identical: no; how many differ is not on record."
        case verdict:
            pass
    counts = f"{replayed.differing:,} of {replayed.compared:,} compared"
    said = f"Tokens: {in_1000(replayed.differing, replayed.compared)} differ from plain decoding ({counts})."
    if not replayed.sample_compared:
        return f"{said} Rounding may do that; there was no smaller batch to measure it with."
    batches = f"{replayed.sample_at_once} requests run at once instead of {replayed.at_once}"
    if verdict == "few":
        own = (
            f"In plain decoding itself none of {replayed.sample_compared:,} differ when {batches}: too few to compare."
        )
    else:
        rate = in_1000(replayed.sample_differing, replayed.sample_compared)
        counts = f"{replayed.sample_differing:,} of {replayed.sample_compared:,}"
        more = "rounding alone does NOT explain the difference; see “tokens differ” in docs/operations.md"
        own = f"In plain decoding itself {rate} ({counts}) differ when {batches}: "
        own += f"{more if verdict == 'more' else 'this is rounding'}."
    return f"{said} {own} (That took {replayed.sample_s:.1f} s to measure, outside the steps.)"


def in_short(replayed: Replayed) -> str:
    """The token comparison in a few words."""
    match replayed.verdict:
        case "identical":
            return "the same tokens"
        case "fault":
            return "OTHER TOKENS, where none may differ"
        case "uncounted":
            return "not all tokens the same"
        case "more":
            return f"{in_1000(replayed.differing, replayed.compared)} tokens differ, more than rounding explains"
        case verdict:
            why = " by rounding" if verdict == "rounding" else ""
            return f"{in_1000(replayed.differing, replayed.compared)} tokens differ{why}"


def in_1000(differing: int, compared: int) -> str:
    """As in `1.9 in 1,000`."""
    rate = 1000 * differing / compared
    return f"{rate:.0f} in 1,000" if rate >= 9.95 else f"{rate:.2g} in 1,000"
