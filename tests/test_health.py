"""What a run says of its health: five lights, warnings as events, and that nothing was learned."""

from pathlib import Path

import pytest

import tlt
from tests.training import small
from tlt.tasks.toy import ToyTask
from tlt.types import Completion, Prompt
from tlt.watch.history import steps_of


class Same(ToyTask):
    """Every answer earns the same, or that of one prompt in four does not."""

    def __init__(self, odd: str = "") -> None:
        super().__init__(small(Path()).task.toy, seed=0)
        self._odd = odd

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.key.request % 2) if prompt.id == self._odd else 0.25


@pytest.mark.parametrize("odd", [False, True])
def test_a_step_tells_the_share_of_groups_without_a_signal(tmp_path: Path, odd: bool) -> None:
    prompts = Same().sample(0, 4)
    task = Same(prompts[2].id if odd else "")
    (step,) = steps_of(tlt.train(small(tmp_path, "--run.steps=1"), task))
    assert step.no_signal == (0.75 if odd else 1.0)
    assert (step.grad_norm > 0) == odd
