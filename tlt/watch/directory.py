"""A run's directory: one per verb and name, one writer at a time, and no earlier run is overwritten.

Invariants: the lock on a directory belongs to a process, and the system releases it when the process ends, however it
ends. A new run under an existing name is refused unless the existing run has no results.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.watch.events import (
    CONFIG_FILE,
    EVENTS_FILE,
    CheckpointSaved,
    RolloutFinished,
    RunStarted,
    StepFinished,
    WarmupStep,
    read_events,
)
from tlt.watch.history import counted

TRAIN = "train"
CHECKPOINTS, POLICY, ROLLOUTS = "checkpoints", "policy", "rollouts.jsonl"
_LOCK = ".lock"
_RESULTS = (StepFinished, RolloutFinished, WarmupStep, CheckpointSaved)


def directory_of(config: RunConfig, verb: str) -> Path:
    """`out/name` belongs to `tlt train`; other verbs have `out/name-VERB`, so that a recipe serves them all."""
    return Path(config.run.out) / (config.run.name if verb == TRAIN else f"{config.run.name}-{verb}")


@contextmanager
def held(config: RunConfig, verb: str, *, resume: bool = False) -> Iterator[Path]:
    """Holds the directory of a run for this process. ConfigError if it is in use or holds another run.

    `resume`: the run in the directory goes on. A run that ended without any result does not block the next.
    """
    directory = directory_of(config, verb)
    with _locked(directory, verb):
        _refuse_to_replace(directory, verb, resume)
        yield directory


# ---- one process at a time


@contextmanager
def _locked(directory: Path, verb: str) -> Iterator[None]:
    with _lock_file(directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory} is in use: {file.read().strip() or 'another process'} writes to it; "
                "wait until it has ended, or give this run another name with --run.name"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be locked ({error.strerror}); expected run.out on a file system that locks files: "
                "give another with --run.out"
            ) from None
        _sign(file, f"process {os.getpid()} on {socket.gethostname()} (`tlt {verb}`)")
        yield


def _lock_file(directory: Path) -> TextIO:
    """Opened at its beginning and not changed: it names the process that holds the lock."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("a+", encoding="utf-8")
        file.seek(0)
        return file
    except OSError as error:
        raise unwritable(directory, error) from None


def _sign(file: TextIO, holder: str) -> None:
    try:
        file.truncate(0)
        file.write(f"{holder}\n")
        file.flush()
    except OSError as error:
        raise unwritable(Path(file.name).parent, error) from None


def unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run's directory {directory} cannot be written to ({error.strerror}); expected run.out to be a directory "
        "that can: give another with --run.out, or make room"
    )


# ---- nothing is replaced


@dataclass(frozen=True, slots=True)
class _Left:
    """Files and events of earlier runs in a directory."""

    verbs: frozenset[str]  # of the runs that wrote events
    steps: int  # of the newest run
    results: bool  # whether there is anything that would be missed
    files: tuple[str, ...]


def _refuse_to_replace(directory: Path, verb: str, resume: bool) -> None:
    left = _left_in(directory)
    other = bool(left.verbs) and verb not in left.verbs
    if not (other if resume else left.results):
        return
    owner = next(iter(sorted(left.verbs)), verb) if other else verb
    took = f" that took {left.steps} {'step' if left.steps == 1 else 'steps'}" if left.steps else ""
    again = "go on with --resume, " if verb == TRAIN and not other else ""
    raise ConfigError(
        f"{directory} holds a run of `tlt {owner}`{took} ({', '.join(left.files)}), and no run is written over; "
        f"{again}give this run another name with --run.name, or remove the directory"
    )


def _left_in(directory: Path) -> _Left:
    records = read_events(directory / EVENTS_FILE) if (directory / EVENTS_FILE).exists() else ()
    steps = {record.event.step for record in counted(records) if isinstance(record.event, StepFinished | WarmupStep)}
    names = (CONFIG_FILE, EVENTS_FILE, CHECKPOINTS, POLICY, ROLLOUTS)
    files = tuple(name for name in names if (directory / name).exists())
    kept = any((directory / CHECKPOINTS).glob("step_*")) or POLICY in files or ROLLOUTS in files
    return _Left(
        verbs=frozenset(record.event.verb for record in records if isinstance(record.event, RunStarted)),
        steps=len(steps),
        results=kept or any(isinstance(record.event, _RESULTS) for record in records),
        files=files,
    )
