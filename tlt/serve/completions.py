"""`POST /v1/completions`: prompts as text or tokens, echoed and scored if asked for."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt.serve import logprobs
from tlt.serve.answers import Call, Piece, answer, finish_reason, new_id, now, read_top, streams, version_fields
from tlt.serve.fields import Fields
from tlt.serve.http import read_fields
from tlt.serve.sampling import read_sampling
from tlt.serve.service import Service

_USUAL_TOKENS = 16  # as OpenAI has it


async def completions(request: Request, service: Service) -> Response:
    fields = await read_fields(request, service.body_limit)
    model = service.check_model(fields)
    fields.only("suffix", "")
    prompts = service.prompts(fields)
    echo, most = fields.flag("echo"), fields.integer("max_tokens", _USUAL_TOKENS)
    stream, usage = streams(fields)
    call = Call(
        model,
        prompts,
        read_sampling(fields, max(1, most), service.options.queue),
        *(stream, usage),
        logprobs=fields.has("logprobs"),
        top=read_top(fields, "logprobs"),
        echo=echo,
        token_ids=fields.flag("return_token_ids"),
        as_ids=fields.flag("return_tokens_as_token_ids"),
        with_stop=fields.flag("include_stop_str_in_output"),
        write=most > 0,
        keep=_texts(fields),
    )
    if not most and not echo:
        fields.only("max_tokens", why="without echo there is nothing to answer")
    return await answer(request, service, call, _CompletionForm(service, new_id("cmpl"), now()))


def _texts(fields: Fields) -> dict[str, Any]:
    """Prompts that came as text are echoed as they came."""
    value = fields.raw("prompt")
    return {"texts": [value] if isinstance(value, str) else value}


@dataclass(frozen=True, slots=True)
class _CompletionForm:
    service: Service
    id: str
    created: int

    def _echoed(self, call: Call, index: int) -> str:
        given = call.keep["texts"]
        text = given[index // call.sampling.n] if len(given) == len(call.prompts) else None
        return text if isinstance(text, str) else self.service.tokenizer.decode(call.prompt(index))

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        if not call.echo:
            return None
        return {"index": index, "text": self._echoed(call, index), "logprobs": None, "finish_reason": None}

    def choice(self, call: Call, piece: Piece, *, streamed: bool) -> dict[str, Any]:
        part, prompt = piece.part, call.prompt(piece.part.index)
        echo = call.echo and not streamed
        before = self._echoed(call, part.index) if echo else ""
        found: dict[str, Any] | None = None
        if call.logprobs:
            told = logprobs.of_part(part, prompt, echo=echo, top=call.top, processed=self.service.processed)
            found = logprobs.for_completions(told, self.service.tokenizer, 0, as_ids=call.as_ids)
        tokens = {"token_ids": list(part.tokens), "prompt_token_ids": list(prompt)} if call.token_ids else {}
        return {
            "index": part.index,
            "text": before + piece.text,
            "logprobs": found,
            "finish_reason": finish_reason(part),
            "stop_reason": piece.stop,
            **tokens,
            **version_fields(part),
        }

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": call.model}
        return {**head, "choices": choices}
