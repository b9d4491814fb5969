"""When a graph is worth capturing: pure counting.

A capture takes as long as several ticks, and in a rollout's tail a batch size may last no longer. So a run that has no
graph of its own yet is served by a larger one of the same role, idle rows and all, or by none; and when all that this
has wasted comes to what a capture costs, it is captured. What always holds: by this reckoning, no more is spent on
captures than doing without them had wasted before. Knows roles and sizes, neither graphs nor seconds.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable

WORTH = 4.0  # runs: what a capture costs
_BARE = 1.5  # runs that one without a graph wastes: the host launches its kernels one by one
_LARGEST = 2  # times the size: a graph beyond that computes too much that nobody needs


class Thrift:
    def __init__(self) -> None:
        self._captured: dict[Hashable, list[int]] = {}  # role → sizes, ascending
        self._wasted: dict[tuple[Hashable, int], float] = {}

    def captured(self, role: Hashable, size: int) -> None:
        """There is a graph of it now."""
        insort(self._captured.setdefault(role, []), size)

    def serve(self, role: Hashable, size: int, *, exactly: bool = False) -> int:
        """The size of the graph for one more run: of a larger one, if it need not be exactly this size, or its own,
        which may have to be captured first; 0: run it without."""
        larger = self._larger(role, size)
        if larger == size:
            return size
        if exactly or larger > _LARGEST * size:
            larger = 0
        waste = 1.0 - size / larger if larger else _BARE
        wasted = self._wasted.get((role, size), 0.0) + waste
        if wasted > WORTH:
            return size
        self._wasted[role, size] = wasted
        return larger

    def _larger(self, role: Hashable, size: int) -> int:
        """The smallest captured one that holds it; 0: none does."""
        sizes = self._captured.get(role, [])
        at = bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else 0
