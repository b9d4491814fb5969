"""A drafter within a time: how many steps fit, that asking touches nothing, and that the command keeps to it."""

import math
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import pytest
import tiny
import torch

from tests.clocks import Clock
from tlt.cli import main
from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.train import pacing
from tlt.train.drafter import DrafterTrainer, policy_states
from tlt.train.kept_states import KeptStates
from tlt.train.pacing import affordable, steps_until, until
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


def test_asking_touches_neither_drafter_nor_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take half a second: of 3 s there is room for one more when a few were timed, of 3000 s for thousands."""
    clock = Clock()
    clock.used_by(monkeypatch, pacing)
    clock.passes_in(monkeypatch, DrafterTrainer, "launch", 0.5)
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
            clock.now + seconds,
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
    assert few == 1
    assert 5000 < many < 7000


def test_the_command_takes_fewer_steps_where_time_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    train = ["draft", "train", "tiny", "--prompts", "toy", *small, "--draft.steps=3"]
    taken, cut = {}, {}
    for seconds in ("0.001", "600", "0"):
        assert main([*train, f"--draft.seconds={seconds}", "--out", str(tmp_path / seconds)]) == 0
        told = capsys.readouterr().out
        found = re.search(r"^(\d+) steps", told, re.MULTILINE)
        assert found is not None
        taken[seconds], cut[seconds] = (
            int(found[1]),
            "1 of 3 steps fit into 0.001 s: for more, raise draft.seconds" in told,
        )
    assert taken == {"0.001": 1, "600": 3, "0": 3}
    assert cut == {"0.001": True, "600": False, "0": False}


def test_training_ends_when_time_is_up_and_nothing_launched_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was planned: one batch is learned from, and then as many as come in time."""
    clock = Clock()
    clock.used_by(monkeypatch, pacing)

    def slowly() -> Iterator[int]:
        for number in range(100):
            clock.now += 0.05
            yield number

    deadline_s = clock.now + 0.22
    assert list(until(deadline_s, slowly())) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert list(until(deadline_s, iter("abc"))) == ["a"]  # type: ignore[arg-type]
    assert list(until(math.inf, iter("abc"))) == ["a", "b", "c"]  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [1, 5])
def test_steps_are_timed_with_what_comes_before_them(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """The policy runs once for several batches: over whole runs of it, a step takes what it takes on average. The first
    steps, slow as they are, do not count."""
    clock = Clock()
    clock.used_by(monkeypatch, pacing)

    def batches() -> Iterator[int]:
        for number in range(1000):
            clock.now += 50.0 if number == 0 else 0.0  # compiling
            clock.now += 3.0 * together if number % together == 0 else 0.0
            clock.now += 0.5
            yield number

    class Trainer:
        def micro_steps(self, given: Iterator[int]) -> Iterator[int]:
            yield from given

    assert pacing._step_s(Trainer(), batches(), together) == pytest.approx(3.5)  # type: ignore[arg-type]
    few = islice(batches(), 3)
    assert pacing._step_s(Trainer(), few, 1) > 3.5  # type: ignore[arg-type]


def test_on_a_gpu_batches_share_runs_of_the_policy() -> None:
    class Head:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda = is_cuda

    for tokens, expected in ((2048, 16), (16384, 2), (10**6, 1)):
        settings = DraftSettings(tokens_per_batch=tokens)
        assert pacing._together(settings, Head(True)) == expected  # type: ignore[arg-type]
        assert pacing._together(settings, Head(False)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("filling_s", "kept"), [(0.0, True), (1e6, False)])
def test_states_are_kept_if_there_is_time_to_compute_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filling_s: float, kept: bool
) -> None:
    made: list[object] = []
    original = KeptStates.__init__

    def noticed(self: KeptStates, *given: object) -> None:
        made.append(self)
        original(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(KeptStates, "__init__", noticed)
    monkeypatch.setattr("tlt.draft.filling_s", lambda *_: filling_s)
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    train = ["draft", "train", "tiny", "--prompts", "toy", *small, "--draft.steps=30", "--draft.seconds=600"]
    assert main([*train, "--out", str(tmp_path / "drafter")]) == 0
    assert bool(made) == kept
