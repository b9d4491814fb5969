"""Assigns requests to workers: longest expected group first, to the worker with the least expected work.

Requests wait here and not at the workers, so a worker that is faster than expected gets more of them. A worker holds
one full batch and one more group. Expected lengths come from earlier completions of the same prompt. A request is
assigned once, unless its worker is lost. Knows keys and lengths; does not know how requests are sent.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from tlt.engine.request import Request
from tlt.types import Completion, Experience, Key

_MEMORY = 0.5  # weight of a prompt's previous expected length against the newest completion's


class Dispatch:
    """Call `begin` per rollout, `next` until None, `completed` per completion, and `lost` per lost worker."""

    def __init__(self, rows: int) -> None:
        self._rows = rows  # batch size of a worker
        self._expected: dict[str, float] = {}  # expected tokens of a completion, by prompt
        self._waiting: list[tuple[Request, ...]] = []  # ascending by expected length; taken from the end
        self._at: dict[int, dict[Key, Request]] = {}  # requests of each worker
        self._spare = 0  # requests of a worker beyond its rows, so that no row waits for the next assignment
        self._wrote: dict[Key, int] = {}  # the worker that completed a request
        self._further: deque[tuple[int, Request]] = deque()  # next turns, and the workers that hold their KV cache

    def copy(self) -> "Dispatch":
        """An independent copy of the expected lengths, without requests."""
        other = Dispatch(self._rows)
        other._expected = dict(self._expected)
        return other

    @property
    def waiting(self) -> int:
        return sum(len(unit) for unit in self._waiting)

    @property
    def open(self) -> int:
        """Requests without a completion."""
        return self.waiting + len(self._further) + sum(len(held) for held in self._at.values())

    def begin(self, requests: Sequence[Request], workers: Iterable[int]) -> None:
        """Groups are not split, as they share their prompt's KV cache, unless there are fewer groups than workers."""
        self._at, self._wrote = {worker: {} for worker in workers}, {}
        units = _groups(requests)
        if len(units) < len(self._at):
            units = [(request,) for request in requests]
        self._waiting = sorted(units, key=self._tokens)
        self._spare = max(map(len, units), default=0)

    def next(self, *, crowded: bool = False) -> tuple[int, tuple[Request, ...]] | None:
        """The next assignment: worker and requests. None if no request waits or no worker has room.

        `crowded`: workers without room count too. A next turn goes to the worker of the turn before, if it is not lost.
        """
        while self._further:
            worker, request = self._further.popleft()
            if worker in self._at:
                self._at[worker][request.key] = request
                return worker, (request,)
            self._waiting.append((request,))
        with_room = [worker for worker, held in self._at.items() if crowded or self._has_room(len(held))]
        if not self._waiting or not with_room:
            return None
        worker = min(with_room, key=lambda w: (self._tokens(tuple(self._at[w].values())), w))
        unit = self._waiting.pop()
        self._at[worker].update({request.key: request for request in unit})
        return worker, unit

    def _has_room(self, held: int) -> bool:
        return held < self._rows + self._spare

    def completed(self, worker: int, completion: Completion) -> bool:
        """Records a completion. False if the request is no longer assigned to this worker."""
        request = self._at.get(worker, {}).pop(completion.key, None)
        if request is None:
            return False
        self._wrote[completion.key] = worker
        length = len(completion.tokens)
        known = self._expected.get(request.prompt_id, length)
        self._expected[request.prompt_id] = _MEMORY * known + (1 - _MEMORY) * length
        return True

    def add(self, requests: Iterable[Request]) -> None:
        """Next turns of completed requests."""
        self._further.extend((self._wrote[request.key], request) for request in requests)

    def lost(self, worker: int) -> int:
        """Puts the worker's open requests at the front of the queue. Returns their number."""
        held = tuple(self._at.pop(worker, {}).values())
        if held:
            self._waiting.extend(_groups(held))
        return len(held)

    def expected(self, request: Request) -> float:
        """Expected tokens of its completion; `max_tokens` if the prompt is new."""
        return self._expected.get(request.prompt_id, float(request.params.max_tokens))

    def _tokens(self, unit: Sequence[Request]) -> float:
        return sum(self.expected(request) for request in unit)


def _groups(requests: Sequence[Request]) -> list[tuple[Request, ...]]:
    """Groups requests by prompt id. A request without an id is a group of its own."""
    groups: dict[object, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt_id or request.key, []).append(request)
    return [tuple(group) for group in groups.values()]


def deal(experiences: Sequence[Experience], workers: int, minibatches: int) -> list[list[Experience]]:
    """A share for each worker: about as many tokens, and of every minibatch what one worker's would have had.

    A trainer's minibatch i is every `minibatches`-th of its experiences, from the i-th on.
    """
    shares: list[list[list[Experience]]] = [[] for _ in range(workers)]
    for first in range(minibatches):
        for worker, part in enumerate(_balanced(experiences[first::minibatches], workers)):
            shares[worker].append(part)
    return [_woven(share) for share in shares]


def _balanced(experiences: Sequence[Experience], workers: int) -> list[list[Experience]]:
    """Assigns the longest first, each to the worker with the fewest tokens among those below their count."""
    parts: list[list[int]] = [[] for _ in range(workers)]
    tokens = [0] * workers
    room = [len(experiences[worker::workers]) for worker in range(workers)]
    lengths = [_length(experience) for experience in experiences]
    for index in sorted(range(len(experiences)), key=lambda i: -lengths[i]):
        worker = min((w for w in range(workers) if len(parts[w]) < room[w]), key=lambda w: (tokens[w], w))
        parts[worker].append(index)
        tokens[worker] += lengths[index]
    return [[experiences[index] for index in sorted(part)] for part in parts]


def _woven(parts: Sequence[Sequence[Experience]]) -> list[Experience]:
    """Interleaves the parts: element i of every n belongs to part i. Earlier parts are never shorter."""
    return [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]


def _length(experience: Experience) -> int:
    completion = experience.rollout.completion
    return len(completion.prompt_tokens) + len(completion.tokens)
