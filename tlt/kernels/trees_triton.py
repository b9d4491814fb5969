"""The two small kernels around a verification tick on a GPU: row state and trees → inputs, drawn tokens → walk.

They do what `tlt.kernels.trees` does with torch operations, in one launch each instead of a hundred.
"""
# R rows, Q nodes of a tree, S steps of a walk, P pages of a row

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _prepare_kernel(
    ints_ptr, floats_ptr, pages_ptr, count_ptr, token_ptr, depth_ptr, int64s_ptr, slot_ptr, context_ptr, float32s_ptr,
    rows, pages_stride, PAGE: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    inside = node < Q
    live = row < tl.load(count_ptr)
    position = tl.where(live, tl.load(ints_ptr + row * 5 + 1), 0)
    place = position + node
    page = tl.load(pages_ptr + row * pages_stride + place // PAGE, mask=inside & live, other=0)
    slot = page * PAGE + (place % PAGE).to(tl.int32)
    depth = tl.load(depth_ptr + row * Q + node, mask=inside, other=0)
    deep = tl.where(live, position + depth, 0)
    cell = row * Q + node
    tl.store(token_ptr + row * Q, tl.load(ints_ptr + row * 5))
    tl.store(int64s_ptr + cell, deep, mask=inside)
    tl.store(int64s_ptr + rows * Q + cell, deep + 1, mask=inside)
    for column in tl.static_range(2, 5):  # seed, request, top-k
        same = tl.zeros((BLOCK,), tl.int64) + tl.load(ints_ptr + row * 5 + column)
        tl.store(int64s_ptr + column * rows * Q + cell, same, mask=inside)
    tl.store(slot_ptr + cell, tl.where(live, slot, -1), mask=inside)
    tl.store(context_ptr + row, tl.where(live, position.to(tl.int32) + Q, 0))
    for column in tl.static_range(2):  # temperature, top-p
        same = tl.zeros((BLOCK,), tl.float32) + tl.load(floats_ptr + row * 2 + column)
        tl.store(float32s_ptr + column * rows * Q + cell, same, mask=inside)


@triton.jit
def _at(values, node, here):
    """The value at one node."""
    return tl.sum(tl.where(node == here, values, 0), axis=0)


@triton.jit
def _finish_kernel(
    ints_ptr, count_ptr, parent_ptr, token_ptr, slot_ptr, drawn_ptr, logprob_ptr, policy_logprob_ptr,
    packed_ptr, source_ptr, node_ptr, steps_ptr, Q: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    inside = node < Q
    cell = row * Q + node
    parent = tl.load(parent_ptr + cell, mask=inside, other=-1)
    token = tl.load(token_ptr + cell, mask=inside, other=-2)
    slot = tl.load(slot_ptr + cell, mask=inside, other=-1)
    drawn = tl.load(drawn_ptr + cell, mask=inside, other=0)
    logprob = tl.load(logprob_ptr + cell, mask=inside, other=0.0)
    policy_logprob = tl.load(policy_logprob_ptr + cell, mask=inside, other=0.0)
    here = tl.program_id(0) * 0
    walking = here == 0
    steps = here + 1
    out = packed_ptr + row * (3 * S + 1)
    for step in tl.static_range(S):
        if step > 0:
            follows = (parent == here) & (token == _at(drawn, node, here)) & inside
            child = tl.min(tl.where(follows, node, BLOCK), axis=0)
            walking = walking & (child < BLOCK)
            here = tl.where(walking, child, here)
            steps += walking.to(tl.int32)
            source = tl.where(walking & (here != step), _at(slot, node, here), -1)
            tl.store(source_ptr + row * (S - 1) + step - 1, source)
        tl.store(node_ptr + row * S + step, here.to(tl.int64))
        tl.store(out + step, _at(drawn, node, here).to(tl.int32))
        tl.store(out + S + step, _at(logprob, node, here).to(tl.int32, bitcast=True))
        tl.store(out + 2 * S + step, _at(policy_logprob, node, here).to(tl.int32, bitcast=True))
    tl.store(out + 3 * S, steps)
    tl.store(steps_ptr + row, steps.to(tl.int64))
    if row < tl.load(count_ptr):
        tl.store(ints_ptr + row * 5, tl.maximum(_at(drawn, node, here), 0))
        tl.store(ints_ptr + row * 5 + 1, tl.load(ints_ptr + row * 5 + 1) + steps)


def prepare(
    ints_R5: Tensor,
    floats_R2: Tensor,
    pages_RP: Tensor,
    count: Tensor,
    token_RQ: Tensor,
    depth_RQ: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `trees.prepare`."""
    rows, nodes = token_RQ.shape
    device = ints_R5.device
    int64s = torch.empty((5, rows, nodes), dtype=torch.int64, device=device)
    slot_RQ = torch.empty((rows, nodes), dtype=torch.int32, device=device)
    context_R = torch.empty(rows, dtype=torch.int32, device=device)
    float32s = torch.empty((2, rows, nodes), dtype=torch.float32, device=device)
    _prepare_kernel[(rows,)](
        ints_R5, floats_R2, pages_RP, count, token_RQ, depth_RQ, int64s, slot_RQ, context_R, float32s,
        rows, pages_RP.stride(0), PAGE=page_size, Q=nodes, BLOCK=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    return int64s, slot_RQ, context_R, float32s


def finish(
    ints_R5: Tensor,
    count: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
    drawn: tuple[Tensor, Tensor, Tensor],
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `trees.finish`."""
    rows, nodes = tree[0].shape
    device = ints_R5.device
    packed = torch.empty((rows, 3 * steps + 1), dtype=torch.int32, device=device)
    source = torch.empty((rows, steps - 1), dtype=torch.int32, device=device)
    node_RS = torch.empty((rows, steps), dtype=torch.int64, device=device)
    steps_R = torch.empty(rows, dtype=torch.int64, device=device)
    _finish_kernel[(rows,)](
        ints_R5, count, *tree, *drawn, packed, source, node_RS, steps_R,
        Q=nodes, S=steps, BLOCK=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    return packed, source, node_RS, steps_R
