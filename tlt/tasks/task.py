"""The task protocol: a source of prompts and their reward, the two methods that a user writes, and for completions of
several turns a third one.

`sample` and `reply` depend on their arguments only, so a resumed run gets the prompts and replies of an uninterrupted
run.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from tlt.types import Completion, Prompt


@runtime_checkable
class Task(Protocol):
    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        """`count` prompts (at least 1) of step `step`, counted from 0. The same arguments give the same prompts."""
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> float | Mapping[str, float]:
        """The reward of the completion: a finite number, or a mapping of which `score` is the reward and other numbers
        are metrics."""
        ...


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    def reply(self, prompt: Prompt, completion: Completion) -> str | Sequence[int] | None:
        """What follows a turn, for example the output of a tool: text or tokens; None: the completion is complete.

        `completion` holds all turns so far, replies included. The policy continues behind the reply and does not learn
        from it. Called in a thread of its own, for one completion at a time.
        """
        ...
