"""The server of `tlt watch`: the page and the runs' JSON, on the loopback interface by default. Read-only.

Invariants: no request changes anything; only runs in the directory are served; on other interfaces every path begins
with a secret. One thread at a time reads runs.
"""

import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt.errors import ConfigError, TltError
from tlt.watch.live import LiveRun, LiveRuns
from tlt.watch.site import POLICY, SERVED, read_page, runs_json
from tlt.watch.views import live_view, step_view

LOOPBACK, _EVERYWHERE = ("127.0.0.1", "localhost", "::1"), ("0.0.0.0", "::")
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address may hold the secret
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def watch(directory: Path, host: str, port: int, told: Callable[[str], None]) -> None:
    """Serves until interrupted. `told` gets the address."""
    import uvicorn

    if not directory.is_dir():
        raise ConfigError(f"{directory}: is no directory; expected that of the runs, as in runs, or of one run")
    secret = "" if host in LOOPBACK else secrets.token_urlsafe(18)
    listening = _listen(host, port)
    number = listening.getsockname()[1]
    named = socket.gethostname() if host in _EVERYWHERE else host
    name = f"[{named}]" if ":" in named else named
    told(f"http://{name}:{number}/{f'{secret}/' if secret else ''}")
    app = build_app(directory, secret=secret)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; choose others") from None
    return listening


def build_app(directory: Path, *, secret: str = "") -> Starlette:
    """`secret`: the first part of every path. Without one only requests that name this machine in their Host header are
    answered, so that a page of another site cannot read through the user's browser (DNS rebinding)."""
    page = _Pages(LiveRuns(directory))
    routes: list[BaseRoute] = [
        Route("/", page.file),
        *(Route(f"/{name}", page.file) for name in SERVED),
        Route("/data/runs.json", page.runs),
        Route("/data/{run}/run.json", page.run),
        Route("/data/{run}/step_{step:int}.json", page.step),
    ]
    middleware = [Middleware(_Headers), Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)]
    if secret:
        return Starlette(routes=[Mount(f"/{secret}", routes=routes)], middleware=middleware)
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    return Starlette(routes=routes, middleware=[hosts, *middleware])


class _Headers:
    """Adds the same headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, with_headers)


class _Pages:
    """The endpoints. Plain functions: the framework calls them in threads."""

    def __init__(self, runs: LiveRuns) -> None:
        self._runs, self._lock = runs, Lock()

    def file(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or "index.html"
        return Response(read_page(name), headers={"Content-Type": SERVED[name]})

    def runs(self, request: Request) -> Response:
        with self._lock:
            return _json(runs_json(self._runs.refreshed()))

    def run(self, request: Request) -> Response:
        rows, lives, at = (_count(request, name) for name in ("rows", "lives", "at"))
        with self._lock:
            live = self._runs.one(request.path_params["run"])
            if not isinstance(live, LiveRun):
                return _missing(request, live)
            if at == live.offset:
                return _json({"unchanged": True})
            return _json(live_view(live, rows=rows, lives=lives))

    def step(self, request: Request) -> Response:
        step = request.path_params["step"]
        with self._lock:
            live = self._runs.one(request.path_params["run"])
            if not isinstance(live, LiveRun):
                return _missing(request, live)
            view = step_view(live, step)
        return _json(view) if view else _json({"error": f"step {step} is not over, or was never taken"}, 404)


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def _missing(request: Request, error: TltError | None) -> Response:
    return _json({"error": str(error or f"there is no run {request.path_params['run']!r} here")}, 404)


def _count(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    return int(text) if text.isdecimal() and len(text) < 16 else 0
