"""How many workers pay in data-parallel drafter training, from measured times. Pure.

Always holds: averaging is expected to take at most a tenth of a group's time; a worker alone always pays. Until
something was measured, everybody may join.
"""

MOST_SHARE = 0.1  # of a micro-step's time, for averaging
_KEPT = 0.5  # part of the old estimate in a new one
_ENOUGH = 8  # micro-steps after which a session counts as measured


def transfer_factor(members: int) -> float:
    """How often each member of an all-reduce in a ring sends all its gradients."""
    return 2.0 * (members - 1) / members


class GroupSize:
    """Learns from the micro-steps of sessions what averaging costs. `most`: of all workers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._compute_s: float | None = None  # of a micro-step
        self._transfer_s = 0.0  # of sending all gradients once

    def observe(self, members: int, micro_steps: int, seconds: float, averaging_s: float) -> None:
        """Of a session: its micro-steps took `seconds` together, of which `averaging_s` were spent averaging."""
        if members < 2 or micro_steps < _ENOUGH:
            return
        compute_s = max(0.0, seconds - averaging_s) / micro_steps
        transfer_s = averaging_s / micro_steps / transfer_factor(members)
        if self._compute_s is None:
            self._compute_s, self._transfer_s = compute_s, transfer_s
        else:
            self._compute_s += (1 - _KEPT) * (compute_s - self._compute_s)
            self._transfer_s += (1 - _KEPT) * (transfer_s - self._transfer_s)

    def share(self, members: int) -> float:
        """Of a group's time, for averaging."""
        averaging_s = transfer_factor(members) * self._transfer_s
        return averaging_s / max(1e-9, averaging_s + (self._compute_s or 0.0)) if averaging_s else 0.0

    @property
    def most(self) -> int:
        """Members that pay, the leader included."""
        return max(members for members in range(1, self._most + 1) if members == 1 or self.share(members) <= MOST_SHARE)
