"""Training the drafter together: gradients meet at the leader's, and everyone takes the same micro-step.

A session is a number of micro-steps with the same members. Who wants to join asks the leader, who ends the session at
the next micro-step and opens another; the newcomer starts from a copy of the leader's drafter. So all members hold the
same drafter, bit by bit, at every micro-step. The leader decides when a session ends and says so with the mean of a
micro-step: all members stop at the same one. A member that is lost is waited for no longer; without their leader the
others part, and what they hold is replaced by a copy when they join again. Nobody outside the group is ever waited for.
Knows nothing of how calls travel from one process to another.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt.drafting.idle import Rounds

_LOOK_S = 0.005  # between two looks around while waiting

Vector = NDArray[Any]


class Parted(Exception):
    """The group has gone on, or ended, without this worker: the micro-step is void."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The leader to a newcomer: the session opens with these members, from this state of the drafter."""

    session: int
    members: tuple[int, ...]
    state: Any


@dataclass(frozen=True, slots=True)
class Mean:
    """The leader to the members: the mean of what they gave, and whether the session is over."""

    vector: Vector
    stop: bool


class GradientDesk:
    """The leader's side of a session. Other threads call `request_join` and `give` for members and wait for it."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._wishes: dict[int, int] = {}  # member → how often it has asked: the last time counts
        self._admitted: dict[int, SessionOpened] = {}
        self._session = 0
        self._members: frozenset[int] = frozenset()
        self._rounds = Rounds()
        self._given: dict[int, Vector] = {}
        self._means: dict[tuple[int, int], Mean] = {}  # of the last two rounds

    # ---- on behalf of members

    def request_join(self, member: int, patience_s: float) -> SessionOpened | None:
        """Waits until a session opens with this member; None if none did in time."""
        with self._changed:
            asked = self._wishes[member] = self._wishes.get(member, 0) + 1
            self._admitted.pop(member, None)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: member in self._admitted or self._wishes.get(member) != asked, timeout=patience_s
            )
            if self._wishes.get(member) == asked and member not in self._admitted:
                del self._wishes[member]
            return self._admitted.pop(member, None)

    def give(self, session: int, step: int, member: int, vector: Vector, patience_s: float) -> Mean | None:
        """Waits for the mean of the round; None if the round goes without this member."""
        with self._changed:
            if session != self._session or not self._rounds.give(member, step):
                return None
            self._given[member] = vector
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (session, step) in self._means or session != self._session, timeout=patience_s
            )
            return self._means.get((session, step))

    # ---- the leader's own

    def wishers(self, among: Collection[int]) -> tuple[int, ...]:
        with self._changed:
            return tuple(sorted(member for member in self._wishes if member in among))

    def open(self, members: Sequence[int], state: Any) -> int:
        """A session with these members, who have asked for it, and the leader."""
        with self._changed:
            self._session += 1
            self._members = frozenset(members) | {self._worker}
            self._rounds, self._given, self._means = Rounds(), {}, {}
            for member in self._members:
                self._rounds.join(member)
            self._rounds.advance()
            for member in members:
                self._wishes.pop(member, None)
                self._admitted[member] = SessionOpened(self._session, tuple(sorted(self._members)), state)
            self._changed.notify_all()
            return self._session

    def close(self) -> None:
        """Whoever still waits for a mean goes without."""
        with self._changed:
            self._session += 1
            self._changed.notify_all()

    def mean(self, own: Vector, present: Callable[[], Collection[int]], stop: Callable[[], bool]) -> Mean:
        """Closes a round: the mean over all members that are present. `present` and `stop` may look at the mail."""
        with self._changed:
            self._rounds.give(self._worker, self._rounds.step)
            self._given[self._worker] = own
        while not self._complete(present()):
            with self._changed:
                self._changed.wait(_LOOK_S)
        ends = stop()
        with self._changed:
            contributors = self._rounds.contributors
            total = sum((self._given[member] for member in contributors[1:]), self._given[contributors[0]])
            mean = Mean(total / len(contributors), ends)
            self._means = {key: old for key, old in self._means.items() if key[1] == self._rounds.step - 1}
            self._means[self._session, self._rounds.step] = mean
            self._given = {}
            self._rounds.advance()
            self._changed.notify_all()
            return mean

    def _complete(self, present: Collection[int]) -> bool:
        """Whoever asks to join has left the session; whoever is gone has too."""
        with self._changed:
            self._rounds.keep({*(m for m in present if m not in self._wishes), self._worker})
            return self._rounds.complete


class Together:
    """A worker's trainer sees the group through this: `average` is handed to it, and does nothing for one alone."""

    def __init__(self) -> None:
        self._exchange: Callable[[Vector], Mean] | None = None
        self.over = False  # the session ends: no micro-step any more
        self.rounds = 0
        self.waited_s = 0.0

    def enter(self, exchange: Callable[[Vector], Mean]) -> None:
        self._exchange, self.over, self.rounds, self.waited_s = exchange, False, 0, 0.0

    def leave(self) -> None:
        self._exchange = None

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes, in place, its mean over the members."""
        if self._exchange is None:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
        started = time.perf_counter()
        mean = self._exchange(flat.numpy())
        self.waited_s += time.perf_counter() - started
        self.rounds += 1
        self.over = self.over or mean.stop
        result = torch.from_numpy(np.array(mean.vector))  # what arrived may be read-only
        offset = 0
        for tensor in tensors:
            tensor.copy_(result[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
