"""Row-wise layers of a training pass, with gradients. Torch, on any device: autograd knows the way back.

What always holds: the functions here define what the fused ones in `training_triton` must compute, forth and back.
Knows rows and heads; knows nothing of weights' names or layers.
"""
# T tokens, N width of a fused row of queries, keys and values, R = half a head, P positions

import torch
from torch import Tensor

from tlt.kernels.elementwise import rms_norm, silu_mul

__all__ = ["rms_norm", "rotate_heads", "silu_mul", "split_and_rotate"]


def split_and_rotate(
    qkv_TN: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor, query: int, kv: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [T, heads, dim], queries and keys turned by their positions' angles."""
    q, k, v = torch.split(qkv_TN.view(len(qkv_TN), -1, dim), [query, kv, kv], dim=1)
    return rotate_heads(q, k, v, cos_PR, sin_PR, position_T)


def rotate_heads(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where queries and keys were split already, as when their heads were normed in between."""
    cos_T1R, sin_T1R = cos_PR[position_T][:, None, :], sin_PR[position_T][:, None, :]
    return _rotate(q_THd, cos_T1R, sin_T1R), _rotate(k_THd, cos_T1R, sin_T1R), v_THd


def _rotate(x_THd: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    wide = torch.promote_types(x_THd.dtype, torch.float32)
    first, second = x_THd.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1).to(x_THd.dtype)
