"""Attention over a paged KV cache, in Triton. Same functions as in `reference`, which explains them.

Always holds: launches depend on shapes alone, never on what a tensor holds, so each call can be captured in a CUDA
graph; sums are taken in a fixed order, so a replay gives the same bits; nothing outside a request's context is used.
Danger: two attention calls must not run at once on one device, since they share arrival counters: keep to one stream.

Legend: as in `reference`, and in kernels M rows of a tile, (query, head of the group) pairs; N keys of a tile; D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import copy_kv, rope_and_write, start
from tlt.kernels.attention.kv_splits import list_kv_splits
from tlt.kernels.attention.plan import AttentionLaunch, plan_launch

__all__ = ["AttentionLaunch", "copy_kv", "kv_splits_of", "paged_attention", "plan_launch", "rope_and_write"]

COUNTERS = 1 << 18  # (request, key head, row block) triples of one launch
MULTIPROCESSORS_OF_NO_GPU = 2  # what the interpreter plans for
_counters: dict[torch.device, Tensor] = {}


@triton.jit
def _set_bits(word):
    """How many bits of each 32-bit word are set."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _kv_split(kv_split_ptr, SPLIT: tl.constexpr):
    """The request whose context this program reads (−1: none), the split's number in it, and the tiles of a split."""
    program = tl.program_id(2)
    request, split, tiles = program, program * 0, program * 0 + (1 << 24)
    if SPLIT:
        listed = tl.load(kv_split_ptr + 1 + program)
        request, split, tiles = listed >> 8, listed & 255, tl.load(kv_split_ptr)
    return request, split, tiles


@triton.jit
def _work(
    query_len, context_len, first_row, split_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TREE_WORDS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) a row block reads, those below `shared` seen by all rows, and how many splits have keys."""
    first_position = context_len - query_len
    first_query = first_row // GROUP
    last_query = tl.minimum(first_row + BLOCK_M - 1, query_len * GROUP - 1) // GROUP
    if TREE_WORDS > 0:
        high = context_len
        shared = first_position
        window_from = first_position - WINDOW + 1
    else:
        high = first_position + last_query + 1
        shared = first_position + first_query + 1
        window_from = first_position + first_query - WINDOW + 1
    high = tl.where(context_len > 0, high, 0)
    low = high * 0
    if WINDOW > 0:
        low = tl.maximum(window_from, 0) // BLOCK_N * BLOCK_N
        shared = low  # the window's edge cuts through tiles: mask them all
    tiles = tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
    return low, high, shared, tl.maximum(tl.cdiv(tiles, split_tiles), 1)


@triton.jit
def pages_of(page_row_ptr, first_key, high, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    key_N = first_key + tl.arange(0, BLOCK_N)
    return tl.load(page_row_ptr + key_N // PAGE, mask=key_N < high, other=0)


@triton.jit
def take_tile(
    q_MD, acc_MD, peak_M, sum_M, page_N, first_key, high,
    k_ptr, v_ptr, page_row_ptr, tree_row_ptrs, word_M, row_ok_M, query_M, position_M, first_position,
    stride_page, stride_slot, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    TREE_WORDS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, SPARE,
):  # fmt: skip
    """One tile of keys, taken into the running softmax (in base 2); and the pages of the next tile.

    Looked up a tile ahead, they let the loads of keys and values depend on no load of their own iteration: the compiler
    then keeps several tiles in flight. SPARE, a constexpr or known at run time: a NaN key affects only the
    queries that see it, and in a tree so does a NaN value.
    """
    key_N = first_key + tl.arange(0, BLOCK_N)
    next_page_N = pages_of(page_row_ptr, first_key + BLOCK_N, high, BLOCK_N, PAGE)
    column_D = tl.arange(0, BLOCK_D)
    offset_ND = (page_N.to(tl.int64) * stride_page + (key_N % PAGE) * stride_slot)[:, None] + column_D[None, :]
    if MASKED or D != BLOCK_D:  # zeros for what lies outside: a weight of zero would not silence a NaN
        inside_ND = (key_N < high)[:, None] & (column_D < D)[None, :]
        k_ND = tl.load(k_ptr + offset_ND, mask=inside_ND, other=0.0)
        v_ND = tl.load(v_ptr + offset_ND, mask=inside_ND, other=0.0)
    else:
        k_ND = tl.load(k_ptr + offset_ND)
        v_ND = tl.load(v_ptr + offset_ND)
    if SPARE:  # the score is NaN for queries that see the key; for the others the value must not be
        if TREE_WORDS > 0:  # the key takes over the value's NaN: element by element, no thread asks another
            nan_ND = v_ND != v_ND
            k_ND = tl.where(nan_ND, v_ND, k_ND)
            v_ND = tl.where(nan_ND, 0.0, v_ND)
        else:
            nan_N = tl.max((k_ND != k_ND).to(tl.int32), 1) > 0
            v_ND = tl.where(nan_N[:, None], 0.0, v_ND)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
    if MASKED:
        if TREE_WORDS > 0:
            node_N = key_N - first_position
            bits_MN = word_M[:, None]
            for word in tl.static_range(1, TREE_WORDS):
                word_M = tl.load(tree_row_ptrs + word, mask=row_ok_M, other=0)
                bits_MN = tl.where((node_N >> 5 == word)[None, :], word_M[:, None], bits_MN)
            bits_MN = bits_MN >> (node_N & 31)[None, :]
            seen_MN = (node_N < 0)[None, :] | ((bits_MN & 1) != 0)
        else:
            seen_MN = key_N[None, :] <= (first_position + query_M)[:, None]
        seen_MN = seen_MN & (key_N < high)[None, :]
        if WINDOW > 0:
            seen_MN = seen_MN & (key_N[None, :] > (position_M - WINDOW)[:, None])
        score_MN = tl.where(seen_MN, score_MN, -float("inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
    if MASKED:
        anchor_M = tl.where(new_peak_M == -float("inf"), 0.0, new_peak_M)  # a row that has seen nothing yet
    else:
        anchor_M = new_peak_M
    weight_MN = tl.exp2(score_MN - anchor_M[:, None])
    decay_M = tl.exp2(peak_M - anchor_M)
    sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision="ieee")
    return acc_MD, new_peak_M, sum_M, next_page_N


@triton.jit
def join_part(acc_MD, peak_M, sum_M, part_MD, lse_M):
    """One more split's output, taken into the running mean. A split in which a row saw nothing changes no bit of it."""
    new_peak_M = tl.maximum(peak_M, lse_M)
    anchor_M = tl.where(new_peak_M == -float("inf"), 0.0, new_peak_M)
    weight_M, decay_M = tl.exp2(lse_M - anchor_M), tl.exp2(peak_M - anchor_M)
    return acc_MD * decay_M[:, None] + part_MD * weight_M[:, None], new_peak_M, sum_M * decay_M + weight_M


@triton.jit
def sum_splits(
    partial_ptr, lse_ptr, at_work, row_M,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The softmax-weighted mean of the splits' outputs, in order, CHUNK in flight.

    Other programs wrote them in this very launch: read past the first-level cache.
    """
    column_D = tl.arange(0, BLOCK_D)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(0, at_work, CHUNK):
        for next_one in tl.static_range(CHUNK):
            split = first + next_one
            there = split < at_work
            part_row_M = split * BLOCK_M + row_M
            lse_M = tl.load(lse_ptr + part_row_M, mask=there, other=-float("inf"), cache_modifier=".cg")
            part_ptrs = partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :]
            part_MD = tl.load(part_ptrs, mask=there, other=0.0, cache_modifier=".cg")
            acc_MD, peak_M, sum_M = join_part(acc_MD, peak_M, sum_M, part_MD, lse_M)
    return acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@triton.jit(do_not_specialize=["row_blocks"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, context_len_ptr, page_table_ptr, tree_ptr, kv_split_ptr,
    partial_ptr, lse_ptr, counter_ptr, scale_log2, row_blocks,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_page, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    TREE_WORDS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, row block, kv split; without SPLIT a request): its rows over its keys.

    Alone at work it writes the output. Otherwise it leaves its part in memory, and the last to arrive sums all parts.
    A program with nothing to do leaves before it waits, and keeps no other from its place: lengths are older than the
    kernel before this one, which lets this one come only after its own wait.
    """
    request, split, split_tiles = _kv_split(kv_split_ptr, SPLIT)
    if request < 0:
        return
    head = tl.program_id(0)
    row_block = row_blocks - 1 - tl.program_id(1)  # longest causal rows first
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    context_len = tl.load(context_len_ptr + request)
    first_row = row_block * BLOCK_M
    if first_row >= query_len * GROUP:
        return
    low, high, shared, at_work = _work(
        query_len, context_len, first_row, split_tiles, GROUP, BLOCK_M, BLOCK_N, TREE_WORDS, WINDOW
    )
    if split >= at_work:
        return
    start(PDL)

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
    first_position = context_len - query_len
    tree_row_ptrs = tree_ptr + token_M * TREE_WORDS
    word_M = query_M
    if TREE_WORDS > 0:
        word_M = tl.load(tree_row_ptrs, mask=row_ok_M, other=0)
    position_M = first_position + query_M
    if TREE_WORDS > 0 and WINDOW > 0:
        depth_M = query_M * 0 - 1
        for word in tl.static_range(TREE_WORDS):
            depth_M += _set_bits(tl.load(tree_row_ptrs + word, mask=row_ok_M, other=0))
        position_M = first_position + depth_M

    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    page_row_ptr = page_table_ptr + request.to(tl.int64) * stride_table
    k_head_ptr, v_head_ptr = k_ptr + head * stride_head, v_ptr + head * stride_head
    begin = low + split * split_tiles * BLOCK_N
    end = tl.minimum(begin + split_tiles * BLOCK_N, high)
    middle = tl.maximum(tl.minimum(shared // BLOCK_N * BLOCK_N, end), begin)
    middle = begin + (middle - begin) // BLOCK_N * BLOCK_N
    page_N = pages_of(page_row_ptr, begin, end, BLOCK_N, PAGE)
    for first_key in tl.range(begin, middle, BLOCK_N):
        acc_MD, peak_M, sum_M, page_N = take_tile(
            q_MD, acc_MD, peak_M, sum_M, page_N, first_key, end,
            k_head_ptr, v_head_ptr, page_row_ptr, tree_row_ptrs, word_M, row_ok_M, query_M, position_M, first_position,
            stride_page, stride_slot, scale_log2, D, BLOCK_D, BLOCK_N, PAGE, TREE_WORDS, WINDOW, False, False,
        )  # fmt: skip
    # a tree takes a tile or two: nothing to keep in flight, and more programs fit without the memory for it
    TREE_ALONE: tl.constexpr = TREE_WORDS > 0 and WINDOW == 0
    for first_key in tl.range(middle, end, BLOCK_N, num_stages=1 if TREE_ALONE else None):
        acc_MD, peak_M, sum_M, page_N = take_tile(
            q_MD, acc_MD, peak_M, sum_M, page_N, first_key, end,
            k_head_ptr, v_head_ptr, page_row_ptr, tree_row_ptrs, word_M, row_ok_M, query_M, position_M, first_position,
            stride_page, stride_slot, scale_log2, D, BLOCK_D, BLOCK_N, PAGE, TREE_WORDS, WINDOW, True,
            query_len > 1 if TREE_ALONE else TREE_WORDS > 0,  # a lone query sees all there is
        )  # fmt: skip

    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    out_ptrs = out_ptr + (token_M * stride_ot + head_M * stride_oh)[:, None] + column_D[None, :]
    if not SPLIT:  # noqa: SIM114, known when it is compiled: without splits there is nothing else
        tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)
    elif at_work == 1:
        tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=row_ok_MD)
    else:
        column = head * row_blocks + row_block
        base = (column * tl.num_programs(2) + tl.program_id(2) - split).to(tl.int64) * BLOCK_M
        part_row_M = base + split * BLOCK_M + row_M
        tl.store(partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :], out_MD)
        tl.store(lse_ptr + part_row_M, tl.where(sum_M == 0.0, -float("inf"), peak_M + tl.log2(sum_M)))
        # all threads' stores, then one thread's release: the program that counts last has acquired them all
        tl.debug_barrier()
        block = request * tl.num_programs(0) * row_blocks + column
        arrived = tl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == at_work - 1:
            tl.store(counter_ptr + block, 0)  # ready for the next launch
            total_MD = sum_splits(partial_ptr + base * BLOCK_D, lse_ptr + base, at_work, row_M, CHUNK, BLOCK_M, BLOCK_D)
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
    tree_mask_TW: Tensor | None = None,
    out: Tensor | None = None,
    sliding_window: int = 0,
    pdl: bool = False,
    kv_splits_S: Tensor | None = None,
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """As `reference.paged_attention`, except that tokens no request owns are left as they are in `out`.

    `kv_splits_S` comes from `kv_splits_of` for these contexts; all layers of a forward use it. With `pdl` it must be
    given, and a kernel in between must wait for the kernels that wrote it and the lengths: programs read both before
    they wait.
    The first call on a device must not be inside a graph capture: it makes the arrival counters (and compiles).
    """
    check_strides(q_THd, k_cache, v_cache, page_table_RP, tree_mask_TW)
    (_, page_size, n_kv, d_head), n_requests = k_cache.shape, context_len_R.shape[0]
    group = q_THd.shape[1] // n_kv
    launch = launch or plan_launch(n_requests, n_kv, group, max_query, multiprocessors_of(q_THd.device))
    row_blocks = triton.cdiv(max_query * group, launch.block_m)
    if launch.extra and kv_splits_S is None:
        kv_splits_S, pdl = list_kv_splits(context_len_R, launch), False
    programs = launch.kv_splits(n_requests)
    parts = programs * n_kv * row_blocks if launch.extra else 0
    block_d = max(16, triton.next_power_of_2(d_head))  # what the matrix units take at least
    out = torch.empty_like(q_THd) if out is None else out
    partial = torch.empty((parts, launch.block_m, block_d), dtype=torch.float32, device=q_THd.device)
    lse = torch.empty((parts, launch.block_m), dtype=torch.float32, device=q_THd.device)
    _attention_kernel[(n_kv, row_blocks, programs)](
        q_THd, k_cache, v_cache, out, query_start_R1, context_len_R, page_table_RP,
        query_start_R1 if tree_mask_TW is None else tree_mask_TW,
        query_start_R1 if kv_splits_S is None else kv_splits_S,
        partial, lse, arrival_counters(q_THd.device, n_requests * n_kv * row_blocks if parts else 0),
        scale * 1.4426950408889634, row_blocks,
        q_THd.stride(0), q_THd.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), page_table_RP.stride(0),
        GROUP=group, D=d_head, BLOCK_D=block_d, PAGE=page_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        CHUNK=in_flight(launch.block_m * block_d), TREE_WORDS=0 if tree_mask_TW is None else tree_mask_TW.shape[1],
        WINDOW=sliding_window, SPLIT=parts > 0, PDL=pdl, num_warps=launch.num_warps, num_stages=launch.num_stages,
        launch_pdl=pdl, maxnreg=most_registers(launch, block_d * q_THd.element_size(), tree_mask_TW is not None),
    )  # fmt: skip
    return out


def kv_splits_of(context_len_R: Tensor, n_kv: int, group: int, max_query: int) -> Tensor | None:
    """As `reference.kv_splits_of`; None where no context is divided."""
    launch = plan_launch(len(context_len_R), n_kv, group, max_query, multiprocessors_of(context_len_R.device))
    return list_kv_splits(context_len_R, launch) if launch.extra else None


def most_registers(launch: AttentionLaunch, row_bytes: int, trees: bool) -> int | None:
    """Of a thread; None: the compiler's own choice. Over trees with rows of 128 bytes that lets fewer programs on the
    chip, 159 with 2 warps and 147 with 8, though nothing spills at 128 (read off its code for an H200).
    """
    return 128 if trees and launch.num_warps != 4 and row_bytes == 128 else None


def in_flight(elements: int) -> int:
    """Parts a program of 128 threads or more may hold while it sums them, in registers the tiles need anyway."""
    return min(8, max(1, 8192 // elements))


def check_strides(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, tree: Tensor | None) -> None:
    if k_cache.stride() != v_cache.stride() or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"key and value caches differ in layout: {tuple(k_cache.shape)} strides {k_cache.stride()}, "
            f"{tuple(v_cache.shape)} strides {v_cache.stride()}; allocate them alike"
        )
    if q.stride(-1) != 1 or k_cache.stride(-1) != 1 or page_table.stride(-1) != 1:
        raise ValueError("q, caches or page table have gaps in their last dimension; call .contiguous() on them first")
    if tree is not None and not tree.is_contiguous():
        raise ValueError(f"tree mask has strides {tree.stride()}; expected contiguous words [tokens, words]")


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS_OF_NO_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def arrival_counters(device: torch.device, blocks: int) -> Tensor:
    """Zeros between launches: each launch resets those it used. Graphs hold this pointer: made once, never replaced."""
    if blocks > COUNTERS:
        raise ValueError(
            f"{blocks} (request, key head, row block) triples share contexts in one attention call; expected at most "
            f"{COUNTERS}: cut the batch, or launch without extra splits"
        )
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first attention call on a device came inside a graph capture; run it once before")
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
