"""The event loop's side of the engine: calls as coroutines, parts as they come, and a limit of what is under way.

What always holds: whoever leaves a `Generation`, by its end or by an exception, leaves nothing under way.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from tlt.serve.engine_loop import EngineLoop, Pause
from tlt.serve.errors import ApiError
from tlt.serve.metrics import Counters
from tlt.serve.served import ServedPolicy, ServedReport
from tlt.serve.work import Ask, Delta
from tlt.types import Key

T = TypeVar("T")


class Client:
    """Started inside a running event loop."""

    def __init__(self, served: ServedPolicy, queue: int, ended: Callable[[str], None]) -> None:
        """`queue`: completions under way or waiting, at most. `ended` is called if the engine's thread dies."""
        self.served, self.queue, self.counters = served, queue, Counters()
        self.under_way = 0
        self._events = asyncio.get_running_loop()
        self._ended = ended
        self._loop: EngineLoop[Generation] = EngineLoop(served, self._deliver, self._over)
        self._loop.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.stop)

    @property
    def alive(self) -> bool:
        return self._loop.alive

    @property
    def paused(self) -> bool:
        return self._loop.paused

    def generation(self, asks: Sequence[Ask]) -> "Generation":
        """Refused where the queue is full, or could never hold so many."""
        if len(asks) > self.queue:
            raise ApiError(400, f"{len(asks)} completions in one call; the server's queue holds {self.queue}")
        if self.under_way + len(asks) > self.queue:
            raise ApiError(
                429, f"{self.under_way} completions are under way and {self.queue} may be; try again", code="queue_full"
            )
        return Generation(self, self._loop, asks)

    async def report(self) -> ServedReport:
        return await asyncio.wrap_future(self._loop.call(self.served.report))

    async def call(self, work: Callable[[], T]) -> T:
        """In the engine's thread, between two ticks."""
        return await asyncio.wrap_future(self._loop.call(work))

    async def pause(self, mode: Pause) -> None:
        await asyncio.wrap_future(self._loop.pause(mode))

    def abort_all(self) -> None:
        """Ends what is under way, without waiting for it. Nothing is written from then on."""
        if self.alive:
            self._loop.pause("abort")

    async def resume(self) -> None:
        await asyncio.wrap_future(self._loop.resume())

    async def update(self, change: Callable[[], int]) -> int:
        return await asyncio.wrap_future(self._loop.update(change))

    async def when_idle(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.when_idle(work))

    # ---- in the engine's thread

    def _deliver(self, parts: "list[tuple[Generation, Delta]]") -> None:
        if parts and not self._events.is_closed():
            self._events.call_soon_threadsafe(_hand_out, parts)

    def _over(self, why: str) -> None:
        if why and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._ended, why)


class Generation:
    """The completions of one call: `async with` it, and iterate over their parts."""

    def __init__(self, client: Client, loop: "EngineLoop[Generation]", asks: Sequence[Ask]) -> None:
        self._client, self._loop, self._asks = client, loop, asks
        self._parts: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._keys: dict[int, Key] = {}  # of those under way, by their place in the call

    async def __aenter__(self) -> Self:
        self._client.under_way += len(self._asks)
        submitted: Future[list[Key]] | None = None
        try:
            submitted = self._loop.submit(self._asks, self)
            keys = await asyncio.shield(asyncio.wrap_future(submitted))
            self._keys = {ask.index: key for ask, key in zip(self._asks, keys, strict=True)}
        finally:
            if not self._keys:
                self._client.under_way -= len(self._asks)
                if submitted is not None:
                    submitted.add_done_callback(self._drop_submitted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.under_way -= len(self._asks)
        self._drop(self._keys.values())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._keys:
            part = await self._next()
            if part.failure:
                self._keys.pop(part.index, None)
                raise ApiError(500, part.failure)
            if part.completion is not None:
                self._keys.pop(part.index, None)
                self._client.counters.completed(part.completion)
            yield part

    async def _next(self) -> Delta:
        """The next part, with what waits behind it of the same completion: a busy loop sends fewer, longer ones."""
        while not self._parts:
            self._arrived.clear()
            await self._arrived.wait()
        part = self._parts.popleft()
        while self._parts and self._parts[0].index == part.index and not (part.failure or self._parts[0].failure):
            part = _joined(part, self._parts.popleft())
        return part

    def take(self, part: Delta) -> None:
        self._parts.append(part)
        self._arrived.set()

    def _drop_submitted(self, submitted: "Future[list[Key]]") -> None:
        """The client left before the engine had taken its asks."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._drop(submitted.result())

    def _drop(self, keys: Collection[Key]) -> None:
        with suppress(ApiError):  # the engine's thread has ended, and everything with it
            if keys:
                self._loop.drop(keys)


def _joined(part: Delta, following: Delta) -> Delta:
    return replace(
        following,
        tokens=part.tokens + following.tokens,
        logprobs=part.logprobs + following.logprobs,
        policy_logprobs=part.policy_logprobs + following.policy_logprobs,
    )


def _hand_out(parts: list[tuple[Generation, Delta]]) -> None:
    for generation, part in parts:
        generation.take(part)
