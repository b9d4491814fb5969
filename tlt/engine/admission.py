"""Who enters the batch next. An order over waiting requests: nothing is dropped, and where no more come, all enter.

The batch ends when its longest answer ends, so the answers expected to be long go first. What is known of a prompt is
its earlier answers; of a prompt never seen, one request goes ahead as a probe and tells for its group.
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
        """Tokens of its completion; its limit if nothing is known of its prompt."""
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
    """Probes first, then by expected length; a prompt without history is expected to be as long as its limit."""

    def __init__(self, memory: float = 0.5) -> None:
        self._memory = memory  # weight of what was known against a new answer
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
