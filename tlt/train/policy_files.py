"""A policy and its trainer on disk, as part of a checkpoint: written by one worker, or by every worker its shards.

Always holds: `policy/` is a Hugging Face directory in every case, and the trainer's state is read by any number of
workers, however many wrote it. From shards, the directory is put together tensor by tensor. Does not know drafters,
runs or when a checkpoint is complete.
"""

import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from tlt.model.config import ModelConfig
from tlt.model.weights import places, read_config, write_companions, write_policy, write_tensors
from tlt.train.checkpoint import save_state
from tlt.train.shard_files import STATE, ShardFiles, empty_shard, load_shards, save_shards, write_shards

POLICY, OPTIMIZER = "policy", "optimizer"  # directories of a checkpoint
_SHARDS = "policy.shards"  # until the policy's directory is made of them


class PolicyFiles(Protocol):
    """`contents`: copies of `PolicyTrainer.weights` and `PolicyTrainer.state`, as POLICY and OPTIMIZER."""

    def write(self, contents: Mapping[str, Any], config: ModelConfig, source: Path, directory: Path) -> None:
        """`source`: the directory whose tokenizer goes with the policy."""

    def read_state(self, directory: Path, device: torch.device) -> dict[str, Any]:
        """The trainer's state, as `PolicyTrainer.restore` takes it."""


class WholePolicyFiles:
    """Of a worker that holds everything."""

    def write(self, contents: Mapping[str, Any], config: ModelConfig, source: Path, directory: Path) -> None:
        if POLICY in contents:  # of adapters, it need not be saved
            write_policy(contents[POLICY], config, directory / POLICY, tokenizer_from=source)
        save_state(contents[OPTIMIZER], directory / OPTIMIZER, STATE)

    def read_state(self, directory: Path, device: torch.device) -> dict[str, Any]:
        return load_shards(directory / OPTIMIZER, lambda whole: torch.empty_like(whole, device=device))


class ShardedPolicyFiles:
    """Of a worker that holds shards. All workers of `group` write at the same time; `merge_policy` ends the work."""

    def __init__(self, mesh: DeviceMesh, group: Any) -> None:
        self._mesh, self._group = mesh, group

    def write(self, contents: Mapping[str, Any], config: ModelConfig, source: Path, directory: Path) -> None:
        first = self._mesh.get_rank() == 0
        if first:
            dtype = next(iter(contents[POLICY].values())).dtype
            write_companions(config, dtype, directory / POLICY, tokenizer_from=source)
        write_shards(contents[POLICY], directory / _SHARDS, self._group)
        save_shards(contents[OPTIMIZER], directory / OPTIMIZER, self._group, words=first)

    def read_state(self, directory: Path, device: torch.device) -> dict[str, Any]:
        return load_shards(directory / OPTIMIZER, lambda whole: empty_shard(whole, self._mesh))


def merge_policy(directory: Path) -> None:
    """Makes the policy's directory of the shards that the workers have written, tensor by tensor, and removes them."""
    target = directory / POLICY
    files = ShardFiles(directory / _SHARDS)
    found = places(read_config(target))
    whole = lru_cache(maxsize=1)(files.whole)  # q, k and v are parts of one parameter, and come one after the other
    write_tensors(
        {name: place.of(files) for name, place in found.items()},
        target,
        read=lambda name: found[name].of({found[name].parameter: whole(found[name].parameter)}),
    )
    shutil.rmtree(directory / _SHARDS)
