"""Expanding draft trees level by level, in Triton: one launch between two levels.

Same functions as in `growth`, which explains them. Always holds: one program per row, which reads all it needs before
it writes anything.
"""
# As in `growth`; in kernels C successors, P nodes of a level, L of a tree, D hidden, each padded to a power of two

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.draft_tree.growth import Growing
from tlt.kernels.sampling.candidates_triton import ordered_key

_MOST_WIDTH = 16  # all pairs of successors are compared at once


@triton.jit
def _likeliest(score_ptr, named_ptr, place_P, W: tl.constexpr, C: tl.constexpr):
    """Of W · W successors the one that comes at each place: how many are likelier is its place."""
    c_C = tl.arange(0, C)
    real_C = c_C < W * W
    above_C = tl.load(score_ptr + c_C // W, mask=real_C, other=0.0)
    key_C = ordered_key(above_C + tl.load(named_ptr + c_C, mask=real_C, other=0.0), c_C, W * W)
    rank_C = tl.sum((key_C[None, :] > key_C[:, None]).to(tl.int32), 1)
    return tl.sum(tl.where(rank_C[None, :] == place_P[:, None], c_C[None, :], 0), 1)


@triton.jit(do_not_specialize=["levels", "stride_position"])
def _grow_kernel(
    tokens_ptr, parents_ptr, scores_ptr, token_ptr, score_ptr, state_ptr, seen_ptr, slot_ptr, entry_ptr, level_ptr,
    named_token_ptr, named_score_ptr, named_state_ptr, position_ptr, stride_state, stride_position, levels, width,
    W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, L: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one row. Positions are given for roots only."""
    start(PDL)
    row, nodes = tl.program_id(0).to(tl.int64), levels * W
    place_P, column_L, column_D = tl.arange(0, P), tl.arange(0, L), tl.arange(0, D)
    ok_P = place_P < W
    ok_PL, ok_PD = ok_P[:, None] & (column_L < nodes)[None, :], ok_P[:, None] & (column_D < width)[None, :]
    seen_ptrs = seen_ptr + row * W * nodes + column_L[None, :]
    if position_ptr is not None:
        level = row * 0
        entry = tl.load(position_ptr + row * stride_position).to(tl.int64) - 1
        best_P = tl.load(named_score_ptr + row * W + place_P, mask=ok_P)
        token_P = tl.load(named_token_ptr + row * W + place_P, mask=ok_P)
        above_P = place_P * 0
        parent_P = above_P.to(tl.int64) - 1
        seen_PL = tl.zeros([P, L], tl.uint8)
    else:
        level = tl.load(level_ptr + row)
        entry = tl.load(entry_ptr + row)
        named_score_ptr += row * W * W
        chosen_P = _likeliest(score_ptr + row * W, named_score_ptr, place_P, W, C)
        above_P = chosen_P // W
        best_P = tl.load(score_ptr + row * W + above_P, mask=ok_P) + tl.load(named_score_ptr + chosen_P, mask=ok_P)
        token_P = tl.load(named_token_ptr + row * W * W + chosen_P, mask=ok_P)
        parent_P = above_P + (level - 1) * W
        seen_PL = tl.load(seen_ptrs + above_P[:, None] * nodes, mask=ok_PL, other=0)
    # roots share their row's state
    from_P = row * stride_state + above_P * width
    state_PD = tl.load(named_state_ptr + from_P[:, None] + column_D[None, :], mask=ok_PD)
    next_level = tl.minimum(level + 1, tl.maximum(levels - 1, 1))
    slot_P = (next_level - 1) * W + place_P
    seen_PL = tl.where(column_L[None, :] == slot_P[:, None], 1, seen_PL)
    tl.debug_barrier()  # every read before the first write

    at_P = row * nodes + level * W + place_P
    tl.store(tokens_ptr + at_P, token_P, mask=ok_P)
    tl.store(parents_ptr + at_P, parent_P, mask=ok_P)
    tl.store(scores_ptr + at_P, best_P, mask=ok_P)
    tl.store(token_ptr + row * W + place_P, token_P, mask=ok_P)
    tl.store(score_ptr + row * W + place_P, best_P, mask=ok_P)
    tl.store(slot_ptr + row * W + place_P, slot_P, mask=ok_P)
    tl.store(seen_ptrs + place_P[:, None] * nodes, seen_PL.to(tl.uint8), mask=ok_PL)
    tl.store(state_ptr + (row * W + place_P)[:, None] * width + column_D[None, :], state_PD, mask=ok_PD)
    tl.store(entry_ptr + row, entry + (next_level - level))
    tl.store(level_ptr + row, next_level)


def start_trees(
    trees: Growing, token_Rw: Tensor, score_Rw: Tensor, state_RD: Tensor, position_R: Tensor, *, pdl: bool = False
) -> None:
    """As `growth.start_trees`."""
    _launch(trees, token_Rw, score_Rw, state_RD, position_R, pdl)


def expand(trees: Growing, token_Nk: Tensor, score_Nk: Tensor, state_RwD: Tensor, *, pdl: bool = False) -> None:
    """As `growth.expand`."""
    _launch(trees, token_Nk, score_Nk, state_RwD, None, pdl)


def _launch(trees: Growing, token: Tensor, score: Tensor, state: Tensor, position_R: Tensor | None, pdl: bool) -> None:
    rows, width, hidden = trees.state_RwD.shape
    if width > _MOST_WIDTH:
        raise ValueError(f"levels of {width} nodes; expected at most {_MOST_WIDTH}")
    rest_contiguous = state.stride()[1:] == ((hidden, 1) if position_R is None else (1,))
    given = (token, score, *(getattr(trees, name) for name in trees.__slots__))
    if not rest_contiguous or not all(tensor.is_contiguous() for tensor in given):
        raise ValueError("trees, names and states must be contiguous; take views of first rows only")
    block = triton.next_power_of_2(hidden)
    _grow_kernel[(rows,)](
        *(trees.token_RL, trees.parent_RL, trees.score_RL, trees.token_Rw, trees.score_Rw, trees.state_RwD),
        *(trees.seen_RwL.view(torch.uint8), trees.slot_Rw, trees.entry_R, trees.level_R, token, score, state),
        position_R, state.stride(0), 0 if position_R is None else position_R.stride(0), trees.levels, hidden,
        W=width, C=max(16, triton.next_power_of_2(width * width)), P=triton.next_power_of_2(width),
        L=triton.next_power_of_2(trees.token_RL.shape[1]), D=block, PDL=pdl,
        num_warps=16 if block > 4096 else 8 if block * width >= 4096 else 4, launch_pdl=pdl,
    )  # fmt: skip
