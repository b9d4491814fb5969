"""Row-wise layers and losses of a training pass, in torch: what a CPU runs, and the reference of `triton`.

Always holds: the functions here define what the fused ones compute, forward and backward. Layers are differentiated by
autograd; losses come with their gradient by the logits. Sums are in float32 or finer whatever the logits are; rows do
not depend on each other. Knows rows, heads and logits; knows nothing of weights' names, models or tokens' meaning.
"""
# T tokens, N width of a fused row of queries, keys and values, R = half a head, P positions; C tokens of a loss,
# V vocabulary, S draft steps, v draft vocabulary

import torch
from torch import Tensor

from tlt.kernels.linear import elementwise

# ---- norm and gate


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return elementwise.rms_norm(x_TD, weight_D, eps)


def silu_mul(gate_up_TN: Tensor) -> Tensor:
    return elementwise.silu_mul(gate_up_TN)


# ---- queries and keys


def split_and_rotate(
    qkv_TN: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor, query: int, kv: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [T, heads, dim], queries and keys turned by their positions' angles."""
    q, k, v = torch.split(qkv_TN.view(len(qkv_TN), -1, dim), [query, kv, kv], dim=1)
    return rotate_heads(q, k, v, cos_PR, sin_PR, position_T)


def rotate_heads(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where queries and keys were split already, as when their heads were normed in between."""
    cos_T1R, sin_T1R = cos_PR[position_T][:, None, :], sin_PR[position_T][:, None, :]
    return _rotate(q_THd, cos_T1R, sin_T1R), _rotate(k_THd, cos_T1R, sin_T1R), v_THd


def _rotate(x_THd: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    wide = torch.promote_types(x_THd.dtype, torch.float32)
    first, second = x_THd.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1).to(x_THd.dtype)


# ---- log-probabilities of given tokens


def read_logprobs(logits_CV: Tensor, token_C: Tensor, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of softmax(sharpness · logits): log-probability of each row's token, entropy, and log of the softmax's sum."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    scaled_CV = logits_CV.to(wide) * sharpness
    logsum_C = torch.logsumexp(scaled_CV, dim=-1)
    logprob_C = scaled_CV.gather(1, token_C[:, None]).squeeze(1) - logsum_C
    probability_CV = (scaled_CV - logsum_C[:, None]).exp_()
    entropy_C = logsum_C - (probability_CV * scaled_CV).sum(-1)
    return logprob_C, entropy_C, logsum_C


def logprobs_gradient(
    logits_CV: Tensor, token_C: Tensor, logsum_C: Tensor, slope_C: Tensor, sharpness: float, dtype: torch.dtype
) -> Tensor:
    """Gradient by the logits of Σ slope · log-probability, in `dtype`. May be written over the logits."""
    grad_CV = logits_CV.to(logsum_C.dtype).mul_(sharpness).sub_(logsum_C[:, None]).exp_()
    slope_C1 = (slope_C * sharpness)[:, None]
    grad_CV.mul_(-slope_C1).scatter_add_(1, token_C[:, None], slope_C1)
    return grad_CV.to(dtype)


# ---- a drafter's distribution against the policy's


def compare_distributions(
    policy_Cv: Tensor, draft_SCv: Tensor, weight_SC: Tensor, variation: float
) -> tuple[Tensor, Tensor]:
    """Σ weight · [(1 − variation) · −Σ p log q + variation · ½ Σ |p − q|] and its gradient by the drafter's logits.

    p and q are the softmaxes of the policy's and the drafter's logits; every draft step is compared with the same p.
    The gradient has the logits' type and may lie in their memory.
    """
    wide = weight_SC.dtype
    p_Cv = torch.softmax(policy_Cv, dim=-1, dtype=wide)
    logq_SCv = torch.log_softmax(draft_SCv, dim=-1, dtype=wide)
    entropy_SC = -torch.einsum("cv,scv->sc", p_Cv, logq_SCv)
    q_SCv = logq_SCv.exp_()
    above_SCv = (q_SCv > p_Cv).to(wide)
    q_above_SC = torch.einsum("scv,scv->sc", q_SCv, above_SCv)
    p_above_SC = torch.einsum("cv,scv->sc", p_Cv, above_SCv)
    # Σ |p − q| / 2 is what q has above p; its slope is q · (above − q's mass above)
    loss_SC = (1 - variation) * entropy_SC + variation * (q_above_SC - p_above_SC)
    slope_SCv = above_SCv.sub_(q_above_SC[:, :, None]).mul_(variation).add_(1 - variation)
    grad_SCv = q_SCv.mul_(slope_SCv).sub_(p_Cv, alpha=1 - variation).mul_(weight_SC[:, :, None])
    return (weight_SC * loss_SC).sum(), grad_SCv.to(draft_SCv.dtype)
