"""A worker's part in training the drafter together: leads a session, or asks to join one, until told otherwise.

What always holds: between two micro-steps the worker looks around, and has left before the next one if it was handed a
request. Every session takes a micro-step at least, so that newcomers delay training and never stop it. Whoever was left
alone in the middle of a micro-step has not taken it. Knows nothing of how calls travel, nor what it is trained for.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tlt.cluster.timeline import Timeline
from tlt.cluster.together import GradientDesk, Mean, Parted, Together, Vector
from tlt.cluster.transfer import on_host
from tlt.drafting.idle import State, WorkerStatus
from tlt.drafting.trainer import DraftingResult, OnlineDrafter

_LOOK_S = 0.02  # between two looks around while waiting for an answer
_REJOIN_S = 0.5  # that the members of the last session are waited for


class Reply(Protocol):
    def here(self, wait_s: float) -> bool: ...

    def get(self) -> Any: ...


class FarDesk(Protocol):
    """The desk of another worker: what it answers comes later."""

    def request_join(self, member: int) -> Reply: ...

    def give(self, session: int, step: int, member: int, vector: Vector) -> Reply: ...


class Sessions:
    """`look_around` reads the mail, and waits a moment for it if asked to; `offer` tells of a better drafter."""

    def __init__(
        self,
        seat: WorkerStatus,
        timeline: Timeline,
        look_around: Callable[[bool], None],
        offer: Callable[[OnlineDrafter], None],
    ) -> None:
        self._seat, self._timeline, self._look_around, self._offer = seat, timeline, look_around, offer
        self._together = Together()
        self.desk = GradientDesk(seat.worker)
        self.average = self._together.average
        self.offered = 0  # version of the drafter that others know of
        self._session_from = 0  # micro-steps that had been taken when the session began
        self.begin({})

    def begin(self, desks: Mapping[int, FarDesk]) -> None:
        """A new rollout, with these others in it."""
        self._desks = desks
        self._members: set[int] = set()  # of the last session that this worker led
        self.rested = False  # the drafter wants no more training, as far as the answers at hand tell
        self.led: list[DraftingResult] = []
        self.joins, self.join_s, self.waited_s = 0, 0.0, 0.0

    def wanted(self, drafter: OnlineDrafter) -> bool:
        return not self.rested and drafter.able()

    def take_part(self, drafter: OnlineDrafter) -> None:
        """One session, from its beginning to its end; or none, if there is none to join."""
        leader = self._seat.group[0]
        try:
            result = self._lead(drafter) if leader == self._seat.worker else self._follow(drafter, leader)
        except Parted:
            drafter.restore(drafter.state(buffer=False))  # drops the gradients of the micro-step that was not taken
            return
        finally:
            self._together.leave()
            self.waited_s += self._together.waited_s
        self.rested = result is not None and result.ended in ("rested", "no answers")

    # ---- leading

    def _lead(self, drafter: OnlineDrafter) -> DraftingResult:
        self._session_from = drafter.steps_taken
        cold = not self._session_from  # which tokens it can name is yet to be chosen, by one
        joining = set() if cold else self._joining()
        self._timeline.enter("drafting")
        self.desk.open(sorted(joining), on_host(drafter.state(buffer=False)) if joining else None)

        def must_end() -> bool:
            return self._must_end(drafter)

        if joining:
            self._together.enter(lambda own: self.desk.mean(own, lambda: self._present(joining), must_end))
        try:
            result = drafter.train((lambda: self._together.over) if joining else must_end)
        finally:
            self.desk.close()
        self._tell_of(drafter)
        if result.micro_steps:
            self.led.append(result)
        return result

    def _joining(self) -> set[int]:
        """Who has asked to join. Those of the last session will: they are given a moment."""
        until = time.perf_counter() + _REJOIN_S
        while time.perf_counter() < until:
            group = set(self._seat.group)
            if self._members & group <= set(self.desk.wishers(group)):
                break
            self._look_around(True)
        self._members = set(self.desk.wishers(self._seat.group))
        return self._members

    def _present(self, members: set[int]) -> set[int]:
        self._look_around(False)
        return members & set(self._seat.group)

    def _must_end(self, drafter: OnlineDrafter) -> bool:
        """Asked between micro-steps."""
        self._look_around(False)
        self._tell_of(drafter)
        if not self._follows(self._seat.worker):
            return True
        return drafter.steps_taken > self._session_from and bool(self.desk.wishers(self._seat.group))

    def _tell_of(self, drafter: OnlineDrafter) -> None:
        """A drafter that became better is told of at once: somebody may have a long answer to write yet."""
        somebody_writes = len(self._seat.group) < len(self._desks)
        if somebody_writes and drafter.version > self.offered:
            self.offered = drafter.version
            self._offer(drafter)

    # ---- following

    def _follow(self, drafter: OnlineDrafter, leader: int) -> DraftingResult | None:
        self._timeline.enter("idle")
        asked, desk = time.perf_counter(), self._desks[leader]
        admission = self._answer(desk.request_join(self._seat.worker), lambda: self._follows(leader))
        if admission is None:
            return None
        self._timeline.enter("drafting")
        drafter.restore(admission.state)
        self.joins, self.join_s = self.joins + 1, self.join_s + time.perf_counter() - asked
        self._together.enter(lambda own: self._give(leader, admission.session, own))
        return drafter.train(lambda: self._together.over)

    def _give(self, leader: int, session: int, own: Vector) -> Mean:
        def goes_on() -> bool:  # when all are told to stop, the leader still finishes the round
            return self._seat.state is State.READY or self._follows(leader)

        reply = self._desks[leader].give(session, self._together.rounds + 1, self._seat.worker, own)
        mean: Mean | None = self._answer(reply, goes_on)
        if mean is None:
            raise Parted
        return mean

    def _follows(self, leader: int) -> bool:
        return self._seat.state is State.DRAFTING and self._seat.group[:1] == (leader,)

    def _answer(self, reply: Reply, goes_on: Callable[[], bool]) -> Any:
        """What the leader answers; None if there is no reason any more to wait for it."""
        while not reply.here(_LOOK_S):
            self._look_around(False)
            if not goes_on():
                return None
        return reply.get()
