"""Log-probabilities of given tokens from rows of logits, and the way back. Torch, on any device.

What always holds: `read` and `gradient` here define what the fused kernels in `logprobs_triton` must compute. Sums are
in float32 or finer whatever the logits are; rows do not depend on each other. Knows logits, nothing of losses.
"""
# C tokens, V vocabulary

import torch
from torch import Tensor


def read(logits_CV: Tensor, token_C: Tensor, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of softmax(sharpness · logits): log-probability of each row's token, entropy, and log of the softmax's sum."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    scaled_CV = logits_CV.to(wide) * sharpness
    logsum_C = torch.logsumexp(scaled_CV, dim=-1)
    logprob_C = scaled_CV.gather(1, token_C[:, None]).squeeze(1) - logsum_C
    probability_CV = (scaled_CV - logsum_C[:, None]).exp_()
    entropy_C = logsum_C - (probability_CV * scaled_CV).sum(-1)
    return logprob_C, entropy_C, logsum_C


def gradient(
    logits_CV: Tensor, token_C: Tensor, logsum_C: Tensor, slope_C: Tensor, sharpness: float, dtype: torch.dtype
) -> Tensor:
    """Gradient by the logits of Σ slope · log-probability, in `dtype`. May be written over the logits."""
    grad_CV = logits_CV.to(logsum_C.dtype).mul_(sharpness).sub_(logsum_C[:, None]).exp_()
    slope_C1 = (slope_C * sharpness)[:, None]
    grad_CV.mul_(-slope_C1).scatter_add_(1, token_C[:, None], slope_C1)
    return grad_CV.to(dtype)
