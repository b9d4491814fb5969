"""From a call's asks to its response, whole or streamed; endpoints say what a piece looks like.

A `Form` is one endpoint's way to write things down. Knows no endpoint; knows when to write which piece.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tlt.serve.client import Generation
from tlt.serve.errors import refused
from tlt.serve.fields import Fields
from tlt.serve.http import EventStream, unless_gone
from tlt.serve.sampling import Sampling
from tlt.serve.service import Service
from tlt.serve.shown_text import ShownText
from tlt.serve.work import Ask, Delta
from tlt.types import Key

_MOST_TOP = 64  # likeliest tokens of a position


@dataclass(frozen=True, slots=True)
class Call:
    """What all endpoints that write completions are asked for."""

    model: str
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    stream: bool = False
    usage: bool = False  # a last event with the tokens counted
    logprobs: bool = False
    top: int = 0  # likeliest tokens of each position
    echo: bool = False  # the prompt comes before the completion
    token_ids: bool = False
    as_ids: bool = False  # tokens are named by number in log-probabilities
    with_stop: bool = False  # the stop text is part of the text
    write: bool = True  # False: prompts are only scored
    keep: dict[str, Any] = field(default_factory=dict)  # what a form wants to know of the body

    def asks(self) -> list[Ask]:
        scored = self.logprobs and (self.top > 0 or self.echo)
        params = self.sampling.params if self.write else None
        return [
            Ask(index, prompt, params, Key(self.sampling.seed, index), self.stream, self.top if scored else None)
            for index, prompt in enumerate(prompt for prompt in self.prompts for _ in range(self.sampling.n))
        ]

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.prompts[index // self.sampling.n]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one completion with its text."""

    part: Delta
    text: str
    stop: str | int | None  # what ended it, if that was asked for


class Form(Protocol):
    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        """A stream's first choice for a completion; None: it begins with text."""
        ...

    def choice(self, call: Call, piece: Piece, *, streamed: bool) -> dict[str, Any]: ...

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]: ...


async def answer(request: Request, service: Service, call: Call, form: Form) -> Response:
    if call.stream and call.logprobs and (call.top or call.echo):
        field_name = "echo" if call.echo else "top_logprobs"
        raise refused(field_name, "the likeliest tokens, and log-probabilities of the prompt, are not streamed")
    generation = service.client.generation(call.asks())
    if not call.stream:
        return JSONResponse(await unless_gone(request, _whole(generation, service, call, form)))
    await generation.__aenter__()

    async def close() -> None:
        await generation.__aexit__(None, None, None)

    return EventStream(_events(generation, service, call, form), close)


async def _whole(generation: Generation, service: Service, call: Call, form: Form) -> dict[str, Any]:
    pieces: dict[int, Piece] = {}
    async with generation:
        async for part in generation:
            text = ShownText(service.tokenizer, call.sampling.params, with_stop=call.with_stop)
            pieces[part.index] = Piece(part, text.feed(part.tokens, part.reason), text.stop)
    choices = [form.choice(call, piece, streamed=False) for _, piece in sorted(pieces.items())]
    written = sum(len(piece.part.tokens) for piece in pieces.values())
    return {**form.envelope(call, choices, streamed=False), "usage": _usage(call, written)}


async def _events(generation: Generation, service: Service, call: Call, form: Form) -> AsyncIterator[dict[str, Any]]:
    texts: dict[int, ShownText] = {}
    written = 0
    async for part in generation:
        if part.index not in texts:
            texts[part.index] = ShownText(service.tokenizer, call.sampling.params, with_stop=call.with_stop)
            opening = form.opening(call, part.index)
            if opening is not None:
                yield form.envelope(call, [opening], streamed=True)
        written += len(part.tokens)
        piece = Piece(part, texts[part.index].feed(part.tokens, part.reason), texts[part.index].stop)
        yield form.envelope(call, [form.choice(call, piece, streamed=True)], streamed=True)
    if call.usage:
        yield {**form.envelope(call, [], streamed=True), "usage": _usage(call, written)}


def _usage(call: Call, written: int) -> dict[str, int]:
    read = sum(map(len, call.prompts))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def finish_reason(part: Delta) -> str | None:
    return "stop" if part.reason == "eos" else part.reason


def version_fields(part: Delta) -> dict[str, Any]:
    """The policy's version, and from which token on each that wrote."""
    if part.completion is None:
        return {}
    spans = [{"start": start, "version": version} for start, version in part.versions]
    return {"weight_version": part.completion.policy_version, "weight_versions": spans}


def read_top(fields: Fields, name: str, default: int = 0) -> int:
    return fields.integer(name, default, 0, _MOST_TOP)


def streams(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and with a count of tokens at the end."""
    options = Fields(fields.object("stream_options"), "stream_options.")
    return fields.flag("stream"), options.flag("include_usage")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())
