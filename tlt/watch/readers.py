"""The readers of a run's events that `watch` asks for: the console, TensorBoard, W&B and trackio.

TensorBoard, W&B, trackio and terminals fail in their own ways while a run goes on. Whatever they raise becomes a
ReaderError: the event log then drops that reader and records it as an event. What they raise at the start ends the run
before it begins: a tracker that was asked for and is not installed is an error. The events are complete either way. All
trackers get the metrics of `tlt.watch.metrics`, under the same names.
"""

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from secrets import token_hex
from typing import Any

from rich.console import Console

from tlt.config import RunConfig
from tlt.errors import ConfigError, ReaderError, Terminated, TltError
from tlt.recipe import flat
from tlt.watch.console import Lines, LiveLines, StartupLines, StartupStatus
from tlt.watch.directory import TRAIN, directory_of
from tlt.watch.events import Recorded, RolloutFinished, RunFailed, RunResumed
from tlt.watch.log import Reader
from tlt.watch.metrics import metrics_of

TENSORBOARD_DIRECTORY = "tensorboard"
WANDB_ID_FILE = "wandb_id"


class Guarded:
    """Wraps a reader: every failure becomes a ReaderError."""

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
    """The readers of `tlt train`; an error if one cannot start. The console comes last, so it shows failures of the
    others."""
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
    """The readers of verbs that have their own display after start-up."""
    if config.watch.console == "off":
        return []
    return [Guarded((StartupStatus if _live(config, console) else StartupLines)(console))]


def _live(config: RunConfig, console: Console) -> bool:
    return console.is_terminal if config.watch.console == "auto" else config.watch.console == "live"


# ---- trackers


class TensorBoard:
    """Writes TensorBoard files into one directory. A resumed run purges the steps that it computes again."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        try:
            from torch import tensor
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "watch.tensorboard is true, but TensorBoard is not installed; pip install 'tlt-rl[watch]', "
                "or set it false"
            ) from None
        self._open: Any = SummaryWriter
        self._as_array: Any = tensor
        self._directory = str(directory)
        self._writer: Any = None

    def show(self, record: Recorded) -> None:
        event = record.event
        if isinstance(event, RunResumed):
            self.close()
            self._writer = self._open(self._directory, purge_step=event.step + 1)
        if isinstance(event, RolloutFinished) and event.lengths:
            lengths = self._as_array(event.lengths)
            self._written().add_histogram("length/all", lengths, event.step, walltime=record.time)
        if metrics := metrics_of(event):
            for name, value in metrics.values.items():
                self._written().add_scalar(name, value, metrics.step, walltime=record.time)
            self._written().flush()  # a run may be killed at any moment

    def _written(self) -> Any:
        if self._writer is None:
            self._writer = self._open(self._directory, purge_step=0)  # what an earlier run of that name left
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Wandb:
    """One W&B run per run, across resumes; its id is kept in the directory. Metrics are plotted over `step`, so that
    a step computed again replaces its values."""

    name = "W&B"

    def __init__(self, config: RunConfig, directory: Path, resumed: bool) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"watch.wandb is {config.watch.wandb!r}, but wandb is not installed; pip install 'tlt-rl[wandb]', "
                "or leave it empty"
            ) from None
        try:
            self._run: Any = wandb.init(
                project=config.watch.wandb,
                name=config.run.name,
                id=_wandb_id(directory / WANDB_ID_FILE, config.run.name, resumed),
                resume="allow",
                config=flat(config),
                dir=str(directory),
            )
        except (wandb.Error, OSError) as error:
            raise TltError(
                f"W&B could not be reached: {error}; log in with `wandb login`, set WANDB_MODE=offline to send the run "
                "later, or leave watch.wandb empty"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._failed = False

    def show(self, record: Recorded) -> None:
        self._failed = self._failed or isinstance(record.event, RunFailed)
        if metrics := metrics_of(record.event):
            self._run.log({"step": metrics.step, **metrics.values})

    def close(self) -> None:
        self._run.finish(exit_code=1 if self._failed else 0)


def _wandb_id(kept: Path, name: str, resumed: bool) -> str:
    if resumed and kept.exists():
        return kept.read_text(encoding="utf-8").strip()
    fresh = f"{name}-{token_hex(4)}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(fresh + "\n", encoding="utf-8")
    return fresh


class Trackio:
    """One trackio run per run. trackio's environment variables select where it is stored. A step computed again is
    logged again."""

    name = "trackio"

    def __init__(self, config: RunConfig, resumed: bool) -> None:
        project = config.watch.trackio
        try:
            trackio: Any = import_module("trackio")
        except ImportError:
            raise ConfigError(
                f"watch.trackio is {project!r}, but trackio is not installed; pip install 'tlt-rl[trackio]', or leave "
                "it empty"
            ) from None
        try:
            with redirect_stdout(StringIO()):  # where it is and how to show it, in several lines
                self._run: Any = trackio.init(
                    project=project,
                    name=config.run.name,
                    config=flat(config),
                    resume="allow" if resumed else "never",
                    embed=False,
                )
        except (OSError, ValueError) as error:
            raise TltError(f"trackio could not be opened: {error}; leave watch.trackio empty to go without") from error

    def show(self, record: Recorded) -> None:
        if metrics := metrics_of(record.event):
            self._run.log(metrics=metrics.values, step=metrics.step)

    def close(self) -> None:
        self._run.finish()
