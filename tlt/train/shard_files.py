"""States on disk in shards (torch's distributed checkpoint, DCP): every worker writes and reads its own part.

Always holds: the files are safetensors that name the offsets of their parts, so what any number of workers wrote is
read by any other number of workers, or whole by one. A worker holds no more of a sharded tensor than its own part.
Writing is collective, over a group that nothing else uses: it can run beside training. Reading needs no other worker.
Does not know the meaning of the states.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, empty

from tlt.errors import CheckpointError
from tlt.train.checkpoint import read_words, with_tensors, without_tensors, write_words

STATE = "state"  # name of a state's files


def save_shards(state: Mapping[str, Any], directory: Path, group: Any, *, words: bool) -> None:
    """Writes this worker's part of a state; all workers of `group` call it. `words`: writes the plain values as well,
    which are the same everywhere."""
    tensors: dict[str, Tensor] = {}
    plain = without_tensors(state, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    if words:
        write_words(plain, directory, STATE)
    write_shards(tensors, directory, group)


def write_shards(tensors: Mapping[str, Tensor], directory: Path, group: Any) -> None:
    """As `save_shards`, of tensors by name."""
    with _told(directory):
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
            process_group=group,
        )


def load_shards(directory: Path, cut: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Reads a state. `cut` makes the tensor to be filled, whole or a shard, from one of the whole shape on "meta"."""
    words, files = read_words(directory, STATE), ShardFiles(directory)
    wanted: dict[str, Tensor] = {}

    def place(key: str) -> Tensor:
        wanted[key] = cut(files[key])
        return wanted[key]

    try:
        state: dict[str, Any] = with_tensors(words, place)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error!r}; resume from another checkpoint") from error
    files.read(wanted)
    return state


def empty_shard(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Room for this worker's rows of a tensor; for all of one without rows."""
    if not whole.dim():
        return torch.empty_like(whole, device=mesh.device_type)
    return empty(whole.shape, dtype=whole.dtype, device_mesh=mesh, placements=[Shard(0)])


class ShardFiles(Mapping[str, Tensor]):
    """The tensors in a directory of shards, as tensors without values ("meta"); `read` fills others with the values."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._reader = directory, _Reader(directory)
        with _told(directory):
            found = self._reader.read_metadata().state_dict_metadata
        self._kinds = {key: kind for key, kind in found.items() if isinstance(kind, TensorStorageMetadata)}
        for key, kind in self._kinds.items():
            if sum(prod(chunk.sizes) for chunk in kind.chunks) != prod(kind.size):
                raise CheckpointError(f"{directory} lacks a part of tensor {key}; resume from another checkpoint")

    def __getitem__(self, key: str) -> Tensor:
        kind = self._kinds[key]
        return torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def read(self, wanted: Mapping[str, Tensor]) -> None:
        """Reads values into tensors, or into shards of them; of the files only the rows that are asked for."""
        with _told(self._directory), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no other process to read with
            load(dict(wanted), storage_reader=self._reader, no_dist=True)

    def whole(self, key: str) -> Tensor:
        tensor = torch.empty_like(self[key], device="cpu")
        self.read({key: tensor})
        return tensor


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all files once, however often tensors are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._metadata = self._metadata or super().read_metadata()
        return self._metadata


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Torch's errors in one line: its CheckpointException is not even an Exception."""
    try:
        yield
    except CheckpointException as error:
        reasons = {f"worker {rank}: {reason[0]}" for rank, reason in error.failures.items()}
        raise CheckpointError(f"{directory} cannot be written or read: {'; '.join(sorted(reasons))}") from error
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{directory} cannot be written or read: {error}") from error
