"""`distribution.compare` in Triton: one launch, logits read from memory once or twice, the gradient written over them.

The torch version makes a dozen passes over float32 copies of the logits, which for a drafter is most of its training.
Knows rows of logits only. Sums over a row are in float32; rows do not depend on each other.
"""
# S draft steps, C tokens, v draft vocabulary

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of a row at a time


@triton.jit
def _logits(row_ptr, column, WIDTH: tl.constexpr):
    return tl.load(row_ptr + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32)


@triton.jit
def _compare_kernel(policy_ptr, draft_ptr, weight_ptr, loss_ptr, tokens, variation, WIDTH: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Program: one draft step of one token. Three sweeps; after the first the row is in cache."""
    row = tl.program_id(0).to(tl.int64)
    p_row, q_row = policy_ptr + (row % tokens) * WIDTH, draft_ptr + row * WIDTH
    weight = tl.load(weight_ptr + row)
    lane = tl.arange(0, BLOCK)

    p_max, q_max = tl.full((), -float("inf"), tl.float32), tl.full((), -float("inf"), tl.float32)
    p_sum, q_sum = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        p, q = _logits(p_row, start + lane, WIDTH), _logits(q_row, start + lane, WIDTH)
        p_top, q_top = tl.maximum(p_max, tl.max(p, 0)), tl.maximum(q_max, tl.max(q, 0))
        p_sum = p_sum * tl.exp(p_max - p_top) + tl.sum(tl.exp(p - p_top), 0)
        q_sum = q_sum * tl.exp(q_max - q_top) + tl.sum(tl.exp(q - q_top), 0)
        p_max, q_max = p_top, q_top
    p_log, q_log = p_max + tl.log(p_sum), q_max + tl.log(q_sum)

    entropy = tl.full((), 0.0, tl.float32)
    p_above, q_above = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + lane
        log_q = _logits(q_row, column, WIDTH) - q_log
        p, q = tl.exp(_logits(p_row, column, WIDTH) - p_log), tl.exp(log_q)
        entropy -= tl.sum(tl.where(column < WIDTH, p * log_q, 0.0), 0)
        p_above += tl.sum(tl.where(q > p, p, 0.0), 0)
        q_above += tl.sum(tl.where(q > p, q, 0.0), 0)
    tl.store(loss_ptr + row, weight * ((1.0 - variation) * entropy + variation * (q_above - p_above)))

    for start in range(0, WIDTH, BLOCK):
        column = start + lane
        p = tl.exp(_logits(p_row, column, WIDTH) - p_log)
        q = tl.exp(_logits(q_row, column, WIDTH) - q_log)
        slope = (1.0 - variation) + variation * (tl.where(q > p, 1.0, 0.0) - q_above)
        gradient = weight * (q * slope - (1.0 - variation) * p)
        tl.store(q_row + column, gradient.to(draft_ptr.dtype.element_ty), mask=column < WIDTH)


def compare(policy_Cv: Tensor, draft_SCv: Tensor, weight_SC: Tensor, variation: float) -> tuple[Tensor, Tensor]:
    """As `distribution.compare`, for logits of up to 32 bits. Writes the gradient over the drafter's logits."""
    (steps, tokens), width = weight_SC.shape, policy_Cv.shape[1]
    loss_SC = torch.empty((steps, tokens), dtype=torch.float32, device=draft_SCv.device)
    _compare_kernel[(steps * tokens,)](
        *(policy_Cv.contiguous(), draft_SCv, weight_SC.contiguous(), loss_SC, tokens, variation),
        WIDTH=width,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )
    return loss_SC.sum(), draft_SCv
