"""A checkpoint holds the state at its snapshot, whatever changes while it is copied; a copy that fails ends the run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch import Tensor

import tlt
from tests.training import LEARNED, numbers, small
from tlt import fleet as fleet_module
from tlt.config import RunConfig
from tlt.fleet import LocalFleet
from tlt.loop import Loop
from tlt.policy import source_of
from tlt.tasks.choose import judge_of, task_of
from tlt.text import Tokenizer
from tlt.train.host_copy import HostCopy
from tlt.watch.events import RunFailed, read_run
from tlt.watch.history import events_of, steps_of

SMALLEST = ["--task.prompts=3", "--sampling.max_tokens=24", "--sampling.temperature=1.5", "--drafting.check=1"]
LEARNING = [*LEARNED, *SMALLEST, "--drafting.tokens=64", "--drafting.held_out=16"]


@dataclass
class Asked:
    """Of a copy that begins when it, or a later one, is waited for."""

    future: Future[dict[str, Any]]
    asked: tuple[Event, ...]

    def result(self) -> dict[str, Any]:
        for asked in self.asked:
            asked.set()
        return self.future.result()


class LateCopy(HostCopy):
    """As slow as can be: what waits for a copy finds that it has not begun."""

    asked: tuple[Event, ...] = ()

    def begin(self, state: Mapping[str, Any]) -> Any:
        self.asked += (Event(),)
        self._thread.submit(self.asked[-1].wait)  # the copy is made behind it
        return Asked(super().begin(state), self.asked)


@contextmanager
def run_of(config: RunConfig) -> Iterator[tuple[LocalFleet, Loop]]:
    fleet, task = LocalFleet(config, lambda event: None), task_of(config)
    with judge_of(task, config) as judge:
        yield fleet, Loop(config, task, Tokenizer.load(source_of(config.model)), judge, fleet, lambda event: None)


def always_training(fleet: LocalFleet) -> None:
    """The drafter takes two micro-steps in every step, in the update or before it."""
    drafter = fleet.worker.drafter
    assert drafter is not None

    def draft(step: int, until: Callable[[], bool]) -> None:
        drafter.sort_arrived()
        if drafter.learns_in_updates:
            fleet._update_s = 60.0
        else:
            over = iter((False, False, True))
            drafter.train(lambda: next(over))

    fleet.draft = draft  # type: ignore[method-assign]


def written(write: Callable[[Path], None], directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    write(directory)
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.mark.parametrize(
    "flags",
    [
        ["--drafting.states=update"],
        ["--drafting.states=recompute", "--train.lora_rank=2", "--grpo.kl=0.01"],
        ["--drafting.states=recompute", "--train.offload=true", "--model.dtype=float32"],
    ],
    ids=["update", "lora", "offload"],
)
def test_changes_wait_until_the_snapshot_is_copied(tmp_path: Path, flags: list[str]) -> None:
    """Twice in a row: the policy and its drafter learn before the late copy is written."""
    with run_of(small(tmp_path, *LEARNING, *flags)) as (fleet, loop):
        always_training(fleet)
        late_copy, found = LateCopy(), list[dict[str, bytes]]()
        loop.step(0)
        for taken in (1, 2):
            fleet.worker._host = HostCopy()
            at_once = written(fleet.snapshot(), tmp_path / f"at once {taken}")
            fleet.worker._host = late_copy
            fleet.snapshot()
            late = fleet.snapshot()
            loop.step(taken)
            found.append(written(late, tmp_path / f"late {taken}"))
            assert found[-1] == at_once
    changed = {name for name in found[0] if found[0][name] != found[1][name]}
    assert changed >= {"optimizer/state.safetensors", "drafter/trainer.safetensors"}


def test_the_wait_for_a_copy_is_told_and_part_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 10_000))
    waits: list[float] = []
    original = fleet_module.Worker.wait_for_copies

    def waited(self: fleet_module.Worker) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("tlt.fleet.time.perf_counter", lambda: float(next(clock)))
            original(self)
        waits.append(self._waited_s)

    monkeypatch.setattr(fleet_module.Worker, "wait_for_copies", waited)
    with run_of(small(tmp_path, *SMALLEST, "--spec.drafter=none")) as (_, loop):
        step = loop.step(0)
    assert step.update.checkpoint_s == sum(waits) == 1.0


def test_a_copy_that_fails_ends_the_run_and_the_checkpoint_before_is_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SMALLEST, "--run.steps=3", "--checkpoint.every=1"]
    tlt.train(small(tmp_path, *flags, "--run.name=undisturbed"))
    copy, made = HostCopy._copy, list[int]()

    def failing(self: HostCopy, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        made.extend([len(pairs)] if pairs else [])
        if len(made) == 2:
            raise RuntimeError("no host memory")
        copy(self, pairs)

    config = small(tmp_path, *flags)
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "_copy", failing)
        with pytest.raises(RuntimeError, match="no host memory"):
            tlt.train(config)
    run = read_run(tmp_path / "run")
    assert "no host memory" in events_of(run, RunFailed)[0].message
    assert len(steps_of(run)) == 2
    run = tlt.train(config, resume=True)
    assert numbers(run) == numbers(read_run(tmp_path / "undisturbed"))
