"""Made-up runs to show: events with numbers that a test can find again."""

from pathlib import Path

from tlt.config import RunConfig
from tlt.recipe import load_config
from tlt.watch.events import (
    Event,
    MachineDescribed,
    PhaseStarted,
    Recorded,
    ReplayCompared,
    RolloutFinished,
    RunFinished,
    StepFinished,
)
from tlt.watch.log import start_run

MACHINE = MachineDescribed("CPU", 0.0, "a processor <x>", 2, {"python": "3.11"}, "abc123", "tlt train recipe.toml")


def config_of(directory: Path, *flags: str) -> RunConfig:
    return load_config(None, [f"--run.out={directory}", "--run.name=shown", "--run.steps=12", *flags])


def step(number: int, **changes: float) -> StepFinished:
    """A step, from 1, whose numbers differ from every other step's."""
    before = number - 1
    values: dict[str, float] = {
        "mean_reward": 0.1 + 0.0371 * before,
        "reward_std": 0.4,
        "length_mean": 50.5 + before,
        "length_p50": 40 + before,
        "length_p90": 110 + before,
        "length_max": 301 + before,
        "truncated": 0.0,
        "tokens": 1000 + before,
        "accept_length": 1.5 + 0.1011 * before,
        "loss": 0.01,
        "grad_norm": 1.5,
        "kl": 0.0,
        "clipped": 0.02,
        "mismatch_mean": 1e-6,
        "mismatch_max": 1e-4,
        "learning_rate": 1e-5,
        "rollout_s": 4.0,
        "reward_s": 0.25,
        "update_s": 2.0,
        "drafting_s": 0.5,
        "checkpoint_s": 0.125,
        "step_s": 7.0,
        "saved_s": 3.0,
    }
    return StepFinished(step=number, policy_version=number, **{**values, **changes})  # type: ignore[arg-type]


def rollout(number: int) -> RolloutFinished:
    lengths = tuple(9 + number + 3 * answer for answer in range(100))
    return RolloutFinished(number, 100, 0.5, lengths[50], lengths[90], lengths[-1], sum(lengths), 4.0, lengths)


def events_of_steps(taken: int, last: int) -> list[Event]:
    """Of the steps after `taken` others."""
    events: list[Event] = []
    for number in range(taken + 1, last + 1):
        events += [PhaseStarted(number, "rollout"), rollout(number), step(number)]
    return events


def write_run(config: RunConfig, events: list[Event]) -> Path:
    """One life of a run: RunStarted, then these."""
    with start_run(config, "train", "0.1") as log:
        for event in events:
            log.emit(event)
    return Path(config.run.out) / config.run.name


def whole_run(directory: Path, steps: int = 12) -> Path:
    replay = ReplayCompared(1, 1000, tlt_s=4.0, plain_s=7.0, identical=True)
    events = [MACHINE, *events_of_steps(0, steps), replay, RunFinished(seconds=90.0)]
    return write_run(config_of(directory, f"--run.steps={steps}"), events)


def recorded(*events: Event) -> list[Recorded]:
    return [Recorded(1000.0 + second, event) for second, event in enumerate(events)]
