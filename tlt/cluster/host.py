"""A worker in a process of its own: an actor around `tlt.fleet.Worker`, with a mailbox beside it.

What always holds: one thread does the work, one thing after the other, and reads the mail between ticks and between
micro-steps; other threads only put mail in, hand news out and wait at the leader's desk. What the worker is told, it
does as `LocalFleet` would: being an actor adds no behaviour to it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Event
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt.cluster.interference import Interval, Ticks
from tlt.cluster.messages import (
    Beat,
    Handed,
    News,
    Offer,
    Published,
    RollReport,
    SharedCompletions,
    Stamp,
    WorkerState,
)
from tlt.cluster.placement import Environment, WorkerSlot, cores_of, pin
from tlt.cluster.ring import Meeting, MeetingPlace, RingBroken, WorkerRing, breaking
from tlt.cluster.sessions import Sessions
from tlt.cluster.timeline import Timeline, TimelineSpan
from tlt.cluster.together import Mean, SessionOpened, Vector
from tlt.cluster.transfer import Files, extent, fingerprint, on_host, pieces_of, write_files
from tlt.cluster.turns import Over, Turns, count
from tlt.config import RunConfig
from tlt.drafting.idle import Order, State, WorkerStatus, without_rest
from tlt.drafting.trainer import OnlineDrafter
from tlt.engine.request import Request
from tlt.event_builders import rollout_report
from tlt.fleet import Peers, Worker
from tlt.model.transformer import Transformer
from tlt.train.policy import PolicyTrainer, UpdateResult
from tlt.train.sharded import ShardedTrainer
from tlt.types import Experience

_LOOK_S = 0.02  # between two looks at the mail while there is nothing to do
_PATIENCE_S = 60.0  # that a call from one worker waits at another's desk; it is made again if need be

MAIL = "mail"  # concurrency group of everything that must not wait for the work
POST = "post"  # and of what must also stay in order
Message = Order | Handed | SharedCompletions | Offer
MakeTrainer = Callable[[Transformer, Transformer | None], PolicyTrainer]


class RemoteDesk:
    """Another worker's desk, as calls to it that can be looked at."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def request_join(self, member: int) -> "RemoteReply":
        return RemoteReply(self._actor.request_join.remote(member))

    def give(self, session: int, step: int, member: int, vector: Vector) -> "RemoteReply":
        return RemoteReply(self._actor.give.remote(session, step, member, vector))


class RemoteReply:
    def __init__(self, call: Any) -> None:
        self._call = call

    def here(self, wait_s: float) -> bool:
        return bool(ray.wait([self._call], timeout=wait_s)[0])

    def get(self) -> Any:
        """None if the other worker is gone."""
        with suppress(ray.exceptions.RayActorError):
            return ray.get(self._call)
        return None


class Host:
    """Made in two steps: an actor first, then `open`, so that what goes wrong there is an error of a call."""

    sessions = Sessions

    def __init__(self, seat: int) -> None:
        self._seat = WorkerStatus(seat)
        self._inbox: deque[Message] = deque()
        self._mail = Event()
        self._turns = Turns()
        self._outbox: deque[News] = deque()
        self._news = Condition()
        self._progress = 0
        self._timeline = Timeline()
        self._sessions = self.sessions(self._seat, self._timeline, self._look_around, self._offer)
        self._told = 0  # alarms
        self._loaded = self._swaps = 0  # version of the drafter that the engine has; how often it took a better one
        self._place: MeetingPlace | None = None
        self._write: Callable[[Path], None] = lambda directory: None
        self._writes_to: Path | None = None

    def open(self, config: RunConfig, rank: int, lane: WorkerSlot, nccl: bool) -> None:
        config = replace(config, drafting=without_rest(config.drafting))
        on_cpu = config.model.device == "cpu"
        cores = cores_of(lane, config.cluster.cpus_per_worker) if config.cluster.pin and on_cpu else ()
        pin(cores)
        torch.set_num_threads(max(1, len(cores) or int(config.cluster.cpus_per_worker)))
        self._config, self._rank = config, rank
        self._ring = WorkerRing(config.cluster.hang_s, nccl=nccl)
        self._copies = config.train.minibatches * config.train.epochs > 1 and not config.cluster.shard
        if not config.cluster.shard:  # shards are cut when it is known how many there are
            self._open_worker()

    def _open_worker(self, make_trainer: MakeTrainer | None = None) -> None:
        peers = Peers(self._rank, self._add_up, self._sessions.average, make_trainer)
        self._worker = Worker(self._config, peers)

    # ---- mail

    @ray.method(concurrency_group=MAIL)
    def describe(self) -> Environment:
        return Environment.here()

    @ray.method(concurrency_group=POST)
    def post(self, messages: Sequence[Message]) -> None:
        self._inbox.extend(messages)
        self._mail.set()

    @ray.method(concurrency_group=MAIL)
    def collect(self, patience_s: float) -> Beat:
        """News as soon as there are any; a sign of life in any case."""
        with self._news:
            self._news.wait_for(lambda: bool(self._outbox), timeout=patience_s)
            news = tuple(self._outbox)
            self._outbox.clear()
        return Beat(self._progress, news)

    @ray.method(concurrency_group=MAIL)
    def progress(self) -> int:
        """What changes as long as it gets on with what it was asked to do."""
        worker = getattr(self, "_worker", None)
        return 0 if worker is None else worker.trainer.passes

    @ray.method(concurrency_group=MAIL)
    def request_join(self, member: int) -> SessionOpened | None:
        return self._sessions.desk.request_join(member, _PATIENCE_S)

    @ray.method(concurrency_group=MAIL)
    def give(self, session: int, step: int, member: int, vector: Vector) -> Mean | None:
        return self._sessions.desk.give(session, step, member, vector, _PATIENCE_S)

    def _read_mail(self) -> None:
        self._progress += 1
        while self._inbox:
            match self._inbox.popleft():
                case Order() as order:
                    before = self._seat.state
                    self._seat.hear(order)
                    if self._seat.state is not before:
                        self._tell()
                case Handed(hand_out, requests):
                    if self._seat.take(hand_out):
                        self._worker.submit(requests)
                case SharedCompletions(completions, ids):
                    if self._worker.drafter:
                        self._worker.drafter.learn_from(completions, self._worker.engine.version, ids)
                        self._sessions.rested = False
                case Offer(version, weights):
                    if version > self._loaded:
                        self._swaps += self._worker.take_drafter(weights, version) is not None
                        self._loaded = version

    def _wait_for_mail(self) -> None:
        self._mail.wait(_LOOK_S)
        self._mail.clear()

    def _look_around(self, wait: bool) -> None:
        if wait:
            self._wait_for_mail()
        self._read_mail()

    def _offer(self, drafter: OnlineDrafter) -> None:
        self._tell(offer=Offer(drafter.version, on_host(drafter.weights())))

    def _tell(self, **news: Any) -> None:
        with self._news:
            self._outbox.append(News(self._seat.report(), **news))
            self._news.notify()

    # ---- rollout

    def roll(self, epoch: int, peers: Mapping[int, Any]) -> RollReport:
        """Answers what comes, trains the drafter when nothing does, until told that the rollout is over."""
        self._sessions.begin({seat: RemoteDesk(actor) for seat, actor in peers.items()})
        self._swaps = 0
        before = self._worker.speculation()
        while not (self._seat.epoch == epoch and self._seat.state is State.READY):
            self._read_mail()
            state = self._seat.state
            if state is State.BUSY and not self._worker.idle:
                self._timeline.enter("rolling")
                self._tick()
            elif state is State.DRAFTING and self._worker.drafter and self._sessions.wanted(self._worker.drafter):
                self._sessions.take_part(self._worker.drafter)
            else:
                self._timeline.enter("idle")
                self._worker.finish()  # raises if a request failed: it would be waited for in vain
                self._wait_for_mail()
        self._timeline.end()
        return self._roll_report(before)

    def _tick(self) -> None:
        completions = self._worker.tick()
        alarms = self._worker.engine.alarms
        new, self._told = tuple(alarms[self._told :]), len(alarms)
        if completions or new:
            self._seat.answered(len(completions))
            self._tell(completions=tuple(completions), alarms=new)

    def _roll_report(self, before: Any) -> RollReport:
        after = self._worker.speculation()
        return RollReport(
            spans=self._timeline.take(),
            rollout=rollout_report(after.since(before) if after and before else after),
            drafted=tuple(self._sessions.led),
            joins=self._sessions.joins,
            join_s=self._sessions.join_s,
            waited_s=self._sessions.waited_s,
            swaps=self._swaps,
        )

    def begin_replay(self) -> None:
        self._worker.begin_replay()

    def end_replay(self) -> None:
        self._worker.end_replay()

    # ---- what one's training costs another's writing

    def timed_ticks(self, requests: Sequence[Request]) -> Ticks:
        """How long every tick takes that writes these, plainly."""
        engine, begans, walls, cpus = self._worker.plain_engine(), list[float](), list[float](), list[float]()
        engine.submit(requests)
        while not engine.idle:
            wall, cpu = time.perf_counter(), time.thread_time()
            engine.tick()
            begans.append(wall)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.thread_time() - cpu)
        return Ticks(tuple(begans), tuple(walls), tuple(cpus))

    def draft_in_turns(self, turn_s: float) -> tuple[list[Interval], int]:
        """Trains the drafter, alone, whenever it is its turn, until `leave_off`; when, and how many micro-steps."""
        before = self._drafter.steps_taken

        def work(over: Over) -> None:
            while not over() and self._drafter.able():
                self._drafter.train(over)

        return self._turns.take(turn_s, work), self._drafter.steps_taken - before

    def count_in_turns(self, turn_s: float) -> tuple[list[Interval], int]:
        return self._turns.take(turn_s, count), 0

    @ray.method(concurrency_group=MAIL)
    def leave_off(self) -> None:
        self._turns.end()

    @property
    def _drafter(self) -> OnlineDrafter:
        assert self._worker.drafter is not None
        return self._worker.drafter

    # ---- learning

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        self._timeline.enter("updating")
        copy = self.state() if self._copies else None  # several updates: a lost worker may leave us between two
        try:
            with breaking():
                return self._worker.update(experiences)
        except RingBroken:
            if copy:
                self.take(copy)
            raise
        finally:
            self._timeline.end()

    def _add_up(self, tensors: Sequence[Tensor]) -> None:
        self._progress += 1
        self._ring.add_up(tensors)

    def meeting(self, name: str) -> Meeting:
        """The others will meet here."""
        self._place = self._place or MeetingPlace(Environment.here().address)
        return self._place.meeting(name)

    def join(self, meeting: Meeting, rank: int, size: int) -> None:
        address = Environment.here().address
        self._ring.join(meeting, rank, size, address)
        if self._config.cluster.shard:
            mesh = self._ring.mesh(meeting, rank, size, address)
            self._open_worker(
                lambda whole, reference: ShardedTrainer(
                    whole, self._config, mesh, reference=reference, add_up=self._add_up
                )
            )

    def publish(self, version: int, drafter: Mapping[str, Any] | None) -> Published:
        """`drafter`: the state of the one that learned most, for those who hold another."""
        started = time.perf_counter()
        self._timeline.enter("publishing")
        if drafter is not None:
            self._drafter.restore(drafter)
        if isinstance(self._worker.trainer, ShardedTrainer):
            with breaking():
                self._worker.trainer.publish()
        self._worker.publish(version)
        swapped = self._worker.swap_drafter()
        if self._worker.drafter:
            self._sessions.offered = self._loaded = self._worker.drafter.version
        found = self.fingerprint()
        self._timeline.end()
        return Published(found, swapped, time.perf_counter() - started)

    def spans(self) -> tuple[TimelineSpan, ...]:
        return self._timeline.take()

    # ---- state

    def stamp(self) -> Stamp | None:
        drafter = self._worker.drafter
        return Stamp(drafter.steps_taken, drafter.version) if drafter else None

    def fingerprint(self) -> int:
        """Equal for equal weights of policy and drafter."""
        tensors: list[Tensor] = list(self._worker.policy.model.parameters())
        if self._worker.drafter:
            tensors += self._worker.drafter.weights().values()
        return fingerprint(tensors)

    def drafter_state(self) -> Any:
        return on_host(self._drafter.state(buffer=False))

    def state(self) -> WorkerState:
        worker = self._worker
        return WorkerState(
            policy=on_host(dict(worker.policy.model.named_parameters())),
            trainer=on_host(worker.trainer.state()),
            drafter=self.drafter_state() if worker.drafter else None,
            version=worker.engine.version,
        )

    @torch.no_grad()
    def take(self, state: WorkerState) -> None:
        """From now on this worker is as the one that gave the state."""
        worker = self._worker
        for name, parameter in worker.policy.model.named_parameters():
            parameter.copy_(state.policy[name])
        worker.trainer.restore(state.trainer)
        if worker.drafter and state.drafter:
            worker.drafter.restore(state.drafter)
        worker.publish(state.version)
        worker.swap_drafter()

    def snapshot(self, keep: bool) -> None:
        """One of us keeps it; where the policy is in shards, the others help to gather them."""
        if keep:
            self._write = self._worker.snapshot()
        else:
            self._worker.trainer.state()

    @ray.method(concurrency_group=MAIL)
    def write(self, directory: Path) -> None:
        """The last snapshot, on this machine."""
        self._writes_to = directory
        self._write(directory)

    @ray.method(concurrency_group=MAIL)
    def written(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """The last snapshot in pieces, for a directory on another machine."""
        with TemporaryDirectory() as directory:
            self._writes_to = Path(directory)
            self._write(self._writes_to)
            yield from pieces_of(self._writes_to)

    @ray.method(concurrency_group=MAIL)
    def extent(self) -> int:
        """Of what was written of the snapshot by now."""
        return extent(self._writes_to) if self._writes_to else 0

    def restore(self, directory: Path, version: int) -> None:
        self._worker.restore(directory, version)

    def restore_files(self, files: Files, version: int) -> None:
        with TemporaryDirectory() as directory:
            write_files(files, Path(directory))
            self._worker.restore(Path(directory), version)
