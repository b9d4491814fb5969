"""The parts of a drafter's layer in rollout around its matrix products, in Triton: one launch each.

Same functions as in `layer`, which explains them. Always holds: launches depend on shapes alone; positions that the
ring does not keep are not written anywhere.
"""
# As in `layer`; in kernels H heads of a program, h half a head's width

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.draft_tree.layer import ExtendState, NewPositions

_ROWS, _TOKENS = 256, 1024  # read together, however few there are, so that one kernel serves all sizes


@triton.jit
def _due(taken_ptr, position_ptr, stride_position, live_ptr, row, rows, most, window):
    """The first position that each row still has to ingest, and how many there are."""
    there = row < rows
    position = tl.load(position_ptr + row * stride_position, mask=there, other=0).to(tl.int64)
    first = tl.maximum(tl.load(taken_ptr + row, mask=there, other=0), position - window)
    live = there & (row < tl.load(live_ptr))
    return first, tl.where(live, tl.minimum(tl.maximum(position - first, 0), most), 0)


@triton.jit(
    do_not_specialize=["rows", "tokens", "most", "window", "stride_position"],
    do_not_specialize_on_alignment=["row_ptr", "place_ptr", "source_ptr"],  # one behind the other
)
def _plan_extend_kernel(
    taken_ptr, position_ptr, stride_position, live_ptr, row_ptr, place_ptr, first_ptr, fitting_ptr, source_ptr,
    rows, tokens, most, window, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: some tokens of one row, or of the padding behind all rows."""
    row, part = tl.program_id(0), tl.program_id(1)
    other_R = tl.arange(0, ROWS)
    _, counts_R = _due(taken_ptr, position_ptr, stride_position, live_ptr, other_R, rows, most, window)
    first, count = _due(taken_ptr, position_ptr, stride_position, live_ptr, row, rows, most, window)
    begin = tl.minimum(tl.sum(tl.where(other_R < row, counts_R, 0), axis=0), tokens)
    owned = row < rows
    fitting = tl.minimum(count, tokens - begin)
    place = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = place < tl.where(owned, fitting, tokens - begin)
    at = begin + place
    tl.store(row_ptr + at, tl.where(owned, row, 0).to(tl.int64) + place * 0, mask=inside)
    tl.store(place_ptr + at, tl.where(owned, place, -1), mask=inside)
    tl.store(source_ptr + at, tl.where(owned, row.to(tl.int64) * window + (first + place) % window, 0), mask=inside)
    tl.store(first_ptr + row, first, mask=owned & (part == 0))
    tl.store(fitting_ptr + row, fitting, mask=owned & (part == 0))


def plan_extend(state: ExtendState, most: int, tokens: int, window: int) -> tuple[NewPositions, Tensor]:
    """As `layer.plan_extend`."""
    rows, device = len(state.position_R), state.position_R.device
    row_T, place_T, source_T = torch.empty((3, tokens), dtype=torch.int64, device=device)
    first_R, fitting_R = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    _plan_extend_kernel[(rows + 1, triton.cdiv(tokens, _TOKENS))](
        *_read_of(state), row_T, place_T, first_R, fitting_R, source_T, rows, tokens, most, window,
        ROWS=max(_ROWS, triton.next_power_of_2(rows)), BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip
    return NewPositions(row_T, place_T, first_R, fitting_R), source_T


def _read_of(state: ExtendState) -> tuple[Tensor, Tensor, int, Tensor]:
    return state.taken_R, state.position_R, state.position_R.stride(0), state.live


@triton.jit(do_not_specialize=["stride_position"])
def _finish_extend_kernel(
    taken_ptr, position_ptr, stride_position, live_ptr, ready_ptr, first_ptr, count_ptr, newest_ptr, g_ptr,
    stride_newest, stride_g, width, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one row."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    count, taken = tl.load(count_ptr + row), tl.load(taken_ptr + row)
    new = count > 0
    taken = tl.where(new, tl.load(first_ptr + row) + count, taken)
    left_behind = (row < tl.load(live_ptr)) & (taken < tl.load(position_ptr + row * stride_position))
    ready = ((tl.load(ready_ptr + row) != 0) | new) & (left_behind == 0)
    column = tl.arange(0, BLOCK)
    ok = (column < width) & new
    tl.store(g_ptr + row * stride_g + column, tl.load(newest_ptr + row * stride_newest + column, mask=ok), mask=ok)
    tl.debug_barrier()  # every read before the first write of what it read
    tl.store(taken_ptr + row, taken)
    tl.store(ready_ptr + row, ready.to(tl.uint8))


def finish_extend(state: ExtendState, new: NewPositions, newest_RD: Tensor, g_RD: Tensor, *, pdl: bool = False) -> None:
    """As `layer.finish_extend`."""
    rows, width = g_RD.shape
    block = triton.next_power_of_2(width)
    _finish_extend_kernel[(rows,)](
        *_read_of(state), state.ready_R.view(torch.uint8), new.first_R, new.count_R, newest_RD, g_RD,
        newest_RD.stride(0), g_RD.stride(0), width,
        BLOCK=block, PDL=pdl, num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _normed(x, weight, eps, width):
    fp32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(fp32 * fp32, 0) / width + eps)
    return ((fp32 * inverse).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit(do_not_specialize=["stride_tr", "stride_tq", "stride_sr", "stride_sq"])
def _embed_and_norm_kernel(
    token_ptr, state_ptr, embed_ptr, embed_norm_ptr, state_norm_ptr, row_ptr, place_ptr, count_ptr,
    both_ptr, residual_ptr, eps,
    stride_tr, stride_tq, stride_sr, stride_sq, stride_v, width,
    Q: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one token."""
    column = tl.arange(0, BLOCK)
    ok = column < width
    embed_weight = tl.load(embed_norm_ptr + column, mask=ok, other=0.0).to(tl.float32)
    state_weight = tl.load(state_norm_ptr + column, mask=ok, other=0.0).to(tl.float32)
    if PDL:  # the weights were there long before; the rest comes from the kernel this one may have overtaken
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    row, place = at // Q, at % Q
    token = tl.load(token_ptr + row * stride_tr + place * stride_tq).to(tl.int64)
    state = tl.load(state_ptr + row * stride_sr + place * stride_sq + column, mask=ok, other=0.0)
    embedded = tl.load(embed_ptr + token * stride_v + column, mask=ok, other=0.0)
    tl.store(both_ptr + at * 2 * width + column, _normed(embedded, embed_weight, eps, width), mask=ok)
    tl.store(both_ptr + at * 2 * width + width + column, _normed(state, state_weight, eps, width), mask=ok)
    if count_ptr is None:
        tl.store(residual_ptr + at * width + column, state, mask=ok)
    else:
        whose, place = tl.load(row_ptr + at), tl.load(place_ptr + at)
        last = (place >= 0) & (place == tl.load(count_ptr + whose) - 1)
        tl.store(residual_ptr + whose * width + column, state, mask=ok & last)


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
    """As `layer.embed_and_norm`."""
    rows, queries, width = state_RQD.shape
    if state_RQD.stride(2) != 1 or embed_VD.stride(1) != 1:
        raise ValueError("states or embeddings have gaps in their last dimension; call .contiguous() on them first")
    block = triton.next_power_of_2(width)
    both_TE = state_RQD.new_empty((rows * queries, 2 * width))
    whose = (None, None, None) if new is None else (new.row_T, new.place_T, new.count_R.contiguous())
    residual = torch.empty_like(both_TE[:, :width]) if new is None else both_TE.new_zeros((len(new.count_R), width))
    _embed_and_norm_kernel[(rows * queries,)](
        token_RQ, state_RQD, embed_VD, embed_norm_D, state_norm_D, *whose, both_TE, residual, eps,
        *token_RQ.stride(), *state_RQD.stride()[:2], embed_VD.stride(0), width,
        Q=queries, BLOCK=block, PDL=pdl, num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return both_TE, residual


@triton.jit
def _store_halves(ptrs, first, second, mask, D: tl.constexpr):
    tl.store(ptrs, first.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + D // 2, second.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_pr", "stride_pq", "stride_sr", "stride_sq"])
def _rope_kernel(
    qkv_ptr, position_ptr, slot_ptr, row_ptr, place_ptr, count_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, held_ptr,
    q_ptr, last_ptr,
    stride_pr, stride_pq, stride_sr, stride_sq, stride_kr, stride_kh, stride_kn, stride_hr, last_position,
    Q: tl.constexpr, N_Q: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS of its q, k and v heads). With a window, keys go to the ring and one query per row out."""
    start(PDL)
    at = tl.program_id(0).to(tl.int64)
    row, place = at // Q, at % Q
    head_H, column_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    ok_Hh = (head_H < N_Q + 2 * N_KV)[:, None] & (column_h < D // 2)[None, :]
    is_q_H1, is_k_H1 = (head_H < N_Q)[:, None], ((head_H >= N_Q) & (head_H < N_Q + N_KV))[:, None]
    first_ptrs = qkv_ptr + at * ((N_Q + 2 * N_KV) * D) + head_H[:, None] * D + column_h[None, :]
    first_Hh = tl.load(first_ptrs, mask=ok_Hh, other=0.0).to(tl.float32)
    second_Hh = tl.load(first_ptrs + D // 2, mask=ok_Hh, other=0.0).to(tl.float32)

    out_row = at
    if WINDOW > 0:
        row, place = tl.load(row_ptr + at), tl.load(place_ptr + at)
        count = tl.load(count_ptr + row).to(tl.int64)
        position = tl.load(position_ptr + row * stride_pr).to(tl.int64) + place
        slot = position % WINDOW
        kept = (place >= 0) & (place < count) & (place >= count - WINDOW)
        asked = (place >= 0) & (place == count - 1)
        out_row = row
        here = tl.program_id(1) == 0
        tl.store(held_ptr + row * stride_hr + slot, position, mask=kept & here)
        tl.store(last_ptr + row, position, mask=asked & here)
    else:
        position = tl.load(position_ptr + row * stride_pr + place * stride_pq).to(tl.int64)
        slot = tl.load(slot_ptr + row * stride_sr + place * stride_sq).to(tl.int64)
        kept = slot >= 0
        asked = place >= 0
    column_ok_h = column_h < D // 2
    angle = tl.maximum(tl.minimum(position, last_position), 0) * (D // 2)  # padding may stand anywhere
    cos_1h = tl.load(cos_ptr + angle + column_h, mask=column_ok_h, other=0.0)[None, :]
    sin_1h = tl.load(sin_ptr + angle + column_h, mask=column_ok_h, other=0.0)[None, :]
    turns_H1 = is_q_H1 | is_k_H1
    turned_first = tl.where(turns_H1, first_Hh * cos_1h - second_Hh * sin_1h, first_Hh)
    turned_second = tl.where(turns_H1, second_Hh * cos_1h + first_Hh * sin_1h, second_Hh)

    q_ptrs = q_ptr + out_row * (N_Q * D) + head_H[:, None] * D + column_h[None, :]
    _store_halves(q_ptrs, turned_first, turned_second, ok_Hh & is_q_H1 & asked, D)
    kept_Hh = ok_Hh & kept
    base = row * stride_kr + slot * stride_kn
    k_ptrs = k_ptr + base + (head_H - N_Q)[:, None] * stride_kh + column_h[None, :]
    _store_halves(k_ptrs, turned_first, turned_second, kept_Hh & is_k_H1, D)
    v_ptrs = v_ptr + base + (head_H - N_Q - N_KV)[:, None] * stride_kh + column_h[None, :]
    _store_halves(v_ptrs, turned_first, turned_second, kept_Hh & (head_H >= N_Q + N_KV)[:, None], D)


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
    """As `layer.rope_into_nodes`."""
    rows, queries = position_RQ.shape
    q_RQHd = _empty_queries(qkv_TE, rows, queries, k_RKNd)
    numbers = (*position_RQ.stride(), *slot_RQ.stride(), *k_RKNd.stride()[:3], 0, len(cos_Ph) - 1)
    whose = (None, None, None)
    tensors = (qkv_TE, position_RQ, slot_RQ, *whose, cos_Ph, sin_Ph, k_RKNd, v_RKNd, None, q_RQHd, None)
    _launch_rope(tensors, numbers, queries, q_RQHd.shape[2], k_RKNd, window=0, pdl=pdl)
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
    """As `layer.rope_into_ring`."""
    rows = len(new.count_R)
    q_R1Hd = _empty_queries(qkv_TE, rows, 1, k_RKWd).zero_()
    last_R1 = torch.zeros((rows, 1), dtype=torch.int64, device=qkv_TE.device)
    numbers = (new.first_R.stride(0), 0, 0, 0, *k_RKWd.stride()[:3], held_RW.stride(0), len(cos_Ph) - 1)
    whose = (new.row_T, new.place_T, new.count_R.contiguous())
    tensors = (qkv_TE, new.first_R, None, *whose, cos_Ph, sin_Ph, k_RKWd, v_RKWd, held_RW, q_R1Hd, last_R1)
    window = held_RW.shape[1] - 1
    _launch_rope(tensors, numbers, 1, q_R1Hd.shape[2], k_RKWd, window=window, pdl=pdl)
    return q_R1Hd, last_R1


def _empty_queries(qkv_TE: Tensor, rows: int, queries: int, k: Tensor) -> Tensor:
    heads = qkv_TE.shape[1] // k.shape[3] - 2 * k.shape[1]
    return qkv_TE.new_empty((rows, queries, heads, k.shape[3]))


def _launch_rope(
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    queries: int,
    query_heads: int,
    k: Tensor,
    *,
    window: int,
    pdl: bool,
) -> None:
    qkv_TE, v = tensors[0], tensors[9]
    if not qkv_TE.is_contiguous() or k.stride() != v.stride() or k.stride(3) != 1:
        raise ValueError("qkv must be contiguous, and keys and values in the same layout, contiguous along a head")
    key_heads, width = k.shape[1], k.shape[3]
    half, heads = triton.next_power_of_2(width // 2), query_heads + 2 * key_heads
    block = min(triton.next_power_of_2(heads), max(1, 512 // half))
    _rope_kernel[(len(qkv_TE), triton.cdiv(heads, block))](
        *tensors, *numbers,
        Q=queries, N_Q=query_heads, N_KV=key_heads, D=width, HALF=half, HEADS=block, WINDOW=window,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
