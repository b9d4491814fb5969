"""Fleets for tests: hosts around a small float64 policy, that can be told to die, hang or wait at a chosen moment.

No test of theirs depends on how fast the machine is: a worker waits until something has happened, not for some time.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor

import tlt.fleet
from tests.tiny import letters, policy
from tlt.cluster.all_reduce import Rendezvous
from tlt.cluster.host import CONTROL, Host
from tlt.cluster.messages import WorkerRolloutReport
from tlt.cluster.placement import WorkerSlot
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
from tlt.spec.ahead import Prices
from tlt.spec.tuner import Tuner
from tlt.types import Completion, Prompt, SamplingParams

DEAD_S = 300.0  # after which something that is waited for will not happen any more

CONFIG = RunConfig(
    model=ModelSettings(dtype="float64", device="cpu"),
    task=TaskSettings(prompts=6, group=4),
    sampling=SamplingParams(max_tokens=96),
    engine=EngineSettings(rows=16, kv_gib=0.02, sleep="always"),
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

    def _wants_to_end(self, drafter: Any, leader: int) -> bool:
        if leader != self._status.worker:
            self.reach("following")
        return super()._wants_to_end(drafter, leader)


class TinyHost(Host):
    """A host whose policy is the tiny one. `arm` lets it end its own process, or fall asleep, at a chosen moment;
    `hold` lets it write nothing until it is let go."""

    sessions = TinySessions

    def __init__(self, worker_id: int) -> None:
        super().__init__(worker_id)
        self._trap, self._countdown, self._signal = "", 0, signal.SIGKILL
        self._held = self._joined = False
        self._until_learned = False
        self._free = Event()
        self._peers: list[Any] = []
        self._pieces, self._looked, self._written = 0, 0, 0  # files before a snapshot; those asked for; and there
        self._pieces_alone = False  # nothing follows on them
        self._page = Condition()

    def open(self, config: RunConfig, rank: int, slot: WorkerSlot, nccl: bool, engine: Rendezvous | None) -> None:
        use_the_tiny_policy()
        self._sessions.reach = self._reach
        super().open(config, rank, slot, nccl, engine)

    def arm(self, where: str, countdown: int = 1, how: int = signal.SIGKILL) -> None:
        self._trap, self._countdown, self._signal = where, countdown, how

    def _reach(self, where: str) -> None:
        if where == "following":
            while self._peers:
                self._peers.pop().joined.remote()
        if where == self._trap:
            self._countdown -= 1
            if self._countdown == 0:
                os.kill(os.getpid(), self._signal)

    def be_usual(self) -> None:
        """As a host that was told nothing."""
        self.arm("")
        self._held = self._pieces_alone = False
        self._pieces = 0
        self._free.clear()

    # ---- waiting

    def hold(self, until_learned: bool) -> None:
        """It writes nothing until it is let go; or until the others have trained the drafter together and it has taken
        what they learned."""
        self._held, self._joined, self._until_learned = True, False, until_learned

    @ray.method(concurrency_group=CONTROL)
    def let_go(self) -> None:
        self._held = False
        self._free.set()

    @ray.method(concurrency_group=CONTROL)
    def joined(self) -> None:
        """Another one has joined a session."""
        self._joined = True

    def run_rollout(self, epoch: int, peers: Any, step: int) -> WorkerRolloutReport:
        self._peers = [peer for worker_id, peer in peers.items() if worker_id != self._status.worker]
        return super().run_rollout(epoch, peers, step)

    def _tick(self) -> None:
        if self._held and not (self._until_learned and self._joined and self._swaps):
            self._wait_for_inbox()
            return
        self._held = False
        self._reach("writing ahead" if self._worker.idle else "rollout")
        super()._tick()

    def follow(self) -> None:
        """Of a rank of another worker's engine: the trap is reached whenever it hears of a run."""
        ranks: Any = self._parallel
        heard = ranks.next_command

        def hear() -> Any:
            self._reach("rollout")
            return heard()

        ranks.next_command = hear
        try:
            super().follow()
        finally:
            del ranks.next_command

    def take_chunks(self) -> None:
        """From now on chunks of written-ahead text always pay, whatever this machine's clock says."""
        Tuner.prices = lambda tuner, batch: Prices(lambda shape: 1.0, 0.0, lambda shape, gain: True)  # type: ignore[method-assign]

    def toil(self, moving: bool) -> None:
        """At something until it is let go, pass by pass; or at nothing."""
        while not self._free.wait(0.02):
            self._worker.trainer.passes += moving

    @ray.method(concurrency_group=CONTROL)
    def micro_steps(self) -> int:
        return self._drafter.steps_taken

    # ---- writing

    def write_slowly(self, pieces: int, *, alone: bool = False) -> None:
        """The next snapshots are preceded by so many small files, one whenever somebody looks how far it is; `alone`:
        nothing follows on them."""
        self._pieces, self._pieces_alone = pieces, alone

    def snapshot(self, rest: bool) -> None:
        super().snapshot(rest)
        whole = self._write
        self._looked = self._written = 0

        def slowly(directory: Path) -> None:
            for number in range(self._pieces):
                with self._page:
                    self._page.wait_for(lambda number=number: self._looked > number, DEAD_S)
                    (directory / f"{number}.piece").write_text("a piece")
                    self._written += 1
                    self._page.notify_all()
            if self._pieces_alone:
                Event().wait()
            whole(directory)

        self._write = slowly

    @ray.method(concurrency_group=CONTROL)
    def bytes_written(self) -> int:
        if self._pieces:
            with self._page:
                self._looked += 1
                self._page.notify_all()
                self._page.wait_for(lambda: self._written >= min(self._looked, self._pieces), DEAD_S)
        return super().bytes_written()

    def _add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) > 1:  # the gradients, not the counts
            self._reach("update")
        super()._add_up(tensors)
        if len(tensors) > 1:
            self._reach("after the update")

    def publish(self, version: int, drafter: Any) -> Any:
        self._reach("publish")
        return super().publish(version, drafter)


class CountingHost(Host):
    """Tells how many weights its worker holds."""

    def held(self) -> tuple[int, int]:
        """By the engine, and by the trainer."""
        shards = self._worker.trainer.weights().values()
        engine = sum(parameter.numel() for parameter in self._worker.policy.model.parameters())
        return engine, sum(local.to_local().numel() for local in shards if isinstance(local, DTensor))

    @ray.method(concurrency_group=CONTROL)
    def micro_steps(self) -> int:
        return self._drafter.steps_taken


def with_workers(workers: int, **cluster: Any) -> RunConfig:
    return replace(CONFIG, cluster=replace(CONFIG.cluster, workers=workers, **cluster))


def wait_for_everyone(fleet: RayFleet, workers: int) -> None:
    """Until those who were lost have successors."""
    given_up = time.monotonic() + DEAD_S
    while len(fleet._actors.members) < workers:
        assert time.monotonic() < given_up
        fleet._recover("rollout")
        time.sleep(0.05)


def is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP, as Linux tells it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
