"""Fleets for tests: hosts around a small float64 policy, that can be told to die or hang at a chosen moment."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

import tlt.fleet
from tests.tiny import letters, policy
from tlt.cluster.host import Host
from tlt.cluster.placement import Lane
from tlt.cluster.ray_fleet import RayFleet
from tlt.cluster.sessions import Sessions
from tlt.config import (
    ClusterSettings,
    DraftingSettings,
    DraftSettings,
    EngineSettings,
    ModelSettings,
    RunConfig,
    SpecSettings,
    TaskSettings,
    TrainSettings,
)
from tlt.policy import TINY_POLICY, Policy
from tlt.types import Completion, Prompt, SamplingParams

CONFIG = RunConfig(
    model=ModelSettings(dtype="float64", device="cpu"),
    task=TaskSettings(prompts=6, group=4),
    sampling=SamplingParams(max_tokens=96),
    engine=EngineSettings(rows=16, kv_gib=0.02),
    spec=SpecSettings(drafter="eagle", path="new", depths=(2,), widths=(1,), verifies=(3,)),
    draft=DraftSettings(window=32, single_steps=4, unroll=2),
    drafting=DraftingSettings(tokens=256, micro_s=0.0, held_out=64, check=4),
    train=TrainSettings(learning_rate=1e-3),
    cluster=ClusterSettings(workers=2, cpus_per_worker=0.5, pin=False, hang_s=60.0),
)


def open_tiny(_: object = None) -> Policy:
    return Policy(policy(torch.float64, sharpness=4.0), letters(), TINY_POLICY)  # whose tokenizer is saved with it


def use_the_tiny_policy() -> None:
    """In this process, whatever policy a worker is told to open."""
    tlt.fleet.open_policy = open_tiny


class Letters:
    """A task: continue the letters; the more of them are A or B, the better."""

    def sample(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}:{n}", chr(ord("A") + n) + chr(ord("A") + (n + step) % 20)) for n in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return sum(letter in "ABCDEFG" for letter in completion.text) / max(1, len(completion.text))


class TinySessions(Sessions):
    reach: Callable[[str], None]

    def _must_end(self, drafter: Any) -> bool:
        self.reach("leading")
        return super()._must_end(drafter)

    def _give(self, leader: int, session: int, own: Any) -> Any:
        self.reach("following")
        return super()._give(leader, session, own)


class TinyHost(Host):
    """A host whose policy is the tiny one. `arm` lets it end its own process, or fall asleep, at a chosen moment."""

    sessions = TinySessions

    def open(self, config: RunConfig, rank: int, lane: Lane, nccl: bool) -> None:
        use_the_tiny_policy()
        self._sessions.reach = self._reach
        self._trap, self._countdown, self._signal = "", 0, signal.SIGKILL
        self._delay = 0.0
        self._before_writing: tuple[int, float, bool] = (0, 0.0, False)
        super().open(config, rank, lane, nccl)

    def arm(self, where: str, countdown: int = 1, how: int = signal.SIGKILL) -> None:
        self._trap, self._countdown, self._signal = where, countdown, how

    def _reach(self, where: str) -> None:
        if where == self._trap:
            self._countdown -= 1
            if self._countdown == 0:
                os.kill(os.getpid(), self._signal)

    def dawdle(self, seconds: float) -> None:
        """Every tick takes longer: the others run dry first."""
        self._delay = seconds

    def toil(self, seconds: float, moving: bool) -> None:
        """At something that takes its time, pass by pass; or at nothing."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            time.sleep(0.1)
            self._worker.trainer.passes += moving

    def write_slowly(self, pieces: int, pause_s: float, *, for_ever: bool = False) -> None:
        """The next snapshots are preceded by so many small files, a moment apart; or nothing follows on these."""
        self._before_writing = (pieces, pause_s, for_ever)

    def snapshot(self, keep: bool) -> None:
        super().snapshot(keep)
        pieces, pause_s, for_ever = self._before_writing
        whole = self._write

        def slowly(directory: Path) -> None:
            for number in range(pieces):
                (directory / f"{number}.piece").write_text("a piece")
                time.sleep(pause_s)
            if for_ever:
                Event().wait()
            whole(directory)

        self._write = slowly

    def _tick(self) -> None:
        self._reach("rollout")
        time.sleep(self._delay)
        super()._tick()

    def _add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) > 1:  # the gradients, not the counts
            self._reach("update")
        super()._add_up(tensors)
        if len(tensors) > 1:
            self._reach("after the update")

    def publish(self, version: int, drafter: Any) -> Any:
        self._reach("publish")
        return super().publish(version, drafter)


def with_workers(workers: int, **cluster: Any) -> RunConfig:
    return replace(CONFIG, cluster=replace(CONFIG.cluster, workers=workers, **cluster))


def wait_for_everyone(fleet: RayFleet, workers: int) -> None:
    """Until those who were lost have successors."""
    while len(fleet._crew.members) < workers:
        fleet._heal("rollout")
        time.sleep(0.05)
