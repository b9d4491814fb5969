"""Attention over a paged KV cache whose bits depend on a query's own keys alone, in Triton.

What always holds: a query's result is the same bit for bit whatever else is in the batch, however many queries of its
request are computed with it (one when decoding, a few in a chain of drafts, many in a prompt), and on however many
programs its context is spread. Because:
- one compiled kernel serves all of that, with tiles of one size; a query's row of a tile is computed from that row;
- tiles and parts of a context begin at fixed positions; parts are joined in order, in registers or through memory;
- keys a query does not see weigh exactly 0 and leave its running sums as they are;
- nothing is contracted (`enable_fp_fusion=False`), so that copies the compiler makes of a line round as the line does.
For that, prompts are computed in small tiles, which is slower than `triton`. Trees it cannot do: their
ancestors lie elsewhere than plain decoding puts them.

Danger: as in `triton`, whose arrival counters it uses.

Legend: as in `triton`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.attention.triton import (
    arrival_counters,
    check_strides,
    in_flight,
    join_part,
    multiprocessors_of,
    pages_of,
    sum_splits,
    take_tile,
)

BLOCK_M, BLOCK_N = 16, 64
PART = 256  # keys of a part, a multiple of BLOCK_N
WARPS, STAGES = 4, 3
MOST_BYTES = 1 << 28  # of memory for parts; where they would need more, one program takes all of a context


def programs_per_context(blocks: int, parts: int, bytes_per_part: int, multiprocessors: int) -> int:
    """How many programs one context is divided among: enough to fill the chip, at most one per part. Changes no bit."""
    if blocks * parts * bytes_per_part > MOST_BYTES:
        return 1
    return max(1, min(parts, -(-2 * multiprocessors // max(1, blocks))))


@triton.jit(
    do_not_specialize=["programs", "row_blocks", "parts", "stride_table"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_len_ptr", "page_table_ptr"],
)
def _exact_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, context_len_ptr, page_table_ptr,
    partial_ptr, lse_ptr, counter_ptr, scale_log2, programs, row_blocks, parts,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_page, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ((its number among those of the context, row block), key head, request)."""
    start(PDL)
    head, request = tl.program_id(1), tl.program_id(2)
    number = tl.program_id(0) // row_blocks
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks  # longest causal rows first
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    context_len = tl.load(context_len_ptr + request)
    first_row = row_block * BLOCK_M
    if first_row >= query_len * GROUP:
        return

    first_position = context_len - query_len
    last_query = tl.minimum(first_row + BLOCK_M - 1, query_len * GROUP - 1) // GROUP
    high = tl.where(context_len > 0, first_position + last_query + 1, 0)
    low = high * 0
    if WINDOW > 0:
        low = tl.maximum(first_position + first_row // GROUP - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    first_part, last_part = low // PART, tl.cdiv(high, PART)
    at_work = tl.maximum(tl.minimum(programs, last_part - first_part), 1)
    if number >= at_work:
        return

    row_M = tl.arange(0, BLOCK_M)
    column_D = tl.arange(0, BLOCK_D)
    query_M = (first_row + row_M) // GROUP
    head_M = head * GROUP + (first_row + row_M) % GROUP
    row_ok_M = first_row + row_M < query_len * GROUP
    token_M = (query_start + query_M).to(tl.int64)
    row_ok_MD = row_ok_M[:, None] & (column_D < D)[None, :]
    q_MD = tl.load(
        q_ptr + (token_M * stride_qt + head_M * stride_qh)[:, None] + column_D[None, :], mask=row_ok_MD, other=0.0
    )
    page_row_ptr = page_table_ptr + request.to(tl.int64) * stride_table
    k_head_ptr, v_head_ptr = k_ptr + head * stride_head, v_ptr + head * stride_head
    block = (request * tl.num_programs(1) + head) * row_blocks + row_block
    base = block.to(tl.int64) * parts * BLOCK_M

    total_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total_sum_M = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.range(first_part + number, last_part, programs):
        begin = tl.maximum(part * PART, low)
        end = tl.minimum(part * PART + PART, high)
        acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        page_N = pages_of(page_row_ptr, begin, end, BLOCK_N, PAGE)
        for first_key in tl.range(begin, end, BLOCK_N):
            acc_MD, peak_M, sum_M, page_N = take_tile(
                q_MD, acc_MD, peak_M, sum_M, page_N, first_key, end,
                k_head_ptr, v_head_ptr, page_row_ptr, query_M, query_M, row_ok_M, query_M, first_position + query_M,
                first_position, stride_page, stride_slot, scale_log2, D, BLOCK_D, BLOCK_N, PAGE, 0, WINDOW, True, True,
            )  # fmt: skip
        part_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        lse_M = tl.where(sum_M == 0.0, -float("inf"), peak_M + tl.log2(sum_M))
        total_MD, total_peak_M, total_sum_M = join_part(total_MD, total_peak_M, total_sum_M, part_MD, lse_M)
        if at_work > 1:
            part_row_M = base + (part - first_part) * BLOCK_M + row_M
            tl.store(partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :], part_MD)
            tl.store(lse_ptr + part_row_M, lse_M)

    out_ptrs = out_ptr + (token_M * stride_ot + head_M * stride_oh)[:, None] + column_D[None, :]
    if at_work == 1:
        total_MD = total_MD / tl.where(total_sum_M == 0.0, 1.0, total_sum_M)[:, None]
        tl.store(out_ptrs, total_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)
    else:
        # all threads' stores, then one thread's release: the program that counts last has acquired them all
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == at_work - 1:
            tl.store(counter_ptr + block, 0)  # ready for the next launch
            total_MD = sum_splits(
                partial_ptr + base * BLOCK_D, lse_ptr + base, last_part - first_part, row_M,
                CHUNK, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            tl.store(out_ptrs, total_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)


def paged_attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    page_table_RP: Tensor,
    *,
    max_query: int,
    scale: float,
    sliding_window: int = 0,
    pdl: bool = False,
    programs: int | None = None,
) -> Tensor:
    """As `attention_triton.paged_attention`, without trees. `programs` that share a context at most; None plans."""
    check_strides(q_THd, k_cache, v_cache, page_table_RP, None)
    (_, page_size, n_kv, d_head), n_requests = k_cache.shape, context_len_R.shape[0]
    group = q_THd.shape[1] // n_kv
    block_d = max(16, triton.next_power_of_2(d_head))  # what the matrix units take at least
    row_blocks = triton.cdiv(max_query * group, BLOCK_M)
    blocks = n_requests * n_kv * row_blocks
    parts = triton.cdiv(page_table_RP.shape[1] * page_size, PART)
    if programs is None:
        device_size = multiprocessors_of(q_THd.device)
        programs = programs_per_context(blocks, parts, BLOCK_M * (block_d + 1) * 4, device_size)
    shared = blocks * parts if programs > 1 else 0
    partial = torch.empty((shared, BLOCK_M, block_d), dtype=torch.float32, device=q_THd.device)
    lse = torch.empty((shared, BLOCK_M), dtype=torch.float32, device=q_THd.device)
    out = torch.empty_like(q_THd)
    _exact_attention_kernel[(row_blocks * programs, n_kv, n_requests)](
        q_THd, k_cache, v_cache, out, query_start_R1, context_len_R, page_table_RP,
        partial, lse, arrival_counters(q_THd.device, blocks if shared else 0),
        scale * 1.4426950408889634, programs, row_blocks, parts,
        q_THd.stride(0), q_THd.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), page_table_RP.stride(0),
        GROUP=group, D=d_head, BLOCK_D=block_d, PAGE=page_size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, PART=PART,
        CHUNK=in_flight(BLOCK_M * block_d), WINDOW=sliding_window, PDL=pdl,
        num_warps=WARPS, num_stages=STAGES, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip
    return out
