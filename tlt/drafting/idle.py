"""Decides which workers train the drafter and until when: those without requests, until the rollout's last completion.

A rollout is an epoch, and every message names its epoch. Messages carry the whole state, not changes, and are numbered:
an older or repeated message, or one of another epoch, is ignored, and the next message repairs a lost one. No worker is
told to stop while any worker has a request. A worker that is told to stop, or is assigned a request, leaves training
before its next micro-step. Does not know how messages are sent or what a micro-step is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from tlt.config import DraftingSettings
from tlt.errors import TltError


def without_rest(settings: DraftingSettings) -> DraftingSettings:
    """Settings for workers that train only in idle time: it costs nothing, so training never rests."""
    return replace(settings, probe=1, gain=0.0)


class State(StrEnum):
    """What a worker does."""

    BUSY = "busy"  # has requests
    IDLE = "idle"  # has none
    DRAFTING = "drafting"  # has none and trains the drafter
    READY = "ready"  # the rollout is over


@dataclass(frozen=True, slots=True)
class HandOut:
    """Coordinator to worker: an assignment of requests."""

    epoch: int
    worker: int
    number: int  # 1, 2, … for each worker, in each epoch
    requests: int  # how many


@dataclass(frozen=True, slots=True)
class Order:
    """Coordinator to worker: the complete orders."""

    epoch: int
    worker: int
    serial: int  # of two orders of an epoch, the one with the larger serial is valid
    handed: int  # hand-outs made to this worker so far
    group: tuple[int, ...]  # workers that train the drafter, the leader first
    stop: bool  # the rollout is over


@dataclass(frozen=True, slots=True)
class Report:
    """Worker to coordinator: its progress."""

    epoch: int
    worker: int
    serial: int
    state: State
    taken: int  # hand-outs received
    unanswered: int  # requests among them without a completion


class WorkerStatus:
    """A worker's side. Its state follows from its requests and the newest order alone."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._order = Order(epoch=-1, worker=worker, serial=0, handed=0, group=(), stop=True)
        self._taken = self._unanswered = self._serial = 0

    @property
    def epoch(self) -> int:
        return self._order.epoch

    @property
    def group(self) -> tuple[int, ...]:
        """The workers that train the drafter, by the newest order."""
        return self._order.group

    @property
    def state(self) -> State:
        if self._unanswered or self._taken < self._order.handed:
            return State.BUSY
        if self._order.stop:
            return State.READY
        # an order older than the last hand-out does not count it: do not draft
        wanted = self.worker in self._order.group and self._taken == self._order.handed
        return State.DRAFTING if wanted else State.IDLE

    def take(self, hand_out: HandOut) -> bool:
        """True if this hand-out is the next one, whose requests the worker must take. Others are sent again."""
        if hand_out.worker != self.worker or hand_out.epoch < self.epoch:
            return False
        if hand_out.epoch > self.epoch:
            if hand_out.number != 1:
                return False  # an epoch begins with hand-out 1
            self._enter(Order(hand_out.epoch, self.worker, serial=0, handed=0, group=(), stop=False))
        if hand_out.number != self._taken + 1 or self._order.stop:
            return False
        self._taken += 1
        self._unanswered += hand_out.requests
        return True

    def answered(self, requests: int = 1) -> None:
        if requests > self._unanswered:
            raise AssertionError(f"{requests} requests answered, only {self._unanswered} were open")
        self._unanswered -= requests

    def hear(self, order: Order) -> None:
        if order.worker != self.worker or order.epoch < self.epoch:
            return
        if order.epoch > self.epoch:
            self._enter(order)
        elif order.serial > self._order.serial:
            self._order = order

    def report(self) -> Report:
        self._serial += 1
        return Report(self.epoch, self.worker, self._serial, self.state, self._taken, self._unanswered)

    def _enter(self, order: Order) -> None:
        if self._unanswered:
            raise AssertionError(f"epoch {order.epoch} begins with {self._unanswered} requests of the last one open")
        self._order, self._taken = order, 0


class IdleSplit:
    """Number of workers without requests that train the drafter; the others write ahead.

    Over a rollout, training gets the fraction `share` of these workers' time, in turns of at least `turn_s` seconds,
    because a change of work costs a worker time.
    """

    def __init__(self, share: float, turn_s: float = 1.0) -> None:
        self._share, self._turn_s = share, turn_s
        self._free_s = self._trained_s = 0.0  # worker-seconds without requests; of these, in training
        self._free = self._trainers = 0
        self._seen: float | None = None
        self._turn = 0.0  # start of the present turn

    def trainers(self, free: int, now: float) -> int:
        """Number of trainers among `free` workers without requests. `now`: seconds."""
        passed_s = now - self._seen if self._seen is not None else 0.0
        self._free_s += passed_s * self._free
        self._trained_s += passed_s * self._trainers
        self._seen = now
        if free != self._free or now - self._turn >= self._turn_s:
            owed_s = self._share * (self._free_s + free * self._turn_s) - self._trained_s  # by the end of this turn
            self._trainers = max(0, min(free, round(owed_s / self._turn_s)))
            self._free, self._turn = free, now
        return self._trainers


class Coordinator:
    """The fleet's side: hand-outs and reports of every worker, and the orders that follow from them.

    Workers may be lost and others may join; a worker id is never used again.
    """

    def __init__(self, workers: Iterable[int], *, epoch: int = -1) -> None:
        self._epoch = epoch
        self._handed = dict.fromkeys(workers, 0)
        self._reports: dict[int, Report] = {}  # the newest of this epoch
        self._group: tuple[int, ...] = ()
        self._orders: dict[int, Order] = {}
        self._drafting = False
        self._most_trainers: int | None = None  # workers that train the drafter at most; None: all without requests
        self._open = False  # requests may still be handed out
        self._stopped = True

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self._handed)

    @property
    def group(self) -> tuple[int, ...]:
        return self._group

    @property
    def stopped(self) -> bool:
        """Whether the epoch is over. The workers may not know it yet."""
        return self._stopped

    @property
    def all_ready(self) -> bool:
        """Whether every worker has reported that it stopped."""
        return self._stopped and all(self.state(worker) is State.READY for worker in self._handed)

    def state(self, worker: int) -> State:
        """A worker's state by its last report; requests handed out since count as well."""
        report = self._reports.get(worker)
        if report is None or report.taken < self._handed[worker]:
            return State.BUSY
        return report.state

    def begin(self, *, drafting: bool) -> int:
        """Begins a new epoch, open for requests. Returns its number."""
        if not self._stopped:
            raise AssertionError(f"epoch {self._epoch} is not over")
        self._epoch += 1
        self._handed = dict.fromkeys(self._handed, 0)
        self._reports, self._orders, self._group, self._most_trainers = {}, {}, (), None
        self._drafting, self._open, self._stopped = drafting, True, False
        return self._epoch

    @property
    def free(self) -> tuple[int, ...]:
        """Workers without requests."""
        return tuple(worker for worker in self._handed if self._dry(worker))

    def limit_trainers(self, most: int | None) -> None:
        """Limits the workers that train the drafter, from the next orders on; None: all without requests."""
        self._most_trainers = most

    def hand(self, worker: int, requests: int) -> HandOut:
        if not self._open:
            raise AssertionError(f"epoch {self._epoch} takes no more requests")
        self._handed[worker] += 1
        return HandOut(self._epoch, worker, self._handed[worker], requests)

    def hear(self, report: Report) -> None:
        """Takes a report. Ignores those of other epochs, of lost workers, and older ones."""
        known = self._reports.get(report.worker)
        if report.epoch != self._epoch or report.worker not in self._handed:
            return
        if known is None or report.serial > known.serial:
            self._reports[report.worker] = report

    def unconfirmed(self, worker: int) -> range:
        """Numbers of the hand-outs that a worker has not confirmed."""
        report = self._reports.get(worker)
        return range(report.taken if report else 0, self._handed[worker])

    def lost(self, worker: int) -> None:
        """Removes a worker. Its open requests must be handed to others before the epoch is closed."""
        for book in (self._handed, self._reports, self._orders):
            book.pop(worker, None)
        if not self._handed:
            raise TltError("no worker is left")

    def join(self, worker: int) -> None:
        """Adds a worker, which takes part at once."""
        self._handed[worker] = 0

    def close(self) -> None:
        """Every request of the epoch has its completion; no more are handed out."""
        self._open = False

    def orders(self) -> list[Order]:
        """The orders of all workers. An unchanged order keeps its serial, so it may be sent any number of times."""
        dry = self.free
        if not self._open and len(dry) == len(self._handed):
            self._stopped = True
        stays = tuple(worker for worker in self._group if worker in dry)
        joins = tuple(worker for worker in dry if worker not in stays)
        self._group = () if self._stopped or not self._drafting else (stays + joins)[: self._most_trainers]
        return [self._order(worker) for worker in self._handed]

    def _dry(self, worker: int) -> bool:
        report = self._reports.get(worker)
        return report is not None and report.taken == self._handed[worker] and not report.unanswered

    def _order(self, worker: int) -> Order:
        last = self._orders.get(worker)
        content = (self._handed[worker], self._group, self._stopped)
        if last is None or (last.handed, last.group, last.stop) != content:
            serial = last.serial + 1 if last else 1
            self._orders[worker] = Order(self._epoch, worker, serial, *content)
        return self._orders[worker]
