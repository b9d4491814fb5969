"""The timeline of a worker: which phase it was in, from when and for how long."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One phase of a worker's timeline."""

    name: str  # rolling, idle, drafting, updating, publishing
    start: float  # seconds since 1970
    seconds: float


class Timeline:
    """Records the phases of a worker, one at a time."""

    def __init__(self) -> None:
        self._spans: list[TimelineSpan] = []
        self._name = ""
        self._since = 0.0

    def enter(self, name: str) -> None:
        if name != self._name:
            self.end()
            self._name, self._since = name, time.time()

    def end(self) -> None:
        if self._name:
            self._spans.append(TimelineSpan(self._name, self._since, time.time() - self._since))
        self._name = ""

    def take(self) -> tuple[TimelineSpan, ...]:
        spans, self._spans = tuple(self._spans), []
        return spans


def longest_spans(spans: Sequence[TimelineSpan], most: int = 256) -> list[TimelineSpan]:
    """At most so many of them, in the order of time: what is told of a step stays bounded."""
    longest = sorted(spans, key=lambda span: -span.seconds)[:most]
    return sorted(longest, key=lambda span: span.start)


def seconds_of(spans: Iterable[TimelineSpan], name: str) -> float:
    return sum(span.seconds for span in spans if span.name == name)
