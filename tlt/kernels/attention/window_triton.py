"""The drafter's attention in rollout, in Triton. Same function as in `window`, which explains it.

Always holds: one launch whose shape depends on shapes alone; masks are computed from positions, never stored;
softmax in float32; sums in a fixed order, so a replay gives the same bits; a query that sees nothing gives zeros.
Danger: shares the arrival counters of `workspace`, so keep to one stream.

Legend: as in `window`, and in kernels M rows of a tile, (query, head of the group) pairs; N keys; D width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.attention.window import Beside
from tlt.kernels.linear.workspace import shared_workspace

PROGRAMS = 264  # wanted at least: two for each of an H200's processors
MOST_SPLITS = 16
MOST_ROWS = 64  # (query, head) pairs of one program


@dataclass(frozen=True, slots=True)
class WindowLaunch:
    """How one call is cut into programs."""

    block_m: int
    block_n: int  # keys per tile
    splits: int  # programs that divide one ring among them

    @classmethod
    def plan(cls, rows: int, key_heads: int, pairs: int, window: int, *, beside: bool = False) -> "WindowLaunch":
        """Small batches cut each ring to fill the chip; large ones read it in long tiles, one program each. `beside`:
        one more program looks at what is beside a ring that was cut."""
        block_m = min(MOST_ROWS, max(16, triton.next_power_of_2(pairs)))
        programs = rows * key_heads * triton.cdiv(pairs, block_m)
        longest = max(16, triton.next_power_of_2(window))
        if programs >= PROGRAMS:
            return cls(block_m, min(128 if block_m == 16 else 64, longest), 1)
        block_n = min(64, longest)
        wanted = triton.cdiv(PROGRAMS, programs)
        if beside and wanted > 2:
            wanted -= 1
        splits = triton.next_power_of_2(wanted)  # powers of two: few kernels are ever compiled
        return cls(block_m, block_n, min(MOST_SPLITS, triton.cdiv(window, block_n), splits))


@triton.jit
def _take_in(q_MD, k_ND, v_ND, seen_MN, acc_MD, peak_M, sum_M, scale_log2):
    """One tile of keys, taken into the running softmax (in base 2)."""
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
    score_MN = tl.where(seen_MN, score_MN, -float("inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
    anchor_M = tl.where(new_peak_M == -float("inf"), 0.0, new_peak_M)  # a row that has seen nothing yet
    weight_MN = tl.exp2(score_MN - anchor_M[:, None])
    decay_M = tl.exp2(peak_M - anchor_M)
    sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision="ieee")
    return acc_MD, new_peak_M, sum_M


@triton.jit
def _sum_splits(partial_ptr, lse_ptr, row_M, column_D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                SPLITS: tl.constexpr):  # fmt: skip
    """The softmax-weighted mean of the splits' outputs, in order; other programs wrote them in this very launch."""
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled: none of the loads waits for another
        part_row_M = split * BLOCK_M + row_M
        lse_M = tl.load(lse_ptr + part_row_M, cache_modifier=".cg")
        part_MD = tl.load(partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :], cache_modifier=".cg")
        new_peak_M = tl.maximum(peak_M, lse_M)
        anchor_M = tl.where(new_peak_M == -float("inf"), 0.0, new_peak_M)
        weight_M, decay_M = tl.exp2(lse_M - anchor_M), tl.exp2(peak_M - anchor_M)
        sum_M = sum_M * decay_M + weight_M
        acc_MD = acc_MD * decay_M[:, None] + part_MD * weight_M[:, None]
        peak_M = new_peak_M
    return acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@triton.jit(do_not_specialize=["Q", "N", "stride_pr", "stride_pq", "stride_sr", "stride_sq"])
def _ring_kernel(
    q_ptr, k_ptr, v_ptr, held_ptr, position_ptr, near_k_ptr, near_v_ptr, seen_ptr, out_ptr,
    partial_ptr, lse_ptr, counter_ptr, scale_log2, Q, N,
    stride_qr, stride_qq, stride_qh, stride_kr, stride_kh, stride_kw, stride_hr, stride_pr, stride_pq,
    stride_nr, stride_nh, stride_nn, stride_sr, stride_sq,
    GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NEAR: tl.constexpr, NEAR_TILES: tl.constexpr, TILES: tl.constexpr, RINGS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, (split, row block), row): its queries over one split of the ring, if it is one of the first
    RINGS; the last of all SPLITS reads the nodes."""
    start(PDL)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    split, row_block = tl.program_id(1) % SPLITS, tl.program_id(1) // SPLITS
    row_M, column_D = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    pair_M = row_block * BLOCK_M + row_M
    query_M, head_M = pair_M // GROUP, head * GROUP + pair_M % GROUP
    row_ok_M, column_ok_D = pair_M < Q * GROUP, column_D < D
    ok_MD = row_ok_M[:, None] & column_ok_D[None, :]
    q_ptrs = q_ptr + row * stride_qr + (query_M * stride_qq + head_M * stride_qh)[:, None] + column_D[None, :]
    q_MD = tl.load(q_ptrs, mask=ok_MD, other=0.0)
    position_M = tl.load(position_ptr + row * stride_pr + query_M * stride_pq, mask=row_ok_M, other=0).to(tl.int32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)

    k_ptr += row * stride_kr + head * stride_kh
    v_ptr += row * stride_kr + head * stride_kh
    held_ptr += row * stride_hr
    for tile in range(TILES if RINGS == SPLITS else tl.where(split < RINGS, TILES, 0)):
        slot_N = (split * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        held_N = tl.load(held_ptr + slot_N, mask=slot_N < W, other=-1).to(tl.int32)
        at_ND = slot_N[:, None] * stride_kw + column_D[None, :]
        inside_ND = (slot_N < W)[:, None] & column_ok_D[None, :]
        k_ND = tl.load(k_ptr + at_ND, mask=inside_ND, other=0.0)
        v_ND = tl.load(v_ptr + at_ND, mask=inside_ND, other=0.0)
        # nothing where a slot holds nothing: a weight of zero would not silence a NaN that is left there
        v_ND = tl.where((held_N >= 0)[:, None], v_ND, 0.0)
        seen_MN = (held_N >= 0)[None, :] & (held_N[None, :] > (position_M - W)[:, None])
        acc_MD, peak_M, sum_M = _take_in(q_MD, k_ND, v_ND, seen_MN, acc_MD, peak_M, sum_M, scale_log2)
    if split == SPLITS - 1:
        for near_tile in tl.static_range(NEAR_TILES):
            node_N = near_tile * NEAR + tl.arange(0, NEAR)
            inside_N = node_N < N
            seen_ptrs = seen_ptr + row * stride_sr + query_M[:, None] * stride_sq + node_N[None, :]
            seen_MN = tl.load(seen_ptrs, mask=row_ok_M[:, None] & inside_N[None, :], other=0) != 0
            anyone_N = tl.max(seen_MN.to(tl.int32), 0) > 0
            at_ND = row * stride_nr + head * stride_nh + node_N[:, None] * stride_nn + column_D[None, :]
            inside_ND = inside_N[:, None] & column_ok_D[None, :]
            k_ND = tl.load(near_k_ptr + at_ND, mask=inside_ND, other=0.0)
            v_ND = tl.where(anyone_N[:, None], tl.load(near_v_ptr + at_ND, mask=inside_ND, other=0.0), 0.0)
            acc_MD, peak_M, sum_M = _take_in(q_MD, k_ND, v_ND, seen_MN, acc_MD, peak_M, sum_M, scale_log2)

    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    # out is contiguous: [R, Q, heads, D]
    heads = tl.num_programs(0) * GROUP
    out_ptrs = out_ptr + row * Q * heads * D + (query_M * heads + head_M)[:, None] * D + column_D[None, :]
    if SPLITS == 1:
        tl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), mask=ok_MD)
    else:
        block = (row * tl.num_programs(0) + head) * (tl.num_programs(1) // SPLITS) + row_block
        part_row_M = (block * SPLITS + split) * BLOCK_M + row_M
        tl.store(partial_ptr + part_row_M[:, None] * BLOCK_D + column_D[None, :], out_MD)
        tl.store(lse_ptr + part_row_M, tl.where(sum_M == 0.0, -float("inf"), peak_M + tl.log2(sum_M)))
        # all threads' stores, then one thread's release: the program that counts last has acquired them all
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(counter_ptr + block, 0)  # ready for the next launch
            base = block * SPLITS * BLOCK_M
            total_MD = _sum_splits(
                partial_ptr + base * BLOCK_D, lse_ptr + base, row_M, column_D, BLOCK_M, BLOCK_D, SPLITS
            )
            tl.store(out_ptrs, total_MD.to(out_ptr.dtype.element_ty), mask=ok_MD)


def attend(
    q_RQHd: Tensor,
    k_RKWd: Tensor,
    v_RKWd: Tensor,
    held_RW: Tensor,
    position_RQ: Tensor,
    beside: Beside | None = None,
    *,
    pdl: bool = False,
    launch: WindowLaunch | None = None,
) -> Tensor:
    """As `window.attend`. The first call on a device must not be inside a graph capture."""
    near_k, near_v, seen = beside or (k_RKWd, v_RKWd, held_RW)
    seen = seen.view(torch.uint8) if beside else seen
    _check(q_RQHd, (k_RKWd, v_RKWd), (near_k, near_v), held_RW, seen)
    (R, Q, H, d), K, W = q_RQHd.shape, k_RKWd.shape[1], held_RW.shape[1] - 1
    pairs, nodes = Q * (H // K), near_k.shape[2] if beside else 0
    launch = launch or WindowLaunch.plan(R, K, pairs, W, beside=nodes > 0)
    row_blocks = triton.cdiv(pairs, launch.block_m)
    tiles = triton.cdiv(triton.cdiv(W, launch.block_n), launch.splits)
    rings = triton.cdiv(W, launch.block_n * tiles)  # no program without keys
    splits = rings + (rings > 1 and nodes > 0)  # where a ring is split, one more program reads the nodes
    counters = shared_workspace(q_RQHd.device).counters
    blocks = R * K * row_blocks if splits > 1 else 0
    if blocks > len(counters):
        raise ValueError(
            f"{blocks} rings × heads are shared by programs; expected at most {len(counters)}: cut it less"
        )
    block_d = max(16, triton.next_power_of_2(d))  # what the matrix units take at least
    near = min(64, max(16, triton.next_power_of_2(nodes)))
    out = torch.empty((R, Q, H, d), dtype=q_RQHd.dtype, device=q_RQHd.device)
    partial = torch.empty((blocks * splits, launch.block_m, block_d), dtype=torch.float32, device=q_RQHd.device)
    lse = torch.empty((blocks * splits, launch.block_m), dtype=torch.float32, device=q_RQHd.device)
    _ring_kernel[(K, row_blocks * splits, R)](
        q_RQHd, k_RKWd, v_RKWd, held_RW, position_RQ, near_k, near_v, seen, out,
        partial, lse, counters, d**-0.5 * 1.4426950408889634, Q, nodes,
        *q_RQHd.stride()[:3], *k_RKWd.stride()[:3], held_RW.stride(0), *position_RQ.stride(),
        *near_k.stride()[:3], *seen.stride()[:2],
        GROUP=H // K, D=d, W=W, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=block_d,
        NEAR=near, NEAR_TILES=triton.cdiv(nodes, near), TILES=tiles, RINGS=rings, SPLITS=splits,
        PDL=pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _check(q: Tensor, ring: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor], held: Tensor, seen: Tensor) -> None:
    for k, v in (ring, near):
        if k.stride() != v.stride() or k.shape != v.shape or k.stride(-1) != 1:
            raise ValueError(
                f"keys {tuple(k.shape)} strides {k.stride()} and values {tuple(v.shape)} strides {v.stride()}; "
                "expected the same layout, contiguous along a head"
            )
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (q, held, seen)):
        raise ValueError("queries, positions of the ring or the mask have gaps in their last dimension")
