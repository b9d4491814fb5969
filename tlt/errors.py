"""The errors a user can meet. Each message says what was found, what was expected and what to change.

Always holds: every error that tlt raises on purpose is a TltError. The command line prints it as one line and exits
with its code. `Terminated` is no TltError: it is raised on SIGTERM.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class TltError(Exception):
    """An error that the user can correct. `exit_code`: exit code of the command line."""

    exit_code = 1


class ConfigError(TltError):
    """A recipe or a flag is wrong, or a value in one."""

    exit_code = 2


class ModelError(TltError):
    """A model directory is missing, incomplete, misshapen or of an unsupported family."""


class RequestError(TltError):
    """The engine cannot accept or complete a request. Other requests are not affected.

    `completions`: completions of the other requests, if the error is raised at the end of a batch.
    """

    def __init__(self, message: str, completions: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.completions = tuple(completions)


class TaskError(TltError):
    """A task returned invalid prompts or rewards."""


class CheckpointError(TltError):
    """A checkpoint cannot be written or read."""


class ReaderError(TltError):
    """A reader of a run's events (console, TensorBoard, W&B) failed. The run continues."""


class ClusterError(TltError):
    """Workers cannot be started, or too many of them were lost."""


class RankLost(ClusterError):
    """Another rank of an engine was lost, with its slice of the policy: the engine cannot continue."""


class StateLost(ClusterError):
    """No worker with the policy's training state is left: the run continues from its last checkpoint."""


def shown(value: object, most: int = 120) -> str:
    """A value for an error's message: one line of at most `most` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        text = f"a value of type {type(value).__name__}, too large to show"
    return text if len(text) <= most else text[:most] + "…"


def shown_names(names: Iterable[str], most: int = 400) -> str:
    """Names from a file, for an error's message."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names) or "none"
    return text if len(text) <= most else text[:most] + "…"


def check_reachable(path: Path | str, error: type[TltError]) -> None:
    """Raises `error` if the system cannot tell whether the file exists, e.g. for lack of permission on a directory."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as problem:
        raise error(
            f"{path} cannot be reached ({problem.strerror}); see that it and its directories can be read"
        ) from None


class Terminated(SystemExit):
    """The process received SIGTERM. Uncaught, it exits with 143, a shell's code for a process that SIGTERM ended."""

    def __init__(self) -> None:
        super().__init__(143)

    def __str__(self) -> str:
        return "the process received SIGTERM"
