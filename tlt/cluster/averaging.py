"""Data-parallel drafter training: the leader averages the gradients of all members, and all take the same micro-step.

A session is a number of micro-steps with the same members. A worker asks the leader to join; the leader ends the
session at the next micro-step and opens another, and the new member starts from a copy of the leader's drafter. So all
members hold the same drafter, bit by bit, at every micro-step. The leader decides when a session ends and sends that
with the mean gradient, so all members stop at the same micro-step. A lost member is dropped from the round. If the
leader is lost, the members leave the session and copy a drafter when they join the next one. Workers outside the group
are never waited for. Does not know how calls reach other processes.
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

_LOOK_S = 0.005  # seconds between two checks of who is present, while waiting

Vector = NDArray[Any]


class LeftSession(Exception):
    """The session has continued, or ended, without this worker: its micro-step is void."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Leader to a new member: the session opens with these members, from this state of the drafter."""

    session: int
    members: tuple[int, ...]
    state: Any


@dataclass(frozen=True, slots=True)
class MeanGradient:
    """Leader to members: the mean of their gradients, and whether the session is over."""

    vector: Vector
    stop: bool


class GradientReducer:
    """The leader's side of a session. Other threads call `request_join` and `give` on behalf of members, and block."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._requests: dict[int, int] = {}  # member → number of its join requests; only the last one counts
        self._admitted: dict[int, SessionOpened] = {}
        self._session = 0
        self._members: frozenset[int] = frozenset()
        self._rounds = Rounds()
        self._given: dict[int, Vector] = {}
        self._means: dict[tuple[int, int], MeanGradient] = {}  # of the last two rounds

    # ---- called for members

    def request_join(self, member: int, patience_s: float) -> SessionOpened | None:
        """Waits until a session opens with this member; None if none did in time."""
        with self._changed:
            asked = self._requests[member] = self._requests.get(member, 0) + 1
            self._admitted.pop(member, None)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: member in self._admitted or self._requests.get(member) != asked, timeout=patience_s
            )
            if self._requests.get(member) == asked and member not in self._admitted:
                del self._requests[member]
            return self._admitted.pop(member, None)

    def give(self, session: int, step: int, member: int, vector: Vector, patience_s: float) -> MeanGradient | None:
        """Waits for the mean of the round; None if the round is closed without this member."""
        with self._changed:
            if session != self._session or not self._rounds.give(member, step):
                return None
            self._given[member] = vector
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (session, step) in self._means or session != self._session, timeout=patience_s
            )
            return self._means.get((session, step))

    # ---- called by the leader

    def requesters(self, among: Collection[int]) -> tuple[int, ...]:
        with self._changed:
            return tuple(sorted(member for member in self._requests if member in among))

    def open(self, members: Sequence[int], state: Any) -> int:
        """Opens a session of the leader and these members, which have asked to join."""
        with self._changed:
            self._session += 1
            self._members = frozenset(members) | {self._worker}
            self._rounds, self._given, self._means = Rounds(), {}, {}
            for member in self._members:
                self._rounds.join(member)
            self._rounds.advance()
            for member in members:
                self._requests.pop(member, None)
                self._admitted[member] = SessionOpened(self._session, tuple(sorted(self._members)), state)
            self._changed.notify_all()
            return self._session

    def close(self) -> None:
        """Ends the session. Members that still wait for a mean get None."""
        with self._changed:
            self._session += 1
            self._changed.notify_all()

    def mean(self, own: Vector, present: Callable[[], Collection[int]], stop: Callable[[], bool]) -> MeanGradient:
        """Closes a round: the mean over all present members. `present` and `stop` may read the inbox."""
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
            mean = MeanGradient(total / len(contributors), ends)
            self._means = {key: old for key, old in self._means.items() if key[1] == self._rounds.step - 1}
            self._means[self._session, self._rounds.step] = mean
            self._given = {}
            self._rounds.advance()
            self._changed.notify_all()
            return mean

    def _complete(self, present: Collection[int]) -> bool:
        """Drops members that are gone or ask to join anew. True if all others have given their gradients."""
        with self._changed:
            self._rounds.keep({*(m for m in present if m not in self._requests), self._worker})
            return self._rounds.complete


class GradientAveraging:
    """The trainer's view of a session: `average` is its gradient hook, which does nothing outside a session."""

    def __init__(self) -> None:
        self._exchange: Callable[[Vector], MeanGradient] | None = None
        self.over = False  # the session has ended: take no further micro-step
        self.rounds = 0
        self.waited_s = 0.0

    def enter(self, exchange: Callable[[Vector], MeanGradient]) -> None:
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
        result = torch.from_numpy(np.array(mean.vector))  # a copy: Ray's arrays are read-only
        offset = 0
        for tensor in tensors:
            tensor.copy_(result[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
