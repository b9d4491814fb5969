"""Stopped at any moment and resumed, a run gives the numbers of one that was left alone: bit by bit."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import tlt
from tests.training import LEARNED, numbers, small
from tlt.config import RunConfig
from tlt.errors import CheckpointError, ConfigError
from tlt.fleet import LocalFleet
from tlt.loop import Emit
from tlt.recipe import to_toml
from tlt.train.checkpoint import Checkpoints
from tlt.train.policy import UpdateResult
from tlt.types import Experience
from tlt.watch.events import CheckpointSaved, RunResumed, StepFinished, read_run
from tlt.watch.history import events_of, steps_of

FLAGS = ["--run.steps=4", "--checkpoint.every=2", *LEARNED]


def weights(config: RunConfig) -> bytes:
    path = Path(config.run.out) / config.run.name / "checkpoints" / f"step_{config.run.steps}"
    return (path / "policy" / "model.safetensors").read_bytes() + (path / "optimizer.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = small(tmp_path_factory.mktemp("undisturbed"), *FLAGS)
    tlt.train(config)
    return config


def same_as(undisturbed: RunConfig, config: RunConfig) -> bool:
    runs = [read_run(Path(c.run.out) / c.run.name) for c in (undisturbed, config)]
    assert len(numbers(runs[0])) == undisturbed.run.steps
    return numbers(runs[0]) == numbers(runs[1]) and weights(undisturbed) == weights(config)


# ---- stopped from inside


class Stopped(BaseException):
    """Nobody is prepared for it."""


def stopping(phase: str) -> Callable[[RunConfig, Emit], LocalFleet]:
    """A fleet that ends after its third update, or with its second checkpoint written but not yet in place."""

    def open_fleet(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet = LocalFleet(config, emit)
        update, snapshot, calls = fleet.update, fleet.snapshot, Counter[str]()

        def stopped_update(experiences: Sequence[Experience]) -> UpdateResult:
            result = update(experiences)
            calls["update"] += 1
            if phase == "update" and calls["update"] == 3:
                raise Stopped
            return result

        def stopped_snapshot() -> Callable[[Path], None]:
            write = snapshot()

            def stopped_write(directory: Path) -> None:
                write(directory)
                calls["checkpoint"] += 1
                if phase == "checkpoint" and calls["checkpoint"] == 2:
                    raise Stopped

            return stopped_write

        fleet.update, fleet.snapshot = stopped_update, stopped_snapshot  # type: ignore[method-assign]
        return fleet

    return open_fleet


@pytest.mark.parametrize("phase", ["update", "checkpoint"])
def test_stopped_with_the_policy_updated_or_a_checkpoint_half_written(
    undisturbed: RunConfig, tmp_path: Path, phase: str
) -> None:
    config = small(tmp_path, *FLAGS)
    with pytest.raises(Stopped):
        tlt.train(config, open_fleet=stopping(phase))
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2]
    run = tlt.train(config, resume=True)
    assert same_as(undisturbed, config)
    assert [event.step for event in events_of(run, RunResumed)] == [2]
    assert [step.step for step in steps_of(run)] == [1, 2, 3, 4]


# ---- killed from outside


def events_so_far(config: RunConfig) -> list[str]:
    file = Path(config.run.out) / config.run.name / "events.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def kill_when(pid: int, runs: Callable[[], bool], moment: Callable[[], bool], delay: float = 0.0) -> None:
    while runs() and not moment():
        time.sleep(0.001)
    time.sleep(delay)
    if runs():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ForkServerContext:
    """New processes in which everything is imported already: that is what takes time in such small runs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = get_context("forkserver")
    text = ["transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"]
    context.set_forkserver_preload(["tlt.reinforce", "torch._dynamo", *text])
    return context


def test_killed_in_a_checkpoint_and_in_a_rollout(
    undisturbed: RunConfig, tmp_path: Path, processes: ForkServerContext
) -> None:
    config = small(tmp_path, *FLAGS)
    half = tmp_path / "run" / "checkpoints" / ".step_2.writing"

    def in_a_later_rollout() -> bool:
        last = [line for line in events_so_far(config) if "PhaseStarted" in line][-1:]
        return any('"step": 4, "phase": "rollout"' in line for line in last)

    for moment, delay in ((half.exists, 0.0), (in_a_later_rollout, 0.02), (lambda: False, 0.0)):
        process = processes.Process(target=tlt.train, args=(config,), kwargs={"resume": True})
        process.start()
        kill_when(process.pid or 0, process.is_alive, moment, delay)
        process.join()
        ended = process.exitcode
        assert ended in (0, -signal.SIGKILL)
    assert ended == 0
    assert same_as(undisturbed, config)
    assert len([line for line in events_so_far(config) if "RunResumed" in line]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_a_random_moment(undisturbed: RunConfig, tmp_path: Path, seed: int) -> None:
    """The command itself, killed twice: after a random number of events, and some milliseconds more."""
    config, recipe, draw = small(tmp_path, *FLAGS), tmp_path / "recipe.toml", random.Random(seed)
    recipe.write_text(to_toml(config))
    command = [sys.executable, "-m", "tlt", "train", str(recipe), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = 0
    for _ in range(2):
        wanted = len(events_so_far(config)) + draw.randint(0, 16)
        process = subprocess.Popen(command, env=environment)
        kill_when(
            process.pid,
            lambda process=process: process.poll() is None,
            lambda wanted=wanted: len(events_so_far(config)) >= wanted,
            draw.random() * 0.3,
        )
        killed += process.wait() == -signal.SIGKILL
    assert killed
    subprocess.run(command, env=environment, check=True)
    assert same_as(undisturbed, config)


# ---- what else can be wrong


def test_a_run_that_is_over_has_nothing_left_to_do(undisturbed: RunConfig) -> None:
    before = weights(undisturbed)
    run = tlt.train(undisturbed, resume=True)
    assert len(steps_of(run)) == undisturbed.run.steps
    assert weights(undisturbed) == before


def test_resuming_where_nothing_was_saved_begins(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")
    run = tlt.train(config, resume=True)
    assert [(event.step, event.path) for event in events_of(run, RunResumed)] == [(0, "")]
    assert len(steps_of(run)) == 1


def test_a_full_disk_ends_the_run_and_the_last_checkpoint_is_gone_on_from(
    undisturbed: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, *FLAGS)
    write = Checkpoints.write

    def full(self: Checkpoints, step: int, fill: Callable[[Path], None]) -> Path:
        def refuse(directory: Path) -> None:
            fill(directory)
            raise OSError(28, "No space left on device")

        return write(self, step, refuse if step == 4 else fill)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write", full)
        with pytest.raises(CheckpointError, match=r"step_4 cannot be written: No space left.*step_2, is intact"):
            tlt.train(config)
    run = tlt.train(config, resume=True)
    assert same_as(undisturbed, config)
    assert [event.step for event in events_of(run, CheckpointSaved)] == [2, 4]


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")

    def second(_: RunConfig, emit: Emit) -> LocalFleet:
        with pytest.raises(ConfigError, match="another process is training"):
            tlt.train(config, resume=True)
        return LocalFleet(config, emit)

    assert len(steps_of(tlt.train(config, open_fleet=second))) == 1


def test_a_foreign_directory_is_not_resumed_from(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1")
    (tmp_path / "run" / "checkpoints" / "step_3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="step_3 is no checkpoint of a run"):
        tlt.train(config, resume=True)


def test_numbers_tell_runs_apart(undisturbed: RunConfig, tmp_path: Path) -> None:
    """The comparison above can fail: another seed is seen. A step that was told twice counts once."""
    run = tlt.train(small(tmp_path, "--run.steps=1", "--run.seed=1"))
    assert numbers(run) != numbers(read_run(Path(undisturbed.run.out) / "run"))[:1]
    twice = replace(run, events=run.events + tuple(r for r in run.events if isinstance(r.event, StepFinished)))
    assert len(numbers(twice)) == 1
