"""Writing the paged KV cache, in Triton: `rope_and_write` and `copy_kv` of `reference`, which explains them.

Always holds: one launch each; a slot of -1 is neither read nor written. Knows slots as numbers, not their owners.

Legend: as in `reference`, and in kernels H heads of a program, h half a head's width, m moves of a request, w columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_MOVES = 256  # slots one request may move in one copy_kv


@triton.jit
def start(PDL: tl.constexpr):
    """Under programmatic dependent launch a kernel may start early: wait for the one before, let the next one come."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _rope_and_write_kernel(
    qkv_ptr, position_ptr, slot_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, q_norm_ptr, k_norm_ptr, eps,
    stride_t, stride_ot, stride_page, stride_slot, stride_head,
    N_Q: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS of its q, k and v heads). A head is held as two halves, which is what rotation pairs up."""
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column_h = tl.arange(0, HALF)
    column_ok_h = column_h < D // 2
    ok_Hh = (head_H < N_Q + 2 * N_KV)[:, None] & column_ok_h[None, :]
    slot = tl.load(slot_ptr + token).to(tl.int64)
    first_ptrs = qkv_ptr + token * stride_t + head_H[:, None] * D + column_h[None, :]
    first_Hh = tl.load(first_ptrs, mask=ok_Hh, other=0.0).to(tl.float32)
    second_Hh = tl.load(first_ptrs + D // 2, mask=ok_Hh, other=0.0).to(tl.float32)
    is_q_H1 = (head_H < N_Q)[:, None]
    is_qk_H1 = (head_H < N_Q + N_KV)[:, None]
    if NORM:
        inverse_H = tl.rsqrt((tl.sum(first_Hh * first_Hh, 1) + tl.sum(second_Hh * second_Hh, 1)) / D + eps)
        q_first_h = tl.load(q_norm_ptr + column_h, mask=column_ok_h, other=0.0).to(tl.float32)
        k_first_h = tl.load(k_norm_ptr + column_h, mask=column_ok_h, other=0.0).to(tl.float32)
        q_second_h = tl.load(q_norm_ptr + D // 2 + column_h, mask=column_ok_h, other=0.0).to(tl.float32)
        k_second_h = tl.load(k_norm_ptr + D // 2 + column_h, mask=column_ok_h, other=0.0).to(tl.float32)
        kind = qkv_ptr.dtype.element_ty
        normed_first = (first_Hh * inverse_H[:, None]).to(kind).to(tl.float32)
        normed_second = (second_Hh * inverse_H[:, None]).to(kind).to(tl.float32)
        normed_first *= tl.where(is_q_H1, q_first_h[None, :], k_first_h[None, :])
        normed_second *= tl.where(is_q_H1, q_second_h[None, :], k_second_h[None, :])
        first_Hh = tl.where(is_qk_H1, normed_first.to(kind).to(tl.float32), first_Hh)
        second_Hh = tl.where(is_qk_H1, normed_second.to(kind).to(tl.float32), second_Hh)
    if ROTARY:
        position = tl.load(position_ptr + token).to(tl.int64)
        cos_h = tl.load(cos_ptr + position * (D // 2) + column_h, mask=column_ok_h, other=0.0)
        sin_h = tl.load(sin_ptr + position * (D // 2) + column_h, mask=column_ok_h, other=0.0)
        turned_first = first_Hh * cos_h[None, :] - second_Hh * sin_h[None, :]
        turned_second = second_Hh * cos_h[None, :] + first_Hh * sin_h[None, :]
        first_Hh = tl.where(is_qk_H1, turned_first, first_Hh)
        second_Hh = tl.where(is_qk_H1, turned_second, second_Hh)
    out_ptrs = out_ptr + token * stride_ot + head_H[:, None] * D + column_h[None, :]
    _store_halves(out_ptrs, first_Hh, second_Hh, ok_Hh & is_q_H1, D)
    row_ptr = (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot
    kept_Hh = ok_Hh & (slot >= 0)
    k_ptrs = k_ptr + row_ptr + (head_H - N_Q)[:, None] * stride_head + column_h[None, :]
    _store_halves(k_ptrs, first_Hh, second_Hh, kept_Hh & is_qk_H1 & (head_H >= N_Q)[:, None], D)
    v_ptrs = v_ptr + row_ptr + (head_H - N_Q - N_KV)[:, None] * stride_head + column_h[None, :]
    _store_halves(v_ptrs, first_Hh, second_Hh, kept_Hh & (head_H >= N_Q + N_KV)[:, None], D)


@triton.jit
def _store_halves(ptrs, first, second, mask, D: tl.constexpr):
    tl.store(ptrs, first.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + D // 2, second.to(ptrs.dtype.element_ty), mask=mask)


def rope_and_write(
    qkv_TN: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_Mh: Tensor,
    sin_Mh: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    n_q: int,
    n_kv: int,
    d_h: int,
    *,
    rotary: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `reference.rope_and_write`."""
    n_tokens, n_heads = qkv_TN.shape[0], n_q + 2 * n_kv
    out = qkv_TN.new_empty((n_tokens, n_q, d_h)) if out is None else out
    if qkv_TN.stride(1) != 1 or out.stride(1) != d_h or k_cache.stride() != v_cache.stride():
        raise ValueError("qkv and out must have contiguous rows, and both caches the same strides")
    half = triton.next_power_of_2(d_h // 2)
    heads = min(triton.next_power_of_2(n_heads), max(1, 512 // half))
    norm = q_norm is not None and k_norm is not None
    _rope_and_write_kernel[(n_tokens, triton.cdiv(n_heads, heads))](
        qkv_TN, positions_T, slots_T, cos_Mh, sin_Mh, k_cache, v_cache, out,
        q_norm if norm else cos_Mh, k_norm if norm else cos_Mh, norm_eps,
        qkv_TN.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        N_Q=n_q, N_KV=n_kv, D=d_h, HALF=half, HEADS=heads, PAGE=k_cache.shape[1], ROTARY=rotary, NORM=norm, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["moves", "stride_row"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _copy_kernel(
    k_ptr, v_ptr, src_ptr, dst_ptr, moves, stride_row, stride_layer, stride_page, stride_slot, width,
    PAGE: tl.constexpr, BLOCK_MOVES: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (layer, request, columns): all of a request's moves at once, every read before the first write."""
    start(PDL)
    layer, request = tl.program_id(0).to(tl.int64), tl.program_id(1)
    move_m = tl.arange(0, BLOCK_MOVES)
    column_w = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    src_m = tl.load(src_ptr + request * stride_row + move_m, mask=move_m < moves, other=-1).to(tl.int64)
    dst_m = tl.load(dst_ptr + request * stride_row + move_m, mask=move_m < moves, other=-1).to(tl.int64)
    kept_mw = ((src_m >= 0) & (dst_m >= 0))[:, None] & (column_w < width)[None, :]
    src_mw = ((src_m // PAGE) * stride_page + (src_m % PAGE) * stride_slot)[:, None] + column_w[None, :]
    dst_mw = ((dst_m // PAGE) * stride_page + (dst_m % PAGE) * stride_slot)[:, None] + column_w[None, :]
    k_mw = tl.load(k_ptr + layer * stride_layer + src_mw, mask=kept_mw)
    v_mw = tl.load(v_ptr + layer * stride_layer + src_mw, mask=kept_mw)
    tl.debug_barrier()
    tl.store(k_ptr + layer * stride_layer + dst_mw, k_mw, mask=kept_mw)
    tl.store(v_ptr + layer * stride_layer + dst_mw, v_mw, mask=kept_mw)


def copy_kv(
    k_cache_all: Tensor, v_cache_all: Tensor, src_slots: Tensor, dst_slots: Tensor, *, pdl: bool = False
) -> None:
    """As `reference.copy_kv`; a row holds at most MOST_MOVES slots."""
    layers, _, page_size, n_kv, d_head = k_cache_all.shape
    src_Rm, dst_Rm = torch.atleast_2d(src_slots).contiguous(), torch.atleast_2d(dst_slots).contiguous()
    requests, moves = src_Rm.shape
    if moves > MOST_MOVES:
        raise ValueError(f"{moves} slots to copy in one row; expected at most {MOST_MOVES}: give a row per request")
    if k_cache_all.stride() != v_cache_all.stride() or k_cache_all.stride()[-2:] != (d_head, 1):
        raise ValueError("both caches must have the same strides, with the heads of a slot contiguous")
    if moves == 0 or requests == 0:
        return
    block_moves = triton.next_power_of_2(moves)
    block_width = min(triton.next_power_of_2(n_kv * d_head), max(32, 4096 // block_moves))
    _copy_kernel[(layers, requests, triton.cdiv(n_kv * d_head, block_width))](
        k_cache_all, v_cache_all, src_Rm, dst_Rm, moves, src_Rm.stride(0), *k_cache_all.stride()[:3], n_kv * d_head,
        PAGE=page_size, BLOCK_MOVES=block_moves, BLOCK_WIDTH=block_width, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
