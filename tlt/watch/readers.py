"""Who shows a run, as its configuration asks; and the border to code that is not ours.

TensorBoard, W&B and terminals fail in their own ways while a run goes on. Whatever they raise becomes a ReaderError:
the event log then leaves that reader out, and says so in the events, on the console and at the end. What they raise at
the start ends the run before it began. The events are complete either way: `tlt report` needs nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tlt.config import RunConfig
from tlt.errors import ReaderError
from tlt.watch.console import Lines, LiveLines
from tlt.watch.events import Recorded
from tlt.watch.log import Reader
from tlt.watch.tensorboard import TensorBoard
from tlt.watch.wandb import Wandb

TENSORBOARD_DIRECTORY = "tensorboard"


class Guarded:
    """A reader whose failures are told as ReaderError, whatever they are."""

    def __init__(self, reader: Reader) -> None:
        self.name = reader.name
        self._reader = reader

    def show(self, record: Recorded) -> None:
        with _told_as_reader_error():
            self._reader.show(record)

    def close(self) -> None:
        with _told_as_reader_error():
            self._reader.close()


@contextmanager
def _told_as_reader_error() -> Iterator[None]:
    try:
        yield
    except SystemExit:  # what rich does where a pipe breaks: `tlt train … | head`
        raise ReaderError("nobody reads its output any more") from None
    except Exception as error:
        raise ReaderError(f"{type(error).__name__}: {error}") from error


def readers_of(config: RunConfig, console: Console, resumed: bool = False) -> list[Reader]:
    """The readers a configuration asks for; an error if one of them cannot start. The console comes last: it tells
    what became of the others."""
    directory = Path(config.run.out) / config.run.name
    readers: list[Reader] = []
    if config.watch.tensorboard:
        readers.append(TensorBoard(directory / TENSORBOARD_DIRECTORY))
    if config.watch.wandb:
        readers.append(Wandb(config, directory, resumed))
    if config.watch.console != "off":
        live = console.is_terminal if config.watch.console == "auto" else config.watch.console == "live"
        readers.append((LiveLines if live else Lines)(config.run.steps, console))
    return [Guarded(reader) for reader in readers]
