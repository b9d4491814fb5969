"""Function-preserving widening: a small real policy inside a larger shape, writing what the small one writes.

Each norm sees the same direction: padding a vector of width d with zeros to D shrinks its mean square by d/D, so norm
weights are scaled by sqrt(d/D) and eps by d/D. New hidden units stay exactly zero because everything that writes them
is zero; what only *reads* them, and heads, units and layers whose output is multiplied by zero, is filled with small
random numbers, so that the wide model costs what a model of its size costs (hardware runs faster on zeros).
"""

from typing import Protocol

import torch
from torch import Tensor

from tlt.errors import ModelError
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer

# The benchmark shapes: like the popular sizes, and multiples of SmolLM2's heads (3 query heads a key-value head).
SHAPES: dict[str, dict[str, int]] = {
    "1.5B": {"hidden": 1920, "layers": 30, "mlp": 6912, "heads": 24, "kv_heads": 8},
    "7B": {"hidden": 3840, "layers": 32, "mlp": 15360, "heads": 48, "kv_heads": 16},
}


class CornerPlacement(Protocol):
    """Copies source to the upper left corner of target; the rest is zero, or random where its outputs are not read."""

    def __call__(self, target: Tensor, source: Tensor, *, free: bool) -> None: ...


def wide_config(config: ModelConfig, shape: str) -> ModelConfig:
    """The config of a predefined shape for a policy like this one."""
    if shape not in SHAPES:
        raise ModelError(f"shape is {shape!r}; predefined: {', '.join(SHAPES)}")
    size = SHAPES[shape]
    return config.reshaped(**size, norm_eps=config.norm_eps * config.hidden / size["hidden"])


@torch.no_grad()
def widen(
    model: Transformer,
    config: ModelConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Transformer:
    """`model` in the shape of `config`, with equal logits. `config` comes from `ModelConfig.reshaped`."""
    small = model.config
    _check(small, config)
    wide = Transformer(config, dtype=dtype or model.embed.dtype, device=device or model.embed.device)
    place = placing(torch.Generator(device=wide.embed.device).manual_seed(seed))
    shrink = (small.hidden / config.hidden) ** 0.5
    place(wide.embed, model.embed, free=False)
    place(wide.norm, model.norm * shrink, free=False)
    if wide.head is not None and model.head is not None:
        place(wide.head, model.head, free=True)  # extra columns read hidden units that are zero
    originals = dict(model.named_parameters())
    for name, target in wide.blocks.named_parameters():
        source = originals.get(f"blocks.{name}")
        _widen_block(name.split(".", 1)[1], target, source, small, config, shrink, place)
    return wide


def placing(generator: torch.Generator) -> CornerPlacement:
    def place(target: Tensor, source: Tensor, *, free: bool) -> None:
        if free:
            target.normal_(0.0, 0.02, generator=generator)
        else:
            target.zero_()
        target[tuple(slice(size) for size in source.shape)].copy_(source)

    return place


def _widen_block(
    part: str,
    target: Tensor,
    source: Tensor | None,
    small: ModelConfig,
    config: ModelConfig,
    shrink: float,
    place: CornerPlacement,
) -> None:
    """One parameter of one block; `source` is None in the layers the small model does not have."""
    if source is None:
        source = target.new_zeros((0,) * target.dim())  # an added layer: only what is written must be zero
    if part in ("attn_norm", "mlp_norm"):
        place(target, source * shrink, free=False)
        if not source.numel():
            target.fill_(shrink)
    elif part in ("q_norm", "k_norm"):
        place(target, source, free=False)
        if not source.numel():
            target.fill_(1.0)
    elif part in ("qkv", "qkv_bias"):
        place_heads(target, source, small, config, place)
    elif part in ("gate_up", "gate_up_bias"):
        for ours, theirs in zip(target.chunk(2), source.chunk(2), strict=True):
            place(ours, theirs, free=True)
    else:  # o and down write the residual stream: zero but for the original
        place(target, source, free=False)


def place_heads(
    target: Tensor, source: Tensor, small: ModelConfig, config: ModelConfig, place: CornerPlacement
) -> None:
    """Query, key and value heads each keep their index; new heads follow, multiplied by zero columns of `o`."""
    d = config.head_dim
    wide_parts = torch.split(target, [config.heads * d, config.kv_heads * d, config.kv_heads * d])
    sizes = [small.heads * d, small.kv_heads * d, small.kv_heads * d] if source.numel() else [0, 0, 0]
    for ours, theirs in zip(wide_parts, torch.split(source, sizes), strict=True):
        place(ours, theirs, free=True)


def _check(small: ModelConfig, config: ModelConfig) -> None:
    wrong = [
        f"{name} is {getattr(config, name)}, at least {getattr(small, name)} expected"
        for name in ("hidden", "mlp", "layers", "heads", "kv_heads")
        if getattr(config, name) < getattr(small, name)
    ]
    if config.heads // config.kv_heads != small.heads // small.kv_heads:
        wrong.append(f"query heads per key-value head must stay {small.heads // small.kv_heads}")
    for name in ("head_dim", "vocab", "family", "tied"):
        if getattr(config, name) != getattr(small, name):
            wrong.append(f"{name} is {getattr(config, name)}, must stay {getattr(small, name)}")
    if abs(config.norm_eps * config.hidden - small.norm_eps * small.hidden) > 1e-9 * small.hidden:
        wrong.append(f"norm_eps is {config.norm_eps}, expected {small.norm_eps * small.hidden / config.hidden}")
    if wrong:
        raise ModelError(f"cannot widen to that shape: {'; '.join(wrong)}")
