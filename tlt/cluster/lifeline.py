"""The lifeline: whether the Ray processes that a driver cannot do without are still there.

What always holds: where the head (GCS) or this machine's raylet is gone, `check` raises ClusterError at once. Ray
itself ends the process without a word: in the next call that moves data through a dead raylet, or a minute after the
head died.
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

import ray

from tlt.errors import ClusterError

_RETRY_S = 0.5  # seconds between two attempts to connect
_CONNECT_S = 1.0  # seconds to wait for an answer; none is no sign of death, a refusal is
_PATIENCE_S = 20.0  # seconds that the head of a cluster which others operate may be away: it may be restarted

Address = tuple[str, int]


class Lifeline:
    """`patience_s`: seconds for which each process, by name, may refuse connections."""

    def __init__(self, addresses: Mapping[str, Address], patience_s: Mapping[str, float]) -> None:
        self._wires = {name: _Wire(address) for name, address in addresses.items()}
        self._patience_s = patience_s
        self.torn = False

    @classmethod
    def of_this_driver(cls, *, ours: bool) -> "Lifeline":
        """`ours`: Ray was started by this process."""
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        addresses = {
            "the head of the Ray cluster (gcs_server)": (host.strip("[]"), int(port)),
            "the raylet of this machine": (here["NodeManagerAddress"], here["NodeManagerPort"]),
        }
        return cls(addresses, dict(zip(addresses, (0.0 if ours else _PATIENCE_S, 0.0), strict=True)))

    def check(self) -> None:
        """Costs microseconds: call it before anything that Ray would not survive."""
        for name, wire in self._wires.items():
            refused_s = wire.refused_s()
            if refused_s is not None and refused_s >= self._patience_s[name]:
                self.torn = True
                host, port = wire.address
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


class _Wire:
    """A connection that is held open and carries nothing: the kernel closes it with the process at its other end."""

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
            while self._socket.recv(4096):  # a greeting
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
