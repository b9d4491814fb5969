"""The engine's thread: ticks while there is work, and runs what others ask of the engine between two ticks.

What always holds: the engine is touched by this thread alone; every `Ask` taken ends with exactly one last part, or was
dropped by its client; weights change between ticks, and unless the server is paused only when no request is under way.
Knows asks and parts; knows nothing of HTTP.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from tlt.engine.request import Request
from tlt.errors import TltError
from tlt.serve.errors import ApiError
from tlt.serve.served import ServedPolicy
from tlt.serve.work import Ask, Delta, Versions
from tlt.types import Completion, Key, Timing

T = TypeVar("T")
C = TypeVar("C")
Pause = Literal["keep", "wait", "abort"]
_STOPPED = "the server is shutting down"


@dataclass(slots=True, eq=False)
class _Live(Generic[C]):
    """An ask under way. `client` receives its parts."""

    ask: Ask
    client: C
    key: Key
    sent: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)


class EngineLoop(Generic[C]):
    def __init__(
        self,
        served: ServedPolicy,
        deliver: Callable[[list[tuple[C, Delta]]], None],
        ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`deliver` is called in the engine's thread, once per tick; `ended` when the thread has ended, with the reason
        if nobody asked for it."""
        self._served, self._deliver, self._on_end = served, deliver, ended
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._live: dict[Key, _Live[C]] = {}
        self._streamed: dict[Key, _Live[C]] = {}
        self._unscored: deque[tuple[_Live[C], Completion | None]] = deque()
        self._when_idle: deque[Callable[[], None]] = deque()  # asks wait behind these
        self._held: deque[Callable[[], None]] = deque()
        self._promised: set[Future[Any]] = set()
        self._asked = 0
        self._paused = self._stopping = False
        self._rested = False  # the drafter has learned from all there is
        self._thread = threading.Thread(target=self._run, name="engine")

    # ---- what other threads call

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def stop(self) -> None:
        """Ends every ask, and then the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Has the engine's thread do something between two ticks. A TltError is the future's; others end the thread."""
        future = self._promise(work)
        self._post(lambda: _keep_promise(work, future))
        return future

    def submit(self, asks: Sequence[Ask], client: C) -> "Future[list[Key]]":
        """Takes all of the asks, or none. The keys are for `drop`."""
        work = partial(self._submit, asks, client)
        future = self._promise(work)

        def enter() -> None:
            if self._when_idle:
                self._held.append(enter)
            else:
                _keep_promise(work, future)

        self._post(enter)
        return future

    def drop(self, keys: Iterable[Key]) -> None:
        """Their client is gone: what is still under way ends, and no parts come any more."""
        gone = list(keys)
        self.call(lambda: self._drop(gone))

    def pause(self, mode: Pause) -> "Future[None]":
        """No ticks until `resume`. keep: requests under way go on then; abort: they end now; wait: first they end."""
        if mode == "wait":
            return self.when_idle(lambda: self._set_paused(True))
        return self.call(lambda: self._pause(abort=mode == "abort"))

    def resume(self) -> "Future[None]":
        return self.call(lambda: self._set_paused(False))

    def when_idle(self, work: Callable[[], T]) -> "Future[T]":
        """Runs once no request is under way; asks that come meanwhile wait behind it. At once while paused."""
        future = self._promise(work)
        run = partial(_keep_promise, work, future)
        self._post(lambda: run() if self._paused else self._when_idle.append(run))
        return future

    def update(self, change: Callable[[], int]) -> "Future[int]":
        """`change` gives the policy other weights and returns their version: when no request is under way, or while
        paused at once; then requests under way go on with these."""
        return self.when_idle(lambda: self._update(change))

    @property
    def paused(self) -> bool:
        return self._paused

    def _promise(self, work: Callable[[], T]) -> "Future[T]":
        """A future that is resolved at the latest when the thread ends."""
        future: Future[T] = Future()
        self._promised.add(future)
        future.add_done_callback(self._promised.discard)
        return future

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            if not self.alive:
                raise ApiError(503, _STOPPED)
            self._inbox.append(work)
            self._wake.notify()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_one_round()
        finally:
            error = sys.exception()
            self._end(f"the engine's thread died: {error!r}" if error else "")

    def _do_one_round(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        if self._paused:
            self._wait()
        elif self._served.busy or self._unscored:
            self._tick()
        elif self._when_idle:
            self._when_idle.popleft()()
        elif self._held:
            self._held.popleft()()
        elif self._rested or not self._served.learns:
            self._wait()
        else:
            self._rested = not self._served.learn(until=self._called)

    def _called(self) -> bool:
        return bool(self._inbox) or self._stopping

    def _wait(self) -> None:
        with self._wake:
            self._wake.wait_for(self._called)

    def _end(self, why: str) -> None:
        with self._wake:
            self._stopping = True
        for future in list(self._promised):
            if not future.done():
                future.set_exception(ApiError(503, why or _STOPPED))
        live = [*self._live.values(), *(live for live, _ in self._unscored)]
        self._deliver([(each.client, Delta(each.ask.index, failure=why or _STOPPED)) for each in live])
        self._served.close()
        self._on_end(why)

    # ---- between ticks

    def _submit(self, asks: Sequence[Ask], client: C) -> list[Key]:
        started = [_Live(ask, client, Key(self._asked, ask.index)) for ask in asks]
        self._asked += 1
        writing = [
            Request(each.key, each.ask.prompt, each.ask.params, str(hash(each.ask.prompt)), each.ask.noise, keep=True)
            for each in started
            if each.ask.params is not None
        ]
        self._served.submit(writing)
        for each in started:
            each.versions.append((0, self._served.version))
            if each.ask.params is None:
                self._served.check(each.ask.prompt)
                self._unscored.append((each, None))
                continue
            self._live[each.key] = each
            if each.ask.streamed:
                self._streamed[each.key] = each
        return [each.key for each in started]

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._streamed.pop(key, None)
            if self._live.pop(key, None) is not None:
                self._served.abort(key)
        self._unscored = deque(item for item in self._unscored if item[0].key not in keys)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _pause(self, abort: bool) -> None:
        if abort:
            ended = [(self._live[key], self._served.abort(key)) for key in list(self._live)]
            self._live, self._streamed = {}, {}
            self._deliver([self._last(each, completion) for each, completion in ended])
        self._paused = True

    def _update(self, change: Callable[[], int]) -> int:
        version = change()
        for each in self._live.values():
            written = self._served.count(each.key)
            if each.versions[-1][0] == written:
                each.versions.pop()  # nothing was written with these
            each.versions.append((written, version))
        self._rested = False
        return version

    # ---- ticks

    def _tick(self) -> None:
        out: list[tuple[C, Delta]] = []
        if self._served.busy:
            for completion in self._served.tick():
                each = self._live.pop(completion.key)
                self._streamed.pop(completion.key, None)
                self._rested = False
                if each.ask.top is None:
                    out.append(self._last(each, completion))
                else:
                    self._unscored.append((each, completion))
            for key, why in self._served.take_failures().items():
                each = self._live.pop(key)
                self._streamed.pop(key, None)
                out.append((each.client, Delta(each.ask.index, failure=why)))
            out += [part for each in self._streamed.values() if (part := self._next(each))]
        if self._unscored:
            out += self._score()
        if out:
            self._deliver(out)

    def _next(self, each: _Live[C]) -> tuple[C, Delta] | None:
        new = self._served.written_since(each.key, each.sent)
        if not new.tokens:
            return None
        each.sent += len(new.tokens)
        return each.client, Delta(each.ask.index, new.tokens, new.logprobs, new.policy_logprobs)

    def _last(self, each: _Live[C], completion: Completion) -> tuple[C, Delta]:
        rest = slice(each.sent, None)
        part = Delta(
            *(each.ask.index, completion.tokens[rest], completion.logprobs[rest], completion.policy_logprobs[rest]),
            reason=completion.finish_reason,
            completion=completion,
            versions=_versions(each),
        )
        return each.client, part

    def _score(self) -> list[tuple[C, Delta]]:
        """Some of those that wait: as much as a tick may read of prompts."""
        batch, tokens = list[tuple[_Live[C], Completion]](), 0
        while self._unscored and (not batch or tokens < self._served.score_tokens):
            each, completion = self._unscored.popleft()
            completion = completion or _nothing(each)
            batch.append((each, completion))
            tokens += len(completion.prompt_tokens) + len(completion.tokens)
        texts = [completion.prompt_tokens + completion.tokens for _, completion in batch]
        scores = self._served.score(texts, max(each.ask.top or 0 for each, _ in batch))
        return [
            (
                each.client,
                Delta(
                    *(each.ask.index, completion.tokens, completion.logprobs, completion.policy_logprobs),
                    reason=completion.finish_reason,
                    completion=completion,
                    scores=score,
                    versions=_versions(each),
                ),
            )
            for (each, completion), score in zip(batch, scores, strict=True)
        ]


def _versions(each: _Live[C]) -> Versions:
    return tuple(each.versions)


def _nothing(each: _Live[C]) -> Completion:
    """The completion of a prompt that is only scored."""
    version = each.versions[-1][1]
    return Completion(each.key, each.ask.prompt, (), "", (), (), "length", version, Timing(0.0, 0.0))


def _keep_promise(work: Callable[[], T], future: "Future[T]") -> None:
    """A TltError is the future's; any other ends the thread."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except TltError as error:
        future.set_exception(error)
