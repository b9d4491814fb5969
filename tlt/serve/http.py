"""HTTP bodies and streams: size limits, strict JSON, errors, and server-sent events until the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tlt.serve.protocol import ApiError, Fields
from tlt.strict_json import InvalidJson, parse

T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"


async def read_fields(request: Request, limit: int) -> Fields:
    """The body's object; none is an empty one."""
    body = await read_body(request, limit)
    if not body:
        return Fields({})
    try:
        value = parse(body)
    except InvalidJson as problem:
        raise ApiError(400, f"the body {problem}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; expected an object", code="invalid_json")
    return Fields(value, size=len(body))


async def read_body(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        413, f"the body has more than {limit} bytes, the limit of this server (--body-mib)", code="too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first."""
    running = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({running, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        for task in (running, disconnect):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await disconnect
        if not running.done():
            await asyncio.wait({running})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one per object; an error is the last one. `close` is called at the end and on disconnect."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._close = events, close
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        disconnect = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            sending.cancel()
            await asyncio.wait({sending, disconnect})
            await self._close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": _event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
