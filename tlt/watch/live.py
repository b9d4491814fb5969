"""Follows a run's events while the run goes on: only new lines are read.

Invariant: `LiveRun.run` equals `read_run`, except for events that no figure uses: progress within finished steps,
lengths of completions of all but a few steps, and spans of workers of all but the last step. Memory grows with the
number of steps, not of events. Never writes; a file that was replaced or truncated is read again from the start.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.errors import TltError
from tlt.recipe import load_config
from tlt.watch.events import (
    CONFIG_FILE,
    EVENTS_FILE,
    PhaseStarted,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    Run,
    RunStarted,
    StartupPhase,
    parse_event,
)
from tlt.watch.figures import POOLED
from tlt.watch.metrics import Columns, columns_of
from tlt.watch.workers import WorkerSpans

_PASSING = (PhaseStarted, RolloutProgress, StartupPhase)  # of these the newest counts
_MOST_LINES = 1024  # about workers, whose places are remembered, of one step


class LiveRun:
    """`refresh` reads new lines; `run` is the run so far."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self.offset = 0  # bytes of the file that were read
        self.lives = 0  # processes that wrote to it: with another one, steps may have been computed again
        self.now: Recorded | None = None  # what goes on within the step, or the start-up
        self._records: list[Recorded] = []
        self._lengths: list[int] = []  # places of the records that hold lengths
        self._lanes: list[Recorded] = []  # of workers, in the last step that has any
        self._lines: dict[int, list[int]] = {}  # step → places in the file of lines about its workers
        self._made: tuple[int, Run] | None = None
        self._columns: tuple[int, int, Columns] | None = None  # lives and offset that they are of
        self._row: tuple[int, dict[str, Any]] | None = None

    def refresh(self) -> bool:
        """Reads new lines; whether there were any."""
        path = self.directory / EVENTS_FILE
        with path.open("rb") as file:
            found = path.stat()
            if found.st_ino != self._inode or found.st_size < self.offset:
                self._forget()
                self._inode = found.st_ino
            file.seek(self.offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].split(b"\n")[:-1]:  # the rest is being written, or torn
            self._take(parse_event(line, f"{path}, byte {self.offset}"))
            self.offset += len(line) + 1
        return whole > 0

    def _take(self, record: Recorded) -> None:
        event = record.event
        if isinstance(event, RunStarted):
            self.lives += 1
            self._lanes = []
        self.now = record if isinstance(event, _PASSING) else None
        if isinstance(event, WorkerSpans):
            self._lines.setdefault(event.step, []).append(self.offset)
            del self._lines[event.step][:-_MOST_LINES]
            self._lanes = [lane for lane in self._lanes if getattr(lane.event, "step", 0) == event.step] + [record]
        elif self.now is None:
            if isinstance(event, RolloutFinished) and event.lengths:
                self._keep_lengths()
            self._records.append(record)

    def _keep_lengths(self) -> None:
        """Keeps the lengths of the first and the last few steps only."""
        self._lengths.append(len(self._records))
        if len(self._lengths) > 2 * POOLED:
            place = self._lengths.pop(POOLED)
            old = self._records[place]
            assert isinstance(old.event, RolloutFinished)
            self._records[place] = Recorded(old.time, replace(old.event, lengths=()))

    @property
    def run(self) -> Run:
        if self._made is None or self._made[0] != self.offset:
            config = load_config(self.directory / CONFIG_FILE)
            self._made = (self.offset, Run(config, (*self._records, *self._lanes)))
        return self._made[1]

    @property
    def columns(self) -> Columns:
        """The run's columns; known steps are not computed again."""
        known = self._columns
        if known is None or known[:2] != (self.lives, self.offset):
            same = known[2] if known and known[0] == self.lives else None
            self._columns = known = (self.lives, self.offset, columns_of(self.run, same))
        return known[2]

    def once(self, make: Callable[["LiveRun"], dict[str, Any]]) -> dict[str, Any]:
        """The result of `make`, cached until the next event."""
        if self._row is None or self._row[0] != self.offset:
            self._row = (self.offset, make(self))
        return self._row[1]

    def lanes_of(self, step: int) -> list[WorkerSpans]:
        """Spans of the workers in a step, as computed last."""
        found: list[WorkerSpans] = []
        with (self.directory / EVENTS_FILE).open("rb") as file:
            for place in self._lines.get(step, ()):
                file.seek(place)
                event = parse_event(file.readline().rstrip(b"\n"), EVENTS_FILE).event
                if isinstance(event, WorkerSpans):
                    found.append(event)
        return found


class LiveRuns:
    """The runs in a directory, or the single run that the directory is, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, LiveRun] = {}

    def refreshed(self) -> dict[str, LiveRun | TltError]:
        """All runs, refreshed; an error in place of a run that cannot be read."""
        return {home.name: self._read(home) for home in self._homes()}

    def one(self, name: str) -> LiveRun | TltError | None:
        """The run of that name, refreshed; None if there is none."""
        home = next((home for home in self._homes() if home.name == name), None)
        return None if home is None else self._read(home)

    def _homes(self) -> list[Path]:
        if (self._directory / EVENTS_FILE).is_file():
            return [self._directory.resolve()]
        return sorted(found.parent for found in self._directory.glob(f"*/{EVENTS_FILE}"))

    def _read(self, home: Path) -> LiveRun | TltError:
        live = self._known.setdefault(home.name, LiveRun(home))
        try:
            live.refresh()
            _ = live.run
        except TltError as error:
            return error
        except OSError as error:
            return TltError(f"{home}: {error.strerror}")
        return live
