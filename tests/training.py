"""Small real runs for tests: the tiny policy, a few steps, float64 so that no batch rounds to another token."""

from pathlib import Path

from tlt.config import RunConfig
from tlt.recipe import load_config
from tlt.watch.events import Run, StepFinished
from tlt.watch.history import steps_of

SMALL = [
    "--model.dtype=float64",
    "--model.device=cpu",
    "--task.prompts=4",
    "--task.group=4",
    "--task.toy.median_ops=3",
    "--task.toy.max_ops=6",
    "--sampling.max_tokens=40",
    "--engine.rows=16",
    "--engine.kv_gib=0.05",
    "--train.learning_rate=1e-3",
    "--draft.window=64",
    "--draft.unroll=2",
    "--drafting.tokens=256",
    "--drafting.held_out=256",
    "--watch.console=off",
    "--watch.report=false",
]
LEARNED = ["--spec.drafter=both", "--spec.path=new"]


def small(out: Path, *flags: str) -> RunConfig:
    return load_config(None, [*SMALL, f"--run.out={out}", *flags])


def numbers(run: Run) -> list[tuple[float, ...]]:
    """What a step is, apart from its times: equal in two runs only if they did the same."""
    return [_numbers(step) for step in steps_of(run)]


def _numbers(step: StepFinished) -> tuple[float, ...]:
    learned = (step.loss, step.grad_norm, step.learning_rate, step.clipped)
    return (step.step, step.mean_reward, step.reward_std, step.length_mean, step.length_max, step.tokens, *learned)
