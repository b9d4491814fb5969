"""The engine thread: ticks while there are requests, and runs functions of other threads between two ticks.

What always holds: only this thread uses the engine; every submitted `ServeRequest` ends with exactly one last output,
or was dropped by its client; weights change between ticks, and unless the server is paused only while no request runs.
Does not know HTTP.
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
from tlt.serve.messages import ServeOutput, ServeRequest, Versions
from tlt.serve.protocol import ApiError
from tlt.serve.served_policy import ServedPolicy
from tlt.types import Completion, Key, SamplingParams, Timing

T = TypeVar("T")
C = TypeVar("C")
PauseMode = Literal["keep", "wait", "abort"]
_STOPPED = "the server is shutting down"


@dataclass(slots=True, eq=False)
class _LiveRequest(Generic[C]):
    """A request that has not ended. `client` receives its outputs."""

    request: ServeRequest
    client: C
    key: Key
    sent: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)


class EngineLoop(Generic[C]):
    def __init__(
        self,
        served: ServedPolicy,
        deliver: Callable[[list[tuple[C, ServeOutput]]], None],
        ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`deliver` is called in the engine thread, once per tick; `ended` when the thread has ended, with its error
        ("" without one)."""
        self._served, self._deliver, self._on_end = served, deliver, ended
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._live: dict[Key, _LiveRequest[C]] = {}
        self._streamed: dict[Key, _LiveRequest[C]] = {}
        self._unscored: deque[tuple[_LiveRequest[C], Completion | None]] = deque()
        self._when_idle: deque[Callable[[], None]] = deque()  # new requests wait behind these
        self._held: deque[Callable[[], None]] = deque()
        self._futures: set[Future[Any]] = set()
        self._calls = 0
        self._paused = self._stopping = False
        self._rested = False  # training the drafter no longer helps
        self._thread = threading.Thread(target=self._run, name="engine")

    # ---- called by other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def stop(self) -> None:
        """Ends every request, and then the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Runs `work` between two ticks. The future receives a TltError; any other exception ends the thread."""
        future = self._future(work)
        self._post(lambda: _resolve(work, future))
        return future

    def submit(self, requests: Sequence[ServeRequest], client: C) -> "Future[list[Key]]":
        """Submits all requests or none. The result is their keys, for `drop`."""
        work = partial(self._submit, requests, client)
        future = self._future(work)

        def enter() -> None:
            if self._when_idle:
                self._held.append(enter)
            else:
                _resolve(work, future)

        self._post(enter)
        return future

    def drop(self, keys: Iterable[Key]) -> None:
        """Aborts requests whose client has disconnected. No further outputs are delivered."""
        gone = list(keys)
        self.call(lambda: self._drop(gone))

    def pause(self, mode: PauseMode) -> "Future[None]":
        """No ticks until `resume`. keep: requests continue then; abort: they end now; wait: they end first."""
        if mode == "wait":
            return self.when_idle(lambda: self._set_paused(True))
        return self.call(lambda: self._pause(abort=mode == "abort"))

    def resume(self) -> "Future[None]":
        return self.call(lambda: self._set_paused(False))

    def when_idle(self, work: Callable[[], T]) -> "Future[T]":
        """Runs `work` once all running requests have ended, while new ones wait; at once if the server is paused."""
        future = self._future(work)
        run = partial(_resolve, work, future)
        self._post(lambda: run() if self._paused else self._when_idle.append(run))
        return future

    def update(self, change: Callable[[], int]) -> "Future[int]":
        """Runs `change`, which loads weights and returns their version, as `when_idle` does. Requests of a paused
        server continue with the new weights."""
        return self.when_idle(lambda: self._update(change))

    @property
    def paused(self) -> bool:
        return self._paused

    def _future(self, work: Callable[[], T]) -> "Future[T]":
        """A future that is resolved when the thread ends, at the latest."""
        future: Future[T] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
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
            self._end(f"the engine thread died: {error!r}" if error else "")

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
        for future in list(self._futures):
            if not future.done():
                future.set_exception(ApiError(503, why or _STOPPED))
        unfinished = [*self._live.values(), *(live for live, _ in self._unscored)]
        self._deliver([(live.client, ServeOutput(live.request.index, failure=why or _STOPPED)) for live in unfinished])
        self._served.close()
        self._on_end(why)

    # ---- between ticks

    def _submit(self, requests: Sequence[ServeRequest], client: C) -> list[Key]:
        started = [_LiveRequest(request, client, Key(self._calls, request.index)) for request in requests]
        self._calls += 1
        generated = [
            _engine_request(live.key, live.request, live.request.params)
            for live in started
            if live.request.params is not None
        ]
        self._served.submit(generated)
        for live in started:
            live.versions.append((0, self._served.version))
            if live.request.params is None:
                self._served.check(live.request.prompt)
                self._unscored.append((live, None))
                continue
            self._live[live.key] = live
            if live.request.streamed:
                self._streamed[live.key] = live
        return [live.key for live in started]

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
            ended = [self._end_request(self._served.abort(key)) for key in list(self._live)]
            self._deliver([output for output in ended if output])
        while self._unscored:  # by the weights that drew them
            self._deliver(self._score())
        self._paused = True

    def _update(self, change: Callable[[], int]) -> int:
        version = change()
        for live in self._live.values():
            written = self._served.count(live.key)
            if live.versions[-1][0] == written:
                live.versions.pop()  # these weights drew no token
            live.versions.append((written, version))
        for live, completion in self._unscored:
            if completion is None:
                live.versions = [(0, version)]  # the prompt is scored with these weights
        self._rested = False
        return version

    # ---- ticks

    def _tick(self) -> None:
        out: list[tuple[C, ServeOutput]] = []
        if self._served.busy:
            for completion in self._served.tick():
                self._rested = False
                if output := self._end_request(completion):
                    out.append(output)
            for key, why in self._served.take_failures().items():
                live = self._live.pop(key)
                self._streamed.pop(key, None)
                out.append((live.client, ServeOutput(live.request.index, failure=why)))
            out += [output for live in self._streamed.values() if (output := self._next(live))]
        if self._unscored:
            out += self._score()
        if out:
            self._deliver(out)

    def _next(self, live: _LiveRequest[C]) -> tuple[C, ServeOutput] | None:
        new = self._served.written_since(live.key, live.sent)
        if not new.tokens:
            return None
        live.sent += len(new.tokens)
        return live.client, ServeOutput(live.request.index, new.tokens, new.logprobs, new.policy_logprobs)

    def _end_request(self, completion: Completion) -> tuple[C, ServeOutput] | None:
        """The last output; None: the completion is scored first."""
        live = self._live.pop(completion.key)
        self._streamed.pop(completion.key, None)
        if live.request.top is None:
            return self._last(live, completion)
        self._unscored.append((live, completion))
        return None

    def _last(self, live: _LiveRequest[C], completion: Completion) -> tuple[C, ServeOutput]:
        rest = slice(live.sent, None)
        output = ServeOutput(
            *(live.request.index, completion.tokens[rest], completion.logprobs[rest], completion.policy_logprobs[rest]),
            reason=completion.finish_reason,
            completion=completion,
            versions=_versions(live),
        )
        return live.client, output

    def _score(self) -> list[tuple[C, ServeOutput]]:
        """Scores waiting requests, up to as many tokens as a tick may prefill."""
        batch, tokens = list[tuple[_LiveRequest[C], Completion]](), 0
        while self._unscored and (not batch or tokens < self._served.score_tokens):
            live, completion = self._unscored.popleft()
            completion = completion or _nothing(live)
            batch.append((live, completion))
            tokens += len(completion.prompt_tokens) + len(completion.tokens)
        texts = [completion.prompt_tokens + completion.tokens for _, completion in batch]
        scores = self._served.score(texts, max(live.request.top or 0 for live, _ in batch))
        return [
            (
                live.client,
                ServeOutput(
                    *(live.request.index, completion.tokens, completion.logprobs, completion.policy_logprobs),
                    reason=completion.finish_reason,
                    completion=completion,
                    scores=score,
                    versions=_versions(live),
                ),
            )
            for (live, completion), score in zip(batch, scores, strict=True)
        ]


def _engine_request(key: Key, request: ServeRequest, params: SamplingParams) -> Request:
    """Requests with one prompt share a prompt id, under which the engine remembers lengths and completions."""
    return Request(key, request.prompt, params, str(hash(request.prompt)), request.noise, keep=True)


def _versions(live: _LiveRequest[C]) -> Versions:
    return tuple(live.versions)


def _nothing(live: _LiveRequest[C]) -> Completion:
    """The completion of a prompt that is only scored."""
    version = live.versions[-1][1]
    return Completion(live.key, live.request.prompt, (), "", (), (), "length", version, Timing(0.0, 0.0))


def _resolve(work: Callable[[], T], future: "Future[T]") -> None:
    """Resolves the future with the result of `work` or its TltError. Other exceptions end the thread."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except TltError as error:
        future.set_exception(error)
