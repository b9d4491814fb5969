"""Held-out prompts and their judges: one set per file of `eval.paths`, or one set of a task's own prompts.

The toy and steps tasks draw them with another seed than training's. Does not know policies or scores.
"""

import random
from dataclasses import dataclass, replace

from tlt.config import RunConfig, evaluation_names
from tlt.errors import ConfigError, TaskError
from tlt.tasks.choose import BUILT_IN, built_in, judge_of
from tlt.tasks.files import FileTask
from tlt.tasks.judge import Judge
from tlt.tasks.task import Task
from tlt.types import Prompt

_DRAWN = 256  # prompts of a task without a file, if eval.prompts is 0


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Prompts that are evaluated together."""

    name: str
    prompts: tuple[Prompt, ...]
    judge: Judge
    task: Task  # replies to turns, if it does


def evaluation_seed(config: RunConfig) -> int:
    """The seed of evaluation's prompts and sampling. No rollout of training uses it."""
    return random.Random(f"evaluation/{config.run.seed}").getrandbits(62)


def held_out_of(config: RunConfig, task: Task | None = None, eval_task: Task | None = None) -> list[HeldOut]:
    """The sets that `[eval]` asks for. `task`: the user's own, if training has one; `eval_task`: its held-out side."""
    if config.eval.paths:
        named = zip(evaluation_names(config.eval.paths), config.eval.paths, strict=True)
        return [_of_file(name, path, config, task) for name, path in named]
    if eval_task is not None:
        return [_drawn("held_out", eval_task, config)]
    if task is None and config.task.name in BUILT_IN:
        name = config.task.name
        return [_drawn(name, built_in(name, config, evaluation_seed(config)), config)]
    raise ConfigError(
        "eval.paths is empty, and this task has no prompts that are held out; expected files of prompts that are not "
        "trained on: name them in eval.paths"
        + ("" if task is None else ", give tlt.train an eval_task")
        + (", or set eval.every to 0" if config.eval.every else "")
    )


def _of_file(name: str, path: str, config: RunConfig, training: Task | None) -> HeldOut:
    settings = replace(config.task, name="files", path=path)
    if config.eval.reward:
        settings = replace(settings, reward=config.eval.reward, rewards=(), reward_weights=())
    task = FileTask(settings, seed=config.run.seed, max_tokens=_limit(config), knob="eval.paths")
    prompts = tuple(task.prompts[: config.eval.prompts or None])
    return HeldOut(name, prompts, task.judge, training or task)


def _drawn(name: str, task: Task, config: RunConfig) -> HeldOut:
    if config.eval.reward:
        raise ConfigError(
            f"eval.reward is {config.eval.reward!r}, and the task judges its prompts itself; leave it empty, or name "
            "files in eval.paths"
        )
    drawn = task.sample(0, config.eval.prompts or _DRAWN)
    prompts = {prompt.id: prompt for prompt in drawn}
    if not prompts:
        raise TaskError("the task returned no prompts to evaluate; expected at least one")
    limited = replace(config, sampling=replace(config.sampling, max_tokens=_limit(config)))
    return HeldOut(name, tuple(prompts.values()), judge_of(task, limited), task)


def _limit(config: RunConfig) -> int:
    """Tokens of a completion at most."""
    return config.eval.max_tokens or config.sampling.max_tokens
