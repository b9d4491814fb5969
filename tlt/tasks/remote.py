"""A reward server: completions are posted to it as JSON, and it returns a reward for each.

POST {"answers": [{prompt, completion, tokens, reference, data_source, columns}, …]} gives {"rewards": [reward, …]}, in
order, each a number or an object with `score`. A temporary failure (no connection, no answer in time, status 408, 429
or 5xx) is retried after a wait that doubles, or after the seconds of the server's Retry-After. Knows HTTP; does not
know rewards or processes.
"""

import json
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tlt.errors import TaskError, shown

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_LARGEST = 2**26  # bytes of a reply
_PASSING = {408, 429, *range(500, 600)}  # statuses of temporary failures


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def backoffs(retries: int) -> Iterator[float]:
    """Seconds before each further attempt, unless the server asks for others."""
    return (min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**index) for index in range(retries))


def longest_s(timeout_s: float, retries: int) -> float:
    """Seconds that a call takes at most. Each attempt may reach the time limit in connecting, in answering and in
    sending, and the server may ask for the longest wait before the next."""
    return 3 * (retries + 1) * timeout_s + retries * _LONGEST_WAIT_S


class RemoteReward:
    def __init__(self, url: str, timeout_s: float, retries: int) -> None:
        """`timeout_s`: of an attempt, for each completion."""
        self._url, self._timeout_s, self._retries = url, timeout_s, retries

    def values(self, completions: Sequence[dict[str, Any]]) -> list[Any]:
        """The server's value for each completion. TaskError after the last attempt."""
        body = json.dumps({"answers": list(completions)}, default=str).encode()
        waits = [*backoffs(self._retries), 0.0]
        for attempt, wait_s in enumerate(waits, start=1):
            try:
                return _rewards(self._post(body, self._timeout_s * len(completions)), len(completions), self._url)
            except HTTPError as error:
                problem = f"answered with status {error.code}: {_said(error)}"
                wait_s = _asked_wait(error, wait_s)
                if error.code not in _PASSING:
                    break
            except TimeoutError:
                problem = f"gave no answer within {self._timeout_s * len(completions):g} s"
            except (URLError, OSError, HTTPException) as error:
                reason = getattr(error, "reason", error)
                slow = isinstance(reason, TimeoutError)
                problem = "could not be reached in time" if slow else f"could not be reached ({reason})"
            if attempt <= self._retries:
                time.sleep(wait_s)
        times = "once" if attempt == 1 else f"{attempt} times"
        raise TaskError(
            f"the reward server {self._url} {problem}; it was asked {times}: see that it runs, or change "
            "task.reward_retries or task.reward_timeout_s"
        )

    def _post(self, body: bytes, timeout_s: float) -> bytes:
        """The reply. The time limit holds for the whole of it, also if the server sends single bytes."""
        request = Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        ends, received = time.monotonic() + timeout_s, bytearray()
        with urlopen(request, timeout=timeout_s) as reply:
            while part := reply.read1(2**16):
                received += part
                if time.monotonic() > ends:
                    raise TimeoutError
                if len(received) > _LARGEST:
                    raise TaskError(f"the reward server {self._url} sent more than {_LARGEST >> 20} MiB")
        return bytes(received)


def _said(error: HTTPError) -> str:
    try:
        return shown(error.read(400).decode("utf-8", "replace"))
    except (OSError, HTTPException):  # the status came, and then nothing more
        return "nothing"


def _asked_wait(error: HTTPError, wait_s: float) -> float:
    """Seconds of Retry-After, at most the longest wait; `wait_s` without one."""
    asked = error.headers.get("Retry-After", "")
    return min(_LONGEST_WAIT_S, float(asked)) if asked.isdecimal() else wait_s


def _rewards(reply: bytes, count: int, url: str) -> list[Any]:
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, TypeError, KeyError):
        rewards = None
    if not isinstance(rewards, list) or len(rewards) != count:
        text = shown(reply[:400].decode("utf-8", "replace"))
        raise TaskError(
            f'the reward server {url} sent {text}; expected {{"rewards": [{count} of them]}}, one each, in order'
        )
    return rewards
