"""Who shows a run, as its configuration asks; and the border to code that is not ours.

TensorBoard, W&B and terminals fail in their own ways while a run goes on. Whatever they raise becomes a ReaderError:
the event log then leaves that reader out, and says so in the events, on the console and at the end. What they raise at
the start ends the run before it began. The events are complete either way: `tlt report` needs nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from tlt.config import RunConfig
from tlt.errors import ReaderError, Terminated
from tlt.watch.console import Lines, LiveLines, StartupLines, StartupStatus
from tlt.watch.directory import TRAIN, directory_of
from tlt.watch.events import Recorded
from tlt.watch.log import Reader
from tlt.watch.tensorboard import TensorBoard
from tlt.watch.trackio import Trackio
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
    except Terminated:  # of the run, not of this reader
        raise
    except SystemExit:  # what rich does where a pipe breaks: `tlt train … | head`
        raise ReaderError("nobody reads its output any more") from None
    except Exception as error:
        raise ReaderError(f"{type(error).__name__}: {error}") from error


def readers_of(config: RunConfig, console: Console, resumed: bool = False) -> list[Reader]:
    """The readers of a `tlt train`; an error if one of them cannot start. The console comes last: it tells what became
    of the others."""
    directory = directory_of(config, TRAIN)
    readers: list[Reader] = []
    if config.watch.tensorboard:
        readers.append(TensorBoard(directory / TENSORBOARD_DIRECTORY))
    if config.watch.wandb:
        readers.append(Wandb(config, directory, resumed))
    if config.watch.trackio:
        readers.append(Trackio(config, resumed))
    if config.watch.console != "off":
        readers.append((LiveLines if _live(config, console) else Lines)(config, console))
    return [Guarded(reader) for reader in readers]


def startup_readers_of(config: RunConfig, console: Console) -> list[Reader]:
    """The readers of verbs that have a display of their own once they are ready."""
    if config.watch.console == "off":
        return []
    return [Guarded((StartupStatus if _live(config, console) else StartupLines)(console))]


def _live(config: RunConfig, console: Console) -> bool:
    return console.is_terminal if config.watch.console == "auto" else config.watch.console == "live"
