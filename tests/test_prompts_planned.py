"""A run says how often it will ask the prompts of its file: a small one is gone through again and again."""

from pathlib import Path

import pytest

import tlt
from tests.training import small
from tlt.watch.console import notice
from tlt.watch.events import PromptsPlanned, StartupFinished
from tlt.watch.history import events_of

WHOLE = ["--task.name=files", "--run.steps=2", "--sampling.max_tokens=4", "--task.prompts=5"]


def test_it_is_told_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "three.jsonl"
    file.write_text("".join(f'{{"question": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(3)))
    run = tlt.train(small(tmp_path, *WHOLE, f"--task.path={file}", "--grpo.dynamic_sampling=1"))
    (told,) = events_of(run, PromptsPlanned)
    assert told == PromptsPlanned(str(file), prompts=3, per_step=5, steps=2, turns=2)
    kinds = [type(record.event) for record in run.events]
    assert kinds.index(PromptsPlanned) < kinds.index(StartupFinished)


@pytest.mark.parametrize(
    ("prompts", "turns", "text", "style"),
    [
        (7473, 5, "f has 7,473 prompts: each is asked 1.71 to 8.56 times in 200 steps", "dim"),
        (64001, 1, "f has 64,001 prompts: 200 steps ask 12,800 of them", "dim"),
        (64001, 5, "f has 64,001 prompts: 200 steps ask 12,800 to 64,000 of them", "dim"),
        (7473, 1, "f has 7,473 prompts: each is asked 1.71 times in 200 steps", "dim"),
        (
            100,
            1,
            "asked 128 times in 200 steps; the policy may learn them by heart: more prompts",
            "yellow",
        ),
        (
            3,
            1,
            "some more than once in a step, as a step asks 64: lower task.prompts to 3",
            "yellow",
        ),
    ],
)
def test_what_is_said_of_it(prompts: int, turns: int, text: str, style: str) -> None:
    said = notice(PromptsPlanned("f", prompts, 64, 200, turns))
    assert said is not None
    assert text in said[0]
    assert style in said[1]
