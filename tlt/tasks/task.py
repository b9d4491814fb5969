"""The task protocol: a source of prompts and their reward, the two methods that a user writes.

`sample` depends on its arguments only, so a resumed run gets the prompts of an uninterrupted run.
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
