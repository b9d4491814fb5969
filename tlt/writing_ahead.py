"""Writing ahead: completions of the next step, written with its keys while rows or workers have nothing else to do.

In the next step they are guesses at the completions (`Request.draft_tokens`). What always holds: nothing that was
written ahead is a completion of any step; a request that somebody waits for takes rows and pages from those written
ahead; a text is used for the very request that it was written for, in the step after, and dropped otherwise. Knows no
tensors.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tlt.drafting.idle import IdleSplit
from tlt.engine.request import Request
from tlt.spec.ahead import Prices, emitted
from tlt.spec.budget import PROMISED_TICKS, Budget
from tlt.types import Completion, Key

_MOST_TOKENS = 16_000_000  # of all texts of a step: 64 MB; the shortest are left out where there are more
_MOST_SLOWER = 0.1  # share of the pace that requests may lose to those written beside them
_WORTH = 2.0  # times as much must come back as they lose
_KEPT_OVER = 256  # tokens of a request over which the share that is kept is expected


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What was written of a request of the next step; it may end anywhere."""

    key: Key
    tokens: "array[int]"

    @classmethod
    def of(cls, key: Key, tokens: Iterable[int]) -> "WrittenText":
        return cls(key, array("I", tokens))


class WrittenTexts:
    """The texts written ahead in one step, for the next. Held by the fleet, which gives them to the requests."""

    def __init__(self) -> None:
        self._step = 0  # in which they were written
        self._requests: dict[Key, Request] = {}  # that they were written for
        self._texts: dict[Key, array[int]] = {}
        self._whole: set[Key] = set()  # requests whose text was written to its end
        self.tokens = 0  # of these texts

    def begin(self, step: int, requests: Sequence[Request]) -> None:
        """In this step, texts for these requests of the next one may come in."""
        self._step, self.tokens = step, 0
        self._requests, self._texts = {request.key: request for request in requests}, {}
        self._whole.clear()

    def put(self, texts: Iterable[WrittenText], *, whole: bool = False) -> None:
        """Of two texts for one request the longer is kept. Those for other requests are dropped. `whole`: they were
        written to their end."""
        for text in texts:
            if text.key not in self._requests:
                continue
            self._whole.update([text.key] if whole else ())
            known = len(self._texts.get(text.key, ()))
            if len(text.tokens) > known:
                self._texts[text.key] = text.tokens
                self.tokens += len(text.tokens) - known
        while self.tokens > _MOST_TOKENS:
            shortest = min(self._texts, key=lambda key: len(self._texts[key]))
            self.tokens -= len(self._texts.pop(shortest))

    def given(self, step: int, requests: Sequence[Request]) -> list[Request]:
        """The requests of a step, each with the text that was written for it in the step before, if there is one."""
        return [self._with_text(request) if step == self._step + 1 else request for request in requests]

    def unfinished(self, step: int) -> list[Request]:
        """The requests that texts are written for in this step and not at their end, each with what there is of it."""
        wanted = self._requests.values() if step == self._step else ()
        return [self._with_text(request) for request in wanted if request.key not in self._whole]

    def _with_text(self, request: Request) -> Request:
        text, asked = self._texts.get(request.key), self._requests.get(request.key)
        if text is None or asked is None or (asked.prompt, asked.params) != (request.prompt, request.params):
            return request
        return replace(request, draft_tokens=tuple(text))


class WritingEngine(Protocol):
    """What the writer needs of an engine."""

    @property
    def in_flight(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def turn_rate(self) -> float: ...

    def holds(self, key: Key) -> bool: ...

    def submit(self, requests: Iterable[Request]) -> None: ...

    def tick(self) -> list[Completion]: ...

    def abort(self, key: Key) -> Completion: ...


class Pricing(Protocol):
    """What a tuner knows of ticks, and the account."""

    budget: Budget

    def prices(self, batch: int) -> Prices | None: ...


class AheadWriter:
    """A worker's part: writes requests of the next step in rows that nothing else needs."""

    def __init__(
        self,
        engine: WritingEngine,
        sizes: Sequence[int],
        tuner: Pricing | None = None,
        forget: Callable[[Completion], object] = lambda completion: None,
    ) -> None:
        """`sizes`: padded batch sizes, the last of which is all rows. `tuner` says what rows beside others cost; None:
        there are none. `forget` gets each completion that was written ahead or cut: no drafter learns from it."""
        self._engine, self._sizes, self._tuner, self._forget = engine, sizes, tuner, forget
        self._waiting: deque[Request] = deque()
        self._running: dict[Key, Request] = {}
        self._texts: list[WrittenText] = []
        self._slower = 0.0  # share of their pace that other requests lose to those written beside them
        self.written = 0  # tokens so far

    @property
    def running(self) -> int:
        """Requests in flight that are written ahead."""
        return len(self._running)

    @property
    def others(self) -> int:
        """Requests in flight that are waited for."""
        return self._engine.in_flight - len(self._running)

    @property
    def open(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._waiting or self._running)

    @property
    def has_room(self) -> bool:
        """Whether rows stand empty that no request waits for."""
        return self._engine.in_flight < self._sizes[-1] and self._engine.running == self._engine.in_flight

    def offer(self, requests: Iterable[Request]) -> None:
        """Requests of the next step, in the order in which they are to be written."""
        self._waiting.extend(requests)

    def tick(self) -> list[Completion]:
        """A tick of the engine, with requests of the next step in rows that nothing else needs; the completions that
        are waited for."""
        self._fill()
        others, account = self.others, self._tuner.budget if self._tuner else Budget()
        account.nothing_waits = not others
        started = time.perf_counter()
        completions = self._engine.tick()
        if others and self._running:
            account.shared(self._slower * (time.perf_counter() - started))
        account.nothing_waits = False
        return self._sort_out(completions)

    def give_way(self) -> list[Completion]:
        """Frees all rows and pages; what was cut. It is a text, and a guess where its request is taken up again."""
        cut = [self._engine.abort(key) for key in self._running if self._engine.holds(key)]
        for completion in reversed(cut):
            request = self._running[completion.key]
            self._keep(request, completion)
            if len(completion.tokens) > len(request.draft_tokens):
                request = replace(request, draft_tokens=completion.tokens)
            self._waiting.appendleft(request)
        self._running = {}
        return cut

    def end(self) -> tuple[WrittenText, ...]:
        """Nothing more is written for this step; all texts not yet taken."""
        self.give_way()
        self._waiting.clear()
        return self.take_texts()

    def take_texts(self) -> tuple[WrittenText, ...]:
        """What was written since this was last asked."""
        texts, self._texts = tuple(self._texts), []
        return texts

    def _fill(self) -> None:
        others = self.others
        if not self._waiting or (others and not self.has_room):
            return
        rows = self._rows_beside(others) if others else self._sizes[-1]
        while self._waiting and len(self._running) < rows:
            request = self._waiting.popleft()
            self._engine.submit([request])
            self._running[request.key] = request

    def _rows_beside(self, others: int) -> int:
        """As many as pay by the tuner's estimates, if the account affords what the others lose by them."""
        if self._tuner is None:
            return 0
        sizes = {others} | {size for size in self._sizes if size >= others}
        known = {size: self._tuner.prices(size) for size in sizes}
        rates = {size: price.rate for size, price in known.items() if price}
        if len(rates) < len(sizes):
            return 0
        rows, self._slower = rows_beside(others, rates, emitted(self._engine.turn_rate, _KEPT_OVER) / _KEPT_OVER)
        worst_s = self._slower * PROMISED_TICKS * self._tuner.budget.tick_s
        return rows if not worst_s or self._tuner.budget.affords(worst_s) else 0

    def _sort_out(self, completions: Sequence[Completion]) -> list[Completion]:
        theirs = []
        for completion in completions:
            request = self._running.pop(completion.key, None)
            if request is None:
                theirs.append(completion)
            else:
                self._keep(request, completion)
        if not all(map(self._engine.holds, self._running)):  # one failed
            self._running = {key: request for key, request in self._running.items() if self._engine.holds(key)}
        return theirs

    def _keep(self, request: Request, completion: Completion) -> None:
        self._forget(completion)
        if len(completion.tokens) > len(request.draft_tokens):
            self.written += len(completion.tokens) - len(request.draft_tokens)
            self._texts.append(WrittenText.of(request.key, completion.tokens))


class AheadQueue:
    """A fleet's part: which worker writes which requests of the next step."""

    def __init__(self, requests: Sequence[Request], workers: int, rows: int) -> None:
        """`requests` in the order in which they are to be written. A worker has a share of them at a time, so that
        workers that run dry later find some, and no more than it has rows."""
        self._waiting = deque(requests)
        self._share = max(1, min(rows, -(-len(requests) // max(1, workers))))
        self._at: dict[int, dict[Key, Request]] = {}

    @property
    def open(self) -> bool:
        """Whether a request is not written yet."""
        return bool(self._waiting) or any(self._at.values())

    def next(self, worker: int) -> tuple[Request, ...]:
        """What a worker without other requests is to write beside what it has; nothing while that is enough."""
        held = self._at.setdefault(worker, {})
        count = self._share - len(held) if len(held) <= self._share // 2 else 0
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        held.update((request.key, request) for request in taken)
        return tuple(taken)

    def written(self, worker: int, texts: Iterable[WrittenText]) -> None:
        """A worker has written these to their end."""
        for text in texts:
            self._at.get(worker, {}).pop(text.key, None)

    def lost(self, worker: int) -> None:
        """What a lost worker had is written by others."""
        self._waiting.extendleft(reversed(self._at.pop(worker, {}).values()))


@dataclass(frozen=True, slots=True)
class AheadWork:
    """What the workers of a fleet write ahead in a rollout, and where the texts go."""

    queue: AheadQueue
    texts: WrittenTexts
    split: IdleSplit  # of the time of workers without requests, between training the drafter and writing ahead


NOTHING_AHEAD = AheadWork(AheadQueue((), 1, 1), WrittenTexts(), IdleSplit(1.0))


def longest_first(requests: Iterable[Request], expected: Callable[[Request], float]) -> list[Request]:
    """The order in which requests are written ahead: the tail of the next step begins with the longest."""
    return sorted(requests, key=expected, reverse=True)


def rows_beside(others: int, rates: Mapping[int, float], kept: float) -> tuple[int, float]:
    """Rows that are worth writing ahead beside so many requests that are waited for, and the share of their pace that
    these lose.

    `rates`: tokens per second and request by number of requests; the largest is a full batch. `kept`: share of the
    tokens written ahead that the next step accepts: each saves what it takes a full batch to write one.
    """
    now, full = rates[others], max(rates)
    best, found = 0.0, (0, 0.0)
    for size, rate in rates.items():
        slower = max(0.0, 1.0 - rate / now)
        saved = (size - others) * rate * kept / (full * rates[full])
        if size > others and slower <= _MOST_SLOWER and saved - _WORTH * slower > best:
            best, found = saved - _WORTH * slower, (size - others, slower)
    return found
