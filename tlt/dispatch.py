"""Which worker answers which requests: the longest expected first, each group to whoever will be done soonest.

Requests wait here and not at the workers, so that whoever is faster than expected gets more of them; a worker holds
what its batch can take, and one group more. What is known of a prompt is the length of its earlier answers. Nothing is
handed out twice, unless its worker was lost. Knows keys and lengths; knows nothing of how requests travel.
"""

from collections.abc import Iterable, Sequence

from tlt.engine.request import Request
from tlt.types import Completion, Experience, Key

_MEMORY = 0.5  # weight of what was known of a prompt against a new answer


class Dispatch:
    """`begin` a rollout, `next_for` whoever has room, `answered` as completions come, `lost` if a worker is."""

    def __init__(self, rows: int) -> None:
        self._rows = rows  # requests that a worker decodes at the same time
        self._expected: dict[str, float] = {}  # tokens of an answer, by prompt
        self._waiting: list[tuple[Request, ...]] = []  # the longest expected last: taken from the end
        self._at: dict[int, dict[Key, Request]] = {}  # what each worker has
        self._spare = 0  # requests a worker may have beyond its rows, so that no row waits for the next hand-out

    def apart(self) -> "Dispatch":
        """Another that knows the same of every prompt, and from now on learns by itself."""
        other = Dispatch(self._rows)
        other._expected = dict(self._expected)
        return other

    @property
    def waiting(self) -> int:
        return sum(len(unit) for unit in self._waiting)

    @property
    def open(self) -> int:
        """Requests not answered yet."""
        return self.waiting + sum(len(held) for held in self._at.values())

    def begin(self, requests: Sequence[Request], workers: Iterable[int]) -> None:
        """Groups stay whole, as they share their prompt; unless there are fewer than workers."""
        self._at = {worker: {} for worker in workers}
        units = _groups(requests)
        if len(units) < len(self._at):
            units = [(request,) for request in requests]
        self._waiting = sorted(units, key=self._tokens)
        self._spare = max(map(len, units), default=0)

    def next(self, *, crowded: bool = False) -> tuple[int, tuple[Request, ...]] | None:
        """The next hand-out: what, and to whom. None while nothing waits or nobody has room, unless `crowded`."""
        with_room = [worker for worker, held in self._at.items() if crowded or self._has_room(len(held))]
        if not self._waiting or not with_room:
            return None
        worker = min(with_room, key=lambda w: (self._tokens(tuple(self._at[w].values())), w))
        unit = self._waiting.pop()
        self._at[worker].update({request.key: request for request in unit})
        return worker, unit

    def _has_room(self, held: int) -> bool:
        return held < self._rows + self._spare

    def answered(self, worker: int, completion: Completion) -> bool:
        """Whether the answer is new: one that was replayed elsewhere meanwhile is not."""
        request = self._at.get(worker, {}).pop(completion.key, None)
        if request is None:
            return False
        length = len(completion.tokens)
        known = self._expected.get(request.prompt_id, length)
        self._expected[request.prompt_id] = _MEMORY * known + (1 - _MEMORY) * length
        return True

    def lost(self, worker: int) -> int:
        """What it had not answered waits again, first in line; how many requests."""
        held = tuple(self._at.pop(worker, {}).values())
        if held:
            self._waiting.extend(_groups(held))
        return len(held)

    def came(self, worker: int) -> None:
        self._at[worker] = {}

    def expected(self, request: Request) -> float:
        """Tokens of its answer; as many as it may have, where nothing is known of its prompt."""
        return self._expected.get(request.prompt_id, float(request.params.max_tokens))

    def _tokens(self, unit: Sequence[Request]) -> float:
        return sum(self.expected(request) for request in unit)


def _groups(requests: Sequence[Request]) -> list[tuple[Request, ...]]:
    """Requests with one prompt id belong together; without an id, each is alone."""
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
    """The longest first, each to whoever has the fewest tokens and may have one more."""
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
    """One list of which every so-manieth, from the i-th on, is part i. Earlier parts are never shorter."""
    return [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]


def _length(experience: Experience) -> int:
    completion = experience.rollout.completion
    return len(completion.prompt_tokens) + len(completion.tokens)
