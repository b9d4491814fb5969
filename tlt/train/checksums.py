"""Checksums of a directory: the file `SHA256SUMS`, which `sha256sum -c` can read.

Always holds: the list names every file that was in the directory when it was written. Its last line is a checksum of
the other lines, which distinguishes damage of the list from damage of the files. Files added later are not damage. The
list is replaced by a rename. Does not know the contents of the files.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from tlt.errors import CheckpointError

SUMS = "SHA256SUMS"
_LAST = "# the lines above: "  # a comment to sha256sum


def write_checksums(directory: Path) -> None:
    """Reads every file of the directory and writes the list of checksums."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    _write(directory, {name: _sum_of(directory / name) for name in names if name != SUMS})


def read_checksums(directory: Path) -> dict[str, str]:
    """Checksums by file name, relative to the directory. Raises CheckpointError if the list is missing or damaged."""
    try:
        text = (directory / SUMS).read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise CheckpointError(f"{SUMS} is missing: half removed, or written by an older version of tlt") from None
    except OSError as error:
        raise CheckpointError(f"{SUMS} cannot be read ({error.strerror})") from error
    lines = text[: text.rfind(_LAST)].split("\n")[:-1]
    sums = {name: value for value, _, name in (line.partition("  ") for line in lines)}
    if text != _text(sums):
        raise CheckpointError(f"{SUMS} is damaged")
    return sums


def damage(directory: Path) -> dict[str, str]:
    """Problems by file name. Empty if every listed file is unchanged."""
    try:
        sums = read_checksums(directory)
    except CheckpointError as error:
        return {SUMS: str(error)}
    found = {name: _problem(directory / name, name, expected) for name, expected in sums.items()}
    return {name: problem for name, problem in found.items() if problem}


def forget_checksums(directory: Path, names: set[str]) -> None:
    """Takes files off the list, on disk when this returns."""
    _write(directory, {name: value for name, value in read_checksums(directory).items() if name not in names})


def _write(directory: Path, sums: Mapping[str, str]) -> None:
    aside = directory / f".{SUMS}.part"
    with aside.open("wb") as file:
        file.write(_text(sums).encode("utf-8", "surrogateescape"))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(directory / SUMS)


def _text(sums: Mapping[str, str]) -> str:
    lines = "".join(f"{value}  {name}\n" for name, value in sums.items())
    return f"{lines}{_LAST}{hashlib.sha256(lines.encode('utf-8', 'surrogateescape')).hexdigest()}\n"


def _problem(path: Path, name: str, expected: str) -> str:
    try:
        return "" if _sum_of(path) == expected else f"{name} is damaged: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
