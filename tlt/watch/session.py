"""The life of a watched run: opens log and readers, records how the run ends, writes the report.

Invariant: however the run ends, its end is an event, the report is written and the last lines name it. An error while
recording never hides the error of the run.
"""

import traceback
from types import TracebackType

from rich.console import Console

from tlt.config import RunConfig
from tlt.errors import Terminated, TltError
from tlt.watch.directory import TRAIN, directory_of
from tlt.watch.events import RunFailed, read_run
from tlt.watch.log import EventLog, start_run
from tlt.watch.readers import readers_of, startup_readers_of
from tlt.watch.report import write_report
from tlt.watch.summary import last_lines, summarise

_NAMES: dict[type[BaseException], str] = {KeyboardInterrupt: "interruption", Terminated: "termination"}


class Watched:
    """`with Watched(config, "train", version) as log:` and emit. `resumed`: RunResumed is the first event to come."""

    def __init__(
        self, config: RunConfig, verb: str, version: str, *, resumed: bool = False, console: Console | None = None
    ) -> None:
        self._config = config
        self._verb, self._version, self._resumed = verb, version, resumed
        self._console = console or Console(highlight=False)
        self._directory = directory_of(config, verb)

    def __enter__(self) -> EventLog:
        if self._verb == TRAIN:
            readers = readers_of(self._config, self._console, self._resumed)
        else:
            readers = startup_readers_of(self._config, self._console)
        self._log = start_run(self._config, self._verb, self._version, readers)
        return self._log

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._log.close()
            self._tell()
            return
        try:
            name = _NAMES.get(kind, kind.__name__)
            self._log.emit(RunFailed(name, _whole(error)))
            self._log.close()
            self._tell()
        except (TltError, OSError) as other:  # a full disk, most likely: also what `error` is about
            if str(other) not in str(error):
                self._say(f"and the end could not be written down: {other}", "bold red")

    def _tell(self) -> None:
        """Writes the report and the last lines of `tlt train`; other verbs print their own results."""
        if self._verb != TRAIN:
            return
        run = read_run(self._directory)
        where = str(self._directory)
        if self._config.watch.report:
            where = str(write_report(run, self._directory))
        if self._config.watch.console != "off":
            self._say("", "")
            summary = summarise(run)
            for line in last_lines(summary, where):
                style = "bold yellow" if line == summary.nothing_learned else ""
                self._say(line, style or "bold" if "identical" in line or "TLT" in line else "")

    def _say(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def _whole(error: BaseException | None) -> str:
    """The full message of what stopped the run; for a bug with its traceback."""
    if error is None or isinstance(error, TltError | KeyboardInterrupt | Terminated):
        return str(error or "")
    return f"{error}\n{''.join(traceback.format_exception(error)).strip()}".strip()
