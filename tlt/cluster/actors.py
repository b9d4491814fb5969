"""The Ray actors of a fleet: starts them, calls them, polls them, and kills the lost ones.

What always holds: every wait is bounded. A worker that dies, or makes no progress for `cluster.hang_s`, is lost: its
process is killed, so it cannot send anything later. An error in a worker's code is raised here as the same error.
Does not know what the calls do.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from tlt.cluster.all_reduce import AllReduceBroken
from tlt.cluster.host import CONTROL, INBOX, Host
from tlt.cluster.liveness import RayLiveness
from tlt.cluster.messages import Heartbeat, StatusUpdate
from tlt.cluster.placement import Environment, WorkerPlaces, WorkerResources, WorkerSlot, check_versions
from tlt.config import RunConfig
from tlt.errors import ClusterError, RankLost, StateLost

_START_S = 300.0  # seconds to wait for the cluster to start a worker's process: torch from a busy disk takes long
_HEARTBEAT_S = 1.0  # seconds between two heartbeats
_POLL_S = 0.02  # seconds between two polls of the actors that start
_LOOK_S = 0.2  # seconds between two checks for hung workers
_GRACE_S = 5.0  # seconds after `hang_s`: a peer that waits for a hung worker reports it first
_LONG_S = 60.0  # seconds of waiting after which an event is emitted

OnLost = Callable[[int, str], None]  # rank, reason
OnLongWait = Callable[[str, Sequence[int], float], None]  # name of the call, ranks, seconds


@dataclass(slots=True)
class Member:
    worker_id: int  # unique in the life of the fleet; a replacement has another one
    rank: int  # below `cluster.workers`; a replacement takes the rank of the lost worker
    actor: Any
    environment: Environment
    slot: WorkerSlot | None
    asked: float  # when it was requested
    progress: int = -1
    moved: float = field(default_factory=time.monotonic)  # when its progress last changed
    heartbeat: Any = None  # the pending call that returns its next heartbeat


@dataclass(slots=True)
class _PendingActor:
    """An actor that is not a member yet: its process starts, then it opens its policy."""

    worker_id: int
    rank: int
    actor: Any
    call: Any  # the pending call; None: it has returned
    environment: Environment | None = None
    slot: WorkerSlot | None = None
    opened: bool = False
    asked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Results of one call to several workers."""

    answers: Mapping[int, Any]  # by worker id
    aborted: tuple[int, ...]  # ids of workers whose all-reduce broke because a peer was lost
    lost: tuple[int, ...]  # ids


def wait_while_it_moves(awaited: Any, ask: Callable[[], list[Any]], limit_s: float, liveness: RayLiveness) -> None:
    """Waits for `awaited` without a limit while the results of the calls that `ask` makes keep changing.

    Raises GetTimeoutError once they have not changed, or have not arrived, for `limit_s`.
    """
    moved, seen, calls = time.monotonic(), None, ask()
    while not ray.wait([awaited], timeout=_LOOK_S)[0]:
        liveness.check()
        if len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls):
            now, calls = ray.get(calls), ask()
            if now != seen:
                moved, seen = time.monotonic(), now
        if time.monotonic() - moved > limit_s:
            raise GetTimeoutError(f"no progress for {limit_s:g} s")


class _ProgressProbe:
    """Polls the progress counter of a worker during a call."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._moved = self._asked = time.monotonic()
        self._seen: int | None = None
        self._call: Any = None

    def stalled_s(self) -> float:
        """Seconds since the counter last changed. A dead worker is noticed by the call itself, not here."""
        now = time.monotonic()
        if self._call is None and now - self._asked > _HEARTBEAT_S:
            self._call, self._asked = self._actor.progress.remote(), now
        elif self._call is not None and ray.wait([self._call], timeout=0)[0]:
            with suppress(RayError):
                if (progress := ray.get(self._call)) != self._seen:
                    self._moved, self._seen = now, progress
            self._call = None
        return now - self._moved


class ActorGroup:
    def __init__(
        self,
        config: RunConfig,
        resources: WorkerResources,
        host: type[Host],
        liveness: RayLiveness,
        *,
        on_lost: OnLost,
        on_long_wait: OnLongWait,
    ) -> None:
        self._config, self._resources, self._host, self._liveness = config, resources, host, liveness
        self._on_lost, self._on_long_wait = on_lost, on_long_wait
        self._ranks = config.cluster.tensor_parallel  # of an engine, which is lost and replaced as a whole
        self._here, self._places = Environment.here(), WorkerPlaces(resources, self._ranks)
        self._next_id = 0
        self._pending: dict[int, _PendingActor] = {}  # by rank
        self.members: dict[int, Member] = {}
        self.losses = 0
        self._abandoned = ""  # why one did not start, the last time that happened

    @property
    def ranks(self) -> dict[int, int]:
        """Worker id by rank."""
        return {member.rank: worker_id for worker_id, member in self.members.items()}

    @property
    def leaders(self) -> dict[int, Member]:
        """By worker id, those that have requests: the first rank of each engine."""
        return {worker_id: member for worker_id, member in self.members.items() if member.rank % self._ranks == 0}

    @property
    def followers(self) -> dict[int, Member]:
        """By worker id, the other ranks of the engines."""
        return {worker_id: member for worker_id, member in self.members.items() if member.rank % self._ranks}

    def followers_of(self, leader: int) -> list[int]:
        """Ids of the other ranks of its engine."""
        engine = self.members[leader].rank // self._ranks
        return [worker_id for worker_id, member in self.followers.items() if member.rank // self._ranks == engine]

    def on_this_machine(self, worker_id: int) -> bool:
        return self.members[worker_id].environment.node == self._here.node

    # ---- starting

    def start(self, ranks: Sequence[int]) -> list[int]:
        """Starts a worker for each rank and returns their ids. Raises ClusterError if one does not start in time."""
        self.request(ranks)
        started, arrived = time.monotonic(), list[int]()
        while self._pending:
            arrived += self.take_started()
            unplaced = [a for a in self._pending.values() if a.environment is None]
            if unplaced and time.monotonic() - started > _START_S:
                free = ray.available_resources()
                raise ClusterError(
                    f"{len(unplaced)} of {len(ranks)} workers were not started within {_START_S:g} s; the cluster has "
                    f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free, each worker needs "
                    f"{self._resources.cpus:g} and {self._resources.gpus:g}; wait for others, or lower cluster.workers"
                )
            self._raise_if_late(time.monotonic() - started)
            time.sleep(_POLL_S)
        if not arrived:
            raise ClusterError(f"no worker started. {self._abandoned}; see to the machines")
        return arrived

    def _raise_if_late(self, seconds: float) -> None:
        limit_s = _START_S + self._config.cluster.hang_s
        if self._pending and seconds > limit_s:
            hosts = sorted({one.environment.host for one in self._pending.values() if one.environment})
            raise ClusterError(
                f"workers {sorted(self._pending)} on {', '.join(hosts)} did not open their policy within "
                f"{limit_s:g} s; see whether {self._config.model.path} can be read there, or raise cluster.hang_s"
            )

    def request(self, ranks: Sequence[int]) -> None:
        """Requests workers from Ray without waiting. `take_started` picks up those that have started."""
        for rank in ranks:
            actor = self._actor(self._next_id, rank)
            self._pending[rank] = _PendingActor(self._next_id, rank, actor, actor.describe.remote())
            self._next_id += 1

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks without a member and without a pending actor."""
        taken = {*self.ranks, *self._pending}
        return [rank for rank in range(self._config.cluster.workers) if rank not in taken]

    def take_started(self) -> list[int]:
        """Ids of the workers that have become members since the last call, all ranks of an engine together. Never
        waits."""
        self._liveness.check()
        arrived = []
        for engine in self._pending_engines():
            try:
                started = [self._advance(pending) for pending in engine]
                if all(started):
                    self._open(engine)
                if all(pending.opened for pending in engine):
                    arrived += [self._admit(pending) for pending in engine]
            except RayTaskError as error:
                if not isinstance(error.cause, RankLost):
                    raise (error.cause if isinstance(error.cause, Exception) else error) from error
                self._abandon(engine, str(error.cause))
            except RayError as error:  # one died while starting: the ranks of its engine are missing again
                self._abandon(engine, f"it died ({str(error).strip().splitlines()[-1]})")
        return arrived

    def _pending_engines(self) -> list[list["_PendingActor"]]:
        engines: dict[int, list[_PendingActor]] = {}
        for rank, pending in sorted(self._pending.items()):
            engines.setdefault(rank // self._ranks, []).append(pending)
        return list(engines.values())

    def _advance(self, pending: "_PendingActor") -> bool:
        """Takes what a pending actor's call has returned, if it has. True if it has started and is to be opened."""
        if pending.call is not None and ray.wait([pending.call], timeout=0)[0]:
            reply, pending.call = self._liveness.get(pending.call), None
            if pending.environment is None:
                pending.environment = reply
                check_versions(self._here, [reply])
                pending.slot = self._free_slot(reply.node)
            else:
                pending.opened = True
        return pending.call is None and not pending.opened

    def _open(self, engine: Sequence["_PendingActor"]) -> None:
        """Lets all ranks of an engine open their policy; they meet at the first."""
        leader = engine[0]
        meeting = leader.actor.rendezvous.remote(f"engine-{leader.worker_id}") if len(engine) > 1 else None
        for pending in engine:
            whole_gpu = self._resources.gpus >= 1
            pending.call = pending.actor.open.remote(self._config, pending.rank, pending.slot, whole_gpu, meeting)

    def _admit(self, pending: "_PendingActor") -> int:
        assert pending.environment is not None
        del self._pending[pending.rank]
        self.members[pending.worker_id] = Member(
            *(pending.worker_id, pending.rank, pending.actor),
            environment=pending.environment,
            slot=pending.slot,
            asked=pending.asked,
        )
        return pending.worker_id

    def _abandon(self, engine: Sequence["_PendingActor"], reason: str) -> None:
        self._abandoned = f"worker {engine[0].rank}: {reason}"
        for pending in engine:
            self._end(pending)
            del self._pending[pending.rank]

    def _free_slot(self, node: str) -> WorkerSlot:
        """The first slot number that is free on that machine."""
        everyone: list[Member | _PendingActor] = [*self.members.values(), *self._pending.values()]
        taken = {one.slot.number for one in everyone if one.slot and one.environment and one.environment.node == node}
        number = next(slot for slot in count() if slot not in taken)
        unknown = sum(one.environment is None for one in everyone)  # Ray may place them on this machine as well
        return WorkerSlot(number, max(number, *taken, 0) + 1 + unknown)

    def _actor(self, worker_id: int, rank: int) -> Any:
        threads = 2 * self._config.cluster.workers + 4  # each member may block in this actor's reducer, plus heartbeats
        remote = ray.remote(concurrency_groups={CONTROL: threads, INBOX: 1})(self._host)
        return remote.options(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            scheduling_strategy=self._places.of(rank),
            max_concurrency=1,
            runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive"}},
        ).remote(worker_id)

    # ---- calling

    def ask_all(self, method: str, *arguments: Any) -> CallOutcome:
        calls = {worker_id: getattr(m.actor, method).remote(*arguments) for worker_id, m in self.members.items()}
        return self.ask(calls, method)

    def ask(self, calls: Mapping[int, Any], what: str) -> CallOutcome:
        """Waits for the results. A worker without progress counts as lost; any error but AllReduceBroken is raised."""
        waiting = {call: worker_id for worker_id, call in calls.items()}
        probes = {
            worker_id: _ProgressProbe(self.members[worker_id].actor) for worker_id in calls if worker_id in self.members
        }
        answers: dict[int, Any] = {}
        aborted: list[int] = []
        lost: list[int] = []
        started, told = time.monotonic(), _LONG_S
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
            self._liveness.check()
            for call in done:
                worker_id = waiting.pop(call)
                try:
                    answers[worker_id] = self._liveness.get(call)
                except RayTaskError as error:
                    if isinstance(error.cause, RankLost):
                        lost.append(self.drop(worker_id, f"lost a rank of its engine during {what}"))
                    else:
                        self._raise_unless_aborted(error)
                        aborted.append(worker_id)
                except RayError as error:
                    lost.append(self.drop(worker_id, f"died during {what} ({type(error).__name__})"))
            for call, worker_id in list(waiting.items()):
                if worker_id in probes and probes[worker_id].stalled_s() > self._config.cluster.hang_s + _GRACE_S:
                    del waiting[call]
                    lost.append(self.drop(worker_id, f"hung during {what}"))
            seconds = time.monotonic() - started
            if waiting and seconds > told:
                told *= 2
                ranks = [self.members[worker_id].rank for worker_id in waiting.values() if worker_id in self.members]
                self._on_long_wait(what, ranks, seconds)
        answers = {worker_id: answer for worker_id, answer in answers.items() if worker_id in self.members}
        return CallOutcome(answers, tuple(w for w in aborted if w in self.members), tuple(lost))

    @staticmethod
    def _raise_unless_aborted(error: RayTaskError) -> None:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if not isinstance(cause, AllReduceBroken):
            raise cause from error

    def ask_one(self, worker_id: int, method: str, *arguments: Any) -> Any:
        """One worker's result; None if the worker was lost during the call."""
        call = getattr(self.members[worker_id].actor, method).remote(*arguments)
        return self.ask({worker_id: call}, method).answers.get(worker_id)

    def ask_for_reference(self, worker_id: int, method: str, *arguments: Any) -> Any:
        """A Ray reference to one worker's result, to pass on to other workers; None if the worker was lost first."""
        call = getattr(self.members[worker_id].actor, method).remote(*arguments)
        return call if worker_id in self.ask({worker_id: call}, method).answers else None

    def post(self, worker_id: int, messages: Sequence[Any]) -> None:
        self._liveness.check()
        self.members[worker_id].actor.post.remote(list(messages))

    # ---- heartbeats

    def listen(self, runs: dict[int, Any], followed: dict[int, Any]) -> Iterator[tuple[int, StatusUpdate]]:
        """Status updates that have arrived; waits up to 0.2 s for the first.

        `runs`: the pending rollout call of each leader; `followed`: that of each follower, which sends no updates. Lost
        workers are removed from them.
        """
        for calls in (runs, followed):
            for worker_id in [worker_id for worker_id in calls if worker_id not in self.members]:
                del calls[worker_id]
        for worker_id in runs:
            member = self.members[worker_id]
            member.heartbeat = member.heartbeat or member.actor.collect.remote(_HEARTBEAT_S)
        heartbeats = {self.members[worker_id].heartbeat: worker_id for worker_id in runs}
        if not heartbeats:
            return
        ray.wait(list(heartbeats), timeout=_LOOK_S)
        self._liveness.check()
        done, _ = ray.wait(list(heartbeats), num_returns=len(heartbeats), timeout=0)
        for call in done:
            yield from self._heard(heartbeats[call], call)
        self._drop_hung(runs, "rollout")
        self._look_at(runs)
        self._look_at(followed)

    def _heard(self, worker_id: int, call: Any) -> Iterator[tuple[int, StatusUpdate]]:
        member = self.members[worker_id]
        member.heartbeat = None
        try:
            heartbeat: Heartbeat = self._liveness.get(call)
        except RayError as error:
            self.drop(worker_id, f"died during rollout ({type(error).__name__})")
            return
        if heartbeat.progress != member.progress:
            member.progress, member.moved = heartbeat.progress, time.monotonic()
        for update in heartbeat.updates:
            yield worker_id, update

    def _look_at(self, runs: Mapping[int, Any]) -> None:
        """Raises the error of a rollout call that has ended with one."""
        over = ray.wait(list(runs.values()), num_returns=len(runs), timeout=0)[0] if runs else []
        for worker_id, run in runs.items():
            if run in over and worker_id in self.members:
                self.ask({worker_id: run}, "rollout")

    def _drop_hung(self, worker_ids: Iterable[int], what: str) -> None:
        now = time.monotonic()
        for worker_id in [worker_id for worker_id in worker_ids if worker_id in self.members]:
            if now - self.members[worker_id].moved > self._config.cluster.hang_s:
                self.drop(worker_id, f"hung during {what}: no progress for {self._config.cluster.hang_s:g} s")

    def reset_hang_timers(self) -> None:
        """Starts the time limit of every worker anew."""
        for member in self.members.values():
            member.moved = time.monotonic()

    # ---- losing

    def drop(self, worker_id: int, reason: str) -> int:
        """With it go the other ranks of its engine, each of which has only a slice of the policy."""
        self._liveness.check()  # if Ray itself is gone, say that instead of blaming a worker
        if worker_id not in self.members:
            return worker_id
        rank = self.members[worker_id].rank
        first = rank - rank % self._ranks
        engine = [self.members.pop(one) for at, one in self.ranks.items() if first <= at < first + self._ranks]
        for member in engine:
            self._end(member)
        self.losses += 1
        for member in engine:
            self._on_lost(
                member.rank, reason if member.rank == rank else f"ended, as rank {rank} of its engine {reason}"
            )
        if not self.members:
            raise StateLost(f"every worker was lost, the last one {reason}; go on with --resume")
        if self.losses > self._config.cluster.restarts:
            raise ClusterError(
                f"{self.losses} workers were lost, the last one {reason}; see to the machines and go on with --resume, "
                "or allow more with cluster.restarts"
            )
        return worker_id

    def _end(self, one: "Member | _PendingActor") -> None:
        if not self._liveness.dead:
            with suppress(RayError):
                ray.kill(one.actor)
        if one.environment and one.environment.node == self._here.node:  # a stopped (SIGSTOP) process ignores ray.kill
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one.environment.pid, signal.SIGKILL)

    def stop(self) -> None:
        everyone: list[Member | _PendingActor] = [*self.members.values(), *self._pending.values()]
        for one in everyone:
            self._end(one)
        if not self._liveness.dead:  # otherwise releasing Ray's handles would end this process
            self.members, self._pending = {}, {}
            self._places.close()
