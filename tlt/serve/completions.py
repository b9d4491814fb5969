"""`POST /v1/completions`: prompts as text or token ids, optionally echoed with their log-probabilities."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt.serve import logprobs
from tlt.serve.http import read_fields
from tlt.serve.protocol import Fields, read_sampling
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

_USUAL_TOKENS = 16  # as OpenAI has it


async def completions(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    model = state.check_model(fields)
    fields.only("suffix", "")
    prompts = await state.prompts(fields)
    echo, most = fields.flag("echo"), fields.integer("max_tokens", _USUAL_TOKENS)
    stream, usage = read_stream(fields)
    call = Call(
        model,
        prompts,
        read_sampling(fields, max(1, most), state.options.queue),
        *(stream, usage),
        logprobs=fields.has("logprobs"),
        top=read_top(fields, "logprobs"),
        echo=echo,
        token_ids=fields.flag("return_token_ids"),
        as_ids=fields.flag("return_tokens_as_token_ids"),
        with_stop=fields.flag("include_stop_str_in_output"),
        generate=most > 0,
        prompt_texts=_texts(fields),
    )
    if not most and not echo:
        fields.only("max_tokens", why="without echo the response would be empty")
    return await respond(request, state, call, _CompletionFormat(state, new_id("cmpl"), now()))


def _texts(fields: Fields) -> list[Any]:
    """The prompts as they were sent: texts are echoed unchanged."""
    value = fields.raw("prompt")
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class _CompletionFormat:
    state: ServerState
    id: str
    created: int

    def _echoed(self, call: Call, index: int) -> str:
        given = call.prompt_texts
        text = given[index // call.sampling.n] if len(given) == len(call.prompts) else None
        return text if isinstance(text, str) else self.state.tokenizer.decode(call.prompt(index))

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        if not call.echo:
            return None
        return {"index": index, "text": self._echoed(call, index), "logprobs": None, "finish_reason": None}

    def choice(self, call: Call, found: TextOutput, *, streamed: bool) -> dict[str, Any]:
        output, prompt = found.output, call.prompt(found.output.index)
        echo = call.echo and not streamed
        before = self._echoed(call, output.index) if echo else ""
        scores: dict[str, Any] | None = None
        if call.logprobs:
            values = logprobs.of_output(output, prompt, echo=echo, top=call.top, processed=self.state.processed)
            scores = logprobs.for_completions(values, self.state.tokenizer, 0, as_ids=call.as_ids)
        tokens = {"token_ids": list(output.tokens)} if call.token_ids else {}
        if call.token_ids and found.first:
            tokens["prompt_token_ids"] = list(prompt)
        return {
            "index": output.index,
            "text": before + found.text,
            "logprobs": scores,
            "finish_reason": finish_reason(output),
            "stop_reason": found.stop,
            **tokens,
            **version_fields(output),
        }

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool, first: bool) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": call.model}
        return {**head, "choices": choices}
