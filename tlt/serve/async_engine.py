"""The engine for the event loop: calls are coroutines, outputs arrive as they are generated, the queue is limited.

What always holds: leaving a `Generation`, at its end or by an exception, aborts its remaining requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from tlt.serve.engine_loop import EngineLoop, PauseMode
from tlt.serve.messages import ServeOutput, ServeRequest
from tlt.serve.metrics import Counters
from tlt.serve.protocol import ApiError
from tlt.serve.served_policy import ServedPolicy, ServedReport
from tlt.types import Key

T = TypeVar("T")


class AsyncEngine:
    """Started inside a running event loop."""

    def __init__(self, served: ServedPolicy, queue: int, ended: Callable[[str], None]) -> None:
        """`queue`: completions running or waiting, at most. `ended` is called if the engine thread dies."""
        self.served, self.queue, self.counters = served, queue, Counters()
        self.in_flight = 0
        self._events = asyncio.get_running_loop()
        self._ended = ended
        self._loop: EngineLoop[Generation] = EngineLoop(served, self._deliver, self._thread_ended)
        self._loop.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.stop)

    @property
    def alive(self) -> bool:
        return self._loop.alive

    @property
    def paused(self) -> bool:
        return self._loop.paused

    def generation(self, requests: Sequence[ServeRequest]) -> "Generation":
        """Raises ApiError if the queue is full or too small for the call."""
        if len(requests) > self.queue:
            raise ApiError(400, f"{len(requests)} completions in one call; the server's queue holds {self.queue}")
        if self.in_flight + len(requests) > self.queue:
            raise ApiError(
                429,
                f"{self.in_flight} completions are running or waiting, the limit is {self.queue}; try again",
                code="queue_full",
            )
        return Generation(self, self._loop, requests)

    async def report(self) -> ServedReport:
        return await asyncio.wrap_future(self._loop.call(self.served.report))

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` in the engine thread, between two ticks."""
        return await asyncio.wrap_future(self._loop.call(work))

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.wrap_future(self._loop.pause(mode))

    def abort_all(self) -> None:
        """Aborts all requests and pauses, without waiting for it."""
        if self.alive:
            self._loop.pause("abort")

    async def resume(self) -> None:
        await asyncio.wrap_future(self._loop.resume())

    async def update(self, change: Callable[[], int]) -> int:
        return await asyncio.wrap_future(self._loop.update(change))

    async def when_idle(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.when_idle(work))

    # ---- called in the engine thread

    def _deliver(self, outputs: "list[tuple[Generation, ServeOutput]]") -> None:
        if outputs and not self._events.is_closed():
            self._events.call_soon_threadsafe(_hand_out, outputs)

    def _thread_ended(self, why: str) -> None:
        if why and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._ended, why)


class Generation:
    """The completions of one call: enter it with `async with` and iterate over the outputs."""

    def __init__(self, engine: AsyncEngine, loop: "EngineLoop[Generation]", requests: Sequence[ServeRequest]) -> None:
        self._engine, self._loop, self._requests = engine, loop, requests
        self._outputs: deque[ServeOutput] = deque()
        self._arrived = asyncio.Event()
        self._keys: dict[int, Key] = {}  # of unfinished requests, by index

    async def __aenter__(self) -> Self:
        self._engine.in_flight += len(self._requests)
        submitted: Future[list[Key]] | None = None
        try:
            submitted = self._loop.submit(self._requests, self)
            keys = await asyncio.shield(asyncio.wrap_future(submitted))
            self._keys = {request.index: key for request, key in zip(self._requests, keys, strict=True)}
        finally:
            if not self._keys:
                self._engine.in_flight -= len(self._requests)
                if submitted is not None:
                    submitted.add_done_callback(self._drop_submitted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.in_flight -= len(self._requests)
        self._drop(self._keys.values())

    async def __aiter__(self) -> AsyncIterator[ServeOutput]:
        while self._keys:
            output = await self._next()
            if output.failure:
                self._keys.pop(output.index, None)
                raise ApiError(500, output.failure)
            if output.completion is not None:
                self._keys.pop(output.index, None)
                self._engine.counters.completed(output.completion)
            yield output

    async def _next(self) -> ServeOutput:
        """The next output, joined with the outputs of the same completion that follow it in the queue."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        while self._outputs and self._outputs[0].index == output.index:
            if output.failure or self._outputs[0].failure:
                break
            output = _joined(output, self._outputs.popleft())
        return output

    def take(self, output: ServeOutput) -> None:
        self._outputs.append(output)
        self._arrived.set()

    def _drop_submitted(self, submitted: "Future[list[Key]]") -> None:
        """The client disconnected before the engine thread took its requests."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._drop(submitted.result())

    def _drop(self, keys: Collection[Key]) -> None:
        with suppress(ApiError):  # the engine thread has ended, and its requests with it
            if keys:
                self._loop.drop(keys)


def _joined(output: ServeOutput, following: ServeOutput) -> ServeOutput:
    return replace(
        following,
        tokens=output.tokens + following.tokens,
        logprobs=output.logprobs + following.logprobs,
        policy_logprobs=output.policy_logprobs + following.policy_logprobs,
    )


def _hand_out(outputs: list[tuple[Generation, ServeOutput]]) -> None:
    for generation, output in outputs:
        generation.take(output)
