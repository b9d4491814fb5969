"""Admission order: ranks the waiting requests. No request is dropped, and each one enters once submissions stop.

A rollout ends with its longest completion, so the requests with the longest expected completions enter first. The
expected length comes from earlier completions of the same prompt. For a new prompt one request of the group enters
early, as a probe.
"""

from typing import Protocol

from tlt.engine.request import Request


class Admission(Protocol):
    def rank(self, request: Request) -> tuple[float, ...]:
        """Smaller enters first; equal ranks keep the order of submission."""
        ...

    def started(self, request: Request) -> None: ...

    def finished(self, request: Request, length: int) -> None: ...

    def expected(self, request: Request) -> float:
        """Expected tokens of its completion; `max_tokens` if no completion of its prompt has finished."""
        ...


class FirstComeFirst:
    def rank(self, request: Request) -> tuple[float, ...]:
        return ()

    def started(self, request: Request) -> None:
        pass

    def finished(self, request: Request, length: int) -> None:
        pass

    def expected(self, request: Request) -> float:
        return float(request.params.max_tokens)


class LongestFirst:
    """Probes first, then by expected length. A prompt without finished completions has the length `max_tokens`."""

    def __init__(self, memory: float = 0.5) -> None:
        self._memory = memory  # weight of the previous estimate; a new completion has the rest
        self._expected: dict[str, float] = {}
        self._probed: set[str] = set()

    def rank(self, request: Request) -> tuple[float, ...]:
        expected = self._expected.get(request.prompt_id)
        if expected is None:
            probe = request.prompt_id not in self._probed
            return (0.0 if probe else 1.0, -float(request.params.max_tokens))
        return (1.0, -expected)

    def started(self, request: Request) -> None:
        self._probed.add(request.prompt_id)

    def finished(self, request: Request, length: int) -> None:
        known = self._expected.get(request.prompt_id, float(length))
        self._expected[request.prompt_id] = self._memory * known + (1 - self._memory) * length

    def expected(self, request: Request) -> float:
        return self._expected.get(request.prompt_id, float(request.params.max_tokens))


ADMISSIONS: dict[str, type[FirstComeFirst] | type[LongestFirst]] = {"fifo": FirstComeFirst, "longest": LongestFirst}
