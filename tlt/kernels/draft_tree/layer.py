"""The parts of a drafter's layer in rollout around its matrix products, in torch: the reference of `layer_triton`.

Before the qkv product: the next token's embedding and the hidden state, each normed, side by side. After it: rotary
embedding, and keys and values written to a draft tree's nodes or to the ring of newest positions. Around draft-extend:
which positions a row ingests, and the state afterwards. Knows slots and positions; knows nothing of trees, requests or
weights.
"""
# R rows, Q tokens of a row, T tokens of all rows, D hidden, V vocabulary, N nodes' slots, W ring slots, and one more
# that is never read; H query heads, K key heads, d head width, h half of it, E = (H + 2K) · d, P positions in
# a table

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.kernels.linear.elementwise import rms_norm


@dataclass(frozen=True, slots=True)
class NewPositions:
    """The positions that each row ingests in a draft-extend pass, one row after the other, T tokens in all."""

    row_T: Tensor  # int64
    place_T: Tensor  # int64, of a token among its row's; negative or past the row's count: padding
    first_R: Tensor  # int64, position of each row's first
    count_R: Tensor  # int64


@dataclass(frozen=True, slots=True)
class ExtendState:
    """How far each row is, and how much of it the drafter has ingested: the engine's tensors and the drafter's."""

    position_R: Tensor  # int64, of the newest token: those before are certain
    live: Tensor  # one number: rows from here on are idle
    taken_R: Tensor  # int64, positions before are in the ring
    ready_R: Tensor  # bool, whether all are


def plan_extend(state: ExtendState, most: int, tokens: int, window: int) -> tuple[NewPositions, Tensor]:
    """The positions that each row still has to ingest, at most `most` per row, `tokens` in all and none older than the
    window; the last rows go without where there is no room. And each token's slot in rings of `window` slots, one row's
    ring behind the other's, int64 [T]."""
    position_R, rows = state.position_R, len(state.position_R)
    first_R = torch.maximum(state.taken_R, position_R - window)
    live_R = torch.arange(rows, device=position_R.device) < state.live
    count_R = (position_R - first_R).clamp(min=0, max=most) * live_R
    end_R = count_R.cumsum(0).clamp(max=tokens)
    start_R = torch.cat((end_R.new_zeros(1), end_R[:-1]))
    at_T = torch.arange(tokens, device=count_R.device)
    owned_T = at_T < end_R[-1]
    row_T = torch.searchsorted(end_R, at_T, right=True) * owned_T
    place_T = torch.where(owned_T, at_T - start_R[row_T], -1)
    source_T = (row_T * window + (first_R[row_T] + place_T) % window) * owned_T
    return NewPositions(row_T, place_T, first_R, end_R - start_R), source_T


def finish_extend(state: ExtendState, new: NewPositions, newest_RD: Tensor, g_RD: Tensor, *, pdl: bool = False) -> None:
    """Records that the positions were ingested, and the newest hidden state of the rows that had any."""
    rows = len(state.position_R)
    new_R = new.count_R > 0
    g_RD.copy_(torch.where(new_R[:, None], newest_RD, g_RD))
    state.taken_R.copy_(torch.where(new_R, new.first_R + new.count_R, state.taken_R))
    live_R = torch.arange(rows, device=new_R.device) < state.live
    left_behind_R = live_R & (state.taken_R < state.position_R)
    state.ready_R.copy_((state.ready_R | new_R) & ~left_behind_R)


def embed_and_norm(
    token_RQ: Tensor,
    state_RQD: Tensor,
    embed_VD: Tensor,
    embed_norm_D: Tensor,
    state_norm_D: Tensor,
    eps: float,
    new: NewPositions | None = None,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """[T, 2D] for the qkv product, and the layer's residual, the caller's to write over: a copy of the states.

    With `new`, which names each token's row, only the state of each row's last one is copied; [R, D], zeros where a
    row has none.
    """
    state_TD = state_RQD.flatten(0, 1)
    embedded_TD = embed_VD[token_RQ.flatten()]
    both_TE = torch.cat((rms_norm(embedded_TD, embed_norm_D, eps), rms_norm(state_TD, state_norm_D, eps)), -1)
    if new is None:
        return both_TE, state_TD.clone()
    return both_TE, _of_last(state_TD, new)


def _of_last(x_TX: Tensor, new: NewPositions) -> Tensor:
    """Of each row's last token; zeros where it has none."""
    last_T = (new.place_T >= 0) & (new.place_T == new.count_R[new.row_T] - 1)
    out = x_TX.new_zeros((len(new.count_R), *x_TX.shape[1:]))
    out[new.row_T[last_T]] = x_TX[last_T]
    return out


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
    new: NewPositions,
    cos_Ph: Tensor,
    sin_Ph: Tensor,
    k_RKWd: Tensor,
    v_RKWd: Tensor,
    held_RW: Tensor,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys and writes the new positions to the ring.

    Position p lies in slot p modulo W; `held` says which one a slot holds. Returns the query of each row's last one,
    [R, 1, H, d], and its position, [R, 1]; zeros where a row has none.
    """
    window, row_T, place_T, count_T = held_RW.shape[1] - 1, new.row_T, new.place_T, new.count_R[new.row_T]
    position_T1 = (new.first_R[row_T] + place_T)[:, None]
    q_T1Hd, k_T1Kd, v_T1Kd = _rotated(qkv_TE, position_T1, cos_Ph, sin_Ph, k_RKWd.shape[1], k_RKWd.shape[3])
    kept_T = (place_T >= 0) & (place_T < count_T) & (place_T >= count_T - window)
    slot_T = torch.where(kept_T, position_T1[:, 0] % window, window)  # the others go to the slot that is never read
    k_RKWd[row_T, :, slot_T] = k_T1Kd[:, 0]
    v_RKWd[row_T, :, slot_T] = v_T1Kd[:, 0]
    held_RW[row_T, slot_T] = position_T1[:, 0]
    return _of_last(q_T1Hd, new), _of_last(position_T1, new)


def _rotated(
    qkv_TE: Tensor, position_RQ: Tensor, cos_Ph: Tensor, sin_Ph: Tensor, key_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, computed in the tables' precision or finer, and values: [R, Q, heads, d] each."""
    heads = qkv_TE.view(*position_RQ.shape, -1, width)
    turning, v_RQKd = heads.split((heads.shape[2] - key_heads, key_heads), dim=2)
    first, second = turning.to(torch.promote_types(turning.dtype, torch.float32)).chunk(2, dim=-1)
    angle_RQ = position_RQ.clamp(0, len(cos_Ph) - 1)  # padding may have any position
    cos, sin = cos_Ph[angle_RQ][:, :, None], sin_Ph[angle_RQ][:, :, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(turning.dtype)
    q_RQHd, k_RQKd = turned.split((turned.shape[2] - key_heads, key_heads), dim=2)
    return q_RQHd, k_RQKd, v_RQKd
