"""Tokens in, tokens out: `POST /inference/v1/generate`, `/tokenize` and `/detokenize`. No text is made twice."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tlt.serve import logprobs
from tlt.serve.answers import Call, Piece, answer, finish_reason, new_id, read_top, streams, version_fields
from tlt.serve.chat import chat_prompt
from tlt.serve.errors import refused
from tlt.serve.fields import Fields
from tlt.serve.http import read_fields
from tlt.serve.sampling import read_sampling
from tlt.serve.service import Service


async def generate(request: Request, service: Service) -> Response:
    fields = await read_fields(request, service.body_limit)
    model = service.check_model(fields)
    prompt = fields.tokens("token_ids")
    if not prompt:
        raise refused("token_ids", "expected at least one token id")
    fields.only("features", {}, [])
    params = Fields(fields.object("sampling_params"), "sampling_params.")
    stream, _ = streams(fields)
    top = read_top(params, "logprobs")
    call = Call(
        model,
        [prompt],
        read_sampling(params, params.integer("max_tokens", service.room(prompt), 1), service.options.queue),
        stream,
        logprobs=params.has("logprobs"),
        top=top if top > 1 else 0,  # 1 is what every client sends that wants the drawn tokens' own
    )
    name = fields.text("request_id") or new_id("generate")
    return await answer(request, service, call, _TokenForm(service, name))


@dataclass(frozen=True, slots=True)
class _TokenForm:
    service: Service
    id: str

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        return None

    def choice(self, call: Call, piece: Piece, *, streamed: bool) -> dict[str, Any]:
        part = piece.part
        told = logprobs.of_part(part, (), echo=False, top=call.top, processed=self.service.processed)
        return {
            "index": part.index,
            "token_ids": list(part.tokens),
            "logprobs": logprobs.for_tokens(told) if call.logprobs else None,
            "finish_reason": finish_reason(part),
            "stop_reason": piece.stop,
            **version_fields(part),
        }

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        return {"request_id": self.id, "model": call.model, "choices": choices}


async def tokenize(request: Request, service: Service) -> Response:
    fields = await read_fields(request, service.body_limit)
    service.check_model(fields)
    if fields.has("messages"):
        tokens = chat_prompt(fields, service)
    else:
        special = fields.flag("add_special_tokens", True)
        tokens = tuple(service.tokenizer.encode_text(fields.text("prompt"), special=special))
    names = [service.tokenizer.piece(token) for token in tokens] if fields.flag("return_token_strs") else None
    room = service.client.served.context
    return JSONResponse({"count": len(tokens), "max_model_len": room, "tokens": list(tokens), "token_strs": names})


async def detokenize(request: Request, service: Service) -> Response:
    fields = await read_fields(request, service.body_limit)
    service.check_model(fields)
    tokens = fields.tokens("tokens")
    vocab = service.client.served.model.config.vocab
    if any(token >= vocab for token in tokens):
        raise refused("tokens", f"{max(tokens)} is outside the policy's vocabulary of {vocab}")
    return JSONResponse({"prompt": service.tokenizer.decode(tokens)})
