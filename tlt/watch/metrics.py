"""What a step's numbers are called in TensorBoard, W&B, trackio and on our page: one name each, the same in all.

`group/name`, so that these tools draw them in groups. The names are part of the interface: people's dashboards use
them.
"""

from dataclasses import dataclass

from tlt.watch.events import (
    AccountUpdated,
    DrafterTrained,
    Evaluated,
    Event,
    ReplayCompared,
    RewardsJudged,
    ShapesChosen,
    StepFinished,
)

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
    """Numbers of one step."""

    step: int
    values: dict[str, float]


def evaluation_metrics(told: Evaluated) -> dict[str, float]:
    """What `eval.best` can name."""
    return {
        "reward": told.mean_reward,
        "reward_error": told.reward_error,
        **{f"pass@{k}": value for k, value in told.pass_at},
        "length": told.length_mean,
        "truncated": told.truncated,
        **told.metrics,
    }


def metrics_of(event: Event) -> Metrics | None:
    """What an event adds to the curves; None for one that adds nothing."""
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
