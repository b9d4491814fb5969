"""The errors a user can meet. Each message says what was found, what was expected and what to change.

Everything tlt raises on purpose is a TltError; the command line prints it as one line and exits with its code.
Terminated is none: it is what SIGTERM becomes.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class TltError(Exception):
    """Something the user can put right. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(TltError):
    """A recipe, a flag or a value in one is wrong."""

    exit_code = 2


class ModelError(TltError):
    """A model directory is missing, incomplete, misshapen or of an unsupported family."""


class RequestError(TltError):
    """A request the engine cannot take or answer. Other requests are unaffected.

    `completions` holds what the others were answered, where the error came at the end of a batch.
    """

    def __init__(self, message: str, completions: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.completions = tuple(completions)


class TaskError(TltError):
    """Prompts or rewards are not what a task must give."""


class CheckpointError(TltError):
    """A checkpoint cannot be written or read."""


class ReaderError(TltError):
    """Somebody who shows a run (console, TensorBoard, W&B) cannot go on. The run can."""


class ClusterError(TltError):
    """Workers cannot be had, or too many of them were lost."""


class RankLost(ClusterError):
    """Another rank of an engine is gone, and with it a slice of the policy: the engine cannot go on."""


class StateLost(ClusterError):
    """Nobody is left who knows how far the policy had learned: the run goes on from its last checkpoint."""


def shown(value: object, most: int = 120) -> str:
    """A value in an error's message: on one line, and not longer than can be read."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or an integer of more digits, than Python prints
        text = f"a value of type {type(value).__name__}, too large to show"
    return text if len(text) <= most else text[:most] + "…"


def shown_names(names: Iterable[str], most: int = 400) -> str:
    """Names that a file brings, in an error's message."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names) or "none"
    return text if len(text) <= most else text[:most] + "…"


def check_reachable(path: Path | str, error: type[TltError]) -> None:
    """Raises `error` where the system does not say whether the file is there: a directory on the way may be closed."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as problem:
        raise error(
            f"{path} cannot be reached ({problem.strerror}); see that it and its directories can be read"
        ) from None


class Terminated(SystemExit):
    """SIGTERM: somebody else ends the process. Uncaught it exits with 143, as a shell shows a process that SIGTERM
    ended."""

    def __init__(self) -> None:
        super().__init__(143)

    def __str__(self) -> str:
        return "the process received SIGTERM"
