"""The lifeline: whether the Ray processes that a driver cannot do without are still there.

What always holds: where the head (GCS) or this machine's raylet is gone, `check` raises ClusterError within seconds.
Ray itself ends the process without a word: five seconds after a raylet, a minute after the head.
"""

import socket
import time
from collections.abc import Mapping

import ray

from tlt.errors import ClusterError

_CHECK_S = 0.5  # seconds between two checks
_CONNECT_S = 1.0  # seconds to wait for an answer; none is no sign of death, a refusal is
_PATIENCE_S = 20.0  # seconds that the head of a cluster which others operate may be away: it may be restarted

Address = tuple[str, int]


class Lifeline:
    """`patience_s`: how long each process, by name, may refuse to be talked to."""

    def __init__(self, addresses: Mapping[str, Address], patience_s: Mapping[str, float]) -> None:
        self._addresses, self._patience_s = addresses, patience_s
        self._refused: dict[str, float] = {}  # since when
        self._checked = 0.0
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

    def check(self, *, at_once: bool = False) -> None:
        """Looks now and then, or `at_once`: where something is wrong already."""
        now = time.monotonic()
        if not at_once and now - self._checked < _CHECK_S:
            return
        self._checked = now
        for name, address in self._addresses.items():
            if not _refuses(address):
                self._refused.pop(name, None)
            elif now - self._refused.setdefault(name, now) >= self._patience_s[name]:
                self.torn = True
                raise ClusterError(
                    f"{name} at {address[0]}:{address[1]} does not run any more: it was killed (out of memory?) or "
                    "crashed; see its log there, in /tmp/ray/session_latest/logs, and go on with --resume"
                )


def _refuses(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
