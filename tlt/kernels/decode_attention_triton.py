"""One step of decoding attention in one launch: rotate the newest token, write its key and value, attend. In Triton.

Same as `rope_and_write` followed by `paged_attention` of `attention`, where every request has at most one query. The
newest key and value go from registers into the softmax, so nobody waits for the cache to be written. What holds of
`attention_triton` holds here: launches depend on shapes alone, sums have a fixed order, one call at a time on a device.

Legend: as in `attention_triton`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention_triton import (
    Launch,
    arrival_counters,
    in_flight,
    multiprocessors_of,
    pages_of,
    plan_launch,
    sum_splits,
    take_tile,
)
from tlt.kernels.cache_triton import start


@triton.jit
def _turned(
    head_ptrs, norm_ptr, cos_ptr, sin_ptr, mask, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads, normed and rotated, in the type they came in. Rotation pairs a column with the one half a head away."""
    kind = head_ptrs.dtype.element_ty
    column_D = tl.arange(0, BLOCK_D)
    away_D = tl.where(column_D < D // 2, D // 2, -(D // 2))
    x_MD = tl.load(head_ptrs + column_D[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY:
        other_MD = tl.load(head_ptrs + (column_D + away_D)[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse_M = tl.rsqrt(tl.sum(x_MD * x_MD, 1) / D + eps)
        weight_D = tl.load(norm_ptr + column_D, mask=column_D < D, other=0.0).to(tl.float32)
        x_MD = (x_MD * inverse_M[:, None]).to(kind).to(tl.float32) * weight_D[None, :]
        x_MD = x_MD.to(kind).to(tl.float32)
        if ROTARY:
            away_weight_D = tl.load(norm_ptr + column_D + away_D, mask=column_D < D, other=0.0).to(tl.float32)
            other_MD = (other_MD * inverse_M[:, None]).to(kind).to(tl.float32) * away_weight_D[None, :]
            other_MD = other_MD.to(kind).to(tl.float32)
    if ROTARY:
        angle_D = column_D % (D // 2)
        cos_D = tl.load(cos_ptr + angle_D, mask=column_D < D, other=0.0)
        sin_D = tl.load(sin_ptr + angle_D, mask=column_D < D, other=0.0)
        sin_D = tl.where(column_D < D // 2, -sin_D, sin_D)
        x_MD = x_MD * cos_D[None, :] + other_MD * sin_D[None, :]
    return x_MD.to(kind)


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    qkv_ptr, position_ptr, slot_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, context_len_ptr,
    page_table_ptr, q_norm_ptr, k_norm_ptr, eps, partial_ptr, lse_ptr, counter_ptr, scale_log2, splits,
    stride_t, stride_ot, stride_page, stride_slot, stride_head, stride_table,
    N_Q: tl.constexpr, N_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, split, request). The first split takes the newest key too, and keeps it in the cache."""
    start(PDL)
    head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    context_len = tl.load(context_len_ptr + request)
    if query_len == 0:
        return
    high = tl.maximum(context_len - 1, 0)  # keys that lie in the cache
    low = high * 0
    if WINDOW > 0:
        low = tl.maximum(context_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(high - low, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    at_work = tl.maximum(tl.cdiv(tiles, tiles_per_split), 1)
    if split >= at_work:
        return

    row_M, column_D = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = query_start.to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int64) * (D // 2)
    row_ok_MD = (row_M < GROUP)[:, None] & (column_D < D)[None, :]
    cos_ptr, sin_ptr = cos_ptr + position, sin_ptr + position
    qkv_row_ptr = qkv_ptr + token * stride_t
    q_ptrs = qkv_row_ptr + (head * GROUP + row_M)[:, None] * D
    q_MD = _turned(q_ptrs, q_norm_ptr, cos_ptr, sin_ptr, row_ok_MD, eps, D, BLOCK_D, ROTARY, NORM)

    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if (split == 0) & (context_len > 0):
        one_ok_1D = (column_D < D)[None, :]
        k_ptrs = qkv_row_ptr + (N_Q + head + tl.arange(0, 1))[:, None] * D
        k_1D = _turned(k_ptrs, k_norm_ptr, cos_ptr, sin_ptr, one_ok_1D, eps, D, BLOCK_D, ROTARY, NORM)
        v_1D = tl.load(k_ptrs + N_KV * D + column_D[None, :], mask=one_ok_1D, other=0.0)
        slot = tl.load(slot_ptr + token).to(tl.int64)
        kept = (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot + head * stride_head
        tl.store(k_ptr + kept + column_D[None, :], k_1D.to(k_ptr.dtype.element_ty), mask=one_ok_1D & (slot >= 0))
        tl.store(v_ptr + kept + column_D[None, :], v_1D.to(v_ptr.dtype.element_ty), mask=one_ok_1D & (slot >= 0))
        peak_M = tl.sum(q_MD.to(tl.float32) * k_1D.to(tl.float32), 1) * scale_log2
        sum_M = sum_M + 1.0
        acc_MD = acc_MD + v_1D.to(tl.float32)

    page_row_ptr = page_table_ptr + request.to(tl.int64) * stride_table
    k_head_ptr, v_head_ptr = k_ptr + head * stride_head, v_ptr + head * stride_head
    begin = low + split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, high)
    middle = begin
    if WINDOW == 0:
        middle = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    query_M, last_M, no_tree_ptrs = row_M * 0, row_M * 0 + high, query_start_ptr + row_M
    page_N = pages_of(page_row_ptr, begin, end, BLOCK_N, PAGE)
    for first_key in tl.range(begin, middle, BLOCK_N):
        acc_MD, peak_M, sum_M, page_N = take_tile(
            q_MD, acc_MD, peak_M, sum_M, page_N, first_key, end,
            k_head_ptr, v_head_ptr, page_row_ptr, no_tree_ptrs, query_M, row_M < GROUP, query_M, last_M, high,
            stride_page, stride_slot, scale_log2, D, BLOCK_D, BLOCK_N, PAGE, 0, WINDOW, False, False,
        )  # fmt: skip
    page_N = pages_of(page_row_ptr, middle, end, BLOCK_N, PAGE)
    for first_key in tl.range(middle, end, BLOCK_N):
        acc_MD, peak_M, sum_M, page_N = take_tile(
            q_MD, acc_MD, peak_M, sum_M, page_N, first_key, end,
            k_head_ptr, v_head_ptr, page_row_ptr, no_tree_ptrs, query_M, row_M < GROUP, query_M, last_M, high,
            stride_page, stride_slot, scale_log2, D, BLOCK_D, BLOCK_N, PAGE, 0, WINDOW, True, False,
        )  # fmt: skip

    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    out_ptrs = out_ptr + token * stride_ot + (head * GROUP + row_M)[:, None] * D + column_D[None, :]
    if at_work == 1:
        tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)
    else:
        block = request * tl.num_programs(0) + head
        part_row_M = (block * splits + split).to(tl.int64) * BLOCK_M + row_M
        tl.store(partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :], out_MD)
        tl.store(lse_ptr + part_row_M, tl.where(sum_M == 0.0, -float("inf"), peak_M + tl.log2(sum_M)))
        # all threads' stores, then one thread's release: whoever counts to the end has acquired them all
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == at_work - 1:
            tl.store(counter_ptr + block, 0)  # ready for the next launch
            base = block.to(tl.int64) * splits * BLOCK_M
            total_MD = sum_splits(
                partial_ptr + base * BLOCK_D, lse_ptr + base, at_work, row_M, CHUNK, BLOCK_M, BLOCK_M, BLOCK_D
            )
            tl.store(out_ptrs, total_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)


def decode_attention(
    qkv_TN: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_Mh: Tensor,
    sin_Mh: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    page_table_RP: Tensor,
    n_q: int,
    *,
    scale: float,
    rotary: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    sliding_window: int = 0,
    pdl: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    """`[T, n_q, d]`: what `paged_attention` gives after `rope_and_write`, for at most one query of each request.

    As there, tokens no request owns get nothing, and the first call on a device must not be captured.
    """
    (_, page_size, n_kv, d_head), n_requests = k_cache.shape, context_len_R.shape[0]
    if k_cache.stride() != v_cache.stride() or {qkv_TN.stride(-1), k_cache.stride(-1), page_table_RP.stride(-1)} != {1}:
        raise ValueError("qkv, caches and page table must be contiguous in their last dimension, and both caches alike")
    group = n_q // n_kv
    launch = launch or plan_launch(n_requests, n_kv, group, 1, multiprocessors_of(qkv_TN.device))
    block_m, block_d = triton.next_power_of_2(max(16, group)), max(16, triton.next_power_of_2(d_head))
    out = qkv_TN.new_empty((qkv_TN.shape[0], n_q, d_head))
    blocks = n_requests * n_kv
    parts = blocks * launch.splits if launch.splits > 1 else 0
    partial = torch.empty((parts, block_m, block_d), dtype=torch.float32, device=qkv_TN.device)
    lse = torch.empty((parts, block_m), dtype=torch.float32, device=qkv_TN.device)
    norm = q_norm is not None and k_norm is not None
    _decode_kernel[(n_kv, launch.splits, n_requests)](
        qkv_TN, positions_T, slots_T, cos_Mh, sin_Mh, k_cache, v_cache, out, query_start_R1, context_len_R,
        page_table_RP, q_norm if norm else cos_Mh, k_norm if norm else cos_Mh, norm_eps, partial, lse,
        arrival_counters(qkv_TN.device, blocks if parts else 0), scale * 1.4426950408889634, launch.splits,
        qkv_TN.stride(0), out.stride(0), *k_cache.stride()[:3], page_table_RP.stride(0),
        N_Q=n_q, N_KV=n_kv, GROUP=group, D=d_head, BLOCK_D=block_d, PAGE=page_size, BLOCK_M=block_m,
        BLOCK_N=launch.block_n, MIN_TILES=max(1, launch.min_split // launch.block_n),
        CHUNK=in_flight(block_m * block_d), WINDOW=sliding_window, ROTARY=rotary, NORM=norm, PDL=pdl,
        num_warps=launch.num_warps, num_stages=launch.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
