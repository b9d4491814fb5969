"""A worker in a process of its own: a Ray actor around `tlt.fleet.Worker`, with an inbox and an outbox.

What always holds: one thread does all the work and reads the inbox between ticks and between micro-steps; other threads
only fill the inbox, empty the outbox and wait in the leader's session leader. Calls do what `LocalFleet` does: being
an actor adds no behaviour.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Event
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError
from torch import Tensor

from tlt.cluster.all_reduce import (
    AllReduceBroken,
    AllReduceGroup,
    Rendezvous,
    RendezvousStore,
    all_reduce_errors,
    engine_ranks,
)
from tlt.cluster.averaging import SessionOpened
from tlt.cluster.drafter_state import DrafterWords, describe, pass_over, receive, send
from tlt.cluster.interference import Interval, Over, Ticks, Turns, count
from tlt.cluster.messages import (
    AssignedRequests,
    DrafterOffer,
    DrafterProgress,
    Heartbeat,
    NewestDrafter,
    Published,
    SharedCompletions,
    StatusUpdate,
    UpcomingRequests,
    WorkerRolloutReport,
    WorkerState,
)
from tlt.cluster.placement import Environment, WorkerSlot, cores_of, pin
from tlt.cluster.sessions import Sessions
from tlt.cluster.timeline import Timeline, TimelineSpan
from tlt.cluster.transfer import append_piece, bytes_written, on_host, pieces_of
from tlt.config import RunConfig
from tlt.drafting.idle import Order, State, WorkerStatus, without_rest
from tlt.drafting.trainer import OnlineDrafter
from tlt.engine.request import Request
from tlt.fleet import Peers, Worker
from tlt.following import FollowingWorker
from tlt.machine import wait_for
from tlt.model.fingerprint import fingerprint
from tlt.model.parallel import ALONE, Alone
from tlt.model.transformer import Transformer
from tlt.model.weights import check_finite
from tlt.plan import settled
from tlt.policy import open_slice, source_of
from tlt.train.policy import UpdateResult
from tlt.train.policy_files import ShardedPolicyFiles
from tlt.train.sharded import ShardedTrainer
from tlt.types import Experience

_LOOK_S = 0.02  # seconds between two reads of the inbox while idle
_PATIENCE_S = 60.0  # seconds that a call from another worker waits for the session leader; the caller repeats it
_SESSION_S = 20.0  # seconds without an answer after which the process group of a session is given up

CONTROL = "control"  # concurrency group of calls that must not wait for the work thread
INBOX = "inbox"  # concurrency group of one thread: its calls do not wait for the work thread and stay in order
Message = Order | AssignedRequests | UpcomingRequests | SharedCompletions | DrafterOffer


class RayLeader:
    """Calls to the session leader of another worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def request_join(self, member: int) -> "RayReply":
        return RayReply(self._actor.request_join.remote(member))

    def confirm(self, session: int, member: int, lineage: object) -> "RayReply":
        return RayReply(self._actor.confirm.remote(session, member, lineage))


class RayReply:
    def __init__(self, call: Any) -> None:
        self._call = call

    def ready(self, wait_s: float) -> bool:
        return bool(ray.wait([self._call], timeout=wait_s)[0])

    def get(self) -> Any:
        """None if the other worker is gone."""
        with suppress(ray.exceptions.RayActorError):
            return ray.get(self._call)
        return None


class Host:
    """Made in two steps, the actor and then `open`, so that an error while opening is the error of a call."""

    sessions = Sessions

    def __init__(self, worker_id: int) -> None:
        self._status = WorkerStatus(worker_id)
        self._inbox: deque[Message] = deque()
        self._inbox_changed = Event()
        self._turns = Turns()
        self._outbox: deque[StatusUpdate] = deque()
        self._outbox_changed = Condition()
        self._progress = 0
        self._timeline = Timeline()
        self._sessions = self.sessions(self._status, self._timeline, self._look_around, self._offer, self)
        self._told = 0  # alarms sent
        self._loaded = self._swaps = 0  # version of the engine's drafter; swaps in this rollout
        self._rendezvous_store: RendezvousStore | None = None
        self._write: Callable[[Path], None] = lambda directory: None
        self._writes_to: Path | None = None
        self._parallel: Alone = ALONE
        self._received: TemporaryDirectory[str] | None = None

    def open(self, config: RunConfig, rank: int, slot: WorkerSlot, nccl: bool, engine: Rendezvous | None) -> None:
        """`engine`: where the workers meet that form one engine; None: this one has an engine of its own."""
        config = replace(config, drafting=without_rest(config.drafting))
        on_cpu = config.model.device == "cpu"
        cores = cores_of(slot, config.cluster.cpus_per_worker) if config.cluster.pin and on_cpu else ()
        pin(cores)
        torch.set_num_threads(max(1, len(cores) or int(config.cluster.cpus_per_worker)))
        self._config, self._rank, self._nccl = config, rank, nccl
        self._reduce_group = AllReduceGroup(config.cluster.hang_s, nccl=nccl)
        self._copies = config.train.minibatches * config.train.epochs > 1 and not config.cluster.shard
        if engine is not None:
            at, size = rank % config.cluster.tensor_parallel, config.cluster.tensor_parallel
            self._parallel = engine_ranks(
                engine, at, size, Environment.here().address, config.cluster.hang_s, nccl=nccl
            )
        if not config.cluster.shard:  # with shards, the worker opens in `join`, when their number is known
            self._open_worker()

    def _open_worker(self, **shards: Any) -> None:
        peers = Peers(self._rank, self._add_up, self._sessions.averaging, parallel=self._parallel, **shards)
        self._worker = (FollowingWorker if self._parallel.rank else Worker)(self._config, peers)

    # ---- inbox and outbox

    @ray.method(concurrency_group=CONTROL)
    def describe(self) -> Environment:
        return Environment.here()

    @ray.method(concurrency_group=INBOX)
    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, DrafterOffer):
                with suppress(RayError):  # its leader is gone, and the offer with it
                    self._inbox.append(replace(message, weights=ray.get(message.weights[0])))
            else:
                self._inbox.append(message)
        self._inbox_changed.set()

    @ray.method(concurrency_group=CONTROL)
    def collect(self, patience_s: float) -> Heartbeat:
        """A heartbeat, with status updates as soon as there are any, or without after `patience_s`."""
        with self._outbox_changed:
            self._outbox_changed.wait_for(lambda: bool(self._outbox), timeout=patience_s)
            updates = tuple(self._outbox)
            self._outbox.clear()
        return Heartbeat(self._progress, updates)

    @ray.method(concurrency_group=CONTROL)
    def progress(self) -> int:
        """A counter that changes as long as the current call makes progress."""
        worker = getattr(self, "_worker", None)
        return 0 if worker is None else worker.trainer.passes

    @ray.method(concurrency_group=CONTROL)
    def request_join(self, member: int) -> int | None:
        return self._sessions.leader.request_join(member, _PATIENCE_S)

    @ray.method(concurrency_group=CONTROL)
    def confirm(self, session: int, member: int, lineage: object) -> SessionOpened | None:
        return self._sessions.leader.confirm(session, member, lineage, _PATIENCE_S)

    def _read_inbox(self) -> None:
        self._progress += 1
        while self._inbox:
            match self._inbox.popleft():
                case Order() as order:
                    before = self._status.state
                    self._status.hear(order)
                    if self._status.state is not before:
                        self._send_status()
                case AssignedRequests(hand_out, requests):
                    if self._status.take(hand_out):
                        self._worker.submit(requests)
                case UpcomingRequests(epoch, requests):
                    if epoch == self._status.epoch and self._status.state is not State.READY:
                        self._worker.ahead.offer(requests)
                case SharedCompletions(completions, ids):
                    if self._worker.drafter:
                        self._worker.drafter.learn_from(completions, self._worker.engine.version, ids)
                        self._sessions.rested = False
                case DrafterOffer(version, weights):
                    if version > self._loaded:
                        self._swaps += self._worker.take_drafter(weights, version) is not None
                        self._loaded = version

    def _wait_for_inbox(self) -> None:
        self._inbox_changed.wait(_LOOK_S)
        self._inbox_changed.clear()

    def _look_around(self, wait: bool) -> None:
        if wait:
            self._wait_for_inbox()
        self._read_inbox()

    def _offer(self, drafter: OnlineDrafter) -> None:
        self._send_status(offer=DrafterOffer(drafter.version, [ray.put(on_host(drafter.weights()))]))

    def _send_status(self, **news: Any) -> None:
        with self._outbox_changed:
            self._outbox.append(StatusUpdate(self._status.report(), **news))
            self._outbox_changed.notify()

    # ---- rollout

    def run_rollout(self, epoch: int, peers: Mapping[int, Any], step: int) -> WorkerRolloutReport:
        """Decodes requests, trains the drafter while there are none, until the coordinator ends the rollout."""
        self._sessions.begin({worker_id: RayLeader(actor) for worker_id, actor in peers.items()})
        self._swaps = 0
        self._worker.begin_rollout(step)
        while not (self._status.epoch == epoch and self._status.state is State.READY):
            self._read_inbox()
            state = self._status.state
            if state is State.BUSY and not self._worker.idle:
                self._timeline.enter("rolling")
                self._tick()
            elif state is State.DRAFTING and self._worker.drafter and self._sessions.wanted(self._worker.drafter):
                self._sessions.take_part(self._worker.drafter)
            elif self._worker.ahead.open:
                self._timeline.enter("writing ahead")
                self._worker.finish()
                self._tick()
            else:
                self._timeline.enter("idle")
                self._worker.finish()  # raises if a request failed: the driver would wait for it for ever
                self._wait_for_inbox()
        self._timeline.end()
        report = self._rollout_report()
        self._worker.rest()
        return report

    def follow(self) -> None:
        """Of a worker whose engine is a rank of another's: runs what that one runs, until its rollout is over."""
        assert isinstance(self._worker, FollowingWorker)
        self._worker.follow()

    def _tick(self) -> None:
        completions = self._worker.tick()
        alarms, texts = self._worker.engine.alarms, self._worker.ahead.take_texts()
        new, self._told = tuple(alarms[self._told :]), len(alarms)
        if completions or new or texts:
            self._status.answered(len(completions))
            self._send_status(completions=tuple(completions), alarms=new, texts=texts)

    def _rollout_report(self) -> WorkerRolloutReport:
        texts = self._worker.ahead.end()  # first: the report counts them
        return WorkerRolloutReport(
            spans=self._timeline.take(),
            rollout=self._worker.report(),
            drafted=tuple(self._sessions.led),
            joins=self._sessions.joins,
            join_s=self._sessions.join_s,
            waited_s=self._sessions.waited_s,
            averaging_s=self._sessions.averaging_s,
            swaps=self._swaps,
            texts=texts,
            account=self.account(),
        )

    def begin_replay(self) -> None:
        self._worker.begin_replay()

    def end_replay(self) -> None:
        self._worker.end_replay()

    def begin_evaluation(self) -> None:
        self._worker.begin_evaluation()

    def end_evaluation(self) -> None:
        self._worker.end_evaluation()

    # ---- interference: how training on other workers slows ticks here

    def timed_ticks(self, requests: Sequence[Request]) -> Ticks:
        """Decodes the requests plainly and times every tick."""
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
        """Trains the drafter, alone, in every working turn until `end_turns`. Returns the intervals and micro-steps."""
        before = self._drafter.steps_taken

        def work(over: Over) -> None:
            while not over() and self._drafter.able():
                self._drafter.train(over)

        return self._turns.take(turn_s, work), self._drafter.steps_taken - before

    def count_in_turns(self, turn_s: float) -> tuple[list[Interval], int]:
        return self._turns.take(turn_s, count), 0

    @ray.method(concurrency_group=CONTROL)
    def end_turns(self) -> None:
        self._turns.end()

    @property
    def _drafter(self) -> OnlineDrafter:
        assert self._worker.drafter is not None
        return self._worker.drafter

    # ---- learning

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        self._timeline.enter("updating")
        copy = (
            self.state() if self._copies else None
        )  # of several updates, a lost peer may interrupt any: go back to this
        try:
            with all_reduce_errors():
                return self._worker.update(experiences)
        except AllReduceBroken:
            if copy:
                self.load_state(copy)
            raise
        finally:
            self._timeline.end()

    def _add_up(self, tensors: Sequence[Tensor]) -> None:
        self._progress += 1
        self._reduce_group.all_reduce(tensors)

    def rendezvous(self, name: str) -> Rendezvous:
        """Opens a rendezvous for a new group on this worker."""
        self._rendezvous_store = self._rendezvous_store or RendezvousStore(Environment.here().address)
        return self._rendezvous_store.rendezvous(name)

    def join(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        address, self._group_rank = Environment.here().address, rank
        self._reduce_group.join(rendezvous, rank, size, address)
        if self._config.cluster.shard:
            mesh = self._reduce_group.mesh(rendezvous, rank, size, address, self._config.model.device)

            source = source_of(self._config.model) if self._parallel.size > 1 else None

            def trainer(engine: Transformer, reference: Transformer | None) -> ShardedTrainer:
                sharded = ShardedTrainer(
                    *(engine, settled(self._config), mesh), reference=reference, add_up=self._add_up, source=source
                )
                if source:
                    sharded.publish()
                    check_finite(engine, source)
                return sharded

            files = ShardedPolicyFiles(mesh, self._reduce_group.checkpoint_group())
            opened = partial(open_slice, parallel=self._parallel) if source else None
            self._open_worker(make_trainer=trainer, files=files, open_policy=opened)

    def join_session(self, rendezvous: Rendezvous, rank: int, size: int) -> AllReduceGroup:
        """A process group of the members of a session alone."""
        patience_s = min(_SESSION_S, self._config.cluster.hang_s / 3)  # or it would count as hung beside one that does
        group = AllReduceGroup(patience_s, nccl=self._nccl)
        group.join(rendezvous, rank, size, Environment.here().address)
        return group

    def publish(self, version: int, newest: NewestDrafter | None) -> Published:
        """`newest`: the drafter that some workers are to take over from the one of this rank."""
        self._timeline.enter("publishing")
        if newest is not None:
            self._share_drafter(newest)
        gathered, gather_s = self._gather_policy()
        self._worker.publish(version)
        swapped = self._worker.swap_drafter()
        if self._worker.drafter:
            self._sessions.offered = self._loaded = self._worker.drafter.version
        policy, drafter = self.fingerprint()
        self._timeline.end()
        return Published(policy, drafter, swapped, self._worker.slept, gathered, gather_s)

    def _gather_policy(self) -> tuple[int, float]:
        """Brings the policy from its shards to the engine. Returns bytes and seconds."""
        if not isinstance(self._worker.trainer, ShardedTrainer):
            return 0, 0.0  # the engine reads the trainer's own tensors
        started = time.perf_counter()
        with all_reduce_errors():
            gathered = self._worker.trainer.publish()
            wait_for(self._worker.policy.model.embed.device)
        return gathered, time.perf_counter() - started

    def _share_drafter(self, newest: NewestDrafter) -> None:
        if newest.root == self._group_rank:
            send(self._drafter, self._reduce_group, newest.root)
        elif self._status.worker in newest.behind:
            receive(self._drafter, newest.drafter, self._reduce_group, newest.root)
        else:
            pass_over(newest.drafter, self._reduce_group, newest.root, self._worker.policy.model.embed.device)

    def spans(self) -> tuple[TimelineSpan, ...]:
        return self._timeline.take()

    # ---- state

    def drafter_progress(self) -> DrafterProgress | None:
        drafter = self._worker.drafter
        if drafter is None:
            return None
        return DrafterProgress(drafter.steps_taken, drafter.version, fingerprint(list(drafter.weights().values())))

    def fingerprint(self) -> tuple[int, int | None]:
        """Of policy and drafter, each equal for equal weights; of a drafter where there is one."""
        policy, drafter = self._worker.policy.model, self._worker.drafter
        of_drafter = fingerprint(list(drafter.weights().values())) if drafter else None
        return fingerprint(list(policy.parameters())), of_drafter

    def describe_drafter(self) -> DrafterWords:
        return describe(self._drafter)

    def state(self) -> WorkerState:
        worker = self._worker
        return WorkerState(
            policy=on_host(dict(worker.policy.model.named_parameters())),
            trainer=on_host(worker.trainer.state()),
            drafter=on_host(worker.drafter.state(buffer=False)) if worker.drafter else None,
            version=worker.version,
            account=self.account(),
        )

    @torch.no_grad()
    def load_state(self, state: WorkerState) -> None:
        """Takes over the complete state of another worker."""
        worker = self._worker
        worker.wait_for_copies()
        for name, parameter in worker.policy.model.named_parameters():
            parameter.copy_(state.policy[name])
        worker.trainer.restore(state.trainer)
        if worker.drafter and state.drafter:
            worker.drafter.restore(state.drafter)
        if state.account and worker.account and not worker.account.plain_s:  # a replacement begins as the others
            worker.account.restore([state.account])
        worker.publish(state.version)
        worker.swap_drafter()

    def snapshot(self, rest: bool) -> None:
        """Begins to copy policy and optimizer, or this worker's shards of them. `rest`: also what one worker writes for
        all."""
        self._write = self._worker.snapshot(rest)

    @ray.method(concurrency_group=CONTROL)
    def write(self, directory: Path) -> None:
        """Writes the last snapshot to a directory on this machine."""
        self._writes_to = directory
        self._write(directory)

    @ray.method(concurrency_group=CONTROL)
    def written(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Streams the last snapshot in pieces, for a directory on another machine."""
        with TemporaryDirectory() as directory:
            self._writes_to = Path(directory)
            self._write(self._writes_to)
            yield from pieces_of(self._writes_to)

    @ray.method(concurrency_group=CONTROL)
    def bytes_written(self) -> int:
        """A number that grows while the snapshot is written."""
        return bytes_written(self._writes_to) if self._writes_to else 0

    def account(self) -> dict[str, float] | None:
        """What speculation cost and saved on this worker; None: nothing counts it."""
        return self._worker.account.state() if self._worker.account else None

    def restore_account(self, saved: Sequence[Mapping[str, float]]) -> None:
        if self._worker.account and saved:
            self._worker.account.restore(saved)

    def restore(self, directory: Path, version: int) -> None:
        self._worker.restore(directory, version)

    @ray.method(concurrency_group=CONTROL)
    def sees(self, file: Path) -> bool:
        return file.exists()

    def receive(self, name: str, content: NDArray[np.uint8]) -> None:
        """A piece of a checkpoint that lies on another machine."""
        self._received = self._received or TemporaryDirectory()
        append_piece(name, content, Path(self._received.name))

    def restore_received(self, version: int) -> None:
        assert self._received is not None
        received, self._received = self._received, None
        with received as directory:
            self._worker.restore(Path(directory), version)
