"""Keyed sampling where each rank has the logits of a slice of the vocabulary, in torch: what a CPU runs.

`scan` reduces a slice to six numbers a row, which all ranks exchange, and `join` draws from those of all ranks: the
token is the one that `reference.sample` draws from the whole row, equals included, because noise is a function of the
token and the largest of the slices' best is the largest of all. Sums of probabilities are added slice by slice.
Always holds: equal numbers give an equal result, so that all ranks draw the same. Knows no filters: those need whole
rows. Does not know how ranks exchange numbers.
"""

import torch
from torch import Tensor

from tlt.kernels.sampling import noise
from tlt.kernels.sampling.reference import GREEDY_BELOW, Keys, Out

# R rows, v tokens of a slice, n slices

PARTS = 6  # best sum of scaled logit and noise, its token, its logit, largest logit, sums of policy and scaled softmax


def scan(logits_Rv: Tensor, keys: Keys, temperature_R: Tensor, first: int) -> Tensor:
    """The parts of a slice that begins with token `first`, [R, 6], float32 or float64 as the logits are.

    Sums are relative to the slice's largest logit, which is taken as finite. A token below 2^22 is exactly a float32.
    """
    if logits_Rv.dtype != torch.float64:
        logits_Rv = logits_Rv.float()
    greedy_R1, inverse_R1 = _scales(temperature_R)
    scaled_Rv = logits_Rv * inverse_R1
    noise_Rv = noise.gumbel(*keys, logits_Rv.shape[-1], first)
    perturbed_Rv = noise_Rv.mul_(~greedy_R1) + scaled_Rv
    at_R1 = perturbed_Rv.argmax(-1, keepdim=True)
    top_R1 = _finite(logits_Rv.amax(-1, keepdim=True))
    policy_mass_R1 = (logits_Rv - top_R1).exp().sum(-1, keepdim=True)
    mass_R1 = (scaled_Rv - _finite(top_R1 * inverse_R1)).exp().sum(-1, keepdim=True)
    best_R1, logit_R1 = perturbed_Rv.gather(-1, at_R1), logits_Rv.gather(-1, at_R1)
    token_R1 = (at_R1 + first).to(logits_Rv.dtype)
    return torch.cat((best_R1, token_R1, logit_R1, top_R1, policy_mass_R1, mass_R1), dim=-1)


def join(parts_nR6: Tensor, temperature_R: Tensor, out: Out) -> None:
    """Draws one token per row from the parts of all slices, as `reference.sample` does from whole rows."""
    best_nR, token_nR, logit_nR, top_nR, policy_mass_nR, mass_nR = parts_nR6.unbind(-1)
    greedy_R1, inverse_R1 = _scales(temperature_R)
    greedy_R, inverse_R = greedy_R1[:, 0], inverse_R1[:, 0]
    top_R = top_nR.amax(0)
    scaled_top_nR, scaled_top_R = _finite(top_nR * inverse_R), _finite(top_R * inverse_R)
    policy_mass_R = (policy_mass_nR * (top_nR - top_R).exp()).sum(0)
    mass_R = (mass_nR * (scaled_top_nR - scaled_top_R).exp()).sum(0)
    wins_nR = best_nR == best_nR.amax(0)
    slice_1R = torch.where(wins_nR, token_nR, torch.inf).argmin(0, keepdim=True)
    token_R, logit_R = (part.gather(0, slice_1R)[0] for part in (token_nR, logit_nR))
    # NaN and +inf logits turn the sums into NaN, rows of −inf leave them 0: neither is a distribution
    bad_R = ~((mass_R > 0.0) & (policy_mass_R > 0.0))
    policy_R = (logit_R - top_R) - policy_mass_R.log()
    logprob_R = ((logit_R * inverse_R - scaled_top_R) - mass_R.log()).masked_fill(greedy_R, 0.0)
    out[0].copy_(token_R.masked_fill(bad_R, -1.0))
    out[1].copy_(logprob_R.masked_fill(bad_R, torch.nan))
    out[2].copy_(policy_R.masked_fill(bad_R, torch.nan))


def _scales(temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a row is greedy, and what its logits are multiplied by."""
    greedy_R1 = (temperature_R < GREEDY_BELOW).unsqueeze(-1)
    return greedy_R1, temperature_R.unsqueeze(-1).reciprocal().masked_fill_(greedy_R1, 1.0)


def _finite(top: Tensor) -> Tensor:
    """No −inf, whose difference with itself would be NaN."""
    return top.clamp(min=torch.finfo(torch.float32).min)
