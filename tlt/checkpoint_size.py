"""Size of a run's checkpoints, computed from the configuration before the policy is loaded.

Always holds: the bytes are those of a checkpoint's tensors, without tokenizer files and without the drafter's answers
(`checkpoint.buffer`). Reads configs; loads no weights.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from tlt.config import NEW, RunConfig
from tlt.model.config import ModelConfig
from tlt.model.weights import Place, places, read_config
from tlt.policy import dtype_of, source_of
from tlt.spec import eagle_files
from tlt.spec.eagle import EagleConfig
from tlt.train.adapter import adapted_places, adapter_bytes
from tlt.watch.events import CheckpointsPlanned

_ID_BYTES, _MARK_BYTES = 8, 1  # of a token that the drafter can name, and of any


def checkpoints_planned(config: RunConfig, directory: Path) -> CheckpointsPlanned:
    """Bytes that the checkpoints in this directory will take, and free bytes. The run's directory exists."""
    weights, state = checkpoint_bytes(config)
    without = checkpoint_bytes(replace(config, drafting=replace(config.drafting, frozen=True)))
    run, kept = config.run, config.checkpoint
    written = -(-run.steps // kept.every) if kept.every else 1
    keep_optimizer = kept.keep_optimizer or kept.keep
    best = bool(config.eval.every and config.eval.best)  # the best one, which may be older than those that are kept
    # one more than is kept is there while it is written
    most = (min(written, kept.keep + 1) + best) * weights + min(written, keep_optimizer + 1) * state
    there = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())  # of a run that goes on
    return CheckpointsPlanned(
        path=str(directory),
        weights_bytes=weights,
        optimizer_bytes=state,
        keep=kept.keep,
        keep_optimizer=keep_optimizer,
        most_bytes=most,
        free_bytes=shutil.disk_usage(directory.parent).free + there,
        drafter_bytes=weights + state - sum(without),
    )


def checkpoint_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of one checkpoint: its weights, and the state that only a resumed run needs."""
    dtype = dtype_of(config.model)
    wide = torch.promote_types(dtype, torch.float32).itemsize
    adam = 2 * wide + (0 if wide == dtype.itemsize else wide)  # bytes per learned weight: two moments, and its master
    policy = read_config(source_of(config.model))
    of_policy = places(policy)
    weights = _count(of_policy.values()) * dtype.itemsize
    if config.train.lora_rank:
        weights = adapter_bytes(policy, config.train.lora_rank, dtype) + (weights if config.checkpoint.merge else 0)
        state = config.train.lora_rank * _sides(adapted_places(policy).values()) * 3 * wide  # themselves, two moments
    else:
        state = _count(of_policy.values()) * adam
    if config.spec.learned and not config.drafting.frozen:
        drafter = drafter_config(config, policy)
        count = _count(eagle_files.places(drafter, "flat").values())
        ids = drafter.draft_vocab * _ID_BYTES if drafter.reduced else 0
        weights += count * dtype.itemsize + ids + (drafter.layer.vocab * _MARK_BYTES if drafter.reduced else 0)
        state += count * (dtype.itemsize + adam) + ids
    return weights, state


def _count(of: Iterable[Place]) -> int:
    return sum(prod(place.shape) for place in of)


def _sides(of: Iterable[Place]) -> int:
    """Sum of rows and columns of the adapted matrices. q, k and v share an A, and so do gate and up."""
    columns = {place.parameter: place.shape[1] for place in of}
    return sum(place.shape[0] for place in of) + sum(columns.values())


def drafter_config(config: RunConfig, policy: ModelConfig) -> EagleConfig:
    draft, path = config.draft, Path(config.spec.path)
    if config.spec.path == NEW:
        return eagle_files.drafter_shape(policy, draft)
    source = eagle_files.read_drafter_config(path)
    return eagle_files.drafter_config(source, eagle_files.format_of(source, path), policy, draft.window, path)
