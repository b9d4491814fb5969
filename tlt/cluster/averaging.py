"""Data-parallel drafter training: the members of a session average their gradients by all-reduce, over a process group
of their own.

A session is a number of micro-steps with the same members. A worker asks the leader to join; the leader ends the
session at the next micro-step and opens another, and new members start from the leader's drafter, which is broadcast in
the group. So all members hold the same drafter, bit by bit, at every micro-step. Before each averaging the members
agree whether one of them must leave; if so, all stop after that micro-step. A member that dies breaks the group: the
others discard the micro-step and open another session. Workers outside the group are never waited for. Does not know
how calls reach other processes.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tlt.cluster.all_reduce import AllReduceBroken, Rendezvous
from tlt.cluster.drafter_state import DrafterWords
from tlt.drafting.group_size import SessionTimes


class LeftSession(Exception):
    """The session broke, or never began: the micro-step under way is void."""


class ProcessGroup(Protocol):
    """Of the members of a session alone."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None: ...

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Leader to members: the session's members, and where their process group meets. No tensors."""

    session: int
    leader: int
    members: tuple[int, ...]  # the leader among them, in the order of their ranks
    rendezvous: Rendezvous
    every: int  # micro-steps between two averagings
    drafter: DrafterWords | None  # the leader's, which is broadcast; None: all members hold the same one already


class SessionLeader:
    """The leader's side of the opening of a session. Other threads call `request_join` and `confirm` on behalf of
    members, and block.

    A member that has confirmed stays for at least one micro-step. One that has not within `patience_s` is left out, so
    nobody connects to a member that has left.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: dict[int, int] = {}  # member → number of its join requests; only the last one counts
        self._invited: dict[int, int] = {}  # member → session
        self._confirmed: dict[int, object] = {}  # member of the session that is being opened → its lineage
        self._opened: SessionOpened | None = None
        self._session = 0

    # ---- called for members

    def request_join(self, member: int, patience_s: float) -> int | None:
        """Waits until a session is opened with this member: its number; None if none was in time."""
        with self._changed:
            asked = self._requests[member] = self._requests.get(member, 0) + 1
            self._invited.pop(member, None)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: member in self._invited or self._requests.get(member) != asked, timeout=patience_s
            )
            if self._requests.get(member) == asked and member not in self._invited:
                del self._requests[member]
            return self._invited.pop(member, None)

    def confirm(self, session: int, member: int, lineage: object, patience_s: float) -> SessionOpened | None:
        """Waits for the session's begin; None if it begins without this member. `lineage`: equal for equal drafters."""
        with self._changed:
            if session != self._session or self._begun:
                return None
            self._confirmed[member] = lineage
            self._changed.notify_all()
            self._changed.wait_for(lambda: session != self._session or self._begun, timeout=patience_s)
            opened = self._opened if session == self._session else None
            return opened if opened is not None and member in opened.members else None

    @property
    def _begun(self) -> bool:
        return self._opened is not None

    # ---- called by the leader

    def requesters(self, among: Collection[int]) -> tuple[int, ...]:
        with self._changed:
            return tuple(sorted(member for member in self._requests if member in among))

    def invite(self, members: Sequence[int]) -> int:
        """Begins to open a session with these members, which have asked to join; its number."""
        with self._changed:
            self._session += 1
            self._confirmed, self._opened = {}, None
            for member in members:
                self._requests.pop(member, None)
                self._invited[member] = self._session
            self._changed.notify_all()
            return self._session

    def wait_confirmed(self, members: Collection[int], patience_s: float) -> dict[int, object]:
        """The lineage of those members that have confirmed in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._confirmed.keys() >= set(members), timeout=patience_s)
            return dict(self._confirmed)

    def open(self, opened: SessionOpened) -> None:
        with self._changed:
            self._opened = opened
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the session. Members that still wait for its beginning get None."""
        with self._changed:
            self._session += 1
            self._opened = None
            self._changed.notify_all()


class SessionAveraging:
    """What the trainer averages with (`tlt.train.drafter.Averaging`). Does nothing outside a session."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._size = self._every = 1
        self._must_end: Callable[[], bool] = lambda: False
        self.waited_s = self.averaging_s = 0.0
        self._start(1)

    def enter(self, group: ProcessGroup, size: int, must_end: Callable[[], bool], every: int = 1) -> None:
        """`must_end`: whether this member wants the session to end after the micro-step. `every`: 1 averages the
        gradients of each micro-step; more averages the weights after so many, and after the last one."""
        self._group, self._size, self._must_end = group, size, must_end
        self.waited_s = self.averaging_s = 0.0
        self._start(every)

    def _start(self, every: int) -> None:
        self._every = every
        self.over = False  # the session has ended: take no further micro-step
        self.rounds = 0
        self._averagings = 0
        self._first: tuple[float, int, float] | None = None  # when the first round had ended, and what it took

    def leave(self) -> None:
        """Closes this member's connections, so that nobody waits for it."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    @torch.no_grad()
    def mean(self, tensors: Sequence[Tensor]) -> None:
        if self._group is not None:
            with _session_errors():
                self._group.all_reduce(tensors)
            torch._foreach_div_(list(tensors), float(self._size))

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        if self._group is None:
            return
        with _session_errors():
            self.over = self._agreed_to_end(self._group, tensors[0])
        if self._every == 1:
            self._timed_mean(tensors)
        self.rounds += 1
        self._first = self._first or (time.perf_counter(), self._averagings, self.averaging_s)

    def weights(self, tensors: Sequence[Tensor]) -> bool:
        if self._group is None or self._every == 1 or (self.rounds % self._every and not self.over):
            return False
        self._timed_mean(tensors)
        return True

    def measured(self) -> SessionTimes:
        """Of the micro-steps after the first."""
        if self._first is None:
            return SessionTimes(0, 0.0, 0, 0.0)
        ended, averagings, averaging_s = self._first
        return SessionTimes(
            micro_steps=self.rounds - 1,
            seconds=time.perf_counter() - ended,
            averagings=self._averagings - averagings,
            averaging_s=self.averaging_s - averaging_s,
        )

    def _timed_mean(self, tensors: Sequence[Tensor]) -> None:
        started = time.perf_counter()
        self.mean(tensors)
        self.averaging_s += time.perf_counter() - started
        self._averagings += 1

    @torch.no_grad()
    def _agreed_to_end(self, group: ProcessGroup, like: Tensor) -> bool:
        """Also waits for the slowest member, so that the time of the averaging is that of the transfer alone."""
        started = time.perf_counter()
        wants = like.new_full((1,), float(self._must_end()))
        group.all_reduce([wants])
        agreed = bool(wants.item())
        self.waited_s += time.perf_counter() - started
        return agreed


@contextmanager
def _session_errors() -> Iterator[None]:
    try:
        yield
    except AllReduceBroken as error:
        raise LeftSession(str(error)) from error
