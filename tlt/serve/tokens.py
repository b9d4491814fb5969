"""`POST /inference/v1/generate` (token ids in, token ids out), `/tokenize` and `/detokenize`."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tlt.serve import logprobs
from tlt.serve.chat import chat_prompt
from tlt.serve.http import read_fields
from tlt.serve.protocol import Fields, read_sampling, refused
from tlt.serve.responses import Call, TextOutput, finish_reason, new_id, read_stream, read_top, respond, version_fields
from tlt.serve.state import ServerState


async def generate(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    model = state.check_model(fields)
    prompt = fields.tokens("token_ids")
    if not prompt:
        raise refused("token_ids", "expected at least one token id")
    fields.only("features", {}, [])
    params = Fields(fields.object("sampling_params"), "sampling_params.")
    stream, _ = read_stream(fields)
    top = read_top(params, "logprobs")
    call = Call(
        model,
        [prompt],
        read_sampling(params, params.integer("max_tokens", state.room(prompt), 1), state.options.queue),
        stream,
        logprobs=params.has("logprobs"),
        top=top if top > 1 else 0,  # clients send 1 for the log-probabilities of the drawn tokens alone
    )
    name = fields.text("request_id") or new_id("generate")
    return await respond(request, state, call, _TokenFormat(state, name))


@dataclass(frozen=True, slots=True)
class _TokenFormat:
    state: ServerState
    id: str

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        return None

    def choice(self, call: Call, found: TextOutput, *, streamed: bool) -> dict[str, Any]:
        output = found.output
        values = logprobs.of_output(output, (), echo=False, top=call.top, processed=self.state.processed)
        return {
            "index": output.index,
            "token_ids": list(output.tokens),
            "logprobs": logprobs.for_tokens(values) if call.logprobs else None,
            "finish_reason": finish_reason(output),
            "stop_reason": found.stop,
            **version_fields(output),
        }

    def envelope(self, call: Call, choices: list[dict[str, Any]], *, streamed: bool, first: bool) -> dict[str, Any]:
        return {"request_id": self.id, "model": call.model, "choices": choices}


async def tokenize(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    state.check_model(fields)
    if fields.has("messages"):
        tokens = await chat_prompt(fields, state)
    else:
        special = fields.flag("add_special_tokens", True)
        text = fields.text("prompt")
        tokens = await state.with_tokenizer(fields, lambda own: tuple(own.encode_text(text, special=special)))
    names = [state.tokenizer.piece(token) for token in tokens] if fields.flag("return_token_strs") else None
    room = state.engine.served.context
    return JSONResponse({"count": len(tokens), "max_model_len": room, "tokens": list(tokens), "token_strs": names})


async def detokenize(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    state.check_model(fields)
    tokens = fields.tokens("tokens")
    vocab = state.engine.served.model.config.vocab
    if any(token >= vocab for token in tokens):
        raise refused("tokens", f"{max(tokens)} is outside the policy's vocabulary of {vocab}")
    return JSONResponse({"prompt": await state.with_tokenizer(fields, lambda own: own.decode(tokens))})
