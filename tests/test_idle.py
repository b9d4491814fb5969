"""Idle workers: however badly messages travel, everyone ends ready, nobody too early, and old words change nothing."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import DraftingSettings
from tlt.drafting.cadence import Cadence
from tlt.drafting.idle import Coordinator, HandOut, Order, Report, State, WorkerStatus, without_rest
from tlt.errors import TltError

LEGAL = {
    State.READY: {State.BUSY, State.IDLE},  # the next epoch
    State.BUSY: {State.IDLE},
    State.IDLE: {State.DRAFTING, State.BUSY, State.READY},
    State.DRAFTING: {State.READY, State.BUSY, State.IDLE},
}


class World:
    """A coordinator, statuses, and a bad network: messages are dropped, doubled, late and out of order."""

    def __init__(self, workers: int, rng: random.Random) -> None:
        self.rng = rng
        self.coordinator = Coordinator(range(workers))
        self.statuses = {worker: WorkerStatus(worker) for worker in range(workers)}
        self.next_worker = workers
        self.open: dict[int, set[int]] = {worker: set() for worker in range(workers)}  # requests at each worker
        self.done: dict[int, set[int]] = {worker: set() for worker in range(workers)}  # answered by it this epoch
        self.handed: dict[int, dict[int, set[int]]] = {}  # the requests of every hand-out, to send again
        self.queue: list[set[int]] = []
        self.answered: set[int] = set()  # in the coordinator's books
        self.asked: set[int] = set()
        self.flying: list[tuple[object, frozenset[int]]] = []
        self.said: list[tuple[object, frozenset[int]]] = []  # everything ever sent
        self.states = dict.fromkeys(range(workers), State.READY)

    # ---- what may happen

    def begin(self, requests: int, group: int) -> None:
        self.coordinator.begin(drafting=True)
        first = len(self.asked)
        numbers = list(range(first, first + requests))
        self.asked |= set(numbers)
        self.queue = [set(numbers[at : at + group]) for at in range(0, requests, group)]
        self.handed = {worker: {} for worker in self.statuses}
        self.done = {worker: set() for worker in self.statuses}

    def hand_out(self) -> None:
        if self.queue:
            worker, requests = self.rng.choice(list(self.statuses)), self.queue.pop()
            hand_out = self.coordinator.hand(worker, len(requests))
            self.handed[worker][hand_out.number] = requests
            self.send(hand_out, requests)

    def answer(self) -> None:
        writing = [worker for worker in self.statuses if self.open[worker]]
        if writing:
            worker = self.rng.choice(writing)
            self.done[worker].add(self.open[worker].pop())
            self.statuses[worker].answered()

    def report(self) -> None:
        worker = self.rng.choice(list(self.statuses))
        self.send(self.statuses[worker].report(), self.done[worker])

    def order(self) -> None:
        if not self.queue and self.answered == self.asked:
            self.coordinator.close()
        for order in self.coordinator.orders():
            self.send(order, frozenset())
        for worker, outs in self.handed.items():  # what has not been taken comes again
            for number, requests in outs.items():
                if worker in self.statuses and self.coordinator.state(worker) is State.BUSY and self.rng.random() < 0.3:
                    self.send(HandOut(self.coordinator.epoch, worker, number, len(requests)), requests)

    def deliver(self) -> None:
        if self.flying:
            self.arrive(*self.flying.pop(self.rng.randrange(len(self.flying))))

    def lose(self) -> None:
        if self.flying:
            self.flying.pop(self.rng.randrange(len(self.flying)))

    def repeat(self) -> None:
        if self.said:
            self.arrive(*self.rng.choice(self.said))

    def kill(self) -> None:
        if len(self.statuses) > 1 and not self.coordinator.stopped:
            worker = self.rng.choice(list(self.statuses))
            del self.statuses[worker], self.states[worker]
            left = set().union(*self.handed.pop(worker).values(), set()) - self.answered
            if left:
                self.queue.append(left)
            self.coordinator.lost(worker)

    def come(self) -> None:
        if not self.coordinator.stopped and len(self.statuses) < 4:
            worker, self.next_worker = self.next_worker, self.next_worker + 1
            self.statuses[worker], self.states[worker] = WorkerStatus(worker), State.READY
            self.open[worker], self.done[worker], self.handed[worker] = set(), set(), {}
            self.coordinator.join(worker)

    # ---- the network

    def send(self, message: object, requests: set[int] | frozenset[int]) -> None:
        self.flying.append((message, frozenset(requests)))
        self.said.append((message, frozenset(requests)))

    def arrive(self, message: object, requests: frozenset[int]) -> None:
        if isinstance(message, Report):
            if message.worker in self.statuses and message.epoch == self.coordinator.epoch:
                self.answered |= requests
            self.coordinator.hear(message)
        elif isinstance(message, HandOut) and message.worker in self.statuses:
            if self.statuses[message.worker].take(message):
                self.open[message.worker] |= requests
        elif isinstance(message, Order) and message.worker in self.statuses:
            self.statuses[message.worker].hear(message)

    # ---- what always holds

    def check(self) -> None:
        everything = self.answered == self.asked and not self.queue
        for worker, status in self.statuses.items():
            before, now = self.states[worker], status.state
            assert now == before or now in LEGAL[before], f"{before} → {now}"
            self.states[worker] = now
            if now is not State.BUSY:
                assert not self.open[worker]
            if status.epoch == self.coordinator.epoch and now is State.READY:
                assert everything, "told to stop while an answer was being written"
        assert not self.coordinator.stopped or everything

    def settle(self, limit: int = 400) -> None:
        """Everybody keeps saying how things are, and nothing is lost any more."""
        for _ in range(limit):
            while self.queue:
                self.hand_out()
            self.order()
            for worker, status in self.statuses.items():
                for number, requests in self.handed[worker].items():
                    self.send(HandOut(self.coordinator.epoch, worker, number, len(requests)), requests)
                while self.open[worker]:
                    self.done[worker].add(self.open[worker].pop())
                    status.answered()
                self.send(status.report(), self.done[worker])
            while self.flying:
                self.arrive(*self.flying.pop(0))
                self.check()
            if self.coordinator.all_ready:
                return
        raise AssertionError(f"not everyone is ready: {self.states}")


NOISE = ("hand_out", "answer", "report", "order", "deliver", "deliver", "deliver", "lose", "repeat", "kill", "come")


@given(workers=st.integers(1, 4), seed=st.integers(0, 2**32), steps=st.integers(0, 120))
def test_any_network_ends_ready_and_never_too_early(workers: int, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    world = World(workers, rng)
    for _ in range(3):  # old epochs' messages are still about in later ones
        world.begin(requests=rng.randrange(0, 9), group=rng.randrange(1, 4))
        for _ in range(steps):
            getattr(world, rng.choice(NOISE))()
            world.check()
        world.settle()
        assert {status.epoch for status in world.statuses.values()} == {world.coordinator.epoch}


@given(seed=st.integers(0, 2**32))
def test_what_was_said_before_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(3, rng)
    world.begin(requests=6, group=2)
    for _ in range(60):
        getattr(world, rng.choice(("hand_out", "answer", "report", "order")))()
        while world.flying:
            world.arrive(*world.flying.pop(0))

    def everything() -> object:
        statuses = {worker: (status.state, status.epoch, status.group) for worker, status in world.statuses.items()}
        return statuses, deepcopy(world.open), world.coordinator.orders(), world.coordinator.group

    before = everything()
    for message, requests in rng.sample(world.said, len(world.said)):
        world.arrive(message, requests)
    assert everything() == before


# ---- the story, told once


def settled(coordinator: Coordinator, statuses: list[WorkerStatus]) -> list[State]:
    for _ in range(4):
        for status in statuses:
            coordinator.hear(status.report())
        for order in coordinator.orders():
            statuses[order.worker].hear(order)
    return [status.state for status in statuses]


def test_dry_workers_draft_until_the_last_answer() -> None:
    coordinator, statuses = Coordinator(range(3)), [WorkerStatus(worker) for worker in range(3)]
    coordinator.begin(drafting=True)
    for status in statuses[1:]:
        assert status.take(coordinator.hand(status.worker, 1))
    assert settled(coordinator, statuses) == [State.DRAFTING, State.BUSY, State.BUSY]
    statuses[2].answered()
    assert settled(coordinator, statuses) == [State.DRAFTING, State.BUSY, State.DRAFTING]
    assert statuses[2].group == (0, 2)  # who was there first leads
    recalled = coordinator.hand(0, 2)  # somebody died, say
    assert statuses[0].take(recalled)
    assert statuses[0].state is State.BUSY
    assert settled(coordinator, statuses) == [State.BUSY, State.BUSY, State.DRAFTING]
    statuses[0].answered(2)
    assert settled(coordinator, statuses)[0] is State.DRAFTING
    assert coordinator.group == (2, 0)
    statuses[1].answered()
    coordinator.close()
    assert settled(coordinator, statuses) == [State.READY] * 3
    assert coordinator.all_ready


def test_a_late_stop_of_an_old_epoch_is_ignored() -> None:
    coordinator, statuses = Coordinator(range(1)), [WorkerStatus(0)]
    coordinator.begin(drafting=True)
    coordinator.close()
    settled(coordinator, statuses)
    (stop,) = coordinator.orders()
    assert stop.stop
    coordinator.begin(drafting=True)
    statuses[0].take(coordinator.hand(0, 1))
    statuses[0].hear(replace(stop, serial=10**6))
    assert statuses[0].state is State.BUSY


def test_nobody_drafts_where_it_is_not_wanted() -> None:
    coordinator, statuses = Coordinator(range(2)), [WorkerStatus(0), WorkerStatus(1)]
    coordinator.begin(drafting=False)
    assert settled(coordinator, statuses) == [State.IDLE, State.IDLE]


def test_without_workers_there_is_no_fleet() -> None:
    coordinator = Coordinator(range(1))
    with pytest.raises(TltError, match="no worker is left"):
        coordinator.lost(0)


def test_idle_time_is_never_too_good_for_training() -> None:
    cadence = Cadence(without_rest(DraftingSettings()), cold=False)
    for _ in range(4):
        assert cadence.begin(2.0) != "rested"  # as good as ever
        cadence.goes_on(1.9, 16)  # and training makes it no better
    assert Cadence(DraftingSettings(), cold=False).begin(2.0) == "rested"
