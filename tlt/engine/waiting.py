"""The waiting queue: requests in order of admission. Thousands may wait, so a tick must not visit all of them.

Requests with the same prompt and limit have the same rank and form a line. A heap holds the first request of each line.
Always holds: heap entries that a changed rank made stale are skipped. Does not know how ranks are computed.
"""

import heapq
from collections import deque
from collections.abc import Callable

from tlt.engine.request import Request, RequestState

Rank = tuple[float, ...]
_Line = tuple[str, int]  # prompt, limit
_First = tuple[Rank, int, _Line]  # rank, order of submission


class Waiting:
    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """`rank` depends only on a request's prompt and limit. Smaller enters first; ties enter as submitted."""
        self._rank = rank
        self._lines: dict[_Line, deque[RequestState]] = {}
        self._of_prompt: dict[str, list[_Line]] = {}
        self._first: dict[_Line, _First] = {}  # line → its valid heap entry
        self._heap: list[_First] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, state: RequestState) -> None:
        line = _line_of(state)
        if line not in self._lines:
            self._lines[line] = deque()
            self._of_prompt.setdefault(line[0], []).append(line)
        self._lines[line].append(state)
        self._count += 1
        self._show(line)

    def remove(self, state: RequestState) -> None:
        line = _line_of(state)
        standing = self._lines[line]
        if standing[0] is state:
            standing.popleft()
        else:
            standing.remove(state)
        self._count -= 1
        if standing:
            self._show(line)
            return
        del self._lines[line], self._first[line]
        self._of_prompt[line[0]].remove(line)
        if not self._of_prompt[line[0]]:
            del self._of_prompt[line[0]]

    def rank_changed(self, prompt_id: str) -> None:
        for line in self._of_prompt.get(prompt_id, ()):
            self._show(line)

    def first(self, count: int) -> list[RequestState]:
        """The next `count` requests, which stay in the queue."""
        found: list[RequestState] = []
        shown: list[_First] = []
        lag: list[tuple[Rank, int, _Line, int]] = []  # successors of the requests found, with their index in the line
        while len(found) < count and (front := self._front(shown, lag)):
            rank, _, line, place = front
            standing = self._lines[line]
            found.append(standing[place])
            if place + 1 < len(standing):
                heapq.heappush(lag, (rank, standing[place + 1].order, line, place + 1))
        for entry in shown:
            heapq.heappush(self._heap, entry)
        return found

    def _front(
        self, shown: list[_First], lag: list[tuple[Rank, int, _Line, int]]
    ) -> tuple[Rank, int, _Line, int] | None:
        """The next request of all lines. Entries taken off the heap are appended to `shown`."""
        while self._heap and (self._first.get(self._heap[0][2]) != self._heap[0] or self._heap[0] in shown[-1:]):
            heapq.heappop(self._heap)  # stale (rank changed, or entered) or a duplicate (rank changed back)
        if lag and (not self._heap or lag[0][:2] < self._heap[0][:2]):
            return heapq.heappop(lag)
        if not self._heap:
            return None
        shown.append(heapq.heappop(self._heap))
        return (*shown[-1], 0)

    def _show(self, line: _Line) -> None:
        standing = self._lines[line]
        entry = (self._rank(standing[0].request), standing[0].order, line)
        if self._first.get(line) != entry:
            self._first[line] = entry
            heapq.heappush(self._heap, entry)


def _line_of(state: RequestState) -> _Line:
    return state.request.prompt_id, state.request.params.max_tokens
