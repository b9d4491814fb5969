"""Writes the run's events: one line each, on disk before any reader gets it.

A line is written in one write and flushed. Readers get events from here while the run goes on, or from the file later.
A reader that fails is dropped, which is recorded as an event: no event is lost and the run goes on. Does not depend on
the code that emits or shows events.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tlt.config import RunConfig
from tlt.errors import ReaderError, TltError
from tlt.recipe import to_toml
from tlt.watch.directory import directory_of, unwritable
from tlt.watch.events import CONFIG_FILE, EVENTS_FILE, FORMAT, Event, ReaderFailed, Recorded, RunStarted

_CURE = "make room on its disk; a run of `tlt train` then goes on with --resume"


class Reader(Protocol):
    """Shows or forwards events. Raises ReaderError when it cannot."""

    name: str

    def show(self, record: Recorded) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Appends events to a file and passes them to readers; an incomplete last line is removed first."""

    def __init__(self, path: str | Path, readers: Iterable[Reader] = ()) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self._path)
        self._file = self._path.open("ab", buffering=0)
        self._readers = list(readers)

    def add_reader(self, reader: Reader) -> None:
        """Adds a reader for the following events."""
        self._readers.append(reader)

    def emit(self, event: Event) -> None:
        kind, values = type(event).__name__, asdict(event)
        for name, value in values.items():
            if isinstance(value, float) and not isfinite(value):
                raise TltError(f"{kind} has {name} = {value}; a run cannot go on from a number that is not finite")
        record = Recorded(time.time(), event)
        line = {"time": record.time, "format": FORMAT, "kind": kind, "fields": values}
        # a path or an error of the system may hold bytes that are no text, which JSON has no word for
        self._append(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        # on disk first: a reader that fails costs no event
        for failure in [failure for reader in tuple(self._readers) if (failure := self._tell(reader, record))]:
            self.emit(failure)

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            whole = self._file.write(line) == len(line)
        except OSError as error:
            raise TltError(f"{self._path}: cannot be written ({error.strerror}); {_CURE}") from error
        if not whole:
            self._file.truncate(end)  # the next event, once there is room, begins a line of its own
            raise TltError(f"{self._path}: the disk is full; {_CURE}")

    def sync(self) -> None:
        """Returns when every event so far survives a power cut."""
        try:
            os.fsync(self._file.fileno())
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)  # holds the file's name
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise TltError(f"{self._path}: cannot be written ({error.strerror}); free the disk and resume") from error

    def _tell(self, reader: Reader, record: Recorded) -> ReaderFailed | None:
        try:
            reader.show(record)
        except ReaderError as error:
            self._readers.remove(reader)
            return ReaderFailed(reader.name, str(error))
        return None

    def close(self) -> None:
        while self._readers:
            reader = self._readers.pop()
            try:
                reader.close()
            except ReaderError as error:
                self.emit(ReaderFailed(reader.name, str(error)))
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line, which a crash leaves; an event appended to it would be lost."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def start_run(config: RunConfig, verb: str, version: str, readers: Iterable[Reader] = ()) -> EventLog:
    """Makes the run's directory with its resolved configuration, and opens its log with RunStarted.

    A run that goes on from a checkpoint emits RunResumed before anything that has a step; without it, the run begins
    anew, and what an earlier run of that name left in the file no longer counts.
    """
    directory = directory_of(config, verb)
    try:
        log = EventLog(directory / EVENTS_FILE, readers)
        aside = directory / f"{CONFIG_FILE}.part"
        aside.write_text(to_toml(config), encoding="utf-8")
        aside.replace(directory / CONFIG_FILE)  # whole, or as it was: a run can be told after any crash
    except OSError as error:
        raise unwritable(directory, error) from error
    log.emit(RunStarted(verb=verb, seed=config.run.seed, version=version))
    return log
