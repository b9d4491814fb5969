"""What a task is: a source of prompts and a judge of answers. The two methods a user writes.

`sample` is a function of its arguments alone, so that a resumed run asks what the undisturbed run would have asked.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tlt.types import Completion, Prompt


@runtime_checkable
class Task(Protocol):
    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        """`count` prompts, one at least, of the step after `step` others; the same arguments give the same prompts."""
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """What the answer earns: a finite number."""
        ...
