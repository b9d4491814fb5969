"""Selects the events that are valid: a resumed run repeats some steps, and a file may hold an earlier run as well.

Pure functions over records. Every step is returned once, as it was computed last.
"""

from collections.abc import Iterable
from typing import TypeVar

from tlt.watch.events import (
    Event,
    Recorded,
    Run,
    RunFailed,
    RunFinished,
    RunResumed,
    RunStarted,
    StepFinished,
    UnknownEvent,
)

E = TypeVar("E", bound=Event)


def counted(records: Iterable[Recorded]) -> tuple[Recorded, ...]:
    """The valid records: of the newest run in the file, each step as it was computed last."""
    records = tuple(records)
    if sum(isinstance(record.event, RunStarted) for record in records) < 2:
        return records
    kept: list[Recorded] = []
    for life in _lives(records):
        resumed = next((record.event.step for record in life if isinstance(record.event, RunResumed)), None)
        if resumed is not None:
            kept = [record for record in kept if not _undone(record.event, resumed)]
        elif any(_step_of(record.event) is not None for record in life):
            kept = []  # a new run under the same name
        kept += life
    return tuple(kept)


def _lives(records: Iterable[Recorded]) -> list[list[Recorded]]:
    """Records grouped by process: from one RunStarted to the next."""
    lives: list[list[Recorded]] = []
    for record in records:
        if isinstance(record.event, RunStarted) or not lives:
            lives.append([])
        lives[-1].append(record)
    return lives


def _step_of(event: Event) -> int | None:
    return None if isinstance(event, UnknownEvent) else getattr(event, "step", None)


def _undone(event: Event, resumed: int) -> bool:
    """Whether a run resumed after step `resumed` computes this event's step again."""
    if isinstance(event, RunFinished | RunFailed):
        return True  # it did not end there after all
    step = _step_of(event)
    return step is not None and step > resumed


def events_of(run: Run, kind: type[E]) -> tuple[E, ...]:
    """The valid events of one kind."""
    return tuple(record.event for record in counted(run.events) if isinstance(record.event, kind))


def steps_of(run: Run) -> tuple[StepFinished, ...]:
    """Every step taken, once, in order."""
    return tuple({event.step: event for event in events_of(run, StepFinished)}.values())


def drafted(step: StepFinished) -> bool:
    """Whether drafts were verified in a step, accepted or not. Earlier versions did not count verifies."""
    return step.verifies > 0 or step.accept_length > 1
