"""How many workers pay in data-parallel drafter training, and how often they average, from measured times. Pure.

Always holds: averaging is expected to take at most a tenth of a group's time; a worker alone always pays. Until
something was measured, everybody may join, and averages at every micro-step.
"""

from dataclasses import dataclass
from math import ceil

MOST_SHARE = 0.1  # of a group's time, for averaging
MOST_EVERY = 16  # micro-steps between two averagings; members' drafters drift apart meanwhile
_KEPT = 0.5  # part of the old estimate in a new one
_ENOUGH = 8  # micro-steps after which a session counts as measured


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """What the micro-steps of a session took."""

    micro_steps: int
    seconds: float  # together, averaging included
    averagings: int
    averaging_s: float


def transfer_factor(members: int) -> float:
    """How often each member of an all-reduce in a ring sends all its numbers."""
    return 2.0 * (members - 1) / members


class GroupSize:
    """Learns from sessions what averaging costs. `most`: of all workers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._compute_s: float | None = None  # of a micro-step; None: nothing is known
        self._transfer_s = 0.0  # of sending all numbers once

    def observe(self, members: int, times: SessionTimes) -> None:
        if members < 2 or times.micro_steps < _ENOUGH or not times.averagings:
            return
        compute_s = max(0.0, times.seconds - times.averaging_s) / times.micro_steps
        transfer_s = times.averaging_s / times.averagings / transfer_factor(members)
        if self._compute_s is None:
            self._compute_s, self._transfer_s = compute_s, transfer_s
        else:
            self._compute_s += (1 - _KEPT) * (compute_s - self._compute_s)
            self._transfer_s += (1 - _KEPT) * (transfer_s - self._transfer_s)

    def share(self, members: int, every: int = 1) -> float:
        """Of a group's time, for averaging."""
        averaging_s = transfer_factor(members) * self._transfer_s
        return averaging_s / max(1e-9, averaging_s + every * (self._compute_s or 0.0)) if averaging_s else 0.0

    def every(self, members: int) -> int:
        """Micro-steps between two averagings, so that they take no more than their share; 0: no number is enough."""
        averaging_s = transfer_factor(members) * self._transfer_s
        if self._compute_s is None or not averaging_s:
            return 1
        every = ceil((1 - MOST_SHARE) / MOST_SHARE * averaging_s / max(1e-9, self._compute_s) - 1e-9)
        return max(1, every) if every <= MOST_EVERY else 0

    @property
    def most(self) -> int:
        """Members that pay, the leader included."""
        return max(members for members in range(1, self._most + 1) if members == 1 or self.every(members))
