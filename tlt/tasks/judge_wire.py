"""Messages between the run and a judging process: frames on a socket, and their contents.

Records to the process are pickled: a row may hold any type, and the process runs the user's code anyway. Replies are
JSON, checked field by field: the run reads numbers, text or an error, and never unpickles a reply. A frame is an 8-byte
length followed by that many bytes. Does not know processes, rewards or time limits.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.strict_json import InvalidJson, parse
from tlt.tasks.rewards import NOT_APPLICABLE, Failed, FailureKind, Ready, Refused, Scored, number_of

LARGEST_FRAME = 2**26  # bytes; the run refuses larger replies
LONGEST_TEXT = 8000  # characters; longer messages are truncated
_SHORTEST_WAIT_S = 1e-3  # a socket timeout of 0 means non-blocking
_NOT_APPLICABLE = {"applies": False}
_HEAD = struct.Struct(">Q")
_KINDS: dict[str, FailureKind] = {"raised": "raised", "no number": "no number"}  # a process cannot report its own end


class InvalidReply(Exception):
    """A judging process sent an unexpected reply. The message completes the phrase "it sent"."""


# ---- frames


def send_frame(line: socket.socket, payload: bytes, deadline: float | None = None) -> None:
    """Raises TimeoutError at `deadline`, on the clock of time.monotonic."""
    _limit(line, deadline)
    line.sendall(_HEAD.pack(len(payload)) + payload)


def receive_frame(line: socket.socket, deadline: float | None = None, largest: int | None = None) -> bytes:
    """Raises EOFError if the socket was closed, InvalidReply if the frame exceeds `largest` bytes, and TimeoutError at
    `deadline`, even while bytes keep arriving."""
    (length,) = _HEAD.unpack(_receive(line, _HEAD.size, deadline))
    if largest is not None and length > largest:
        raise InvalidReply(f"a message of {length} bytes; expected at most {largest}")
    return _receive(line, length, deadline)


def _receive(line: socket.socket, count: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        _limit(line, deadline)
        part = line.recv(min(count - len(received), 2**20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _limit(line: socket.socket, deadline: float | None) -> None:
    line.settimeout(None if deadline is None else max(_SHORTEST_WAIT_S, deadline - time.monotonic()))


# ---- replies


def opening_reply(reply: Ready | Refused) -> bytes:
    if isinstance(reply, Refused):
        return _encoded({"refused": _text(reply.message)})
    return _encoded({"takes_groups": reply.takes_groups, "needs": list(reply.needs)})


def scores_reply(scores: Sequence[Scored | Failed]) -> bytes:
    """A number, a number and its metrics, a failure, or that the reward does not apply, for each completion."""
    return _encoded([_reply(score) for score in scores])


def _reply(score: Scored | Failed) -> Any:
    if isinstance(score, Failed):
        return {score.kind: _text(score.message)}
    if not score.applies:
        return _NOT_APPLICABLE
    told = {_text(name): value for name, value in score.metrics.items()}
    return [score.reward, told] if told else score.reward


def read_opening_reply(payload: bytes) -> Ready | Refused:
    match _decoded(payload):
        case {"refused": str(message), **rest} if not rest:
            return Refused(message[:LONGEST_TEXT])
        case {"takes_groups": bool(takes_groups), "needs": [*needs], **rest} if not rest:
            if all(isinstance(name, str) and name.isidentifier() for name in needs):
                return Ready(takes_groups, tuple(needs))
    raise InvalidReply("no answer to its opening")


def read_scores_reply(payload: bytes, count: int) -> tuple[Scored | Failed, ...]:
    values = _decoded(payload)
    if not isinstance(values, list) or len(values) != count:
        raise InvalidReply(f"something other than a list of {count} scores")
    return tuple(_score(value) for value in values)


def _score(value: Any) -> Scored | Failed:
    if value == _NOT_APPLICABLE:
        return NOT_APPLICABLE
    if type(value) in (int, float):
        return _scored(value, {})
    if isinstance(value, dict) and len(value) == 1:
        ((kind, message),) = value.items()
        if kind in _KINDS and isinstance(message, str):
            return Failed(_KINDS[kind], message[:LONGEST_TEXT])
    match value:
        case [int() | float() as reward, dict(metrics)] if type(reward) is not bool:
            return _scored(reward, _metrics(metrics))
    raise InvalidReply("a score that is neither a number nor a failure")


def _scored(reward: float, metrics: Mapping[str, float]) -> Scored | Failed:
    number = number_of(reward)
    return number if isinstance(number, Failed) else Scored(number, metrics)


def _metrics(told: dict[str, Any]) -> dict[str, float]:
    if not all(type(value) in (int, float) and isinstance(number_of(value), float) for value in told.values()):
        raise InvalidReply("a metric that is no finite number")
    return {name: float(value) for name, value in told.items()}


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _decoded(payload: bytes) -> Any:
    try:
        return parse(payload)
    except InvalidJson as error:
        raise InvalidReply(f"a message that {error}") from None


def _text(message: str) -> str:
    """Escapes lone surrogates, as in file names that are not UTF-8."""
    return message.encode("utf-8", "backslashreplace").decode()[:LONGEST_TEXT]
