"""A simulated fleet: rollouts on several simulated workers, with the driver's own decisions.

Requests are assigned by `tlt.dispatch` and idle workers trained by `tlt.drafting.idle`, as in a real fleet; messages
take no time. What always holds: every request of a rollout is completed once; a worker's time is divided into decoding,
drafter training and waiting, which add up to the rollout's time.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from tlt.config import EngineSettings
from tlt.dispatch import Dispatch
from tlt.drafting.idle import Coordinator, State, WorkerStatus
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.sim.book import CostBook
from tlt.sim.trace import Trace
from tlt.sim.worker import SimCompletion, SimText, SimWorker
from tlt.sim.world import World
from tlt.spec.shape import MOST_NODES, Shape
from tlt.spec.shape_policy import ShapePolicy
from tlt.types import Completion, Key, SamplingParams, Timing
from tlt.writing_ahead import AheadQueue, WrittenText, longest_first

_NEVER = 1 << 62  # tokens


@dataclass(frozen=True, slots=True)
class Simulated:
    """One rollout."""

    workers: int
    seconds: float  # to the last completion
    tokens: int
    ticks: int  # of all workers
    finished_s: tuple[float, ...]  # end of each completion, ascending
    writing_s: tuple[float, ...]  # decoding time of each worker
    drafting_s: tuple[float, ...]  # drafter training time of each worker, without requests
    accept_length: float  # tokens per verify; 1 without drafts
    shapes: dict[tuple[int, Shape], int]  # requests and shape → ticks
    ahead: int = 0  # tokens that were written ahead in the rollout before
    written_ahead: int = 0  # tokens of the next rollout

    @property
    def idle_share(self) -> float:
        """Fraction of all workers' time without requests, in which drafter training delays nothing."""
        return 1.0 - sum(self.writing_s) / (self.workers * self.seconds)

    def tail_s(self, left: int) -> float:
        """Time in which at most `left` requests were still running."""
        return self.seconds - (self.finished_s[-1 - left] if left < len(self.finished_s) else 0.0)


class SimFleet:
    """Call `rollout` repeatedly, as a run takes its steps: tuners keep what they learned. Each rollout has the trace's
    lengths and new prompts."""

    def __init__(
        self,
        trace: Trace,
        workers: int,
        world: Callable[[int], World],
        settings: EngineSettings,
        shape_policy: Callable[[], ShapePolicy | None],
        deepest: int = 0,
        turn_rate: float | None = None,
    ) -> None:
        """`world` makes the environment of a worker, `shape_policy` its shape policy; None: plain decoding.
        `turn_rate`: share of the tokens that the policy writes differently after an update; None: nothing is written
        ahead."""
        self._trace, self._rollouts, self._turn_rate = trace, 0, turn_rate
        self._luck = random.Random(0)
        self._written_ahead = 0
        self._lengths: dict[Key, int] = {}
        worlds = [world(number) for number in range(workers)]
        check_room(trace, worlds[0].book)
        self._workers = [SimWorker(one, settings, self._lengths, shape_policy(), deepest) for one in worlds]
        self._rows = worlds[0].book.rows
        self._dispatch = Dispatch(self._rows)
        self._coordinator = Coordinator(range(workers))
        self._statuses = [WorkerStatus(number) for number in range(workers)]
        self._dry_s = [0.0] * workers  # since when a worker has had no request

    def rollout(self) -> Simulated:
        for worker in self._workers:
            worker.begin()
        self._dry_s, writing_s = [0.0] * len(self._workers), [0.0] * len(self._workers)
        self._rollouts += 1
        self._dispatch.begin(self._requests(self._rollouts), range(len(self._workers)))
        self._coordinator.begin(drafting=True)
        self._tell()
        finished: list[SimCompletion] = []
        now = 0.0
        while self._dispatch.open:
            self._hand_out(now)
            number = min((n for n, worker in enumerate(self._workers) if worker.busy), key=self._now)
            begun_s = self._now(number)
            answered = self._workers[number].tick()
            writing_s[number] += self._now(number) - begun_s
            now = self._now(number)
            self._hear(number, answered)
            finished += answered
        drafting_s = self._close() if self._turn_rate is None else [0.0 for _ in self._close()]
        found = self._told(finished, writing_s, drafting_s)
        return replace(found, written_ahead=self._write_ahead(found.seconds, self._turn_rate))

    def _write_ahead(self, until_s: float, turn_rate: float | None) -> int:
        """Workers without requests have written those of the next rollout since they ran dry; the tokens. They disturb
        nobody, so that their clocks may be turned back and go on here."""
        if turn_rate is None:
            return 0
        upcoming = longest_first(self._requests(self._rollouts + 1), self._dispatch.expected)
        queue, texts = AheadQueue(upcoming, len(self._workers), self._rows), dict[Key, int]()
        free = {n for n, worker in enumerate(self._workers) if worker.free_from(self._dry_s[n]) < until_s}
        while free:
            number = min(free, key=self._now)
            worker = self._workers[number]
            worker.take(queue.next(number), worker.now)
            if not worker.busy or worker.now >= until_s:
                free.remove(number)
                continue
            whole = {completion.key: completion.tokens for completion in worker.tick(nothing_waits=True)}
            queue.written(number, [WrittenText.of(key, ()) for key in whole])
            texts |= whole
        for worker in self._workers:
            texts |= worker.cut()
        given = {key: SimText(tokens, self._differs(turn_rate)) for key, tokens in texts.items() if tokens}
        for worker in self._workers:
            worker.give(given)
        return sum(texts.values())

    def _differs(self, turn_rate: float) -> int:
        """Tokens before the first that the updated policy writes differently."""
        if turn_rate in (0.0, 1.0):
            return 0 if turn_rate else _NEVER
        return int(log(1.0 - self._luck.random()) / log(1.0 - turn_rate))

    def _requests(self, rollout: int) -> list[Request]:
        """Requests in the trace's order. No two prompts are alike."""
        requests, params = list[Request](), SamplingParams(max_tokens=self._trace.cap)
        for number, asked in enumerate(self._trace.asked):
            prompt = (number, *[0] * (asked.prompt_tokens - 1))
            for length in asked.lengths:
                key = Key(rollout, len(requests))
                requests.append(Request(key, prompt, params, f"rollout {rollout}, prompt {number}"))
                self._lengths[key] = min(length, self._trace.cap)
        return requests

    def _now(self, number: int) -> float:
        return self._workers[number].now

    def _hand_out(self, now: float) -> None:
        """A single worker gets all requests at once, in order: its engine queues them."""
        alone, given = len(self._workers) == 1, dict[int, list[Request]]()
        while (handed := self._dispatch.next(crowded=alone)) is not None:
            number, requests = handed
            hand_out = self._coordinator.hand(number, len(requests))
            if not self._statuses[number].take(hand_out):
                raise AssertionError(f"worker {number} refuses hand-out {hand_out.number}")
            given.setdefault(number, []).extend(requests)
        for number, asked in given.items():
            self._workers[number].take(sorted(asked, key=lambda one: one.key) if alone else asked, now)

    def _hear(self, number: int, answered: Sequence[SimCompletion]) -> None:
        for completion in answered:
            self._statuses[number].answered()
            if not self._dispatch.completed(number, _completion(completion)):
                raise AssertionError(f"request {completion.key.request} was answered twice")
        if answered:
            self._dry_s[number] = self._now(number)
            self._tell()

    def _tell(self) -> None:
        for status in self._statuses:
            self._coordinator.hear(status.report())
        for order in self._coordinator.orders():
            self._statuses[order.worker].hear(order)

    def _close(self) -> list[float]:
        """Ends the rollout. Workers without requests have trained until now; returns for how long each did."""
        drafting = [status.worker for status in self._statuses if status.state is State.DRAFTING]
        last_s = max(worker.now for worker in self._workers)
        drafting_s = [last_s - self._dry_s[n] if n in drafting else 0.0 for n in range(len(self._workers))]
        self._coordinator.close()
        self._tell()
        self._tell()
        if not self._coordinator.all_ready:
            raise AssertionError("some worker has not heard that the rollout is over")
        return drafting_s

    def _told(
        self, finished: Sequence[SimCompletion], writing_s: Sequence[float], drafting_s: Sequence[float]
    ) -> Simulated:
        shapes = sum((worker.shapes for worker in self._workers), Counter[tuple[int, Shape]]())
        verifies = sum(worker.verifies for worker in self._workers)
        return Simulated(
            workers=len(self._workers),
            seconds=max(completion.at_s for completion in finished),
            tokens=sum(completion.tokens for completion in finished),
            ticks=sum(worker.ticks for worker in self._workers),
            finished_s=tuple(sorted(completion.at_s for completion in finished)),
            writing_s=tuple(writing_s),
            drafting_s=tuple(drafting_s),
            accept_length=1.0 + sum(worker.accepted for worker in self._workers) / max(1, verifies),
            shapes=dict(shapes),
            ahead=sum(worker.ahead for worker in self._workers),
        )


def check_room(trace: Trace, book: CostBook) -> None:
    """Raises ConfigError if the KV cache cannot hold the longest completion and a draft tree after it."""
    needed = max(asked.prompt_tokens + min(max(asked.lengths), trace.cap) for asked in trace.asked) + MOST_NODES
    room = (book.pages - 1) * book.page_size
    if needed > room:
        raise ConfigError(
            f"the longest prompt with its answer and a draft needs {needed} tokens of key-value cache, the book's "
            f"holds {room}; measure with a larger engine.kv_gib, or take shorter answers"
        )


def _completion(completion: SimCompletion) -> Completion:
    tokens = (0,) * completion.tokens
    return Completion(completion.key, (), tokens, "", (), (), "eos", 0, Timing(0.0, completion.at_s))
