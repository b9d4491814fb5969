"""Builds the events of a step from its rollouts, verdicts and alarms, and merges the workers' reports.

Pure: numbers in, records out. Knows no readers and no files.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from tlt.config import TrainSettings
from tlt.drafting.forecast import Forecast
from tlt.drafting.session import DraftingResult
from tlt.engine.engine import SleepReport
from tlt.loop import ByDepth, RolloutReport, Step
from tlt.memory_plan import GIB, MemoryPlan, table
from tlt.spec.acceptance import Alarm
from tlt.spec.budget import Budget
from tlt.spec.shape import Shape, by_batch
from tlt.spec.speculation import SpeculationReport
from tlt.tasks.judge import Verdict
from tlt.train.rates import usual_rate
from tlt.train.signal import has_signal
from tlt.types import Rollout
from tlt.watch.events import (
    MOST_LENGTHS,
    AcceptanceCollapsed,
    AccountUpdated,
    AnswerShown,
    DrafterTrained,
    EngineSlept,
    LearningRatePlanned,
    MemoryPlanned,
    RewardsFailed,
    RewardsJudged,
    RolloutFinished,
    ShapesChosen,
    StepFinished,
    TrainingForecast,
)
from tlt.watch.trace import RequestSpan, ShapeSpan, TickCost, WorkerTrace, host_bytes, wall_time_of

_SHOWN = 600  # characters shown of each end of a long text


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of completion lengths, in tokens."""

    mean: float
    p50: int
    p90: int
    p99: int
    longest: int
    total: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Lengths":
        ordered = sorted(lengths)

        def at(share: float) -> int:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(fmean(ordered), at(0.5), at(0.9), at(0.99), ordered[-1], sum(ordered))


def lengths_of(rollouts: Iterable[Rollout]) -> list[int]:
    return [len(rollout.completion.tokens) for rollout in rollouts]


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    return fmean(rollout.reward for rollout in rollouts)


def rollout_finished(step: int, rollouts: Sequence[Rollout], seconds: float) -> RolloutFinished:
    lengths = Lengths.of(lengths_of(rollouts))
    shown = rollouts[:: -(-len(rollouts) // MOST_LENGTHS)]  # evenly spaced
    return RolloutFinished(
        step=step,
        n=len(rollouts),
        mean_reward=mean_reward(rollouts),
        length_p50=lengths.p50,
        length_p90=lengths.p90,
        length_max=lengths.longest,
        tokens=lengths.total,
        seconds=seconds,
        lengths=tuple(len(rollout.completion.tokens) for rollout in shown),
    )


def answer_shown(step: int, rollout: Rollout) -> AnswerShown:
    content = rollout.prompt.content
    return AnswerShown(
        step=step,
        prompt=rollout.prompt.id,
        question=_shortened(content if isinstance(content, str) else content[-1].content),
        answer=_shortened(rollout.completion.text),
        reward=rollout.reward,
        tokens=len(rollout.completion.tokens),
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} […] {text[-_SHOWN:]}"


def step_finished(step: Step, *, checkpoint_s: float, step_s: float) -> StepFinished:
    """`checkpoint_s`: seconds after the update. The update's wait for an earlier checkpoint's copy is added."""
    rollouts = step.rollouts
    marks = b"".join(rollout.completion.drafted for rollout in rollouts)
    lengths, rewards, update = Lengths.of(lengths_of(rollouts)), [rollout.reward for rollout in rollouts], step.update
    return StepFinished(
        step=step.number,
        policy_version=step.number,
        mean_reward=fmean(rewards),
        reward_std=pstdev(rewards),
        length_mean=lengths.mean,
        length_p50=lengths.p50,
        length_p90=lengths.p90,
        length_max=lengths.longest,
        truncated=fmean(rollout.completion.finish_reason == "length" for rollout in rollouts),
        tokens=lengths.total,
        accept_length=step.report.accept_length,
        loss=update.loss,
        grad_norm=update.grad_norm,
        kl=update.kl,
        clipped=update.clipped,
        mismatch_mean=update.mismatch_mean,
        mismatch_max=update.mismatch_max,
        learning_rate=update.learning_rate,
        rollout_s=step.times.rollout,
        reward_s=step.times.reward,
        update_s=step.times.update,
        drafting_s=step.times.drafting,
        checkpoint_s=checkpoint_s + update.checkpoint_s,
        step_s=step_s,
        saved_s=step.report.saved_s,
        verifies=step.report.verifies,
        entropy=update.entropy,
        host_bytes=sum(trace.host_bytes for trace in step.report.traces),
        device_bytes=max((trace.device_bytes for trace in step.report.traces), default=0),
        no_signal=fmean(not has_signal([r.reward for r in one.group.rollouts]) for one in step.judged),
        groups=len(step.judged),
        groups_learned=len(step.learned),
        weight_mean=update.weight_mean,
        drafted_share=marks.count(1) / max(1, len(marks)),
        ahead_share=marks.count(2) / max(1, len(marks)),
        ahead_tokens=step.report.ahead_tokens,
        staleness=fmean(step.number - 1 - rollout.completion.policy_version for rollout in rollouts),
    )


# ---- speculation


def rollout_report(spent: SpeculationReport | None) -> RolloutReport:
    """The report of one worker. `spent`: None if it does not speculate."""
    if spent is None:
        return RolloutReport()
    known = spent.tuner.by_depth if spent.tuner and spent.verifies else {}
    asked = {drafter for (_, shape), ticks in spent.ticks.items() if ticks for drafter in shape.drafters}
    return RolloutReport(
        verifies=spent.verifies,
        accepted=spent.accepted,
        saved_s=spent.tuner.saved_s - spent.one_off_s if spent.tuner else 0.0,
        chosen=by_batch(spent.ticks.items()),
        by_depth=tuple((drafter, shares) for drafter, shares in known.items() if shares and drafter in asked),
        switches=spent.switches,
        one_off_s=spent.one_off_s,
    )


def worker_trace(
    spent: SpeculationReport | None,
    requests: Sequence[RequestSpan],
    expected: Callable[[Shape, int], tuple[float, float | None]] | None,
    *,
    device_bytes: int,
) -> WorkerTrace:
    """The trace of one worker's rollout. `expected`: its tuner's estimate of accept length and seconds of a tick."""
    spans = spent.spans if spent else ()
    return WorkerTrace(
        requests=tuple(requests),
        shapes=tuple(ShapeSpan(wall_time_of(start), running, shape) for start, running, shape in spans),
        costs=_tick_costs(spent, expected) if spent else (),
        host_bytes=host_bytes(),
        device_bytes=device_bytes,
    )


def _tick_costs(
    spent: SpeculationReport, expected: Callable[[Shape, int], tuple[float, float | None]] | None
) -> tuple[TickCost, ...]:
    """Means over the ticks of one shape, with batch sizes rounded up to a power of two."""
    found: dict[tuple[int, str], list[float]] = {}
    for (running, shape), (ticks, seconds) in spent.timed.items():
        tick_s = expected(shape, running)[1] if expected else None
        sums = found.setdefault((1 << max(0, running - 1).bit_length(), str(shape)), [0, 0.0, 0.0])
        for place, value in enumerate((ticks, seconds, ticks * (tick_s or 0.0))):
            sums[place] += value
    return tuple(
        TickCost(size, shape, int(ticks), measured_s / ticks, expected_s / ticks)
        for (size, shape), (ticks, measured_s, expected_s) in sorted(found.items())
    )


def account_updated(step: int, account: Budget, *, rollouts_only: bool) -> AccountUpdated:
    return AccountUpdated(
        step=step,
        plain_s=account.plain_s,
        saved_s=account.saved_s,
        spent_s={str(kind): seconds for kind, seconds in account.spent.items()},
        balance_s=account.balance_s,
        rollouts_only=rollouts_only,
    )


def together(reports: Sequence[RolloutReport], saved_s: float) -> RolloutReport:
    """Merges the reports of all workers. `saved_s` is given: workers wait for each other, so it is not a sum."""
    return RolloutReport(
        verifies=sum(report.verifies for report in reports),
        accepted=sum(report.accepted for report in reports),
        saved_s=saved_s,
        chosen=by_batch(((size, shape), ticks) for report in reports for size, shape, ticks in report.chosen),
        by_depth=_mean_by_depth(reports),
        switches=sum(report.switches for report in reports),
        one_off_s=sum(report.one_off_s for report in reports),
        ahead_tokens=sum(report.ahead_tokens for report in reports),
        traces=tuple(trace for report in reports for trace in report.traces),
    )


def _mean_by_depth(reports: Sequence[RolloutReport]) -> ByDepth:
    """Means per depth, weighted by each worker's verifies."""
    told: dict[str, list[tuple[int, tuple[float, ...]]]] = {}
    for report in reports:
        for drafter, shares in report.by_depth:
            told.setdefault(drafter, []).append((report.verifies, shares))
    found = []
    for drafter, known in sorted(told.items()):
        means = []
        for depth in range(max(len(shares) for _, shares in known)):
            here = [(weight, shares[depth]) for weight, shares in known if depth < len(shares)]
            means.append(sum(weight * share for weight, share in here) / sum(weight for weight, _ in here))
        found.append((drafter, tuple(means)))
    return tuple(found)


def shapes_chosen(step: int, report: RolloutReport) -> ShapesChosen:
    return ShapesChosen(
        step=step, ticks=report.chosen, by_depth=report.by_depth, switches=report.switches, one_off_s=report.one_off_s
    )


# ---- rewards, alarms and training


def rewards_failed(step: int, verdicts: Iterable[Verdict]) -> list[RewardsFailed]:
    """One event per kind of failure, with its first occurrence."""
    failures = [verdict.failure for verdict in verdicts if verdict.failure]
    counts = Counter(failure.kind for failure in failures)
    first = {failure.kind: failure for failure in reversed(failures)}
    return [
        RewardsFailed(step=step, kind=kind, count=count, prompt=first[kind].prompt, message=first[kind].message)
        for kind, count in counts.items()
    ]


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Means over completions: of each of several rewards, and of each metric that rewards return."""

    parts: dict[str, float]
    metrics: dict[str, float]

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> "RewardMetrics":
        return cls(_means([verdict.parts for verdict in verdicts]), _means([verdict.metrics for verdict in verdicts]))


def _means(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Name → mean over the verdicts that have it."""
    values: dict[str, list[float]] = {}
    for one in told:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(each) for name, each in values.items()}


def rewards_judged(step: int, verdicts: Sequence[Verdict]) -> RewardsJudged | None:
    """None if the reward is a single number without metrics."""
    found = RewardMetrics.of(verdicts)
    return RewardsJudged(step, found.parts, found.metrics) if found.parts or found.metrics else None


def acceptance_collapsed(step: int, alarm: Alarm) -> AcceptanceCollapsed:
    return AcceptanceCollapsed(
        step=step,
        drafter=alarm.drafter,
        shape=str(alarm.shape),
        recent=alarm.recent,
        baseline=alarm.baseline,
        verifies=alarm.verifies,
    )


def drafter_trained(step: int, result: DraftingResult) -> DrafterTrained:
    return DrafterTrained(
        step=step,
        version=result.version,
        micro_steps=result.micro_steps,
        tokens=result.tokens,
        loss_before=result.before.loss,
        loss_after=result.after.loss,
        seconds=result.seconds,
        reason=f"{result.began}, then {result.ended}" + (f": {result.alarm}" if result.alarm else ""),
        accept_before=result.before.accept_length,
        accept_after=result.after.accept_length,
    )


def training_forecast(step: int, found: Forecast) -> TrainingForecast:
    return TrainingForecast(
        step=step,
        pays=found.pays,
        gain=found.gain,
        steps_left=found.steps_left,
        micro_steps=found.micro_steps,
        cost_s=found.cost_s,
        returns_s=found.returns_s,
    )


def memory_planned(plan: MemoryPlan) -> MemoryPlanned:
    return MemoryPlanned(tuple(table(plan)), plan.device_bytes)


def engine_slept(step: int, reports: Sequence[SleepReport]) -> EngineSlept:
    slowest = max(reports, key=lambda report: report.sleep_s + report.wake_s)
    return EngineSlept(step, slowest.bytes / GIB, slowest.sleep_s, slowest.wake_s)


def learning_rate_planned(train: TrainSettings, weights: int) -> LearningRatePlanned:
    """`weights`: number of the policy's weights."""
    usual = usual_rate(weights, train.lora_rank)
    return LearningRatePlanned(
        train.learning_rate or usual.rate, usual.kind, usual.rate, given=bool(train.learning_rate)
    )
