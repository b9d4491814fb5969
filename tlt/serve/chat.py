"""`POST /v1/chat/completions`: messages and tools, rendered with the policy's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt.errors import shown
from tlt.serve import logprobs
from tlt.serve.http import read_fields
from tlt.serve.protocol import Fields, read_sampling, refused
from tlt.serve.responses import (
    Call,
    TextOutput,
    finish_reason,
    new_id,
    now,
    read_stream,
    read_top,
    respond,
    version_fields,
)
from tlt.serve.state import ServerState
from tlt.text import Tokenizer


async def chat_completions(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    model = state.check_model(fields)
    prompt = await chat_prompt(fields, state)
    limit = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    most = fields.integer(limit, state.room(prompt), 1)
    stream, usage = read_stream(fields)
    if read_top(fields, "top_logprobs") and not fields.flag("logprobs"):
        raise refused("top_logprobs", "expected logprobs to be true beside it")
    call = Call(
        model,
        [prompt],
        read_sampling(fields, most, state.options.queue),
        *(stream, usage),
        logprobs=fields.flag("logprobs"),
        top=read_top(fields, "top_logprobs"),
        token_ids=fields.flag("return_token_ids"),
        as_ids=fields.flag("return_tokens_as_token_ids"),
        with_stop=fields.flag("include_stop_str_in_output"),
    )
    return await respond(request, state, call, _ChatFormat(state, new_id("chatcmpl"), now()))


async def chat_prompt(fields: Fields, state: ServerState) -> tuple[int, ...]:
    """The prompt that the template makes of `messages` and `tools`."""
    fields.only("tool_choice", "auto", "none", why="the policy chooses by itself")
    fields.only("modalities", ["text"])
    for name in ("chat_template", "functions", "function_call", "audio", "web_search_options", "documents"):
        fields.only(name)
    messages = [_message(index, message) for index, message in enumerate(fields.objects("messages"))]
    if not messages:
        raise refused(fields.name("messages"), "expected at least one message")
    tools = fields.objects("tools") if fields.raw("tool_choice") != "none" else []
    going_on = fields.flag("continue_final_message")
    prompted = fields.flag("add_generation_prompt", default=not going_on)
    if going_on and prompted:
        raise refused("add_generation_prompt", "true, as continue_final_message is; one of them must be false")
    variables = fields.object("chat_template_kwargs")

    def encoded(tokenizer: Tokenizer) -> tuple[int, ...]:
        return tuple(
            tokenizer.encode_chat(
                messages, tools=tools, going_on=going_on, generation_prompt=prompted, variables=variables
            )
        )

    return await state.with_tokenizer(fields, encoded)


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates know it: its content is text."""
    name = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise refused(f"{name}.role", f"{shown(message.get('role'))} is no text")
    content = message.get("content")
    if isinstance(content, list):
        parts = [Fields(part, f"{name}.content.") if isinstance(part, dict) else None for part in content]
        if not all(part and part.raw("type") == "text" and isinstance(part.raw("text"), str) for part in parts):
            raise refused(f"{name}.content", f"{shown(content)} has parts that are no text; the policy reads text")
        content = "".join(part.text("text") for part in parts if part)
    if not isinstance(content, str | None):
        raise refused(f"{name}.content", f"{shown(content)} is neither a text nor a list of text parts")
    return {**message, "content": content or ""}


@dataclass(frozen=True, slots=True)
class _ChatFormat:
    state: ServerState
    id: str
    created: int

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, call: Call, found: TextOutput, *, streamed: bool) -> dict[str, Any]:
        output = found.output
        scores: dict[str, Any] | None = None
        if call.logprobs:
            values = logprobs.of_output(output, (), echo=False, top=call.top, processed=self.state.processed)
            scores = logprobs.for_chat(values, self.state.tokenizer, as_ids=call.as_ids)
        message = {"content": found.text} if streamed else {"role": "assistant", "content": found.text}
        return {
            "index": output.index,
            "delta" if streamed else "message": message,
            "logprobs": scores,
            "finish_reason": finish_reason(output),
            "stop_reason": found.stop,
            **({"token_ids": list(output.tokens)} if call.token_ids else {}),
            **version_fields(output),
        }

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool, first: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": call.model}
        prompt = {"prompt_token_ids": list(call.prompts[0])} if call.token_ids and first else {}
        return {**head, "choices": choices, **prompt}
