"""Around a verification tick, in Triton: row state and trees → inputs, drawn tokens → walk → row state.

Same functions as in `verification`, which explains them, in one launch each instead of a hundred.
"""
# R rows, Q nodes of a tree, T tokens of the forward, S steps of a walk, P pages of a row, W mask words

import torch
import triton
import triton.language as tl
from torch import Tensor

_UNROLLED = 32  # steps of a walk whose loop is unrolled, at most: a longer one would take seconds to compile


@triton.jit(do_not_specialize=["rows", "spare"])
def _starts_kernel(size_ptr, count_ptr, start_ptr, rows, spare, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    live = row < tl.minimum(tl.load(count_ptr), rows)
    behind = tl.cumsum(tl.load(size_ptr + row, mask=live, other=0).to(tl.int32), axis=0)
    tl.store(start_ptr + 1 + row, row + 1 + tl.minimum(behind, spare), mask=row < rows)
    tl.store(start_ptr, 0)


@triton.jit(do_not_specialize=["rows", "tokens", "Q", "pages_stride"])
def _prepare_kernel(
    ints_ptr, floats_ptr, pages_ptr, count_ptr, token_ptr, depth_ptr, mask_ptr, start_ptr,
    int64s_ptr, slot_ptr, context_ptr, float32s_ptr, seen_ptr, rows, tokens, Q, pages_stride,
    PAGE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: a row, or some of the padding behind the last row, which counts as its root without a slot."""
    program = tl.program_id(0)
    row = tl.minimum(program, rows - 1)
    owned = program < rows
    live = owned & (row < tl.load(count_ptr))
    first = tl.load(start_ptr + tl.minimum(program, rows))
    after = tl.where(owned, tl.load(start_ptr + row + 1), tokens)
    position = tl.where(live, tl.load(ints_ptr + row * 5 + 1), 0)
    newest = tl.load(ints_ptr + row * 5)
    cell = first + tl.maximum(program - rows, 0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < after
    node = tl.where(owned, cell - first, 0)
    place = position + node
    page = tl.load(pages_ptr + row * pages_stride + place // PAGE, mask=inside & live, other=0)
    slot = page * PAGE + (place % PAGE).to(tl.int32)
    depth = tl.load(depth_ptr + row * Q + node, mask=inside, other=0)
    token = tl.load(token_ptr + row * Q + node, mask=inside & (node > 0), other=0)
    deep = tl.where(live, position + depth, 0)
    tl.store(int64s_ptr + cell, tl.where(node > 0, token, newest), mask=inside)
    tl.store(int64s_ptr + tokens + cell, deep, mask=inside)
    tl.store(int64s_ptr + 2 * tokens + cell, deep + 1, mask=inside)
    for column in tl.static_range(2, 5):  # seed, request, top-k
        same = tl.zeros((BLOCK,), tl.int64) + tl.load(ints_ptr + row * 5 + column)
        tl.store(int64s_ptr + (column + 1) * tokens + cell, same, mask=inside)
    tl.store(slot_ptr + cell, tl.where(live, slot, -1), mask=inside)
    for column in tl.static_range(3):  # temperature, top-p, ln min-p
        same = tl.zeros((BLOCK,), tl.float32) + tl.load(floats_ptr + row * 3 + column)
        tl.store(float32s_ptr + column * tokens + cell, same, mask=inside)
    for word in tl.static_range(W):
        bits = tl.load(mask_ptr + (row * Q + node) * W + word, mask=inside, other=0)
        tl.store(seen_ptr + cell * W + word, bits, mask=inside)
    tl.store(token_ptr + row * Q, newest, mask=owned)
    tl.store(context_ptr + row, tl.where(live, position.to(tl.int32) + after - first, 0), mask=owned)


@triton.jit
def _at(values, node, here):
    """The value at one node."""
    return tl.sum(tl.where(node == here, values, 0), axis=0)


@triton.jit
def _step(
    step, here, walking, steps, parent, token, inside, slot, drawn, logprob, policy_logprob,
    row, first, node, out, at_ptr, source_ptr, S, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number `step` of a walk that stands at node `here`; step 0 stays at the root."""
    counts = step < S
    follows = (parent == here) & (token == _at(drawn, node, here)) & inside & counts & (step > 0)
    child = tl.min(tl.where(follows, node, BLOCK), axis=0)
    walking = walking & ((child < BLOCK) | (step == 0))
    here = tl.where(walking & (step > 0), child, here)
    steps += (walking & (step > 0)).to(tl.int32)
    source = tl.where(walking & (here != step), _at(slot, node, here), -1)
    tl.store(source_ptr + row * (S - 1) + step - 1, source, mask=counts & (step > 0))
    tl.store(at_ptr + row * S + step, (first + here).to(tl.int64), mask=counts)
    tl.store(out + step, _at(drawn, node, here).to(tl.int32), mask=counts)
    tl.store(out + S + step, _at(logprob, node, here).to(tl.int32, bitcast=True), mask=counts)
    tl.store(out + 2 * S + step, _at(policy_logprob, node, here).to(tl.int32, bitcast=True), mask=counts)
    return here, walking, steps


@triton.jit(do_not_specialize=["Q", "S"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _finish_kernel(
    ints_ptr, count_ptr, parent_ptr, token_ptr, start_ptr, slot_ptr, drawn_ptr, logprob_ptr, policy_logprob_ptr,
    packed_ptr, source_ptr, target_ptr, at_ptr, steps_ptr, Q, S, MOST: tl.constexpr, UNROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: a row. There are S steps, as many as MOST at most; unrolled where these are few."""
    row = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    first = tl.load(start_ptr + row)
    inside = node < tl.load(start_ptr + row + 1) - first
    parent = tl.load(parent_ptr + row * Q + node, mask=inside, other=-1)
    token = tl.load(token_ptr + row * Q + node, mask=inside, other=-2)
    slot = tl.load(slot_ptr + first + node, mask=inside, other=-1)
    drawn = tl.load(drawn_ptr + first + node, mask=inside, other=0)
    logprob = tl.load(logprob_ptr + first + node, mask=inside, other=0.0)
    policy_logprob = tl.load(policy_logprob_ptr + first + node, mask=inside, other=0.0)
    here = tl.program_id(0) * 0
    walking = here == 0
    steps = here + 1
    out = packed_ptr + row * (3 * S + 1)
    if MOST <= UNROLLED:
        for step in tl.static_range(MOST):
            here, walking, steps = _step(
                step, here, walking, steps, parent, token, inside, slot, drawn, logprob, policy_logprob,
                row, first, node, out, at_ptr, source_ptr, S, BLOCK,
            )  # fmt: skip
    else:
        for step in range(S):
            here, walking, steps = _step(
                step, here, walking, steps, parent, token, inside, slot, drawn, logprob, policy_logprob,
                row, first, node, out, at_ptr, source_ptr, S, BLOCK,
            )  # fmt: skip
    tl.store(target_ptr + row * (S - 1) + node - 1, slot, mask=(node > 0) & (node < S))
    tl.store(out + 3 * S, steps)
    tl.store(steps_ptr + row, steps.to(tl.int64))
    if row < tl.load(count_ptr):
        tl.store(ints_ptr + row * 5, tl.maximum(_at(drawn, node, here), 0))
        tl.store(ints_ptr + row * 5 + 1, tl.load(ints_ptr + row * 5 + 1) + steps)


def starts(size_R: Tensor, count: Tensor, tokens: int) -> Tensor:
    """As `verification.starts`."""
    rows = len(size_R)
    start_R1 = torch.empty(rows + 1, dtype=torch.int32, device=size_R.device)
    block = triton.next_power_of_2(rows)
    _starts_kernel[(1,)](size_R, count, start_R1, rows, tokens - rows, BLOCK=block, num_warps=4)
    return start_R1


def prepare(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    trees: tuple[Tensor, Tensor, Tensor],
    start_R1: Tensor,
    tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `verification.prepare`."""
    (ints_R5, floats_R3, pages_RP, count), (token_RQ, depth_RQ, mask_RQW) = state, trees
    (rows, nodes, words), device = mask_RQW.shape, ints_R5.device
    int64s = torch.empty((6, tokens), dtype=torch.int64, device=device)
    slot_T = torch.empty(tokens, dtype=torch.int32, device=device)
    context_R = torch.empty(rows, dtype=torch.int32, device=device)
    float32s = torch.empty((3, tokens), dtype=torch.float32, device=device)
    mask_TW = torch.empty((tokens, words), dtype=torch.int32, device=device)
    block = triton.next_power_of_2(nodes)
    _prepare_kernel[(rows + triton.cdiv(tokens - rows, block),)](
        ints_R5, floats_R3, pages_RP, count, token_RQ, depth_RQ, mask_RQW, start_R1,
        int64s, slot_T, context_R, float32s, mask_TW, rows, tokens, nodes, pages_RP.stride(0),
        PAGE=page_size, W=words, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return int64s, slot_T, context_R, float32s, mask_TW


def finish(
    ints_R5: Tensor,
    count: Tensor,
    tree: tuple[Tensor, Tensor],
    start_R1: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `verification.finish`."""
    rows, nodes = tree[0].shape
    device = ints_R5.device
    packed = torch.empty((rows, 3 * steps + 1), dtype=torch.int32, device=device)
    source, target = torch.empty((2, rows, steps - 1), dtype=torch.int32, device=device)
    at_RS = torch.empty((rows, steps), dtype=torch.int64, device=device)
    steps_R = torch.empty(rows, dtype=torch.int64, device=device)
    _finish_kernel[(rows,)](
        ints_R5, count, *tree, start_R1, *drawn, packed, source, target, at_RS, steps_R,
        nodes, steps, MOST=triton.next_power_of_2(steps), UNROLLED=_UNROLLED,
        BLOCK=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    return packed, source, target, at_RS, steps_R
