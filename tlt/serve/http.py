"""Bodies in, answers out: size limits, strict JSON, OpenAI's error form, and event streams that notice who has left."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tlt.serve.errors import ApiError
from tlt.serve.fields import Fields
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
    return Fields(value)


async def read_body(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body has more than {limit} bytes, as many as this server takes", code="too_large")
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


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; it is cancelled if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        if not working.done():
            await asyncio.wait({working})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one per object, and the error as the last one if there is one. `close` is called at the end,
    also when the client leaves before."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._close = events, close
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.wait({sending, leaving})
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
