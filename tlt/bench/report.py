"""Results of a benchmark: a table per section that grows during the run, and a JSON file of all records so far."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from tlt.bench.options import EngineScale, RolloutScale, TrainScale
from tlt.bench.peer_file import PeerFile
from tlt.bench.record import write_record
from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.machine import Machine
from tlt.model.config import ModelConfig
from tlt.recipe import flat

_LOG_WIDTH = 160  # of tables where the output is no terminal


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured policy and its settings."""

    model: str
    shape: str  # "as it is", or what it was widened to
    prompts: str
    prompt_tokens_mean: float
    seed: int
    temperature: float


class Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds


class BenchReport:
    def __init__(
        self,
        machine: Machine,
        subject: Subject,
        config: ModelConfig,
        scale: EngineScale | RolloutScale | TrainScale,
        file: Path | None,
        *,
        peer: PeerFile | None = None,
        settings: RunConfig | None = None,
    ) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = _LOG_WIDTH
        self._file = file
        self._content: dict[str, Any] = {
            "machine": asdict(machine),
            "subject": asdict(subject),
            "config": dict(config.source),
            "scale": asdict(scale),
            **({"peer": dict(peer.content)} if peer else {}),
            **({"settings": flat(settings)} if settings else {}),
            "sections": {},
        }
        self._console.print(
            f"[bold]{subject.model}[/bold] ({subject.shape}) on {machine.device}, torch {machine.torch}, "
            f"triton {machine.triton}, transformers {machine.transformers}, tlt {machine.tlt} at {machine.commit}"
        )
        self._write()

    def section(
        self,
        name: str,
        records: Iterable[Any],
        clock: Clock,
        *,
        line: Callable[[Any], str] | None = None,
        table: bool = True,
        upright: bool = False,
    ) -> bool:
        """Shows and keeps records as they come; keeps the error of a section that fails. True if it succeeded.

        `line`: prints a record as one line where the output is no terminal. `table` False: lines on a terminal too.
        `upright`: a column per record, for records with many fields.
        """
        kept: list[Any] = []
        error = ""
        growing = table and self._console.is_terminal
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            try:
                for record in records:
                    kept.append(record)
                    self.keep(name, kept)
                    if growing:
                        live.update(_table(name, kept, upright), refresh=True)
                    elif line:
                        self._console.print(line(record), soft_wrap=True)
            except (TltError, RuntimeError) as failure:  # out of memory is a RuntimeError
                error = f"{type(failure).__name__}: {failure}"
        if kept and table:
            self._console.print(_table(name, kept, upright))
        if error or not kept:
            self._console.print(f"{name}: {error or 'nothing to measure'}", style="red", markup=False)
        self.keep(name, kept, seconds=round(clock.lap(), 3), **({"error": error} if error else {}))
        return not error

    def show(self, what: RenderableType) -> None:
        self._console.print(what)

    def keep(self, name: str, records: list[Any], **more: Any) -> None:
        """Writes all records so far: an interrupted benchmark keeps them."""
        self._content["sections"][name] = {"records": [asdict(record) for record in records], **more}
        self._write()

    def close(self) -> None:
        if self._file:
            self._console.print(f"wrote {self._file}", soft_wrap=True)

    def _write(self) -> None:
        if self._file:
            write_record(self._file, self._content)


def _table(name: str, records: list[Any], upright: bool = False) -> Table:
    """A row per record, with common values below the table; for a single record, a row per field.

    `upright`: a column per record, with its first field as the heading.
    """
    names = [field.name for field in fields(records[0]) if any(_has(record, field.name) for record in records)]
    table = Table(title=name, title_style="bold", title_justify="left", caption_justify="left")
    if upright or len(records) == 1:
        table.show_header = upright
        if upright:
            table.add_column(names[0])
            for record in records:
                table.add_column(_cell(getattr(record, names[0])), justify="right")
        for field in names[1:] if upright else names:
            table.add_row(field.replace("_", " "), *(_cell(getattr(record, field)) for record in records))
        return table
    shared = [field for field in names if len({getattr(record, field) for record in records}) == 1]
    table.caption = ", ".join(f"{field.replace('_', ' ')} {_cell(getattr(records[0], field))}" for field in shared)
    own = [field for field in names if field not in shared]
    for field in own:
        table.add_column(field.replace("_", " "), justify="right")
    for record in records:
        table.add_row(*(_cell(getattr(record, field)) for field in own))
    return table


def _has(record: Any, field: str) -> bool:
    return getattr(record, field) not in (None, "")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(_cell, value))
    return str(value)
