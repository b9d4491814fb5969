"""How far a drafter's distribution is from the policy's, and in which direction to go. Torch, on any device.

What always holds: `compare` here defines what the fused kernel in `distribution_triton` must compute. Sums are in
float32 or finer whatever the logits are. Knows logits; knows nothing of models or tokens.
"""
# S draft steps, C tokens, v draft vocabulary

import torch
from torch import Tensor


def compare(policy_Cv: Tensor, draft_SCv: Tensor, weight_SC: Tensor, variation: float) -> tuple[Tensor, Tensor]:
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
