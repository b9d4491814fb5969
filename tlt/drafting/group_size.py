"""Group size and averaging interval of data-parallel drafter training, from measured times. Pure.

Always holds: averaging is expected to take at most a tenth of a group's time; a single worker is always allowed. Before
the first measurement all workers may join, and they average after every micro-step. Knows no tensors.
"""

from dataclasses import dataclass
from math import ceil

MOST_SHARE = 0.1  # largest fraction of a group's time for averaging
MOST_EVERY = 16  # most micro-steps between two averagings: the members' drafters diverge in between
_KEPT = 0.5  # weight of the old estimate in a new one
_ENOUGH = 8  # fewest micro-steps of a session that is used as a measurement


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Measured times of a session."""

    micro_steps: int
    seconds: float  # of all micro-steps, averaging included
    averagings: int
    averaging_s: float


def transfer_factor(members: int) -> float:
    """Data that each member of a ring all-reduce sends, as a multiple of its tensors' size."""
    return 2.0 * (members - 1) / members


class GroupSize:
    """Estimates the cost of averaging from sessions. `most`: number of all workers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._compute_s: float | None = None  # seconds of a micro-step; None: not measured
        self._transfer_s = 0.0  # seconds to send all tensors once

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
        """Fraction of a group's time for averaging."""
        averaging_s = transfer_factor(members) * self._transfer_s
        return averaging_s / max(1e-9, averaging_s + every * (self._compute_s or 0.0)) if averaging_s else 0.0

    def every(self, members: int) -> int:
        """Micro-steps between two averagings that keep their fraction below `MOST_SHARE`; 0: not possible."""
        averaging_s = transfer_factor(members) * self._transfer_s
        if self._compute_s is None or not averaging_s:
            return 1
        every = ceil((1 - MOST_SHARE) / MOST_SHARE * averaging_s / max(1e-9, self._compute_s) - 1e-9)
        return max(1, every) if every <= MOST_EVERY else 0

    @property
    def most(self) -> int:
        """Largest allowed number of members, the leader included."""
        return max(members for members in range(1, self._most + 1) if members == 1 or self.every(members))
