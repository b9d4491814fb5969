"""Where a command writes what it made: checked before the work begins, written aside and renamed.

What always holds: nothing that is there is written over, and what has its name is whole. What was made and cannot be
written where it belongs is written elsewhere, and the error says where. Knows nothing of what is written.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tlt.errors import ConfigError, TltError

Fill = Callable[[Path], None]  # makes a file or a directory; OSError where it cannot


def check_new(place: Path, argument: str, size: int = 0, *, directory: bool = False) -> None:
    """ConfigError unless something new of so many bytes can be written at the place that `argument` names.

    `directory`: it will be one, and may be there already if it is empty.
    """
    try:
        target = place.resolve()
        taken = any(target.iterdir()) if directory and target.is_dir() else target.exists()
        if not taken:
            if target.parent.is_file():
                raise NotADirectoryError(0, f"{target.parent} is a file")
            target.parent.mkdir(parents=True, exist_ok=True)
            _aside(target).mkdir()
            _aside(target).rmdir()
            free = shutil.disk_usage(target.parent).free
    except (OSError, ValueError) as error:  # a ValueError: no path has such characters
        raise ConfigError(
            f"{argument} {place} cannot be written ({_why(error)}); expected a place that can: give {argument} another"
        ) from None
    if taken:
        raise ConfigError(
            f"{argument} {place} is there already, and nothing is written over; give {argument} another name, or "
            "remove what is there"
        )
    if free < size:
        raise ConfigError(
            f"{argument} {place} needs {size / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB left; make room, or "
            f"give {argument} a place on another disk"
        )


def write_new(place: Path, fill: Fill) -> None:
    """Fills a place. Where that fails, what would be lost is written elsewhere, and TltError says where it is."""
    target = place.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fill_whole(_aside(target), fill)
        if target.is_file():  # which renaming would replace
            raise FileExistsError(0, "it is there already")
        _aside(target).rename(target)
    except OSError as error:
        _remove(_aside(target))
        raise TltError(f"{place} cannot be written ({_why(error)}); {keep(place.name, fill)}") from error


def keep(name: str, fill: Fill, first: tuple[Path, ...] = ()) -> str:
    """Writes what would be lost into the first directory that takes it, and says where it is."""
    directories = dict.fromkeys((*first, Path(tempfile.gettempdir()), Path.cwd(), Path.home()))
    for directory in directories:
        with suppress(OSError):
            place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory)) / name
            try:
                _fill_whole(place, fill)
            except OSError:
                _remove(place.parent)
                raise
            return f"it is at {place} instead, to be moved"
    return f"it is lost, as it could not be written to {', '.join(map(str, directories))} either"


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _fill_whole(place: Path, fill: Fill) -> None:
    """A disk that is full, or has failed, may say so only here."""
    fill(place)
    for path in (place, *place.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
