"""A worker's part in data-parallel drafter training: it leads a session, or asks to join one, until its orders change.

What always holds: the worker reads its inbox between two micro-steps, and has left after the next one if it was
assigned a request. Every session takes at least one micro-step, so joining workers delay training but never stop it. A
worker whose session breaks discards the micro-step under way. Only as many workers train together as pay. Does not know
how calls reach other workers.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tlt.cluster.all_reduce import AllReduceBroken, Rendezvous
from tlt.cluster.averaging import LeftSession, ProcessGroup, SessionAveraging, SessionLeader, SessionOpened
from tlt.cluster.drafter_state import describe, receive, send
from tlt.cluster.timeline import Timeline
from tlt.drafting.group_size import GroupSize
from tlt.drafting.idle import State, WorkerStatus
from tlt.drafting.session import DraftingResult
from tlt.drafting.trainer import OnlineDrafter

_LOOK_S = 0.02  # seconds between two reads of the inbox while waiting for a reply
_REJOIN_S = 0.5  # seconds that a new session waits for the members of the last one
_CONFIRM_S = 0.5  # seconds that invited workers have to confirm


class Reply(Protocol):
    def ready(self, wait_s: float) -> bool: ...

    def get(self) -> Any: ...


class LeaderClient(Protocol):
    """Asynchronous calls to the `SessionLeader` of another worker."""

    def request_join(self, member: int) -> Reply: ...

    def confirm(self, session: int, member: int, lineage: object) -> Reply: ...


class Network(Protocol):
    """Process groups of the members of sessions."""

    def rendezvous(self, name: str) -> Rendezvous:
        """A place on this worker for the members of a new group to meet."""

    def join_session(self, rendezvous: Rendezvous, rank: int, size: int) -> ProcessGroup:
        """Raises AllReduceBroken unless all members come."""


class Sessions:
    """`read_inbox(wait)` reads the inbox, after a short wait if `wait`; `offer` sends a drafter to the driver."""

    def __init__(
        self,
        status: WorkerStatus,
        timeline: Timeline,
        read_inbox: Callable[[bool], None],
        offer: Callable[[OnlineDrafter], None],
        network: Network,
    ) -> None:
        self._status, self._timeline, self._read_inbox, self._offer = status, timeline, read_inbox, offer
        self._network = network
        self.averaging = SessionAveraging()
        self.leader = SessionLeader()
        self.offered = 0  # version of the newest drafter that was offered
        self._every = 1  # micro-steps between two averagings of the session that this worker leads
        self._session_from = 0  # micro-steps taken before the session began
        self._lineage: object = None  # equal on workers whose drafters are equal, bit by bit
        self.begin({})

    def begin(self, leaders: Mapping[int, LeaderClient]) -> None:
        """Begins a rollout with these workers."""
        self._leaders = leaders
        self._members: set[int] = set()  # of the last session that this worker led
        self._pays = GroupSize(max(1, len(leaders)))
        self._lineage = None  # drafters were published since
        self.rested = False  # training no longer gains on the completions received so far
        self.led: list[DraftingResult] = []
        self.joins, self.join_s, self.waited_s, self.averaging_s = 0, 0.0, 0.0, 0.0

    def wanted(self, drafter: OnlineDrafter) -> bool:
        return not self.rested and drafter.able()

    def take_part(self, drafter: OnlineDrafter) -> None:
        """Leads or joins one session, from begin to end. Returns without one if the leader opens none."""
        leader = self._status.group[0]
        try:
            result = self._lead(drafter) if leader == self._status.worker else self._follow(drafter, leader)
        except LeftSession:
            self._lineage = None
            drafter.restore(drafter.state(buffer=False))  # discards the gradients of the interrupted micro-step
            return
        finally:
            self.averaging.leave()
            self.waited_s += self.averaging.waited_s
            self.averaging_s += self.averaging.averaging_s
        self.rested = result is not None and result.ended in ("rested", "no answers")

    # ---- leading

    def _lead(self, drafter: OnlineDrafter) -> DraftingResult:
        self._session_from = drafter.steps_taken
        cold = not self._session_from  # the leader alone chooses the draft vocabulary, in the first micro-step
        joining = () if cold else self._joining()
        self._timeline.enter("drafting")
        try:
            opened = self._open(drafter, joining)
            if opened:
                self._enter(drafter, opened)
            result = self._train(drafter, opened)
        finally:
            self.leader.close()
        self._announce(drafter)
        if result.micro_steps:
            self.led.append(result)
        return result

    def _joining(self) -> tuple[int, ...]:
        """Workers that have asked to join. Waits briefly for the members of the last session to ask again."""
        until = time.perf_counter() + _REJOIN_S
        while time.perf_counter() < until:
            group = set(self._status.group)
            if self._members & group <= set(self.leader.requesters(group)):
                break
            self._read_inbox(True)
        asking = self.leader.requesters(self._status.group)
        known = sorted(asking, key=lambda member: (member not in self._members, member))
        joining = tuple(known[: self._pays.most - 1])
        self._members = set(joining)
        return joining

    def _open(self, drafter: OnlineDrafter, joining: tuple[int, ...]) -> SessionOpened | None:
        """Opens a session with those that confirm; None if nobody does."""
        session = self.leader.invite(joining)
        confirmed = self.leader.wait_confirmed(joining, _CONFIRM_S) if joining else {}
        if not confirmed:
            return None
        equal = self._lineage is not None and all(lineage == self._lineage for lineage in confirmed.values())
        self._members = set(confirmed)
        opened = SessionOpened(
            session,
            leader=self._status.worker,
            members=tuple(sorted((*confirmed, self._status.worker))),
            rendezvous=self._network.rendezvous(f"session-{self._status.worker}-{self._status.epoch}-{session}"),
            every=max(1, self._pays.every(len(confirmed) + 1)),
            drafter=None if equal else describe(drafter),
        )
        self._every = opened.every
        self.leader.open(opened)
        return opened

    def _must_end(self, drafter: OnlineDrafter) -> bool:
        """Checked between micro-steps."""
        self._read_inbox(False)
        self._announce(drafter)
        if not self._follows(self._status.worker):
            return True
        if drafter.steps_taken <= self._session_from:
            return False
        members = len(self._members) + 1
        if members < self._pays.most and self.leader.requesters(self._status.group):
            return True
        self._pays.observe(members, self.averaging.measured())
        return members > self._pays.most or (members > 1 and self._too_often(members))

    def _too_often(self, members: int) -> bool:
        """Whether this session averages more than twice as often as pays."""
        return self._pays.every(members) > 2 * self._every

    def _announce(self, drafter: OnlineDrafter) -> None:
        """Offers a drafter that became better at once: other workers may still decode long completions."""
        somebody_writes = len(self._status.group) < len(self._leaders)
        if somebody_writes and drafter.version > self.offered:
            self.offered = drafter.version
            self._offer(drafter)

    # ---- following

    def _follow(self, drafter: OnlineDrafter, leader: int) -> DraftingResult | None:
        self._timeline.enter("idle")
        asked, client = time.perf_counter(), self._leaders[leader]
        session = self._answer(client.request_join(self._status.worker), lambda: self._follows(leader))
        if session is None:
            return None
        reply = client.confirm(session, self._status.worker, self._lineage)
        until = time.perf_counter() + 2 * _CONFIRM_S + _LOOK_S  # confirmed: it stays, whatever its orders are now
        opened: SessionOpened | None = self._answer(reply, lambda: time.perf_counter() < until)
        if opened is None:
            return None
        self._timeline.enter("drafting")
        self._session_from = drafter.steps_taken
        self._enter(drafter, opened)
        self.joins, self.join_s = self.joins + 1, self.join_s + time.perf_counter() - asked
        return self._train(drafter, opened)

    def _follows(self, leader: int) -> bool:
        return self._status.state is State.DRAFTING and self._status.group[:1] == (leader,)

    def _answer(self, reply: Reply, goes_on: Callable[[], bool]) -> Any:
        """The leader's reply; None once `goes_on` is False."""
        while not reply.ready(_LOOK_S):
            self._read_inbox(False)
            if not goes_on():
                return None
        return reply.get()

    # ---- both

    def _enter(self, drafter: OnlineDrafter, opened: SessionOpened) -> None:
        """Connects with the other members and takes over the leader's drafter."""
        rank, size = opened.members.index(self._status.worker), len(opened.members)
        try:
            group = self._network.join_session(opened.rendezvous, rank, size)
            self.averaging.enter(group, size, lambda: self._wants_to_end(drafter, opened.leader), opened.every)
            if opened.drafter is not None:
                root = opened.members.index(opened.leader)
                if rank == root:
                    send(drafter, group, root)
                else:
                    receive(drafter, opened.drafter, group, root)
        except AllReduceBroken as error:
            raise LeftSession(str(error)) from error

    def _wants_to_end(self, drafter: OnlineDrafter, leader: int) -> bool:
        if leader == self._status.worker:
            return self._must_end(drafter)
        self._read_inbox(False)
        return not self._follows(leader)

    def _train(self, drafter: OnlineDrafter, opened: SessionOpened | None) -> DraftingResult:
        if opened is None:
            self._lineage = None
            return drafter.train(lambda: self._must_end(drafter))
        result = drafter.train(lambda: self.averaging.over)
        # of averaged weights, Adam's moments are each member's own
        ended_together = self.averaging.over and result.ended == "stopped" and opened.every == 1
        self._lineage = (opened.rendezvous, drafter.steps_taken) if ended_together else None
        return result
