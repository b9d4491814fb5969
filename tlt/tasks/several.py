"""Several rewards as one: each has a judge of its own, and their weighted sum is the reward.

Always holds: a verdict names every part that applies, at least one. Rewards are judged beside each other: a step waits
for the slowest one, not for all in turn. A part that failed counts `task.failed_reward`; its verdict fails, too.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import fsum
from pathlib import PurePath
from typing import Self
from urllib.parse import urlsplit

from tlt.config import TaskSettings
from tlt.errors import TaskError
from tlt.tasks.judge import DirectJudge, Judge, ProcessJudge, PromptedCompletion, Verdict
from tlt.tasks.penalties import penalty
from tlt.tasks.remote import is_remote
from tlt.types import Prompt


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One of several rewards."""

    name: str
    weight: float
    judge: Judge


def judge_with(
    settings: TaskSettings, max_tokens: int, columns: frozenset[str] = frozenset(), own: Judge | None = None
) -> Judge:
    """The judge of the configured rewards. `max_tokens`: limit of a completion; `columns`: columns that every prompt
    has; `own`: the judge of a task without a file."""
    if not settings.rewards:
        return own or _judge(settings.reward, settings, max_tokens, columns)
    weights = settings.reward_weights or (1.0,) * len(settings.rewards)
    found = []
    for label, name, weight in zip(reward_names(settings.rewards), settings.rewards, weights, strict=True):
        judge = own if name == "task" and own else _judge(name, settings, max_tokens, columns)
        found.append(WeightedReward(label, weight, judge))
    return SeveralJudge(found)


def _judge(name: str, settings: TaskSettings, max_tokens: int, columns: frozenset[str]) -> Judge:
    if found := penalty(name, settings, max_tokens):
        return DirectJudge(found)
    own = replace(settings, reward=name, rewards=(), reward_weights=())
    return ProcessJudge(own, columns, one_of_several=bool(settings.rewards))


def reward_names(rewards: Sequence[str]) -> list[str]:
    """Short, unique names: the built-in's, the function's, or the last part of the server's path."""
    names: list[str] = []
    for short in map(_short, rewards):
        taken = sum(name == short or name.startswith(f"{short}-") for name in names)
        names.append(f"{short}-{taken + 1}" if taken else short)
    return names


def _short(reward: str) -> str:
    if is_remote(reward):
        parts = urlsplit(reward)
        return PurePath(parts.path).name or parts.hostname or reward
    return reward.rpartition(":")[2]


class SeveralJudge:
    """Judges by every reward and returns the weighted sum."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self._rewards = tuple(rewards)
        self._entered = ExitStack()

    def judge(self, completions: Sequence[PromptedCompletion]) -> list[Verdict]:
        with ThreadPoolExecutor(len(self._rewards), thread_name_prefix="reward") as threads:
            each = list(threads.map(lambda one: one.judge.judge(completions), self._rewards))
        together = zip(*each, strict=True)
        return [self._together(prompt, verdicts) for (prompt, _), verdicts in zip(completions, together, strict=True)]

    def _together(self, prompt: Prompt, verdicts: Sequence[Verdict]) -> Verdict:
        pairs = [pair for pair in zip(self._rewards, verdicts, strict=True) if pair[1].applies]
        if not pairs:
            names = ", ".join(one.name for one in self._rewards)
            raise TaskError(
                f"none of the rewards {names} applies to prompt {prompt.id}; let one return a number for it"
            )
        return Verdict(
            reward=fsum(one.weight * verdict.reward for one, verdict in pairs),
            failure=next((verdict.failure for verdict in verdicts if verdict.failure), None),
            parts={one.name: verdict.reward for one, verdict in pairs},
            metrics=dict(_metrics(pairs)),
        )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for one in self._rewards:
                stack.enter_context(one.judge)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._entered.close()


def _metrics(pairs: Sequence[tuple[WeightedReward, Verdict]]) -> Iterator[tuple[str, float]]:
    for one, verdict in pairs:
        yield from ((f"{one.name}/{name}", value) for name, value in verdict.metrics.items())
