"""Rotary angles: the cos and sin tables of every position, with the scaling a long-context policy was trained with.

The tables are float32 [positions, head_dim / 2] and already hold any attention factor; rotating only multiplies.
"""

import math

import torch
from torch import Tensor

from tlt.model.config import ModelConfig, RopeConfig

BEYOND = 128


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin for every position, and some beyond the last, where the nodes of a draft tree may stand."""
    frequency, factor = _frequencies(config.rope, config.head_dim)
    angle = torch.arange(config.max_positions + BEYOND, dtype=torch.float32)[:, None] * frequency[None, :]
    return angle.cos() * factor, angle.sin() * factor


def rotate(x_THd: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turns each pair (i, i + d/2) of every head by its position's angle, in float32 or wider."""
    wide = torch.promote_types(x_THd.dtype, torch.float32)
    first, second = x_THd.to(wide).chunk(2, dim=-1)
    cos, sin = cos_TR[:, None, :], sin_TR[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THd.dtype)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """The angle per position of each pair, and the factor on cos and sin."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are divided by `factor`, fast ones kept, those between blended."""
    p = rope.parameters
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    turns = p["original_max_position_embeddings"] * plain / (2 * math.pi)  # full turns within the trained context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    scaled: Tensor = (1 - keep) * plain / p["factor"] + keep * plain
    return scaled


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    p = rope.parameters
    low = _pair_with_turns(p.get("beta_fast") or 32, rope, head_dim)
    high = _pair_with_turns(p.get("beta_slow") or 1, rope, head_dim)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    scaled: Tensor = ramp * plain / p["factor"] + (1 - ramp) * plain
    return scaled


def _pair_with_turns(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) index of the pair that makes `turns` full turns within the trained context."""
    context = rope.parameters["original_max_position_embeddings"]
    return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    p = rope.parameters
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if p["factor"] <= 1 else 0.1 * weight * math.log(p["factor"]) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    return magnitude(1.0)
