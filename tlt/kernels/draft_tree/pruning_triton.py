"""`pruning.prune` in Triton: one launch, one program per row, everything by comparing small matrices.

With a shared verify budget two launches of one program each come before it: they find each row's penalty and the score
to cut at, and leave both in memory, so that no rounding can differ. Sizes are run-time numbers, so few kernels are ever
compiled.
"""
# R rows, L nodes grown, Q nodes of a tree, W mask words

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.draft_tree.pruning import LEVEL_COST, WORD, Pruned, VerifyBudget

_LEVEL_COST, _WORD = tl.constexpr(LEVEL_COST), tl.constexpr(WORD)


@triton.jit
def _score(score_ptr, at, node, there, width):
    """The score by which nodes are compared; −inf for NaN and outside the tree."""
    score = tl.load(score_ptr + at, mask=there, other=float("-inf")) - _LEVEL_COST * (node // width)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _unlikely(score, penalty):
    return tl.maximum(-score, 0.0) + penalty


@triton.jit(do_not_specialize=["rows"])
def _penalty_kernel(left_ptr, ready_ptr, remaining_bias_ptr, penalty_ptr, rows, most, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    real = row < rows
    ready = tl.load(ready_ptr + row, mask=real, other=0).to(tl.int32) != 0
    left = tl.maximum(tl.load(left_ptr + row, mask=ready, other=0), 0).to(tl.float32)
    longest = tl.maximum(tl.max(left, axis=0), 1.0)
    penalty = tl.load(remaining_bias_ptr) * (1.0 - tl.div_rn(left, longest + tl.zeros_like(left)))
    tl.store(penalty_ptr + row, tl.minimum(penalty, most), mask=real)


@triton.jit(do_not_specialize=["stride_grown", "rows", "grown", "width", "budget"])
def _cut_kernel(
    score_ptr, ready_ptr, penalty_ptr, cut_ptr, first_ptr, stride_grown, rows, grown, width, budget,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How unlikely the first node is that the budget has no room for, and which of its equals is the first such node.
    Floats ≥ 0 are ordered as their bits, so a binary search over bits finds the value, and one over nodes the place."""
    index = tl.arange(0, BLOCK)
    real = index < rows * grown
    row, node = index // grown, index % grown
    ready = tl.load(ready_ptr + row, mask=real, other=0).to(tl.int32) != 0
    score = _score(score_ptr, row.to(tl.int64) * stride_grown + node, node, ready, width)
    penalty = tl.load(penalty_ptr + row, mask=real, other=0.0)
    bits = _unlikely(score, penalty).to(tl.int32, bitcast=True)
    low = tl.program_id(0) * 0
    high = low + 0x7F800000  # infinity's
    for _ in tl.range(31):
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32), axis=0) > budget
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    cut = high
    left = budget - tl.sum((bits < cut).to(tl.int32), axis=0)  # for equals
    low = tl.program_id(0) * 0
    high = low + BLOCK
    for _ in tl.range(20):
        middle = low + (high - low) // 2
        enough = tl.sum(((bits == cut) & (index <= middle)).to(tl.int32), axis=0) > left
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    tl.store(cut_ptr, cut.to(tl.float32, bitcast=True))
    tl.store(first_ptr, high)


@triton.jit(do_not_specialize=["stride_grown", "stride_out", "stride_mask", "grown", "width", "kept", "nodes"])
def _prune_kernel(
    token_ptr, parent_ptr, score_ptr, ready_ptr, penalty_ptr, cut_ptr, first_ptr, out_token_ptr, out_parent_ptr,
    out_depth_ptr, mask_ptr, size_ptr, stride_grown, stride_out, stride_mask, grown, width, kept, nodes,
    L: tl.constexpr, Q: tl.constexpr, LOG_Q: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ready = tl.load(ready_ptr + row).to(tl.int32) != 0
    node = tl.arange(0, L)
    real = node < grown
    level = node // width
    score = _score(score_ptr, row * stride_grown + node, node, real, width)
    # how many come before each node: those with a better score, and equals that stand before it
    mine, theirs = score[:, None], score[None, :]
    before = (theirs > mine) | ((theirs == mine) & (node[None, :] < node[:, None]))
    stays = real & (tl.sum(before.to(tl.int32), axis=1) < kept)
    if cut_ptr is not None:
        unlikely, cut = _unlikely(score, tl.load(penalty_ptr + row)), tl.load(cut_ptr)
        equals = (unlikely == cut) & (row * grown + node < tl.load(first_ptr)) & (unlikely < float("inf"))
        stays = stays & ((unlikely < cut) | equals)
    place = tl.cumsum(stays.to(tl.int32), axis=0)  # in the tree; the root is 0
    place = tl.where(stays, place, -1)
    token = tl.load(token_ptr + row * stride_grown + node, mask=real, other=0)
    parent = tl.load(parent_ptr + row * stride_grown + node, mask=real, other=-1)
    above = tl.sum(tl.where(node[None, :] == parent[:, None], place[None, :], 0), axis=1)  # 0 where that is the root
    column = tl.arange(0, Q)
    here = column[:, None] == place[None, :]
    filled = (tl.sum(here.to(tl.int32), axis=1) > 0) & ready
    tree_token = tl.sum(tl.where(here, token[None, :], 0), axis=1)
    tree_parent = tl.where(filled, tl.sum(tl.where(here, above[None, :], 0), axis=1), -1)
    tree_depth = tl.where(filled, tl.sum(tl.where(here, level[None, :] + 1, 0), axis=1), 0)
    tl.store(size_ptr + row, tl.sum(filled.to(tl.int64), axis=0))
    inside = column < nodes
    out = row * stride_out + column
    tl.store(out_token_ptr + out, tree_token, mask=inside & (column > 0))
    tl.store(out_parent_ptr + out, tree_parent.to(tl.int64), mask=inside)
    tl.store(out_depth_ptr + out, tree_depth.to(tl.int64), mask=inside)
    one = tl.full((Q,), 1, tl.int32)
    for word in tl.static_range(W):
        sees = tl.where(column // _WORD == word, one << (column % _WORD), 0)
        above = tree_parent
        for _ in tl.static_range(LOG_Q):  # each time twice as far up
            there = column[None, :] == above[:, None]
            sees = sees | tl.sum(tl.where(there, sees[None, :], 0), axis=1)
            above = tl.sum(tl.where(there, above[None, :] + 1, 0), axis=1) - 1
        tl.store(mask_ptr + row * stride_mask + column * W + word, sees, mask=inside)


def prune(
    token_RL: Tensor,
    parent_RL: Tensor,
    score_RL: Tensor,
    ready_R: Tensor,
    width: int,
    depth: int,
    out: Pruned,
    shared: VerifyBudget | None = None,
) -> None:
    """As `pruning.prune`."""
    grown, (rows, nodes) = width * depth, out.token_RQ.shape
    padded = triton.next_power_of_2(max(nodes, 2))
    cut = (None, None, None) if shared is None else _cut(score_RL, ready_R, width, grown, shared)
    _prune_kernel[(rows,)](
        token_RL, parent_RL, score_RL, ready_R, *cut,
        out.token_RQ, out.parent_RQ, out.depth_RQ, out.mask_RQW, out.size_R,
        token_RL.stride(0), out.token_RQ.stride(0), out.mask_RQW.stride(0), grown, width, min(nodes - 1, grown), nodes,
        L=triton.next_power_of_2(max(grown, 2)), Q=padded, LOG_Q=padded.bit_length() - 1, W=out.mask_RQW.shape[2],
        num_warps=4,
    )  # fmt: skip


def _cut(
    score_RL: Tensor, ready_R: Tensor, width: int, grown: int, shared: VerifyBudget
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's penalty, the score to cut at, and the place from which on equal scores are dropped."""
    rows, device = len(ready_R), score_RL.device
    penalty_R, cut = (torch.empty(size, dtype=torch.float32, device=device) for size in (rows, 1))
    first = torch.empty(1, dtype=torch.int32, device=device)
    _penalty_kernel[(1,)](
        shared.left_R, ready_R, shared.remaining_bias, penalty_R, rows, shared.most,
        BLOCK=max(32, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
    block = max(32, triton.next_power_of_2(rows * grown))
    _cut_kernel[(1,)](
        score_RL, ready_R, penalty_R, cut, first, score_RL.stride(0), rows, grown, width, shared.nodes,
        BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return penalty_R, cut, first
