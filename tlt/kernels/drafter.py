"""What surrounds the matrix products of a drafter's layer in rollout, in torch: the reference of `drafter_triton`.

Before the qkv product: the next token's embedding and the state, each normed, side by side. After it: rotation, and
keys and values to where the attention finds them: a draft tree's nodes, or the ring of newest positions. Knows slots
and positions; knows nothing of trees, requests or weights.
"""
# R rows, Q tokens of a row, T = R · Q, D hidden, V vocabulary, N nodes' slots, W ring slots that count, and one more
# that is never read; H query heads, K key heads, d head width, h half of it, E = (H + 2K) · d, P positions in a table

import torch
from torch import Tensor

from tlt.kernels.elementwise import rms_norm


def embed_and_norm(
    token_RQ: Tensor,
    state_RQD: Tensor,
    embed_VD: Tensor,
    embed_norm_D: Tensor,
    state_norm_D: Tensor,
    eps: float,
    count_R: Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """[T, 2D] for the qkv product, and the layer's residual, the caller's to write over: a copy of the states.

    With `count` only the last of each row's first `count_R` states is copied (the first one where there is none).
    """
    state_TD = state_RQD.flatten(0, 1)
    embedded_TD = embed_VD[token_RQ.flatten()]
    both_TE = torch.cat((rms_norm(embedded_TD, embed_norm_D, eps), rms_norm(state_TD, state_norm_D, eps)), -1)
    if count_R is None:
        return both_TE, state_TD.clone()
    return both_TE, state_RQD[torch.arange(len(count_R), device=count_R.device), (count_R - 1).clamp(min=0)]


def rope_into_nodes(
    qkv_TE: Tensor,
    position_RQ: Tensor,
    slot_RQ: Tensor,
    cos_Ph: Tensor,
    sin_Ph: Tensor,
    k_RKNd: Tensor,
    v_RKNd: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Rotates queries and keys, writes keys and values to their slots; the queries, [R, Q, H, d]."""
    q_RQHd, k_RQKd, v_RQKd = _rotated(qkv_TE, position_RQ, cos_Ph, sin_Ph, k_RKNd.shape[1], k_RKNd.shape[3])
    row_R1 = torch.arange(len(slot_RQ), device=slot_RQ.device)[:, None]
    k_RKNd[row_R1, :, slot_RQ] = k_RQKd
    v_RKNd[row_R1, :, slot_RQ] = v_RQKd
    return q_RQHd


def rope_into_ring(
    qkv_TE: Tensor,
    position_R: Tensor,
    count_R: Tensor,
    cos_Ph: Tensor,
    sin_Ph: Tensor,
    k_RKWd: Tensor,
    v_RKWd: Tensor,
    held_RW: Tensor,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates, and keeps the first `count_R` new positions of each row, position_R[r] onwards, as the ring holds them.

    Position p lies in slot p modulo W; `held` says which one a slot holds. Returns the query of each row's last one,
    [R, 1, H, d], and its position, [R, 1].
    """
    rows, window = len(count_R), held_RW.shape[1] - 1
    place_Q = torch.arange(len(qkv_TE) // rows, device=count_R.device)
    position_RQ = position_R[:, None] + place_Q
    q_RQHd, k_RQKd, v_RQKd = _rotated(qkv_TE, position_RQ, cos_Ph, sin_Ph, k_RKWd.shape[1], k_RKWd.shape[3])
    kept_RQ = (place_Q < count_R[:, None]) & (place_Q >= count_R[:, None] - window)
    slot_RQ = torch.where(kept_RQ, position_RQ % window, window)  # the others go where nobody reads
    row_R1 = torch.arange(rows, device=count_R.device)[:, None]
    k_RKWd[row_R1, :, slot_RQ] = k_RQKd
    v_RKWd[row_R1, :, slot_RQ] = v_RQKd
    held_RW[row_R1, slot_RQ] = position_RQ
    last_R1 = (count_R - 1).clamp(min=0)[:, None]
    return q_RQHd[row_R1, last_R1], position_RQ.gather(1, last_R1)


def _rotated(
    qkv_TE: Tensor, position_RQ: Tensor, cos_Ph: Tensor, sin_Ph: Tensor, key_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, in the tables' precision or finer; values as they are: [R, Q, heads, d] each."""
    heads = qkv_TE.view(*position_RQ.shape, -1, width)
    turning, v_RQKd = heads.split((heads.shape[2] - key_heads, key_heads), dim=2)
    first, second = turning.to(torch.promote_types(turning.dtype, torch.float32)).chunk(2, dim=-1)
    angle_RQ = position_RQ.clamp(0, len(cos_Ph) - 1)  # padding may stand anywhere
    cos, sin = cos_Ph[angle_RQ][:, :, None], sin_Ph[angle_RQ][:, :, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(turning.dtype)
    q_RQHd, k_RQKd = turned.split((turned.shape[2] - key_heads, key_heads), dim=2)
    return q_RQHd, k_RQKd, v_RQKd
