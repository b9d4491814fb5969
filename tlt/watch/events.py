"""The run's one stream: typed events, appended to `events.jsonl` one line at a time, and how a run is read back.

A line is written whole, in one write, and flushed; nothing is ever rewritten. So only the last line can be torn (by a
crash) and a reader leaves it out; any other broken line is an error. A kind that a newer version wrote is kept whole.
Knows nothing of who emits or who shows.
"""

import json
import time
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.recipe import load_config, to_toml

EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.toml"


@dataclass(frozen=True, slots=True)
class Event:
    """What every event is: a record of plain values."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The first event of a run."""

    verb: str  # what the command line was asked to do
    seed: int
    version: str  # of tlt


@dataclass(frozen=True, slots=True)
class RolloutFinished(Event):
    """All answers of one step are in and judged."""

    step: int
    n: int  # rollouts
    mean_reward: float
    length_p50: int  # quantiles of the answers' lengths in tokens
    length_p90: int
    length_max: int
    tokens: int  # generated, all answers together
    seconds: float  # from the first submit to the last answer


@dataclass(frozen=True, slots=True)
class RewardsFailed(Event):
    """Answers of one step whose reward failed in one way, and the first of them. The run goes on as the user chose."""

    step: int
    kind: str  # raised, timed out, died, or no number
    count: int  # answers
    prompt: str  # id of the first
    message: str  # what the first said


@dataclass(frozen=True, slots=True)
class AcceptanceCollapsed(Event):
    """The policy suddenly refuses a drafter's tokens. Answers stay right; the drafter is out until it helps again."""

    step: int
    drafter: str
    shape: str  # in use when it showed
    recent: float  # accept length of the drafter alone over the last verifies
    usual: float  # what it was before, in the same shapes
    verifies: int  # that `recent` rests on


@dataclass(frozen=True, slots=True)
class WarmupStep(Event):
    """One optimizer step of supervised training."""

    step: int
    loss: float  # nats per answer token
    tokens: int  # answer tokens in the batch
    seconds: float


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    """The last event of a run that ended by itself."""

    seconds: float  # since RunStarted


@dataclass(frozen=True, slots=True)
class UnknownEvent(Event):
    """An event of a kind, or with fields, that this version does not know."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event as it stands in the file."""

    time: float  # seconds since 1970
    event: Event


@dataclass(frozen=True, slots=True)
class Run:
    """What a run directory tells."""

    config: RunConfig
    events: tuple[Recorded, ...]


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (RunStarted, RolloutFinished, RewardsFailed, AcceptanceCollapsed, WarmupStep, RunFinished)
}


class EventLog:
    """Appends events to a file; a file that ends in a torn line is put right first."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def emit(self, event: Event) -> None:
        kind, values = type(event).__name__, asdict(event)
        for name, value in values.items():
            if isinstance(value, float) and not isfinite(value):
                raise TltError(f"{kind} has {name} = {value}; a run cannot go on from a number that is not finite")
        record = {"time": time.time(), "kind": kind, "fields": values}
        self._file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    """A crash may leave half a line; what is appended after it would be lost with it."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def read_events(path: str | Path) -> tuple[Recorded, ...]:
    """All events of the file, a torn last line left out."""
    lines = Path(path).read_bytes().split(b"\n")
    return tuple(_parse(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1))


def _parse(line: bytes, where: str) -> Recorded:
    try:
        record = json.loads(line)
        when, kind, values = float(record["time"]), str(record["kind"]), dict(record["fields"])
    except (ValueError, KeyError, TypeError):
        raise TltError(
            f"{where}: is not an event; the file was edited or overwritten, restore or remove the line"
        ) from None
    known = _KINDS.get(kind)
    if known is None or {f.name for f in fields(known)} != values.keys():
        return Recorded(when, UnknownEvent(kind, values))
    return Recorded(when, known(**values))


def start_run(config: RunConfig, verb: str, version: str) -> EventLog:
    """Makes the run's directory with its resolved configuration, and opens its log with RunStarted."""
    directory = Path(config.run.out) / config.run.name
    log = EventLog(directory / EVENTS_FILE)
    (directory / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    log.emit(RunStarted(verb=verb, seed=config.run.seed, version=version))
    return log


def read_run(directory: str | Path) -> Run:
    """A run's configuration and events, while it runs or afterwards."""
    directory = Path(directory)
    if not (directory / EVENTS_FILE).exists():
        raise TltError(f"{directory}: holds no {EVENTS_FILE}; expected a directory that a run wrote")
    return Run(load_config(directory / CONFIG_FILE), read_events(directory / EVENTS_FILE))
