"""One rollout, as the driver sees it: requests go out, orders follow from reports, answers come back.

What always holds: an answer that comes twice counts once; what a worker may not have heard is said again; nobody is
told to stop before the last answer is here. Knows nothing of what the answers are for.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from tlt.cluster.actors import ActorGroup
from tlt.cluster.messages import Handed, News, RollReport, SharedCompletions
from tlt.dispatch import Dispatch
from tlt.drafting.idle import Coordinator, State
from tlt.event_builders import acceptance_collapsed
from tlt.loop import Emit
from tlt.types import Completion
from tlt.watch.workers import FleetWaits

_SHARE_S = 0.5  # seconds between two deliveries of others' answers to a worker that drafts
_REMIND_S = 5.0  # seconds between two repetitions of what may not have been heard
_QUIET_S = 60.0  # seconds without any news after which somebody should know


class Epoch:
    """`begin`, then take all `answers`, or `draft`; then `end`."""

    def __init__(self, actors: ActorGroup, desk: Coordinator, dispatch: Dispatch, emit: Emit, step: int) -> None:
        self._actors, self._desk, self._dispatch, self._emit, self._step = actors, desk, dispatch, emit, step
        self._runs: dict[int, Any] = {}
        self._ordered: dict[int, int] = {}  # serial of the last order sent
        self._handed: dict[int, list[Handed]] = {}
        self._prompt_ids: dict[Any, str] = {}
        self._written: list[tuple[int, Completion]] = []  # by whom
        self._shared: dict[int, tuple[int, float]] = {}  # how many of these a worker was given, and when
        self._reminded = self._heard = time.monotonic()
        self._told_s = _QUIET_S

    def begin(self, *, drafting: bool) -> None:
        epoch = self._desk.begin(drafting=drafting)
        self._actors.awake()
        peers = {seat: member.actor for seat, member in self._actors.members.items()}
        self._runs = {seat: actor.roll.remote(epoch, peers) for seat, actor in peers.items()}

    def answers(self) -> Iterator[Completion]:
        """Until every request is answered; whoever has none left trains the drafter."""
        while self._dispatch.open:
            self._hand_out()
            yield from self._hear()
        self._desk.close()

    def draft(self, until: Callable[[], bool]) -> None:
        while not until():
            for _ in self._hear():
                raise AssertionError("an answer to nothing")
        self._desk.close()

    def end(self) -> dict[int, RollReport]:
        """Waits until everyone has stopped."""
        while not self._desk.all_ready:
            for _ in self._hear():
                raise AssertionError("an answer after the last")
        runs = {seat: run for seat, run in self._runs.items() if seat in self._actors.members}
        return dict(self._actors.ask(runs, "rollout").answers)

    def _hand_out(self) -> None:
        while (handed := self._dispatch.next()) is not None:
            seat, requests = handed
            self._prompt_ids.update((request.key, request.prompt_id) for request in requests)
            message = Handed(self._desk.hand(seat, len(requests)), requests)
            self._handed.setdefault(seat, []).append(message)
            self._actors.post(seat, [message])

    def _hear(self) -> Iterator[Completion]:
        self._order()
        self._remind()
        for seat, news in self._actors.listen(self._runs):
            self._heard, self._told_s = time.monotonic(), _QUIET_S
            self._desk.hear(news.report)
            self._pass_on(news)
            for completion in news.completions:
                if self._dispatch.completed(seat, completion):
                    self._written.append((seat, completion))
                    yield completion
        self._share()

    def _order(self) -> None:
        for order in self._desk.orders():
            if self._ordered.get(order.worker) != order.serial:
                self._ordered[order.worker] = order.serial
                self._actors.post(order.worker, [order])

    def _remind(self) -> None:
        """Whatever was not confirmed is said again: who has heard it will ignore it. Long silence is an event."""
        now = time.monotonic()
        if now - self._reminded > _REMIND_S:
            self._reminded = now
            for order in self._desk.orders():
                missing = self._desk.unconfirmed(order.worker)
                handed = self._handed.get(order.worker, [])[missing.start : missing.stop]
                self._actors.post(order.worker, [order, *handed])
        if now - self._heard > self._told_s:
            self._told_s *= 2
            busy = [m.rank for seat, m in self._actors.members.items() if self._desk.state(seat) is State.BUSY]
            self._emit(FleetWaits(self._step, "rollout", tuple(busy), now - self._heard))

    def _pass_on(self, news: News) -> None:
        for alarm in news.alarms:
            self._emit(acceptance_collapsed(self._step, alarm))
        if news.offer and news.report.epoch == self._desk.epoch:
            for seat in self._actors.members:
                if self._desk.state(seat) is State.BUSY:
                    self._actors.post(seat, [news.offer])

    def _share(self) -> None:
        """Who trains the drafter learns from what everyone wrote."""
        now = time.monotonic()
        for seat in self._desk.group:
            given, when = self._shared.get(seat, (0, 0.0))
            news = [completion for writer, completion in self._written[given:] if writer != seat]
            if news and now - when >= _SHARE_S:
                ids = tuple(self._prompt_ids[completion.key] for completion in news)
                self._actors.post(seat, [SharedCompletions(tuple(news), ids)])
                self._shared[seat] = (len(self._written), now)
