"""The ASGI application: routes, API keys, and errors as responses."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tlt.errors import TltError
from tlt.serve import chat, completions, control, tokens
from tlt.serve.async_engine import AsyncEngine
from tlt.serve.http import error_response
from tlt.serve.options import ServeOptions
from tlt.serve.protocol import ApiError
from tlt.serve.served_policy import ServedPolicy
from tlt.serve.state import ServerState

Endpoint = Callable[[Request, ServerState], Awaitable[Response]]

_OPEN = {"/health", "/liveness", "/ping"}  # no API key needed
_READ: dict[str, Endpoint] = {
    "/health": control.health,
    "/liveness": control.health,
    "/ping": control.health,
    "/metrics": control.metrics,
    "/load": control.load,
    "/version": control.version,
    "/server_info": control.server_info,
    "/get_world_size": control.world_size,
    "/is_paused": control.is_paused,
    "/is_sleeping": control.is_sleeping,
    "/v1/models": control.models,
}
_WRITE: dict[str, Endpoint] = {
    "/v1/completions": completions.completions,
    "/v1/chat/completions": chat.chat_completions,
    "/inference/v1/generate": tokens.generate,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/pause": control.pause,
    "/resume": control.resume,
    "/update_weights": control.update_weights,
    "/sleep": control.sleep,
    "/wake_up": control.wake_up,
    "/reset_prefix_cache": control.reset_prefix_cache,
    "/load_lora_adapter": control.load_lora_adapter,
    "/v1/load_lora_adapter": control.load_lora_adapter,
    "/unload_lora_adapter": control.unload_lora_adapter,
    "/v1/unload_lora_adapter": control.unload_lora_adapter,
}


def build_app(served: ServedPolicy, options: ServeOptions, ended: Callable[[str], None]) -> Starlette:
    """`ended` is called if the engine's thread dies."""
    path = served.config.model.path

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine = AsyncEngine(served, options.queue, ended)
        app.state.server = ServerState(engine, options, options.name or path, path)
        try:
            yield
        finally:
            app.state.server.close()
            await engine.close()

    routes = [Route(name, _guarded(endpoint, options), methods=["GET"]) for name, endpoint in _READ.items()]
    routes += [Route(name, _guarded(endpoint, options), methods=["POST"]) for name, endpoint in _WRITE.items()]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _unknown})


def _guarded(endpoint: Endpoint, options: ServeOptions) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        try:
            if request.url.path not in _OPEN:
                _check_key(request, options.api_key)
            return await endpoint(request, request.app.state.server)
        except ApiError as error:
            return error_response(error)
        except TltError as error:
            return error_response(ApiError(400, str(error)))
        except ClientDisconnect:
            return Response(status_code=499)  # the connection is closed

    return run


def _check_key(request: Request, key: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key and not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
