"""One rollout, as the driver sees it: assigns requests, sends orders that follow from reports, collects completions.

What always holds: a completion that arrives twice counts once; an unconfirmed message is sent again; no worker is told
to stop before the last completion has arrived. Does not know what the completions are used for.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from tlt.cluster.actors import ActorGroup
from tlt.cluster.messages import (
    AssignedRequests,
    SharedCompletions,
    StatusUpdate,
    UpcomingRequests,
    WorkerRolloutReport,
)
from tlt.dispatch import Dispatch
from tlt.drafting.idle import Coordinator, State
from tlt.event_builders import acceptance_collapsed
from tlt.loop import Emit
from tlt.multi_turn import MultiTurn
from tlt.types import Completion
from tlt.watch.workers import FleetWaits
from tlt.writing_ahead import NOTHING_AHEAD, AheadWork

_SHARE_S = 0.5  # seconds between two deliveries of the other workers' completions to a worker that trains the drafter
_REMIND_S = 5.0  # seconds between two repetitions of an unconfirmed message
_REPLY_S = 0.01  # seconds that a reply is waited for before the next messages are
_QUIET_S = 60.0  # seconds without any status update after which an event is emitted


class Epoch:
    """Call `begin`, then exhaust `completions` or call `draft`, then `end`."""

    def __init__(
        self,
        actors: ActorGroup,
        coordinator: Coordinator,
        dispatch: Dispatch,
        emit: Emit,
        step: int,
        ahead: Callable[[], AheadWork] | None = None,
    ) -> None:
        """`ahead`: what workers without requests write ahead, asked for when the first one runs dry."""
        self._actors, self._coordinator, self._dispatch, self._emit, self._step = (
            actors,
            coordinator,
            dispatch,
            emit,
            step,
        )
        self._runs: dict[int, Any] = {}  # of the leaders, by worker id
        self._followed: dict[int, Any] = {}  # of the followers
        self._ordered: dict[int, int] = {}  # serial of the last order sent
        self._assigned: dict[int, list[AssignedRequests]] = {}
        self._prompt_ids: dict[Any, str] = {}
        self._written: list[tuple[int, Completion]] = []  # with the id of the worker that wrote it
        self._given: dict[int, tuple[int, float]] = {}  # how many of them each worker has received, and when
        self._reminded = self._heard = time.monotonic()
        self._told_s = _QUIET_S
        self._ask_ahead, self._ahead = ahead, NOTHING_AHEAD

    def begin(self, *, drafting: bool) -> None:
        epoch = self._coordinator.begin(drafting=drafting)
        self._actors.reset_hang_timers()
        peers = {worker_id: member.actor for worker_id, member in self._actors.leaders.items()}
        self._followed = {
            worker_id: member.actor.follow.remote() for worker_id, member in self._actors.followers.items()
        }
        self._runs = {
            worker_id: actor.run_rollout.remote(epoch, peers, self._step) for worker_id, actor in peers.items()
        }

    def completions(self, turns: MultiTurn) -> Iterator[Completion]:
        """Yields until every request has its completion. Workers without requests train the drafter meanwhile."""
        while self._dispatch.open or turns.waiting:
            self._hand_out()
            for completion in self._receive():
                turns.hand_in(completion)
            complete, further = turns.take(_REPLY_S)
            self._dispatch.add(further)
            yield from complete
        self._coordinator.close()

    def draft(self, until: Callable[[], bool]) -> None:
        while not until():
            for _ in self._receive():
                raise AssertionError("a completion without a request")
        self._coordinator.close()

    def end(self) -> dict[int, WorkerRolloutReport]:
        """Waits until every worker has stopped."""
        while not self._coordinator.all_ready:
            for _ in self._receive():
                raise AssertionError("a completion after the last")
        runs = {**self._runs, **self._followed}
        runs = {worker_id: run for worker_id, run in runs.items() if worker_id in self._actors.members}
        answers = self._actors.ask(runs, "rollout").answers
        reports = {worker_id: report for worker_id, report in answers.items() if worker_id in self._runs}
        for report in reports.values():
            self._ahead.texts.put(report.texts)
        return reports

    def lost(self, worker_id: int) -> None:
        """What a lost worker was to write ahead is written by others."""
        self._ahead.queue.lost(worker_id)

    def _hand_out(self) -> None:
        while (assigned := self._dispatch.next()) is not None:
            worker_id, requests = assigned
            self._prompt_ids.update((request.key, request.prompt_id) for request in requests)
            message = AssignedRequests(self._coordinator.hand(worker_id, len(requests)), requests)
            self._assigned.setdefault(worker_id, []).append(message)
            self._actors.post(worker_id, [message])

    def _receive(self) -> Iterator[Completion]:
        self._offer_ahead()
        self._order()
        self._remind()
        for worker_id, update in self._actors.listen(self._runs, self._followed):
            self._heard, self._told_s = time.monotonic(), _QUIET_S
            self._coordinator.hear(update.report)
            self._pass_on(update)
            for completion in update.completions:
                if self._dispatch.completed(worker_id, completion):
                    self._written.append((worker_id, completion))
                    yield completion
        self._share_completions()

    def _order(self) -> None:
        for order in self._coordinator.orders():
            if self._ordered.get(order.worker) != order.serial:
                self._ordered[order.worker] = order.serial
                self._actors.post(order.worker, [order])

    def _remind(self) -> None:
        """Sends unconfirmed messages again (workers ignore duplicates) and emits an event after a long wait."""
        now = time.monotonic()
        if now - self._reminded > _REMIND_S:
            self._reminded = now
            for order in self._coordinator.orders():
                missing = self._coordinator.unconfirmed(order.worker)
                assigned = self._assigned.get(order.worker, [])[missing.start : missing.stop]
                self._actors.post(order.worker, [order, *assigned])
        if now - self._heard > self._told_s:
            self._told_s *= 2
            busy = [
                m.rank
                for worker_id, m in self._actors.leaders.items()
                if self._coordinator.state(worker_id) is State.BUSY
            ]
            self._emit(FleetWaits(self._step, "rollout", tuple(busy), now - self._heard))

    def _offer_ahead(self) -> None:
        """Workers without requests get some of the next step, and do not train the drafter all the time."""
        free = () if self._coordinator.stopped else self._coordinator.free
        if free and self._ask_ahead is not None:
            self._ahead, self._ask_ahead = self._ask_ahead(), None
        for worker_id in free:
            if requests := self._ahead.queue.next(worker_id):
                self._actors.post(worker_id, [UpcomingRequests(self._coordinator.epoch, requests)])
        trainers = self._ahead.split.trainers(len(free), time.monotonic()) if self._ahead.queue.open else None
        self._coordinator.limit_trainers(trainers)

    def _pass_on(self, update: StatusUpdate) -> None:
        self._ahead.texts.put(update.texts, whole=True)
        self._ahead.queue.written(update.report.worker, update.texts)
        for alarm in update.alarms:
            self._emit(acceptance_collapsed(self._step, alarm))
        if update.offer and update.report.epoch == self._coordinator.epoch:
            for worker_id in self._actors.leaders:
                if self._coordinator.state(worker_id) is State.BUSY:
                    self._actors.post(worker_id, [update.offer])

    def _share_completions(self) -> None:
        """Sends each worker that trains the drafter the completions of the other workers."""
        now = time.monotonic()
        for worker_id in self._coordinator.group:
            given, when = self._given.get(worker_id, (0, 0.0))
            new = [completion for writer, completion in self._written[given:] if writer != worker_id]
            if new and now - when >= _SHARE_S:
                ids = tuple(self._prompt_ids[completion.key] for completion in new)
                self._actors.post(worker_id, [SharedCompletions(tuple(new), ids)])
                self._given[worker_id] = (len(self._written), now)
