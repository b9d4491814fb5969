"""Liveness of the Ray processes that a driver depends on: the head of the cluster and this machine's raylet.

What always holds: if the head (GCS) or this machine's raylet is gone, `check` raises ClusterError at once. Ray itself
ends the process silently: in the next call that moves data through a dead raylet, or a minute after the head died.
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

import ray

from tlt.errors import ClusterError

_RETRY_S = 0.5  # seconds between two attempts to connect
_CONNECT_S = 1.0  # seconds to wait for a connection; a timeout is not taken for death, a refusal is
_PATIENCE_S = 20.0  # seconds that the head of a cluster at `cluster.address` may be away, as it may be restarted

Address = tuple[str, int]


class RayLiveness:
    """`patience_s`: seconds for which each process, by name, may refuse connections."""

    def __init__(self, addresses: Mapping[str, Address], patience_s: Mapping[str, float]) -> None:
        self._connections = {name: _Connection(address) for name, address in addresses.items()}
        self._patience_s = patience_s
        self.dead = False

    @classmethod
    def of_this_driver(cls, *, ours: bool) -> "RayLiveness":
        """`ours`: this process started Ray."""
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        addresses = {
            "the head of the Ray cluster (gcs_server)": (host.strip("[]"), int(port)),
            "the raylet of this machine": (here["NodeManagerAddress"], here["NodeManagerPort"]),
        }
        return cls(addresses, dict(zip(addresses, (0.0 if ours else _PATIENCE_S, 0.0), strict=True)))

    def check(self) -> None:
        """Costs microseconds: call it before every Ray call that would end the process if Ray is gone."""
        for name, connection in self._connections.items():
            refused_s = connection.refused_s()
            if refused_s is not None and refused_s >= self._patience_s[name]:
                self.dead = True
                host, port = connection.address
                raise ClusterError(
                    f"{name} at {host}:{port} does not run any more: it was killed (out of memory?) or crashed; see "
                    "its log there, in /tmp/ray/session_latest/logs, and go on with --resume"
                )

    def get(self, call: Any) -> Any:
        """The result of a Ray call; a broken pipe to a dead raylet is raised as ClusterError."""
        self.check()
        try:
            return ray.get(call)
        except OSError:
            self.check()
            raise


class _Connection:
    """An idle open connection: the kernel closes it when the process at its other end dies."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._socket: socket.socket | None = None
        self._refused_at: float | None = None  # first
        self._tried_at = 0.0

    def refused_s(self) -> float | None:
        """Seconds since the process first refused a connection; None while it accepts them or its state is unknown."""
        if self._open():
            self._refused_at = None
        elif time.monotonic() - self._tried_at >= _RETRY_S:
            self._connect()
        return None if self._refused_at is None else time.monotonic() - self._refused_at

    def _open(self) -> bool:
        if self._socket is None:
            return False
        try:
            while self._socket.recv(4096):  # discards what the server sends
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        self._socket, self._tried_at = None, 0.0
        return False

    def _connect(self) -> None:
        self._tried_at = time.monotonic()
        try:
            self._socket = socket.create_connection(self.address, timeout=_CONNECT_S)
            self._socket.setblocking(False)
            self._refused_at = None
        except ConnectionRefusedError:
            self._refused_at = self._refused_at or self._tried_at
        except OSError:
            self._refused_at = None
