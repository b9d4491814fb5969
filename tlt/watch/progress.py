"""The progress of a command: a bar in a terminal; elsewhere (a pipe, a log file) lines at growing intervals.

Invariant: elsewhere the first line is printed when the work begins, and no line is rewritten.
"""

from collections.abc import Callable
from math import inf
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tlt.watch.summary import duration

_LEAST_S, _SHARE = 5.0, 0.1  # between two lines: seconds, and share of the time so far


class WorkProgress:
    """`with WorkProgress("answers", 512, console, clock) as shown: shown.at(1, "256 running")`."""

    def __init__(self, what: str, total: int, console: Console, clock: Callable[[], float]) -> None:
        self._what, self._total, self._console, self._clock = what, total, console, clock
        self._began_s = clock()
        self._line_s = self._began_s + _LEAST_S  # when the next line is due
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=total, note="")

    def at(self, done: int, note: str = "", *, work: float | None = None, most_s: float = inf) -> None:
        """Reports progress. `work`: the share of all work, if pieces differ in size; `most_s`: seconds until a time
        limit."""
        spent_s = self._clock() - self._began_s
        part = done / self._total if work is None else work
        left_s = min(most_s, spent_s * (1 / part - 1) if part and spent_s else inf)
        left = f", about {duration(max(0.0, left_s))} left" if left_s < inf else ""
        words = f"{note}{', ' if note else ''}{duration(spent_s)}{left}"
        self._bar.update(self._task, completed=done, note=words)
        if not self._console.is_terminal and self._began_s + spent_s >= self._line_s:
            self._print(f"{self._what}: {done} of {self._total}, {words}")
            self._line_s = self._began_s + spent_s * (1 + _SHARE) + _LEAST_S

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> "WorkProgress":
        self._bar.start()
        if not self._console.is_terminal:
            self._print(f"{self._what}: 0 of {self._total}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
