"""Transfer between workers: states copied to host memory, directories as file contents."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 64 * 1024**2  # bytes
_BLOCK = 512  # bytes, the unit of `st_blocks`


def on_host(value: Any) -> Any:
    """A copy with every tensor in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: on_host(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(part) for part in value)
    return value


def pieces_of(directory: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """The contents of a directory in pieces of at most 64 MiB, for `append_piece`."""
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        for start in range(0, max(1, path.stat().st_size), _PIECE):
            yield str(path.relative_to(directory)), np.fromfile(path, dtype=np.uint8, count=_PIECE, offset=start)


def append_piece(name: str, content: NDArray[np.uint8], directory: Path) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        content.tofile(file)


def bytes_written(directory: Path) -> int:
    """A number that grows while files are written: sizes plus allocation: a file may be sized before its data."""
    total = 0
    for place, _, names in os.walk(directory):  # skips directories that were renamed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                found = os.stat(os.path.join(place, name))
                total += found.st_size + found.st_blocks * _BLOCK
    return total
