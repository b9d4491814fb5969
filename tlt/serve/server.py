"""`tlt serve`: opens the policy, listens, and serves until a signal or the engine's end.

The event loop runs in the main thread, the engine in its own. On a signal the server takes no new calls, aborts
running ones after a grace period, and ends the engine thread.
"""

import asyncio
import socket
import sys

from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError
from tlt.serve.options import ServeOptions

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 3  # for running calls after a signal
_ENDING_S = 5  # after that, for clients to read the end of their responses
_KEEP_ALIVE_S = 120  # of an idle connection: a busy client may read a response much later than it was sent
_SWITCH_S = 0.0005  # Python's default of 5 ms is as long as a tick


def serve(config: RunConfig, options: ServeOptions) -> None:
    try:
        import uvicorn
    except ImportError:
        raise ConfigError("tlt serve needs starlette and uvicorn: pip install 'tlt-rl[serve]'") from None
    from tlt.serve.app import build_app
    from tlt.serve.served_policy import ServedPolicy

    if options.host not in _LOOPBACK and not options.api_key:
        raise ConfigError(
            f"--host {options.host} lets others on the network change the policy's weights; give an --api-key, or "
            "listen on 127.0.0.1"
        )
    listening = listen(options)
    served = ServedPolicy(config)
    died: list[str] = []

    def ended(why: str) -> None:
        died.append(why)
        server.should_exit = True

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(_GRACE_S, app.state.server.engine.abort_all)
            await super().shutdown(sockets)

    app = build_app(served, options, ended)
    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S + _ENDING_S,
        )
    )
    sys.setswitchinterval(_SWITCH_S)
    host, port = listening.getsockname()[:2]
    print(f"tlt serve: {config.model.path} on http://{host}:{port}", file=sys.stderr, flush=True)
    server.run(sockets=[listening])
    if died:
        raise TltError(f"the server has stopped: {died[0]}")


def listen(options: ServeOptions) -> socket.socket:
    """Binds before the policy is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off where it sees TCP by name: it would hold small responses back for 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(f"--host {options.host} --port {options.port}: {error.strerror}; choose others") from None
    return listening
