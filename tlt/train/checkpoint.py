"""Checkpoints: directories `step_N`, each complete or absent.

Always holds: a checkpoint is written to a temporary directory with the checksums of its files, synced to disk, and then
renamed. A directory named `step_N` is therefore complete, whenever the run stops. Incomplete directories are never
read, and the next write removes them. Older checkpoints are removed only after a newer one is on disk. Does not know
the contents: a state is a nesting of tensors and plain values.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt.errors import CheckpointError
from tlt.model.stream import write_safetensors
from tlt.strict_json import read_object
from tlt.train.checksums import damage, forget_checksums, read_checksums, write_checksums

_NAME = re.compile(r"step_(\d+)")
_HALF_WRITTEN = re.compile(r"\.step_\d+\.(writing|replaced)")
_SET_ASIDE = re.compile(r"step_\d+\.aside")


class Checkpoints:
    """The checkpoints of one run. Keeps the newest `keep`, the weights of the `best`, and the state files of the newest
    `keep_state`.

    `state`: patterns of the files that only a resumed run needs. `keep_state` = 0 keeps them in all kept checkpoints.
    """

    def __init__(self, directory: Path | str, keep: int = 2, *, keep_state: int = 0, state: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        self._keep, self._keep_state, self._state = keep, keep_state or keep, tuple(state)
        self.best: int | None = None  # step of a checkpoint that is not removed

    def steps(self) -> list[int]:
        """The steps of all checkpoints, oldest first."""
        return sorted(int(match[1]) for name in self._names() if (match := _NAME.fullmatch(name)))

    def newest(self) -> tuple[int, Path] | None:
        """The newest checkpoint's step and path. None if there is no checkpoint."""
        steps = self.steps()
        return (steps[-1], self.path(steps[-1])) if steps else None

    def problems(self, step: int) -> dict[str, str]:
        """By file, the reasons why a run cannot resume from a checkpoint. Empty if it can. Reads every file."""
        path = self.path(step)
        found = damage(path)
        if not found and self._state and not self._state_files(read_checksums(path)):
            return {self._state[0]: "it holds weights only (see checkpoint.keep_optimizer)"}
        return found

    def go_on_from(self, step: int) -> None:
        """Renames later checkpoints, which the resumed run does not continue. The next write removes them."""
        try:
            for path in (self.path(later) for later in self.steps() if later > step):
                left = path.with_name(f"{path.name}.aside")
                shutil.rmtree(left, ignore_errors=True)
                path.rename(left)
                _force_directory(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be renamed ({error.strerror}); see that {self.directory} can be written to"
            ) from error

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Writes a checkpoint. `fill` writes its files. On failure raises CheckpointError and leaves no checkpoint."""
        target, aside = self.path(step), self.directory / f".step_{step}.writing"
        try:
            self._sweep()
            aside.mkdir(parents=True)
            fill(aside)
            write_checksums(aside)
            _force_to_disk(aside)
            self._put_in_place(aside, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(self._complaint(target, error)) from error
        self._prune(step)
        return target

    def _put_in_place(self, aside: Path, target: Path) -> None:
        replaced = self.directory / f".{target.name}.replaced"
        if target.exists():  # rename cannot replace a directory that is not empty
            target.rename(replaced)
        aside.rename(target)
        _force_directory(self.directory)
        _force_directory(self.directory.parent)  # the first checkpoint creates self.directory
        shutil.rmtree(replaced, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes incomplete directories of an earlier run."""
        for name in filter(_HALF_WRITTEN.fullmatch, self._names()):
            shutil.rmtree(self.directory / name)

    def _prune(self, newest: int) -> None:
        """Removes old checkpoints and state files. Errors are ignored: an extra checkpoint does no harm."""
        kept = [step for step in self.steps() if step <= newest]
        for name in filter(_SET_ASIDE.fullmatch, self._names()):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for step in (old for old in kept[: -self._keep] if old != self.best):
            path, going = self.path(step), self.directory / f".step_{step}.replaced"
            with suppress(OSError):
                path.rename(going)  # first, so that no directory step_N is ever partly removed
                shutil.rmtree(going)
        with_state = kept[-self._keep_state :]
        for step in (old for old in kept if old not in with_state and (old == self.best or old in kept[-self._keep :])):
            with suppress(OSError, CheckpointError):
                self._drop_state(self.path(step))

    def _drop_state(self, path: Path) -> None:
        """Removes state files. They leave the checksum list first, so that a stop in between is no damage."""
        names = self._state_files(str(file.relative_to(path)) for file in path.rglob("*"))
        if names & read_checksums(path).keys():
            forget_checksums(path, names)
        for name in names:
            (path / name).unlink()

    def _state_files(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if any(fnmatchcase(name, pattern) for pattern in self._state)}

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror}; expected a directory") from error

    def _complaint(self, target: Path, error: OSError | SafetensorError) -> str:
        what = (error.strerror if isinstance(error, OSError) else None) or str(error)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        cure = "make room on the disk" if full else "see that the directory can be written to"
        left = self.newest()
        still = f"the last one, {left[1]}, is intact" if left else "there was none before it"
        return f"the checkpoint {target} cannot be written: {what}; {still}. {cure}, then go on with --resume"


# ---- forcing to disk


def _force_to_disk(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _force(Path(folder) / name, os.O_RDONLY)
        _force_directory(Path(folder))


def _force_directory(directory: Path) -> None:
    _force(directory, os.O_RDONLY | os.O_DIRECTORY)


def _force(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- states

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"  # marks of values that JSON cannot represent


def save_state(state: Mapping[str, Any], directory: Path, name: str) -> None:
    """Writes a state as `name`.json and its tensors as `name`.safetensors. `load_state` restores it bit for bit.

    A state consists of dictionaries, lists, tuples, tensors, numbers, strings and None.
    """
    tensors: dict[str, Tensor] = {}
    words = without_tensors(state, tensors)
    directory.mkdir(exist_ok=True)
    write_words(words, directory, name)
    write_safetensors(directory / f"{name}.safetensors", tensors)


def write_words(words: Any, directory: Path, name: str) -> None:
    (directory / f"{name}.json").write_text(json.dumps(words) + "\n", encoding="utf-8")


def read_words(directory: Path, name: str) -> dict[str, Any]:
    return read_object(directory / f"{name}.json", CheckpointError, "resume from another checkpoint")


def load_state(directory: Path, name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    words = read_words(directory, name)
    try:
        with safe_open(directory / f"{name}.safetensors", framework="pt", device=str(device)) as file:
            state: dict[str, Any] = with_tensors(words, file.get_tensor)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{directory / name} cannot be read: {error}; resume from another checkpoint") from error
    return state


def without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The state with a mark in place of each tensor, which is put into `tensors`."""
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: without_tensors(part, tensors) for key, part in value.items()}
        return {_ITEMS: [[key, without_tensors(part, tensors)] for key, part in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [without_tensors(part, tensors) for part in value]}
    if isinstance(value, list):
        return [without_tensors(part, tensors) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state holds a {type(value).__name__}; expected tensors and plain values")


def with_tensors(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The reverse of `without_tensors`."""
    if isinstance(value, list):
        return [with_tensors(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(with_tensors(part, tensor) for part in value[_TUPLE])
    if _ITEMS in value:
        return {key: with_tensors(part, tensor) for key, part in value[_ITEMS]}
    return {key: with_tensors(part, tensor) for key, part in value.items()}
