"""The metrics of a run: their names, the same in TensorBoard, W&B, trackio and on the page, and their values by step.

Names are `group/name`, so that trackers group them. They are part of the interface: dashboards depend on them. All
columns have a place for every step, None where a step has no value. Columns named `sum/` are running sums that only the
page has.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tlt.watch.events import (
    AccountUpdated,
    DrafterSwapped,
    DrafterTrained,
    Evaluated,
    Event,
    ReplayCompared,
    RewardsJudged,
    Run,
    ShapesChosen,
    StepFinished,
)
from tlt.watch.history import counted, drafted, events_of, steps_of
from tlt.watch.summary import phase_seconds
from tlt.watch.verdict import whole_steps

WHOLE_RATIO, REPLAY_RATIO = "sum/whole_step_ratio", "sum/rollout_ratio"
ACCEPT_LENGTH = "rollout/accept_length"
ROLLOUT_SUM, PLAIN_SUM = "sum/rollout_s", "sum/plain_rollout_s"
DRAFTER_STALENESS = "sum/drafter_staleness"
_AGAIN = 2  # steps at the end of known columns that are computed again: their events may still come
STEP_METRICS = {  # name → field of StepFinished
    "reward/mean": "mean_reward",
    "reward/std": "reward_std",
    "reward/no_signal": "no_signal",
    "length/mean": "length_mean",
    "length/p50": "length_p50",
    "length/p90": "length_p90",
    "length/max": "length_max",
    "length/truncated": "truncated",
    "rollout/groups": "groups",
    "rollout/groups_learned": "groups_learned",
    "rollout/tokens": "tokens",
    "rollout/accept_length": "accept_length",
    "rollout/verifies": "verifies",
    "rollout/drafted_share": "drafted_share",
    "rollout/ahead_share": "ahead_share",
    "rollout/ahead_tokens": "ahead_tokens",
    "rollout/saved_s": "saved_s",
    "policy/version": "policy_version",
    "policy/loss": "loss",
    "policy/grad_norm": "grad_norm",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "policy/clipped": "clipped",
    "policy/mismatch_mean": "mismatch_mean",
    "policy/mismatch_max": "mismatch_max",
    "policy/weight_mean": "weight_mean",
    "policy/staleness": "staleness",
    "policy/learning_rate": "learning_rate",
    "time/rollout_s": "rollout_s",
    "time/reward_s": "reward_s",
    "time/update_s": "update_s",
    "time/drafting_s": "drafting_s",
    "time/checkpoint_s": "checkpoint_s",
    "time/step_s": "step_s",
    "memory/host_bytes": "host_bytes",
    "memory/device_bytes": "device_bytes",
}


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metric values of one step."""

    step: int
    values: dict[str, float]


def evaluation_metrics(told: Evaluated) -> dict[str, float]:
    """The metrics of an evaluation; `eval.best` names one of them."""
    return {
        "reward": told.mean_reward,
        "reward_error": told.reward_error,
        **{f"pass@{k}": value for k, value in told.pass_at},
        "length": told.length_mean,
        "truncated": told.truncated,
        **told.metrics,
    }


def metrics_of(event: Event) -> Metrics | None:
    """The metrics that an event adds; None if it adds none."""
    match event:
        case StepFinished():
            values = {name: float(getattr(event, field)) for name, field in STEP_METRICS.items()}
            values["rollout/tokens_per_s"] = event.tokens / event.rollout_s if event.rollout_s else 0.0
            return Metrics(event.step, values)
        case Evaluated():
            values = {f"eval/{event.name}/{name}": value for name, value in evaluation_metrics(event).items()}
            return Metrics(event.step, values)
        case RewardsJudged():
            parts = {f"rewards/{name}": value for name, value in event.parts.items()}
            return Metrics(event.step, parts | {f"metrics/{name}": value for name, value in event.metrics.items()})
        case ShapesChosen():
            shares = [(drafter, *pair) for drafter, shares in event.by_depth for pair in enumerate(shares, start=1)]
            values = {f"acceptance/{drafter}/{depth}": share for drafter, depth, share in shares}
            work = {"rollout/switches": float(event.switches), "rollout/switch_cost_s": event.one_off_s}
            return Metrics(event.step, values | work)
        case DrafterTrained():
            values = {"drafter/version": event.version, "drafter/loss": event.loss_after}
            return Metrics(event.step, values | {"drafter/seconds": event.seconds})
        case AccountUpdated():
            spent_s = sum(event.spent_s.values())
            values = {
                "account/saved_s": event.saved_s,
                "account/spent_s": spent_s,
                "account/balance_s": event.balance_s,
            }
            return Metrics(event.step, values)
        case ReplayCompared():
            return Metrics(event.step, {"rollout/replay_speedup": event.plain_s / event.tlt_s if event.tlt_s else 0.0})
        case _:
            return None


# ---- a run's metrics in columns


@dataclass(frozen=True, slots=True)
class Columns:
    steps: list[int]
    values: dict[str, list[float | None]]


def columns_of(run: Run, known: Columns | None = None) -> Columns:
    """Columns of the finished steps. `known`: columns of the same run with fewer events; of its steps only the last few
    are computed again."""
    steps = steps_of(run)
    old = max(0, len(known.steps) - _AGAIN) if known else 0
    place = {step.step: index for index, step in enumerate(steps)}
    nothing: list[float | None] = [None] * (len(steps) - old)
    values = {name: each[:old] + nothing for name, each in known.values.items()} if known else {}
    empty: list[float | None] = [None] * len(steps)
    last_old = steps[old - 1].step if old else -1
    plain_s = tlt_s = 0.0  # of the rollouts replayed so far
    for record in counted(run.events):
        event = record.event
        if isinstance(event, ReplayCompared):
            plain_s, tlt_s = plain_s + event.plain_s, tlt_s + event.tlt_s
            if event.step in place:
                values.setdefault(REPLAY_RATIO, empty[:])[place[event.step]] = plain_s / max(1e-9, tlt_s)
        if getattr(event, "step", 0) <= last_old or not (metrics := metrics_of(event)) or metrics.step not in place:
            continue
        index = place[metrics.step]
        for name, value in metrics.values.items():
            if name not in values:
                values[name] = empty[:]
            values[name][index] = value
        if isinstance(event, StepFinished) and not drafted(event):
            values[ACCEPT_LENGTH][index] = None  # of no drafts there is none
    values[WHOLE_RATIO] = empty[:]
    for number, ratio in whole_steps(record.event for record in counted(run.events)).curve:
        if number in place:
            values[WHOLE_RATIO][place[number]] = ratio
    values["time/other_s"] = [phase_seconds(step)["other"] for step in steps]
    values[ROLLOUT_SUM] = list(accumulate(step.rollout_s for step in steps))
    values[PLAIN_SUM] = list(accumulate(step.rollout_s + step.saved_s for step in steps))
    if swaps := events_of(run, DrafterSwapped):
        values[DRAFTER_STALENESS] = _drafter_staleness([step.step for step in steps], swaps)
    return Columns([step.step for step in steps], values)


def _drafter_staleness(steps: Sequence[int], swaps: Sequence[DrafterSwapped]) -> list[float | None]:
    """Updates of the policy since the rollouts that the drafter in use was trained on; None before the first."""
    taken = sorted(swap.step for swap in swaps)
    return [step - taken[place - 1] if (place := bisect_left(taken, step)) else None for step in steps]
