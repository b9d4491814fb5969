"""Who trains the drafter and until when: workers without requests, until the last answer of the rollout is in.

A rollout is an epoch, and every message names its own. Messages say how things are, not what has changed, and are
numbered: an older one, a repeated one or one from another epoch changes nothing, and a lost one is made good by the
next. Nobody is told to stop while anybody has an answer to write. Whoever is told to stop, or is handed a request, has
left the drafter's training before its next micro-step. Knows nothing of how messages travel or what a micro-step is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from tlt.config import DraftingSettings
from tlt.errors import TltError


def without_rest(settings: DraftingSettings) -> DraftingSettings:
    """For workers that train only when nobody waits for them: the time is free, and never too good for training."""
    return replace(settings, probe=1, gain=0.0)


class State(StrEnum):
    """What a worker is at."""

    BUSY = "busy"  # has answers to write
    IDLE = "idle"  # has none
    DRAFTING = "drafting"  # trains the drafter meanwhile
    READY = "ready"  # the rollout is over


@dataclass(frozen=True, slots=True)
class HandOut:
    """Coordinator to worker: requests to answer."""

    epoch: int
    worker: int
    number: int  # 1, 2, … for each worker, in each epoch
    requests: int  # how many


@dataclass(frozen=True, slots=True)
class Order:
    """Coordinator to worker: how things stand."""

    epoch: int
    worker: int
    serial: int  # of two orders of an epoch, the one with the larger serial holds
    handed: int  # hand-outs made to this worker so far
    group: tuple[int, ...]  # who trains the drafter, the leader first
    stop: bool  # the rollout is over


@dataclass(frozen=True, slots=True)
class Report:
    """Worker to coordinator: how far it is."""

    epoch: int
    worker: int
    serial: int
    state: State
    taken: int  # hand-outs received
    unanswered: int  # requests among them that are still being written


class WorkerStatus:
    """A worker's side. Its state follows from what it holds and the newest order; nothing else is remembered."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._order = Order(epoch=-1, worker=worker, serial=0, handed=0, group=(), stop=True)
        self._taken = self._unanswered = self._serial = 0

    @property
    def epoch(self) -> int:
        return self._order.epoch

    @property
    def group(self) -> tuple[int, ...]:
        """Who trains the drafter, as far as this worker has heard."""
        return self._order.group

    @property
    def state(self) -> State:
        if self._unanswered or self._taken < self._order.handed:
            return State.BUSY
        if self._order.stop:
            return State.READY
        # an order older than the last hand-out knows nothing of it: no reason to draft
        wanted = self.worker in self._order.group and self._taken == self._order.handed
        return State.DRAFTING if wanted else State.IDLE

    def take(self, hand_out: HandOut) -> bool:
        """Whether these requests are new and next in line: then they are to be answered. Others come again."""
        if hand_out.worker != self.worker or hand_out.epoch < self.epoch:
            return False
        if hand_out.epoch > self.epoch:
            if hand_out.number != 1:
                return False  # would begin the epoch, but is not its beginning
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


class Coordinator:
    """The fleet's side: books of who was handed what and who has reported what, and the orders that follow from them.

    Workers may be lost and others may come; a number is never used again. `hold` keeps everyone from drafting.
    """

    def __init__(self, workers: Iterable[int], *, epoch: int = -1) -> None:
        self._epoch = epoch
        self._handed = dict.fromkeys(workers, 0)
        self._reports: dict[int, Report] = {}  # the newest of this epoch
        self._group: tuple[int, ...] = ()
        self._orders: dict[int, Order] = {}
        self._hold = True
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
        """Whether the epoch is over for everyone, heard or not."""
        return self._stopped

    @property
    def all_ready(self) -> bool:
        """Whether everyone has said that they stopped."""
        return self._stopped and all(self.state(worker) is State.READY for worker in self._handed)

    def state(self, worker: int) -> State:
        """As far as reported; handed requests count at once."""
        report = self._reports.get(worker)
        if report is None or report.taken < self._handed[worker]:
            return State.BUSY
        return report.state

    def begin(self, *, drafting: bool) -> int:
        """A new epoch, open for requests; its number."""
        if not self._stopped:
            raise AssertionError(f"epoch {self._epoch} is not over")
        self._epoch += 1
        self._handed = dict.fromkeys(self._handed, 0)
        self._reports, self._orders, self._group = {}, {}, ()
        self._hold, self._open, self._stopped = not drafting, True, False
        return self._epoch

    def hand(self, worker: int, requests: int) -> HandOut:
        if not self._open:
            raise AssertionError(f"epoch {self._epoch} takes no more requests")
        self._handed[worker] += 1
        return HandOut(self._epoch, worker, self._handed[worker], requests)

    def hear(self, report: Report) -> None:
        """Reports of other epochs, of the lost, and older ones than the newest are nothing."""
        known = self._reports.get(report.worker)
        if report.epoch != self._epoch or report.worker not in self._handed:
            return
        if known is None or report.serial > known.serial:
            self._reports[report.worker] = report

    def unconfirmed(self, worker: int) -> range:
        """Numbers of the hand-outs that a worker has not yet said it has."""
        report = self._reports.get(worker)
        return range(report.taken if report else 0, self._handed[worker])

    def lost(self, worker: int) -> None:
        """What it was handed and has not answered must be handed to others before the epoch is closed."""
        for book in (self._handed, self._reports, self._orders):
            book.pop(worker, None)
        if not self._handed:
            raise TltError("no worker is left")

    def join(self, worker: int) -> None:
        """Takes part at once."""
        self._handed[worker] = 0

    def close(self) -> None:
        """Every request of the epoch has been answered; nobody will be handed another."""
        self._open = False

    def hold(self) -> None:
        """No drafting for the rest of the epoch: more of it would be wasted."""
        self._hold = True

    def orders(self) -> list[Order]:
        """What everyone should know now. The same order as before if nothing has changed: tell it as often as liked."""
        dry = [worker for worker in self._handed if self._dry(worker)]
        if not self._open and len(dry) == len(self._handed):
            self._stopped = True
        stays = tuple(worker for worker in self._group if worker in dry)
        joins = tuple(worker for worker in dry if worker not in stays)
        self._group = () if self._hold or self._stopped else stays + joins
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


class Rounds:
    """The leader's book of the micro-steps: who takes part, whose gradient is in, when the step may be taken.

    Who joins takes part from the next micro-step on; who leaves is waited for no longer. A gradient counts once, and
    only in the micro-step it was computed for.
    """

    def __init__(self) -> None:
        self.step = 0
        self._joined: list[int] = []
        self._expected: frozenset[int] = frozenset()
        self._given: set[int] = set()

    @property
    def complete(self) -> bool:
        return self._expected <= self._given

    @property
    def contributors(self) -> tuple[int, ...]:
        """Whose gradients the step is made of, in a fixed order."""
        return tuple(sorted(self._given))

    def join(self, member: int) -> int:
        """The first micro-step it takes part in."""
        if member not in self._joined:
            self._joined.append(member)
        return self.step if member in self._expected else self.step + 1

    def keep(self, members: Iterable[int]) -> None:
        """Only these remain, of those who joined."""
        remaining = set(members)
        self._joined = [member for member in self._joined if member in remaining]
        self._expected &= remaining

    def give(self, member: int, step: int) -> bool:
        """Whether the gradient counts."""
        counts = step == self.step and member in self._expected and member not in self._given
        if counts:
            self._given.add(member)
        return counts

    def advance(self) -> None:
        self.step += 1
        self._expected = frozenset(self._joined)
        self._given = set()
