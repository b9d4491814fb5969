"""Checks that the contents of a checkpoint fit the run that resumes from it.

Always holds: a mismatch is a one-line error that names the found and the expected value and the setting to change. It
is raised before any tensor of the mismatching part is copied. Knows names, shapes and dtypes.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.errors import CheckpointError, shown
from tlt.model.transformer import Transformer
from tlt.model.weights import load_tensors, read_config, read_tensors

_SIZES = ("layers", "hidden", "mlp", "vocab", "heads", "kv_heads", "head_dim")
_SHAPES = (*_SIZES, "tied", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
_MOST_SHOWN = 3  # problems
_AS_IT_WAS = "resume with the settings and the version of tlt it was written with (config.toml and run.json say which)"


def restore_policy(model: Transformer, directory: Path) -> None:
    """Copies a checkpoint's policy into the model."""
    load_tensors(model, checked_tensors(model, directory), origin=str(directory))


def checked_tensors(model: Transformer, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint's policy, one at a time, of a model of the same configuration and dtype."""
    saved = read_config(directory)
    differing = [name for name in _SHAPES if getattr(saved, name) != getattr(model.config, name)]
    if differing:
        theirs, ours = (
            ", ".join(f"{name} {getattr(config, name)}" for name in differing) for config in (saved, model.config)
        )
        raise CheckpointError(
            f"{directory} is another model than model.path: {theirs}, where model.path has {ours}; "
            "resume with model.path as it was"
        )
    return _in_dtype(read_tensors(directory), model.embed.dtype, directory)


def _in_dtype(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, directory: Path
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if tensor.dtype != dtype:
            found, wanted = _word(tensor.dtype), _word(dtype)
            raise CheckpointError(
                f"{directory} is in {found}, and this run trains in {wanted}; resume with --model.dtype {found}, or "
                f"start a new run from its weights: --model.path {directory} --run.name NEW"
            )
        yield name, tensor


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Adds the path and the remedy to every CheckpointError in its block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit this run: {error}; {_AS_IT_WAS}") from error


def expect_keys(state: Any, names: Iterable[str | int], what: str) -> None:
    """Raises CheckpointError unless the state is a dictionary with at least these keys."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{what} is {shown(state)}; expected a dictionary")
    missing = [name for name in names if name not in state]
    if missing:
        absent, there = (", ".join(map(str, keys)) for keys in (missing, state))
        raise CheckpointError(f"{what}: {absent} is missing, found {there or 'nothing'}")


def expect_tensors(found: Mapping[str, Any], wanted: Mapping[str, Tensor], what: str) -> None:
    """Raises CheckpointError unless the names, shapes and dtypes of `found` equal those of `wanted`."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not expected" for name in found if name not in wanted]
    for name in (name for name in wanted if name in found):
        value, like = found[name], wanted[name]
        if not isinstance(value, Tensor):
            problems.append(f"{name} is {shown(value)}, expected a tensor")
        elif value.shape != like.shape or value.dtype != like.dtype:
            problems.append(f"{name} is {_kind(value)}, expected {_kind(like)}")
    if problems:
        more = len(problems) - _MOST_SHOWN
        raise CheckpointError(f"{what}: {', '.join(problems[:_MOST_SHOWN])}{f' and {more} more' if more > 0 else ''}")


def expect_list(found: Any, wanted: Mapping[str, Tensor], what: str) -> None:
    """As `expect_tensors`, for a list in the order of `wanted`."""
    if not isinstance(found, list | tuple) or len(found) != len(wanted):
        count = f"{len(found)} tensors" if isinstance(found, list | tuple) else shown(found)
        raise CheckpointError(f"{what}: {count}, expected {len(wanted)} tensors")
    expect_tensors(dict(zip(wanted, found, strict=True)), wanted, what)


def _kind(tensor: Tensor) -> str:
    return f"{_word(tensor.dtype)} {list(tensor.shape)}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
