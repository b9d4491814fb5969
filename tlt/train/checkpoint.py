"""Checkpoints: directories `step_N`, each whole or not there at all.

What always holds: a checkpoint is written aside with the checksums of its files, forced to disk, and only then renamed,
so that whatever stops a run, and when, a name `step_N` stands for everything that was to be saved. What is half written
is never read, and removed by the next write. Other checkpoints are removed after a newer one is safe, never before.
Knows nothing of what is in them: a state is tensors and plain values, nested as their owner likes.
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
from safetensors.torch import save_file
from torch import Tensor

from tlt.errors import CheckpointError
from tlt.strict_json import read_object
from tlt.train.checksums import damage, forget_checksums, read_checksums, write_checksums

_NAME = re.compile(r"step_(\d+)")
_HALF_WRITTEN = re.compile(r"\.step_\d+\.(writing|replaced)")
_SET_ASIDE = re.compile(r"step_\d+\.aside")


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay, and of the newest `keep_state` also their state.

    `state`: patterns of the files that only a resumed run needs. `keep_state` = 0 keeps them as long as the others.
    """

    def __init__(self, directory: Path | str, keep: int = 2, *, keep_state: int = 0, state: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        self._keep, self._keep_state, self._state = keep, keep_state or keep, tuple(state)

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first."""
        return sorted(int(match[1]) for name in self._names() if (match := _NAME.fullmatch(name)))

    def newest(self) -> tuple[int, Path] | None:
        """The last step that was saved, and where; None if none was."""
        steps = self.steps()
        return (steps[-1], self.path(steps[-1])) if steps else None

    def problems(self, step: int) -> dict[str, str]:
        """Why a run cannot go on from a checkpoint, by file: empty if it can. Reads all of it."""
        path = self.path(step)
        found = damage(path)
        if not found and self._state and not self._state_files(read_checksums(path)):
            return {self._state[0]: "it holds weights only (see checkpoint.keep_optimizer)"}
        return found

    def go_on_from(self, step: int) -> None:
        """Sets later checkpoints aside: the run has left them. They are removed once there is a newer one."""
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
        """A checkpoint with what `fill` writes into the directory it is given; or CheckpointError, and nothing new."""
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
        if target.exists():  # a name cannot be given to two directories
            target.rename(replaced)
        aside.rename(target)
        _force_directory(self.directory)
        _force_directory(self.directory.parent)  # where the first checkpoint made a directory
        shutil.rmtree(replaced, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what an earlier run left half written."""
        for name in filter(_HALF_WRITTEN.fullmatch, self._names()):
            shutil.rmtree(self.directory / name)

    def _prune(self, newest: int) -> None:
        """Removes what is not to be kept. A checkpoint too many does no harm: what cannot be removed stays."""
        kept = [step for step in self.steps() if step <= newest]
        for name in filter(_SET_ASIDE.fullmatch, self._names()):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for step in kept[: -self._keep]:
            path, going = self.path(step), self.directory / f".step_{step}.replaced"
            with suppress(OSError):
                path.rename(going)  # at once: it is never found half removed
                shutil.rmtree(going)
        for step in kept[-self._keep : -self._keep_state]:
            with suppress(OSError, CheckpointError):
                self._drop_state(self.path(step))

    def _drop_state(self, path: Path) -> None:
        """The list of checksums is shortened first: what it no longer names is not missed."""
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

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"  # marks of what JSON has no word for


def save_state(state: Mapping[str, Any], directory: Path, name: str) -> None:
    """Writes a state as `name`.json and, for its tensors, `name`.safetensors: bit by bit what `load_state` gives back.

    A state is made of dictionaries, lists, tuples, tensors, numbers, texts and None.
    """
    tensors: dict[str, Tensor] = {}
    words = _without_tensors(state, tensors)
    (directory / f"{name}.json").write_text(json.dumps(words) + "\n", encoding="utf-8")
    save_file(tensors, directory / f"{name}.safetensors")


def load_state(directory: Path, name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    words = read_object(directory / f"{name}.json", CheckpointError, "resume from another checkpoint")
    try:
        with safe_open(directory / f"{name}.safetensors", framework="pt", device=str(device)) as file:
            state: dict[str, Any] = _with_tensors(words, file.get_tensor)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{directory / name} cannot be read: {error}; resume from another checkpoint") from error
    return state


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _without_tensors(part, tensors) for key, part in value.items()}
        return {_ITEMS: [[key, _without_tensors(part, tensors)] for key, part in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_without_tensors(part, tensors) for part in value]}
    if isinstance(value, list):
        return [_without_tensors(part, tensors) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state holds a {type(value).__name__}; expected tensors and plain values")


def _with_tensors(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(_with_tensors(part, tensor) for part in value[_TUPLE])
    if _ITEMS in value:
        return {key: _with_tensors(part, tensor) for key, part in value[_ITEMS]}
    return {key: _with_tensors(part, tensor) for key, part in value.items()}
