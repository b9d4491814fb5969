"""The crew: the actors of a fleet. Hired, asked, listened to, and buried when they are lost.

What always holds: every wait has an end. Whoever dies, or shows no progress for `cluster.hang_s`, is lost, and whoever
is lost is dead: it cannot come back and say something. An error in a worker's code is raised here as it was there.
Knows nothing of what the workers are asked.
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

from tlt.cluster.host import MAIL, POST, Host
from tlt.cluster.lifeline import Lifeline
from tlt.cluster.messages import Beat, News
from tlt.cluster.placement import Environment, Share, WorkerSlot, check_versions
from tlt.cluster.ring import RingBroken
from tlt.config import RunConfig
from tlt.errors import ClusterError, StateLost

_START_S = 300.0  # seconds to wait for the cluster to start a worker's process: torch from a busy disk takes long
_BEAT_S = 1.0  # seconds between two signs of life
_POLL_S = 0.02  # seconds between two looks at who has arrived
_LOOK_S = 0.2  # seconds between two looks at who is late
_GRACE_S = 5.0  # seconds that the hung are given longer than those who wait for them
_LONG_S = 60.0  # seconds of waiting after which somebody should know

OnLost = Callable[[int, str], None]  # rank, reason
OnLongWait = Callable[[str, Sequence[int], float], None]  # what for, ranks, seconds


@dataclass(slots=True)
class Member:
    seat: int  # never used again
    rank: int  # of all ranks below `cluster.workers`, each is taken at most once
    actor: Any
    environment: Environment
    lane: WorkerSlot | None
    asked: float  # when it was asked for
    progress: int = -1
    moved: float = field(default_factory=time.monotonic)  # when its progress last changed
    beat: Any = None  # the call that brings its next sign of life


@dataclass(slots=True)
class _Applicant:
    """On its way to be a member: its process starts, then it opens its policy."""

    seat: int
    rank: int
    actor: Any
    call: Any  # what is waited for
    environment: Environment | None = None
    lane: WorkerSlot | None = None
    asked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of a question to many."""

    answers: Mapping[int, Any]  # by seat
    parted: tuple[int, ...]  # seats of those who were left alone in the ring
    lost: tuple[int, ...]


def wait_while_it_moves(awaited: Any, ask: Callable[[], Any], limit_s: float, lifeline: Lifeline) -> None:
    """Until what is awaited is there, however long that takes: but GetTimeoutError once what `ask` calls for has been
    the same, or has not come, for so long."""
    moved, seen, call = time.monotonic(), None, ask()
    while not ray.wait([awaited], timeout=_LOOK_S)[0]:
        lifeline.check()
        if ray.wait([call], timeout=0)[0]:
            now, call = ray.get(call), ask()
            if now != seen:
                moved, seen = time.monotonic(), now
        if time.monotonic() - moved > limit_s:
            raise GetTimeoutError(f"no progress for {limit_s:g} s")


class _Pulse:
    """Whether a worker that was asked something gets on with it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._moved = self._asked = time.monotonic()
        self._seen: int | None = None
        self._call: Any = None

    def still_s(self) -> float:
        """Seconds since it was last seen to have moved. Whoever died is found out by what was asked of it."""
        now = time.monotonic()
        if self._call is None and now - self._asked > _BEAT_S:
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
        share: Share,
        host: type[Host],
        lifeline: Lifeline,
        *,
        told: OnLost,
        waits: OnLongWait,
    ) -> None:
        self._config, self._share, self._host, self._lifeline = config, share, host, lifeline
        self._told, self._waits = told, waits
        self._here = Environment.here()
        self._seats = 0
        self._applicants: dict[int, _Applicant] = {}  # by rank
        self.members: dict[int, Member] = {}
        self.losses = 0

    @property
    def ranks(self) -> dict[int, int]:
        """Seat by rank."""
        return {member.rank: seat for seat, member in self.members.items()}

    def on_this_machine(self, seat: int) -> bool:
        return self.members[seat].environment.node == self._here.node

    # ---- hiring

    def hire(self, ranks: Sequence[int]) -> list[int]:
        """A worker for each rank, with the policy it was configured with; their seats. Raises if they do not come."""
        self.apply(ranks)
        started, arrived = time.monotonic(), list[int]()
        while self._applicants:
            arrived += self.arrivals()
            unplaced = [a for a in self._applicants.values() if a.environment is None]
            if unplaced and time.monotonic() - started > _START_S:
                free = ray.available_resources()
                raise ClusterError(
                    f"{len(unplaced)} of {len(ranks)} workers were not started within {_START_S:g} s; the cluster has "
                    f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free, each worker needs "
                    f"{self._share.cpus:g} and {self._share.gpus:g}; wait for others, or lower cluster.workers"
                )
            self._raise_if_late(time.monotonic() - started)
            time.sleep(_POLL_S)
        return arrived

    def _raise_if_late(self, seconds: float) -> None:
        limit_s = _START_S + self._config.cluster.hang_s
        if self._applicants and seconds > limit_s:
            hosts = sorted({one.environment.host for one in self._applicants.values() if one.environment})
            raise ClusterError(
                f"workers {sorted(self._applicants)} on {', '.join(hosts)} did not open their policy within "
                f"{limit_s:g} s; see whether {self._config.model.path} can be read there, or raise cluster.hang_s"
            )

    def apply(self, ranks: Sequence[int]) -> None:
        """Asks the cluster for workers. They come when they can: see `arrivals`."""
        for rank in ranks:
            actor = self._actor(self._seats)
            self._applicants[rank] = _Applicant(self._seats, rank, actor, actor.describe.remote())
            self._seats += 1

    @property
    def wanting(self) -> list[int]:
        """Ranks that nobody has or is about to have."""
        taken = {*self.ranks, *self._applicants}
        return [rank for rank in range(self._config.cluster.workers) if rank not in taken]

    def arrivals(self) -> list[int]:
        """Seats of those who are there now and were not before. Never waits."""
        self._lifeline.check()
        arrived = []
        for applicant in list(self._applicants.values()):
            try:
                if self._advance(applicant):
                    arrived.append(applicant.seat)
            except RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from error
            except RayError:  # it died on the way: another may be asked for
                del self._applicants[applicant.rank]
        return arrived

    def _advance(self, applicant: "_Applicant") -> bool:
        """One step on the way from an actor that was asked for to a member."""
        if not ray.wait([applicant.call], timeout=0)[0]:
            return False
        reply = self._lifeline.get(applicant.call)
        if applicant.environment is None:
            applicant.environment = reply
            check_versions(self._here, [reply])
            applicant.lane = lane = self._lane(reply.node)
            applicant.call = applicant.actor.open.remote(self._config, applicant.rank, lane, self._share.gpus >= 1)
            return False
        del self._applicants[applicant.rank]
        self.members[applicant.seat] = Member(
            *(applicant.seat, applicant.rank, applicant.actor),
            environment=applicant.environment,
            lane=applicant.lane,
            asked=applicant.asked,
        )
        return True

    def _lane(self, node: str) -> WorkerSlot:
        """The first that nobody else on that machine has."""
        everyone: list[Member | _Applicant] = [*self.members.values(), *self._applicants.values()]
        taken = {one.lane.number for one in everyone if one.lane and one.environment and one.environment.node == node}
        number = next(lane for lane in count() if lane not in taken)
        unknown = sum(one.environment is None for one in everyone)  # they may be put there, too
        return WorkerSlot(number, max(number, *taken, 0) + 1 + unknown)

    def _actor(self, seat: int) -> Any:
        threads = 2 * self._config.cluster.workers + 4  # each member may wait at this one's desk, and others beside
        remote = ray.remote(concurrency_groups={MAIL: threads, POST: 1})(self._host)
        return remote.options(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            max_concurrency=1,
            runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive"}},
        ).remote(seat)

    # ---- asking

    def ask_all(self, method: str, *arguments: Any) -> CallOutcome:
        calls = {seat: getattr(m.actor, method).remote(*arguments) for seat, m in self.members.items()}
        return self.ask(calls, method)

    def ask(self, calls: Mapping[int, Any], what: str) -> CallOutcome:
        """Waits for everyone's answer. Those who get on with nothing are lost; other errors than a broken ring are
        raised."""
        waiting = {call: seat for seat, call in calls.items()}
        pulses = {seat: _Pulse(self.members[seat].actor) for seat in calls if seat in self.members}
        answers: dict[int, Any] = {}
        parted: list[int] = []
        lost: list[int] = []
        started, told = time.monotonic(), _LONG_S
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
            self._lifeline.check()
            for call in done:
                seat = waiting.pop(call)
                try:
                    answers[seat] = self._lifeline.get(call)
                except RayTaskError as error:
                    self._raise_unless_parted(error)
                    parted.append(seat)
                except RayError as error:
                    self.drop(seat, f"died during {what} ({type(error).__name__})")
                    lost.append(seat)
            for call, seat in list(waiting.items()):
                if seat in pulses and pulses[seat].still_s() > self._config.cluster.hang_s + _GRACE_S:
                    del waiting[call]
                    lost.append(self.drop(seat, f"hung during {what}"))
            seconds = time.monotonic() - started
            if waiting and seconds > told:
                told *= 2
                self._waits(what, [self.members[seat].rank for seat in waiting.values()], seconds)
        return CallOutcome(answers, tuple(parted), tuple(lost))

    @staticmethod
    def _raise_unless_parted(error: RayTaskError) -> None:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if not isinstance(cause, RingBroken):
            raise cause from error

    def one(self, seat: int, method: str, *arguments: Any) -> Any:
        """One worker's answer; None if it was lost on the way."""
        call = getattr(self.members[seat].actor, method).remote(*arguments)
        return self.ask({seat: call}, method).answers.get(seat)

    def keep(self, seat: int, method: str, *arguments: Any) -> Any:
        """One worker's answer as others can be handed it, kept in the cluster; None if the worker was lost first."""
        call = getattr(self.members[seat].actor, method).remote(*arguments)
        return call if seat in self.ask({seat: call}, method).answers else None

    def post(self, seat: int, messages: Sequence[Any]) -> None:
        self._lifeline.check()
        self.members[seat].actor.post.remote(list(messages))

    # ---- listening

    def listen(self, runs: dict[int, Any]) -> Iterator[tuple[int, News]]:
        """What anybody has to say by now; waits a moment for the first. `runs`: what they are all at meanwhile.

        Who is lost, or whose run is over, is not listened to any more.
        """
        for seat in [seat for seat in runs if seat not in self.members]:
            del runs[seat]
        for seat in runs:
            member = self.members[seat]
            member.beat = member.beat or member.actor.collect.remote(_BEAT_S)
        beats = {self.members[seat].beat: seat for seat in runs}
        if not beats:
            return
        ray.wait(list(beats), timeout=_LOOK_S)
        self._lifeline.check()
        done, _ = ray.wait(list(beats), num_returns=len(beats), timeout=0)
        for call in done:
            yield from self._heard(beats[call], call)
        self._drop_hung(runs, "rollout")
        self._look_at(runs)

    def _heard(self, seat: int, call: Any) -> Iterator[tuple[int, News]]:
        member = self.members[seat]
        member.beat = None
        try:
            beat: Beat = self._lifeline.get(call)
        except RayError as error:
            self.drop(seat, f"died during rollout ({type(error).__name__})")
            return
        if beat.progress != member.progress:
            member.progress, member.moved = beat.progress, time.monotonic()
        for news in beat.news:
            yield seat, news

    def _look_at(self, runs: Mapping[int, Any]) -> None:
        """An error in a worker's code ends what it was at."""
        over, _ = ray.wait(list(runs.values()), num_returns=len(runs), timeout=0)
        for seat, run in runs.items():
            if run in over and seat in self.members:
                self.ask({seat: run}, "rollout")

    def _drop_hung(self, seats: Iterable[int], what: str) -> None:
        now = time.monotonic()
        for seat in [seat for seat in seats if seat in self.members]:
            if now - self.members[seat].moved > self._config.cluster.hang_s:
                self.drop(seat, f"hung during {what}: no progress for {self._config.cluster.hang_s:g} s")

    def awake(self) -> None:
        """Whatever they did until now, nobody is late."""
        for member in self.members.values():
            member.moved = time.monotonic()

    # ---- burying

    def drop(self, seat: int, reason: str) -> int:
        self._lifeline.check()  # whose end takes the workers along
        member = self.members.pop(seat)
        self._end(member)
        self.losses += 1
        self._told(member.rank, reason)
        if not self.members:
            raise StateLost(f"every worker was lost, the last one {reason}; go on with --resume")
        if self.losses > self._config.cluster.restarts:
            raise ClusterError(
                f"{self.losses} workers were lost, the last one {reason}; see to the machines and go on with --resume, "
                "or allow more with cluster.restarts"
            )
        return seat

    def _end(self, one: "Member | _Applicant") -> None:
        if not self._lifeline.torn:
            with suppress(RayError):
                ray.kill(one.actor)
        if one.environment and one.environment.node == self._here.node:  # one that is stopped cannot be asked to go
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one.environment.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        everyone: list[Member | _Applicant] = [*self.members.values(), *self._applicants.values()]
        for one in everyone:
            self._end(one)
        if not self._lifeline.torn:  # or to drop what Ray keeps for them would end this process
            self.members, self._applicants = {}, {}
