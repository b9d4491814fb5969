"""Control endpoints for trainers: pause and resume, weight updates, LoRA, sleep, caches; health, models, metrics."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tlt import __version__
from tlt.errors import shown
from tlt.model.transformer import Transformer
from tlt.model.weights import check_headers, load_some, load_tensors, read_tensors
from tlt.serve.http import read_fields
from tlt.serve.metrics import metrics_text
from tlt.serve.protocol import ApiError, Fields, refused
from tlt.serve.responses import now
from tlt.serve.state import ServerState

_TENSORS = ("application/octet-stream", "application/safetensors")  # media types of a body of weights
_PAUSES = ("keep", "wait", "abort")


async def health(request: Request, state: ServerState) -> Response:
    if not state.engine.alive:
        raise ApiError(503, "the engine's thread has ended")
    return Response()


async def models(request: Request, state: ServerState) -> Response:
    served = state.engine.served
    entry = {"object": "model", "created": now(), "owned_by": "tlt", "root": state.path, "parent": None}
    limits = {"max_model_len": served.context, "weight_version": served.version}
    names = [state.model, *(name for name in state.names if name != state.model)]
    return JSONResponse({"object": "list", "data": [{"id": name, **entry, **limits} for name in names]})


async def metrics(request: Request, state: ServerState) -> Response:
    text = metrics_text(state.model, state.engine.counters, await state.engine.report())
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def load(request: Request, state: ServerState) -> Response:
    return JSONResponse({"server_load": state.engine.in_flight})


async def version(request: Request, state: ServerState) -> Response:
    return JSONResponse({"version": __version__})


async def server_info(request: Request, state: ServerState) -> Response:
    mode = f"{state.options.logprobs}_logprobs"
    return JSONResponse({"vllm_config": {"model_config": {"model": state.path, "logprobs_mode": mode}}})


async def world_size(request: Request, state: ServerState) -> Response:
    return JSONResponse({"world_size": 1})


# ---- pausing


async def pause(request: Request, state: ServerState) -> Response:
    fields = await _options(request, state)
    mode = fields.text("mode", "abort")
    if mode not in _PAUSES:
        raise refused("mode", f"{shown(mode)}; expected one of {', '.join(_PAUSES)}")
    clear = _truth(fields, "clear_cache", default=False)
    await state.engine.pause(mode)  # type: ignore[arg-type]
    if clear:
        await state.engine.call(state.engine.served.drop_prefixes)
    return JSONResponse({"status": "paused", "mode": mode})


async def resume(request: Request, state: ServerState) -> Response:
    await state.engine.resume()
    return JSONResponse({"status": "resumed"})


async def is_paused(request: Request, state: ServerState) -> Response:
    return JSONResponse({"is_paused": state.engine.paused})


async def reset_prefix_cache(request: Request, state: ServerState) -> Response:
    await state.engine.call(state.engine.served.drop_prefixes)
    return JSONResponse({"status": "reset"})


async def sleep(request: Request, state: ServerState) -> Response:
    fields = await _options(request, state)
    level = fields.text("level", "1")
    if level != "1":
        raise refused("level", f"{shown(level)}; expected 1: weights go to host memory, the key-value cache is freed")
    await state.engine.when_idle(state.engine.served.sleep)
    return JSONResponse({"status": "asleep"})


async def wake_up(request: Request, state: ServerState) -> Response:
    await state.engine.call(state.engine.served.wake)
    return JSONResponse({"status": "awake"})


async def is_sleeping(request: Request, state: ServerState) -> Response:
    return JSONResponse({"is_sleeping": state.engine.served.asleep})


# ---- weights


async def update_weights(request: Request, state: ServerState) -> Response:
    """Body `{"weight_dir": DIR}`, a Hugging Face directory, or a safetensors file with some of the policy's tensors.

    The version is `version`, or the last one plus one."""
    if request.headers.get("content-type", "").partition(";")[0] in _TENSORS:
        return await _update_from_body(request, state)
    fields = await read_fields(request, state.body_limit)
    directory = fields.text("weight_dir") or fields.text("path")
    if not directory:
        raise refused("weight_dir", "expected the directory of the weights, or a safetensors file as the body")
    if not Path(directory).is_dir():
        raise refused("weight_dir", f"{shown(directory)} is no directory of this machine")
    return await _changed(state, fields, partial(_load_directory, directory=Path(directory)))


async def _update_from_body(request: Request, state: ServerState) -> Response:
    handle, name = tempfile.mkstemp(suffix=".safetensors")
    try:
        with os.fdopen(handle, "wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        fields = Fields(dict(request.query_params))
        return await _changed(state, fields, partial(load_some, file=Path(name)))
    finally:
        Path(name).unlink()


def _load_directory(model: Transformer, directory: Path) -> None:
    check_headers(model.config, directory)  # before anything is copied
    load_tensors(model, read_tensors(directory), origin=str(directory))


async def _changed(state: ServerState, fields: Fields, load: Callable[[Transformer], None]) -> Response:
    wanted = fields.raw("version")
    text = str(wanted) if wanted is not None else ""
    if text and not (text.isdecimal() and len(text) <= 18):
        raise refused("version", f"{shown(wanted)} is no whole number")
    given = int(text) if text else None

    def change() -> int:
        found = state.engine.served.update_weights(load, given)
        state.adapters.forget()
        return found

    return JSONResponse({"status": "updated", "version": await state.engine.update(change)})


async def load_lora_adapter(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    name, path = fields.text("lora_name"), fields.text("lora_path")
    if not name or not path:
        raise refused("lora_path" if name else "lora_name", "expected a text")

    def merge(model: Transformer) -> None:
        state.adapters.load(model, Path(path), name)

    number = await state.engine.update(partial(state.engine.served.update_weights, merge))
    return JSONResponse({"status": "loaded", "version": number})


async def unload_lora_adapter(request: Request, state: ServerState) -> Response:
    fields = await read_fields(request, state.body_limit)
    name = fields.text("lora_name")
    if not name or name != state.adapters.name:
        raise ApiError(404, f"the adapter {name!r} is not loaded", param="lora_name")
    number = await state.engine.update(partial(state.engine.served.update_weights, state.adapters.unload))
    return JSONResponse({"status": "unloaded", "version": number})


async def _options(request: Request, state: ServerState) -> Fields:
    """Options in the query, as vLLM has them, or in the body."""
    body = await read_fields(request, state.body_limit)
    given: dict[str, Any] = {name: body.raw(name) for name in ("mode", "clear_cache", "level")}
    texts = {name: str(value) for name, value in given.items() if isinstance(value, int)}
    return Fields({**given, **texts, **request.query_params})


def _truth(fields: Fields, name: str, *, default: bool) -> bool:
    value = fields.text(name, str(default)).lower()
    if value not in ("true", "false"):
        raise refused(name, f"{shown(value)} is neither true nor false")
    return value == "true"
