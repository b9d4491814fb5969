"""`logprobs` in Triton: logits are read once for the log-probability, once more for the gradient.

The torch version makes half a dozen passes over float32 rows as long as the vocabulary, which for a small policy is a
third of a training step. Knows rows of logits only. Sums over a row are in float32; rows do not depend on each other.
"""
# C tokens, V vocabulary

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of a row at a time


@triton.jit
def _read_kernel(logits_ptr, token_ptr, logprob_ptr, entropy_ptr, logsum_ptr, stride, sharpness, WIDTH: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Program: one row, in one sweep: largest logit, Σ e^z and Σ z·e^z, the sums relative to the largest."""
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full((), -float("inf"), tl.float32)
    total, weighted = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        ok = start + lane < WIDTH
        z = tl.load(line + start + lane, mask=ok, other=-float("inf")).to(tl.float32) * sharpness
        higher = tl.maximum(top, tl.max(z, 0))
        share = tl.exp(z - higher)
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(share, 0)
        weighted = weighted * kept + tl.sum(tl.where(share > 0.0, share * z, 0.0), 0)
        top = higher
    logsum = top + tl.log(total)
    own = tl.load(line + tl.load(token_ptr + row)).to(tl.float32) * sharpness
    tl.store(logprob_ptr + row, own - logsum)
    tl.store(entropy_ptr + row, logsum - weighted / total)
    tl.store(logsum_ptr + row, logsum)


def read(logits_CV: Tensor, token_C: Tensor, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `logprobs.read`, for logits of up to 32 bits."""
    count, width = logits_CV.shape
    logprob_C, entropy_C, logsum_C = (
        torch.empty(count, dtype=torch.float32, device=logits_CV.device) for _ in range(3)
    )
    if count:
        _read_kernel[(count,)](
            logits_CV, token_C, logprob_C, entropy_C, logsum_C, logits_CV.stride(0), sharpness,
            WIDTH=width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return logprob_C, entropy_C, logsum_C


@triton.jit
def _gradient_kernel(logits_ptr, token_ptr, logsum_ptr, slope_ptr, out_ptr, stride, sharpness, width,
                     BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    z = tl.load(logits_ptr + row * stride + column, mask=ok, other=-float("inf")).to(tl.float32) * sharpness
    probability = tl.exp(z - tl.load(logsum_ptr + row))
    one = tl.where(column == tl.load(token_ptr + row), 1.0, 0.0)
    gradient = tl.load(slope_ptr + row) * sharpness * (one - probability)
    tl.store(out_ptr + row * width + column, gradient.to(out_ptr.dtype.element_ty), mask=ok)


def gradient(
    logits_CV: Tensor, token_C: Tensor, logsum_C: Tensor, slope_C: Tensor, sharpness: float, dtype: torch.dtype
) -> Tensor:
    """As `logprobs.gradient`. The logits stay as they are."""
    count, width = logits_CV.shape
    out_CV = torch.empty((count, width), dtype=dtype, device=logits_CV.device)
    if count:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _gradient_kernel[(count, triton.cdiv(width, block))](
            logits_CV, token_C, logsum_C, slope_C.contiguous(), out_CV, logits_CV.stride(0), sharpness, width,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out_CV
