"""A worker's part in data-parallel drafter training: it leads a session, or asks to join one, until its orders change.

What always holds: the worker reads its inbox between two micro-steps, and has left before the next one if it was
assigned a request. Every session takes at least one micro-step, so joining workers delay training but never stop it. A
worker that loses its leader during a micro-step discards that step. Does not know how calls reach other workers.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tlt.cluster.averaging import GradientAveraging, GradientReducer, LeftSession, MeanGradient, Vector
from tlt.cluster.timeline import Timeline
from tlt.cluster.transfer import on_host
from tlt.drafting.idle import State, WorkerStatus
from tlt.drafting.session import DraftingResult
from tlt.drafting.trainer import OnlineDrafter

_LOOK_S = 0.02  # seconds between two reads of the inbox while waiting for a reply
_REJOIN_S = 0.5  # seconds that a new session waits for the members of the last one


class Reply(Protocol):
    def ready(self, wait_s: float) -> bool: ...

    def get(self) -> Any: ...


class ReducerClient(Protocol):
    """Asynchronous calls to the gradient reducer of another worker."""

    def request_join(self, member: int) -> Reply: ...

    def give(self, session: int, step: int, member: int, vector: Vector) -> Reply: ...


class Sessions:
    """`read_inbox(wait)` reads the inbox, after a short wait if `wait`; `offer` sends a drafter to the driver."""

    def __init__(
        self,
        status: WorkerStatus,
        timeline: Timeline,
        read_inbox: Callable[[bool], None],
        offer: Callable[[OnlineDrafter], None],
    ) -> None:
        self._status, self._timeline, self._read_inbox, self._offer = status, timeline, read_inbox, offer
        self._averaging = GradientAveraging()
        self.reducer = GradientReducer(status.worker)
        self.average = self._averaging.average
        self.offered = 0  # version of the newest drafter that was offered
        self._session_from = 0  # micro-steps taken before the session began
        self.begin({})

    def begin(self, reducers: Mapping[int, ReducerClient]) -> None:
        """Begins a rollout with the workers of these reducers."""
        self._reducers = reducers
        self._members: set[int] = set()  # of the last session that this worker led
        self.rested = False  # training no longer gains on the completions received so far
        self.led: list[DraftingResult] = []
        self.joins, self.join_s, self.waited_s = 0, 0.0, 0.0

    def wanted(self, drafter: OnlineDrafter) -> bool:
        return not self.rested and drafter.able()

    def take_part(self, drafter: OnlineDrafter) -> None:
        """Leads or joins one session, from begin to end. Returns without one if the leader opens none."""
        leader = self._status.group[0]
        try:
            result = self._lead(drafter) if leader == self._status.worker else self._follow(drafter, leader)
        except LeftSession:
            drafter.restore(drafter.state(buffer=False))  # discards the gradients of the interrupted micro-step
            return
        finally:
            self._averaging.leave()
            self.waited_s += self._averaging.waited_s
        self.rested = result is not None and result.ended in ("rested", "no answers")

    # ---- leading

    def _lead(self, drafter: OnlineDrafter) -> DraftingResult:
        self._session_from = drafter.steps_taken
        cold = not self._session_from  # the leader alone chooses the draft vocabulary, in the first micro-step
        joining = set() if cold else self._joining()
        self._timeline.enter("drafting")
        self.reducer.open(sorted(joining), on_host(drafter.state(buffer=False)) if joining else None)

        def must_end() -> bool:
            return self._must_end(drafter)

        if joining:
            self._averaging.enter(lambda own: self.reducer.mean(own, lambda: self._present(joining), must_end))
        try:
            result = drafter.train((lambda: self._averaging.over) if joining else must_end)
        finally:
            self.reducer.close()
        self._announce(drafter)
        if result.micro_steps:
            self.led.append(result)
        return result

    def _joining(self) -> set[int]:
        """Workers that have asked to join. Waits briefly for the members of the last session to ask again."""
        until = time.perf_counter() + _REJOIN_S
        while time.perf_counter() < until:
            group = set(self._status.group)
            if self._members & group <= set(self.reducer.requesters(group)):
                break
            self._read_inbox(True)
        self._members = set(self.reducer.requesters(self._status.group))
        return self._members

    def _present(self, members: set[int]) -> set[int]:
        self._read_inbox(False)
        return members & set(self._status.group)

    def _must_end(self, drafter: OnlineDrafter) -> bool:
        """Checked between micro-steps."""
        self._read_inbox(False)
        self._announce(drafter)
        if not self._follows(self._status.worker):
            return True
        return drafter.steps_taken > self._session_from and bool(self.reducer.requesters(self._status.group))

    def _announce(self, drafter: OnlineDrafter) -> None:
        """Offers a drafter that became better at once: other workers may still decode long completions."""
        somebody_writes = len(self._status.group) < len(self._reducers)
        if somebody_writes and drafter.version > self.offered:
            self.offered = drafter.version
            self._offer(drafter)

    # ---- following

    def _follow(self, drafter: OnlineDrafter, leader: int) -> DraftingResult | None:
        self._timeline.enter("idle")
        asked, reducer = time.perf_counter(), self._reducers[leader]
        admission = self._answer(reducer.request_join(self._status.worker), lambda: self._follows(leader))
        if admission is None:
            return None
        self._timeline.enter("drafting")
        drafter.restore(admission.state)
        self.joins, self.join_s = self.joins + 1, self.join_s + time.perf_counter() - asked
        self._averaging.enter(lambda own: self._give(leader, admission.session, own))
        return drafter.train(lambda: self._averaging.over)

    def _give(self, leader: int, session: int, own: Vector) -> MeanGradient:
        def goes_on() -> bool:  # after the stop order the leader still finishes the round
            return self._status.state is State.READY or self._follows(leader)

        reply = self._reducers[leader].give(session, self._averaging.rounds + 1, self._status.worker, own)
        mean: MeanGradient | None = self._answer(reply, goes_on)
        if mean is None:
            raise LeftSession
        return mean

    def _follows(self, leader: int) -> bool:
        return self._status.state is State.DRAFTING and self._status.group[:1] == (leader,)

    def _answer(self, reply: Reply, goes_on: Callable[[], bool]) -> Any:
        """The leader's reply; None once `goes_on` is False."""
        while not reply.ready(_LOOK_S):
            self._read_inbox(False)
            if not goes_on():
                return None
        return reply.get()
