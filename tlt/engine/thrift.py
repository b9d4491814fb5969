"""When a graph is worth capturing: pure reckoning.

A capture takes as long as several ticks, and in a rollout's tail a batch size may last no longer. So a run that has no
graph of its own yet is served by a larger one of the same role, idle rows and all, or by none, whichever wastes less;
and when all that this has wasted comes to what a capture costs, it is captured. What always holds: by this reckoning,
no more is spent on captures than doing without them had wasted before. Knows roles, sizes and seconds, but no graphs.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable

_BARE = 0.4  # of a capture: what a run without a graph wastes, for the host launches its kernels one by one

Waste = Callable[[int], float]  # seconds that a run wastes in a graph of this larger size


class CapturePolicy:
    def __init__(self) -> None:
        self._captured: dict[Hashable, list[int]] = {}  # role → sizes, ascending
        self._wasted: dict[tuple[Hashable, int], float] = {}

    def captured(self, role: Hashable, size: int) -> None:
        """There is a graph of it now."""
        insort(self._captured.setdefault(role, []), size)

    def serve(self, role: Hashable, size: int, capture_s: float, waste: Waste | None) -> int:
        """The size of the graph for one more run: of a larger one, if that may be (`waste`), or its own, which may have
        to be captured first; 0: run it without. A capture takes `capture_s`."""
        larger = self._larger(role, size)
        if larger == size:
            return size
        bare_s = _BARE * capture_s
        more = waste(larger) if waste is not None and larger else bare_s
        if waste is None or more > bare_s:
            larger, more = 0, bare_s
        wasted = self._wasted.get((role, size), 0.0) + max(0.0, more)
        if wasted > capture_s:
            return size
        self._wasted[role, size] = wasted
        return larger

    def _larger(self, role: Hashable, size: int) -> int:
        """The smallest captured one that holds it; 0: none does."""
        sizes = self._captured.get(role, [])
        at = bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else 0
