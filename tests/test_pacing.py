"""A drafter within a time: how many steps fit, that asking touches nothing, and that the command keeps to it."""

import random
import re
import time
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import pytest
import tiny
import torch

from tlt.cli import main
from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.train.drafter import policy_states
from tlt.train.pacing import affordable, steps_until
from tlt.train.packing import Example, pack

SETTINGS = DraftSettings(steps=1000, single_steps=100)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1e6, 1000),  # all of them
        (101.0, 550),  # 100 of 0.01 s, and 450 in the other 100 s
        (1.0, 100),  # only those that unroll nothing
        (0.5, 50),  # half of these
        (0.0, 1),
        (-30.0, 1),  # the answers took longer already
    ],
)
def test_as_many_steps_as_fit(seconds: float, expected: int) -> None:
    assert affordable(seconds, SETTINGS, 0.01, 100 / 450.5) == expected


def test_asking_touches_neither_drafter_nor_policy() -> None:
    policy = tiny.policy()
    shape = EagleConfig.of_policy(policy.config, window=16)
    drafter = Eagle(shape, dtype=torch.float64)
    drafter.init_weights(seed=0)
    source = random.Random(1)
    (row,) = pack([Example(tuple(source.choices(range(tiny.VOCAB), k=24)), 8)], 24)
    batch = policy_states(policy, row, shape.taps)
    before = [parameter.detach().clone() for model in (drafter, policy) for parameter in model.parameters()]
    settings = DraftSettings(steps=10**9, single_steps=3, warmup_steps=0)
    few, many = (
        steps_until(
            time.perf_counter() + seconds,
            drafter,
            policy.head_weight,
            policy.embed,
            settings,
            partial(islice, repeat(batch), lessons),
        )
        for seconds, lessons in ((3.0, 2), (3000.0, 99))
    )
    after = [parameter for model in (drafter, policy) for parameter in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)
    assert 1 <= few < many < 10**9


def test_the_command_takes_fewer_steps_where_time_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    train = ["draft", "train", "tiny", "--prompts", "toy", *small, "--draft.steps=3"]
    taken = {}
    for seconds in ("0.001", "600", "0"):
        assert main([*train, f"--draft.seconds={seconds}", "--out", str(tmp_path / seconds)]) == 0
        found = re.search(r"^(\d+) steps", capsys.readouterr().out, re.MULTILINE)
        assert found is not None
        taken[seconds] = int(found[1])
    assert taken == {"0.001": 1, "600": 3, "0": 3}


def test_training_ends_when_time_is_up_whatever_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.draft.steps_until", lambda *_: 50)
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    train = ["draft", "train", "tiny", "--prompts", "toy", *small, "--draft.seconds=0.001"]
    assert main([*train, "--out", str(tmp_path / "drafter")]) == 0
    assert re.search(r"^1 steps", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "drafter" / "config.json").is_file()
