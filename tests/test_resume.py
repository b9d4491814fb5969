"""Stopped at any moment and resumed, a run gives the numbers of one that was left alone: bit by bit."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from torch import Tensor

import tlt
from tests.training import LEARNED, numbers, small
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.errors import CheckpointError, ConfigError
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet
from tlt.multi_turn import Replies
from tlt.recipe import to_toml
from tlt.resume import ResumePoint, checkpoints_of, starting_point
from tlt.spec.budget import SHARE, CostKind
from tlt.train import host_copy, policy_files
from tlt.train.checkpoint import Checkpoints
from tlt.train.checksums import write_checksums
from tlt.train.policy import UpdateResult
from tlt.types import Completion, Experience
from tlt.watch.console import notice
from tlt.watch.events import (
    AccountUpdated,
    CheckpointDamaged,
    CheckpointSaved,
    NothingLeft,
    RunFinished,
    RunResumed,
    StepFinished,
    read_run,
)
from tlt.watch.history import counted, events_of, steps_of

OPTIMIZER = "optimizer/state.safetensors"
SHORT = "--sampling.max_tokens=24"
FLAGS = ["--run.steps=4", "--checkpoint.every=2", *LEARNED, "--drafting.forced_share=0.3", SHORT]


def weights(config: RunConfig) -> bytes:
    path = Path(config.run.out) / config.run.name / "checkpoints" / f"step_{config.run.steps}"
    return (path / "policy" / "model.safetensors").read_bytes() + (path / OPTIMIZER).read_bytes()


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
    accounts = {event.step: event for event in events_of(run, AccountUpdated)}
    for before, after in pairwise(accounts[step] for step in (1, 2, 3, 4)):
        assert before.plain_s < after.plain_s
        assert all(before.spent_s[kind] <= after.spent_s[kind] for kind in CostKind)


def test_a_resumed_run_goes_on_with_its_account_and_its_learning_curve(tmp_path: Path) -> None:
    """Restored to the bit; and of a checkpoint that holds none, a run begins with empty ones."""
    config = small(tmp_path, *LEARNED)
    first, second = (LocalFleet(config, lambda event: None) for _ in range(2))
    assert first.account is not None
    assert second.account is not None
    planner = first._planner
    assert planner is not None
    planner.trained(1.2, 4096, 1.5)
    planner.rolled_out([5, 9], 1.0, 2.0, 0.0)
    first.account.ran(7.0, 8.0)
    first.account.charge(CostKind.TRAINING, 0.5)
    first.account.tried(0.25)
    first.snapshot()(tmp_path)
    second.restore(tmp_path, 1)
    assert second.account.state() == first.account.state()
    assert second.account.plain_s == 10.0
    assert second._planner is not None
    assert second._planner.state() == planner.state()
    balance_s = second.account.balance_s
    second._planner.rolled_out([5, 9], 1.0, 2.0, 0.0)  # what was booked before is not booked again
    assert second.account.balance_s == pytest.approx(balance_s + SHARE * 2.0)
    (tmp_path / "account.json").unlink()
    third = LocalFleet(config, lambda event: None)
    third.restore(tmp_path, 1)
    assert third.account is not None
    assert third.account.plain_s == 0.0


# ---- the power fails


def test_no_checkpoint_is_in_place_before_the_events_of_its_steps_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename to `step_N`: what was forced to disk by then, all that a power cut is sure to leave."""
    run = tmp_path / "run"
    fsync, rename = os.fsync, os.rename
    on_disk: dict[Path, bytes] = {}  # contents of files, names of directories
    told: dict[str, int] = {}

    def forced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        content = repr(sorted(os.listdir(path))).encode() if path.is_dir() else path.read_bytes()
        fsync(handle)
        on_disk[path] = content

    def renamed(source: Path, target: Path) -> None:
        if Path(target).name.startswith("step_"):
            assert b"'events.jsonl'" in on_disk.get(run, b"")
            told[Path(target).name] = on_disk.get(run / "events.jsonl", b"").count(b'"StepFinished"')
        rename(source, target)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(os, "rename", renamed)
    tlt.train(small(tmp_path, "--run.steps=3", "--checkpoint.every=1", "--sampling.max_tokens=4"))
    assert told == {"step_1": 1, "step_2": 2, "step_3": 3}
    assert b"'checkpoints'" in on_disk[run]
    assert b"'step_3'" in on_disk[run / "checkpoints"]


# ---- killed from outside


def events_so_far(config: RunConfig) -> list[str]:
    file = Path(config.run.out) / config.run.name / "events.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def train_until_killed(config: RunConfig, where: str) -> None:
    """What a process runs. It ends in its first checkpoint, in the copy for it, in the rollout of the fourth step, or
    as it should."""

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def open_fleet(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet = LocalFleet(config, emit)
        rollout = fleet.rollout

        def killed_rollout(step: int, requests: Sequence[Request], replies: Replies | None) -> Iterator[Completion]:
            for completion in rollout(step, requests, replies):
                if where == "rollout" and step == 4:
                    kill()
                yield completion

        fleet.rollout = killed_rollout  # type: ignore[method-assign]
        return fleet

    if where == "checkpoint":
        policy_files.save_state = kill  # after the policy, before what the optimizer remembers
    if where == "copy":
        copied = host_copy.HostCopy._copy

        def killed_copy(self: host_copy.HostCopy, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
            copied(self, pairs[:1])
            if pairs:
                kill()

        host_copy.HostCopy._copy = killed_copy  # type: ignore[method-assign]
    tlt.train(config, resume=True, open_fleet=open_fleet)


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
    context.set_forkserver_preload(["tests.test_resume", "tlt.reinforce", "torch._dynamo", *text])
    return context


def test_killed_in_a_checkpoint_and_in_a_rollout(
    undisturbed: RunConfig, tmp_path: Path, processes: ForkServerContext
) -> None:
    config = small(tmp_path, *FLAGS)
    half = tmp_path / "run" / "checkpoints" / ".step_2.writing"

    def run(where: str) -> int | None:
        process = processes.Process(target=train_until_killed, args=(config, where))
        process.start()
        process.join()
        return process.exitcode

    assert run("checkpoint") == -signal.SIGKILL
    assert [entry.name for entry in half.iterdir()] == ["policy"]
    assert run("rollout") == -signal.SIGKILL
    assert '"step": 4, "phase": "rollout"' in [line for line in events_so_far(config) if "PhaseStarted" in line][-1]
    assert run("copy") == -signal.SIGKILL
    assert Checkpoints(half.parent).steps() == [2]
    assert run("nowhere") == 0
    assert same_as(undisturbed, config)
    assert len([line for line in events_so_far(config) if "RunResumed" in line]) == 4


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

    def opened(config: RunConfig, emit: Emit) -> Fleet:
        raise AssertionError("nobody is needed")

    run = tlt.train(undisturbed, resume=True, open_fleet=opened)
    (told,) = events_of(run, NothingLeft)
    assert told.step == told.steps == undisturbed.run.steps
    text, _ = notice(told) or ("", "")
    assert text == f"nothing is left to do: step {told.step} was the last of run.steps ({told.step}); raise it to go on"
    assert isinstance(counted(run.events)[-1].event, RunFinished)
    assert len(steps_of(run)) == undisturbed.run.steps
    assert weights(undisturbed) == before


def test_resuming_where_nothing_was_saved_begins(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")
    run = tlt.train(config, resume=True)
    assert [(event.step, event.path) for event in events_of(run, RunResumed)] == [(0, "")]
    assert len(steps_of(run)) == 1


def test_a_full_disk_ends_the_run_and_the_last_checkpoint_is_gone_on_from(
    undisturbed: RunConfig, copied: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(checkpoint(copied, 4))
    write = Checkpoints.write

    def full(self: Checkpoints, step: int, fill: Callable[[Path], None]) -> Path:
        def refuse(directory: Path) -> None:
            fill(directory)
            raise OSError(28, "No space left on device")

        return write(self, step, refuse if step == 4 else fill)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write", full)
        with pytest.raises(CheckpointError, match=r"step_4 cannot be written: No space left.*step_2, is intact"):
            tlt.train(copied, resume=True)
    run = tlt.train(copied, resume=True)
    assert same_as(undisturbed, copied)
    assert [event.step for event in events_of(run, CheckpointSaved)] == [2, 4]


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")

    def second(_: RunConfig, emit: Emit) -> LocalFleet:
        with pytest.raises(ConfigError, match=rf"in use: process {os.getpid()} on .* \(`tlt train`\) writes to it"):
            tlt.train(config, resume=True)
        return LocalFleet(config, emit)

    assert len(steps_of(tlt.train(config, open_fleet=second))) == 1


# ---- damaged checkpoints


@pytest.fixture
def copied(undisturbed: RunConfig, tmp_path: Path) -> RunConfig:
    """The undisturbed run, as often as it is to be damaged."""
    shutil.copytree(undisturbed.run.out, tmp_path, dirs_exist_ok=True)
    return small(tmp_path, *FLAGS)


def start_of(config: RunConfig, resume_from: str = "") -> ResumePoint:
    start = starting_point(checkpoints_of(config), resume_from)
    assert start is not None
    return start


def checkpoint(config: RunConfig, step: int) -> Path:
    return checkpoints_of(config).path(step)


def flip(file: Path) -> None:
    """One bit of one byte in its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "is damaged"),
    "truncated": (truncate, "is damaged"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_any_damaged_file_is_noticed(copied: RunConfig, kind: str) -> None:
    """Each file of the checkpoint in turn: the one before is gone on from, and what was found is said."""
    newest = checkpoint(copied, 4)
    damage, told = DAMAGE[kind]
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert {OPTIMIZER, "run.json", "policy/model.safetensors", "drafter/trainer.json", "SHA256SUMS"} <= {
        str(name) for name in files
    }
    assert (start_of(copied).step, start_of(copied).passed_over) == (4, ())
    for name in files:
        content = (newest / name).read_bytes()
        damage(newest / name)
        start = start_of(copied)
        assert start.step == 2
        (event,) = start.passed_over
        assert (event.path, event.problem.partition(":")[0]) == (str(newest), f"{name} {told}")
        (newest / name).write_bytes(content)
    assert start_of(copied).step == 4


def test_an_empty_directory_is_passed_over(copied: RunConfig) -> None:
    shutil.rmtree(checkpoint(copied, 4))
    checkpoint(copied, 4).mkdir()
    assert start_of(copied).step == 2


def test_a_file_that_came_later_is_no_damage(copied: RunConfig) -> None:
    (checkpoint(copied, 4) / "drafter" / "acceptance.json").write_text("{}")
    assert start_of(copied).step == 4


def test_a_run_goes_on_from_the_newest_whole_checkpoint_with_the_same_numbers(
    undisturbed: RunConfig, copied: RunConfig
) -> None:
    config = replace(copied, watch=replace(copied.watch, console="lines"))
    flip(checkpoint(config, 4) / OPTIMIZER)
    run = tlt.train(config, resume=True)
    assert same_as(undisturbed, config)
    assert [event.step for event in events_of(run, RunResumed)] == [2]
    (damaged,) = events_of(run, CheckpointDamaged)
    assert notice(damaged) == (
        f"{checkpoint(config, 4)} is passed over: {OPTIMIZER} is damaged: its checksum differs",
        "bold yellow",
    )
    assert [event.step for event in events_of(run, CheckpointSaved)] == [2, 4]
    assert {entry.name for entry in checkpoints_of(config).directory.iterdir()} == {"step_2", "step_4"}


def refusal(config: RunConfig, **how: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        tlt.train(config, **how)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_where_all_are_damaged_it_says_what_can_be_done(copied: RunConfig) -> None:
    flip(checkpoint(copied, 2) / "policy" / "model.safetensors")
    flip(checkpoint(copied, 4) / OPTIMIZER)
    told = refusal(copied, resume=True)
    assert f"step_4: {OPTIMIZER} is damaged" in told
    assert "step_2: policy/model.safetensors is damaged" in told
    assert f"--model.path {checkpoint(copied, 4) / 'policy'} --run.name NEW" in told
    flip(checkpoint(copied, 4) / "policy" / "model.safetensors")
    told = refusal(copied, resume=True)
    assert "--model.path" not in told
    assert "start a new run with another run.name" in told


@pytest.mark.parametrize("record", ["[" * 100_000, "[1]", '{"format": [1]}', ""])
def test_a_record_that_is_none_is_named(copied: RunConfig, record: str) -> None:
    (checkpoint(copied, 4) / "run.json").write_text(record)
    write_checksums(checkpoint(copied, 4))
    assert str(checkpoint(copied, 4)) in refusal(copied, resume=True)


def test_a_foreign_directory_is_not_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_3").mkdir(parents=True)
    told = refusal(small(tmp_path, "--run.steps=1"), resume=True)
    assert "step_3: SHA256SUMS is missing" in told


# ---- other settings than the checkpoint's


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--model.dtype=float32", "step_4/policy is in float64, and this run trains in float32; resume with --model"),
        (
            "--draft.vocab=16",
            "has a vocabulary of 32, this run's has 16; expected the same: give draft.vocab as it",
        ),
        ("--draft.mlp=0.5", "has an MLP of 512, this run's has 256; expected the same: give draft.mlp as it was"),
        (
            "--train.lora_rank=2",
            "saved without adapters but train.lora_rank is 2; resume with train.lora_rank as it",
        ),
    ],
)
def test_settings_that_change_shapes_are_refused_by_name(copied: RunConfig, flag: str, told: str) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        tlt.train(small(Path(copied.run.out), *FLAGS, flag, "--run.steps=5"), resume=True)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert checkpoints_of(copied).steps() == [2, 4]


def test_a_drafter_may_be_left_out_and_begun_again(undisturbed: RunConfig, copied: RunConfig) -> None:
    """It changes no number, so a run may go on without one, or with one that the checkpoint has none of."""
    shutil.rmtree(checkpoint(copied, 4))
    config = small(Path(copied.run.out), "--run.steps=3", "--checkpoint.every=1", SHORT)
    tlt.train(config, resume=True)
    assert not (checkpoint(config, 3) / "drafter").exists()
    kept = ["--checkpoint.every=1", "--checkpoint.buffer=true"]  # with its answers, even if it has learned nothing yet
    run = tlt.train(small(Path(copied.run.out), *FLAGS, *kept), resume=True)
    assert (checkpoint(config, 4) / "drafter").exists()
    assert numbers(run) == numbers(read_run(Path(undisturbed.run.out) / undisturbed.run.name))


# ---- a checkpoint of one's choice


def test_a_run_goes_on_from_the_checkpoint_that_is_named(undisturbed: RunConfig, copied: RunConfig) -> None:
    """Stopped again before its first checkpoint, it still goes on from there: later ones are set aside."""

    def stopped(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet = LocalFleet(config, emit)

        def stop(experiences: Sequence[Experience]) -> UpdateResult:
            raise Stopped

        fleet.update = stop  # type: ignore[method-assign]
        return fleet

    with pytest.raises(Stopped):
        tlt.train(copied, resume_from="step_2", open_fleet=stopped)
    assert checkpoints_of(copied).steps() == [2]
    run = tlt.train(copied, resume=True)
    assert [event.step for event in events_of(run, RunResumed)] == [2, 2]
    assert same_as(undisturbed, copied)
    assert {entry.name for entry in checkpoints_of(copied).directory.iterdir()} == {"step_2", "step_4"}


def test_a_named_checkpoint_must_be_there_and_whole(copied: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"--resume-from is 'step_3'; expected .*: step_2, step_4$"):
        tlt.train(copied, resume_from="step_3")
    flip(checkpoint(copied, 2) / "run.json")
    told = refusal(copied, resume_from="step_2")
    assert "step_2 cannot be resumed from: run.json is damaged" in told
    assert "name another with --resume-from (step_4)" in told
    assert checkpoints_of(copied).steps() == [2, 4]


def test_numbers_tell_runs_apart(undisturbed: RunConfig, tmp_path: Path) -> None:
    """The comparison above can fail: another seed is seen. A step that was told twice counts once."""
    run = tlt.train(small(tmp_path, "--run.steps=1", "--run.seed=1"))
    assert numbers(run) != numbers(read_run(Path(undisturbed.run.out) / "run"))[:1]
    twice = replace(run, events=run.events + tuple(r for r in run.events if isinstance(r.event, StepFinished)))
    assert len(numbers(twice)) == 1
