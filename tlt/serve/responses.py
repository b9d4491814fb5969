"""Responses of the endpoints that generate: whole or streamed, in the JSON format of the endpoint.

Each endpoint has a `ResponseFormat`. Does not know the endpoints.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tlt.serve.async_engine import Generation
from tlt.serve.detokenizer import Detokenizer
from tlt.serve.http import EventStream, run_until_disconnect
from tlt.serve.messages import ServeOutput, ServeRequest
from tlt.serve.protocol import Fields, Sampling, refused
from tlt.serve.state import ServerState
from tlt.types import Key

_MOST_TOP = 64  # likeliest tokens of a position


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed call of an endpoint that generates."""

    model: str
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    stream: bool = False
    usage: bool = False  # the last event counts the tokens
    logprobs: bool = False
    top: int = 0  # likeliest tokens of each position
    echo: bool = False  # the text begins with the prompt
    token_ids: bool = False
    as_ids: bool = False  # log-probabilities name tokens "token_id:N"
    with_stop: bool = False  # the stop string is part of the text
    generate: bool = True  # False: prompts are only scored
    prompt_texts: Sequence[Any] = ()  # prompts as the body has them

    def requests(self) -> list[ServeRequest]:
        scored = self.logprobs and (self.top > 0 or self.echo)
        params, top = self.sampling.params if self.generate else None, self.top if scored else None
        return [
            ServeRequest(index, prompt, params, Key(self.sampling.seed, index), self.stream, top)
            for index, prompt in enumerate(prompt for prompt in self.prompts for _ in range(self.sampling.n))
        ]

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.prompts[index // self.sampling.n]


@dataclass(frozen=True, slots=True)
class TextOutput:
    """An output of one completion, with its text."""

    output: ServeOutput
    text: str
    stop: str | int | None  # the stop string or token that ended it
    first: bool = True  # of this completion


class ResponseFormat(Protocol):
    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        """A stream's first choice for a completion; None: it begins with text."""
        ...

    def choice(self, call: Call, found: TextOutput, *, streamed: bool) -> dict[str, Any]: ...

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool, first: bool) -> dict[str, Any]:
        """`first`: the choice is the first of its completion."""
        ...


async def respond(request: Request, state: ServerState, call: Call, form: ResponseFormat) -> Response:
    if call.stream and call.logprobs and (call.top or call.echo):
        field = "echo" if call.echo else "top_logprobs"
        raise refused(field, "likeliest tokens and prompt log-probabilities cannot be streamed; set stream to false")
    generation = state.engine.generation(call.requests())
    if not call.stream:
        return JSONResponse(await run_until_disconnect(request, _whole(generation, state, call, form)))
    await generation.__aenter__()

    async def close() -> None:
        await generation.__aexit__(None, None, None)

    return EventStream(_events(generation, state, call, form), close)


async def _whole(generation: Generation, state: ServerState, call: Call, form: ResponseFormat) -> dict[str, Any]:
    found: dict[int, TextOutput] = {}
    async with generation:
        async for output in generation:
            text = Detokenizer(state.tokenizer, call.sampling.params, with_stop=call.with_stop)
            found[output.index] = TextOutput(output, text.feed(output.tokens, output.reason), text.stop)
    choices = [form.choice(call, one, streamed=False) for _, one in sorted(found.items())]
    tokens = sum(len(one.output.tokens) for one in found.values())
    return {**form.envelope(call, choices, streamed=False, first=True), "usage": _usage(call, tokens)}


async def _events(
    generation: Generation, state: ServerState, call: Call, form: ResponseFormat
) -> AsyncIterator[dict[str, Any]]:
    texts: dict[int, Detokenizer] = {}
    tokens = 0
    async for output in generation:
        first, opening = output.index not in texts, None
        if first:
            texts[output.index] = Detokenizer(state.tokenizer, call.sampling.params, with_stop=call.with_stop)
            opening = form.opening(call, output.index)
        if opening is not None:
            yield form.envelope(call, [opening], streamed=True, first=True)
        tokens += len(output.tokens)
        text = texts[output.index]
        found = TextOutput(output, text.feed(output.tokens, output.reason), text.stop, first)
        yield form.envelope(
            call, [form.choice(call, found, streamed=True)], streamed=True, first=first and opening is None
        )
    if call.usage:
        yield {**form.envelope(call, [], streamed=True, first=False), "usage": _usage(call, tokens)}


def _usage(call: Call, tokens: int) -> dict[str, int]:
    prompt_tokens = sum(map(len, call.prompts))
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def finish_reason(output: ServeOutput) -> str | None:
    return "stop" if output.reason == "eos" else output.reason


def version_fields(output: ServeOutput) -> dict[str, Any]:
    """The version of the policy, and the first token that each version drew."""
    if output.completion is None:
        return {}
    spans = [{"start": start, "version": version} for start, version in output.versions]
    return {"weight_version": output.completion.policy_version, "weight_versions": spans}


def read_top(fields: Fields, name: str, default: int = 0) -> int:
    return fields.integer(name, default, 0, _MOST_TOP)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the last event counts the tokens."""
    options = Fields(fields.object("stream_options"), "stream_options.")
    return fields.flag("stream"), options.flag("include_usage")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())
