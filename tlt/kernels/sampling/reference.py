"""Keyed sampling in torch: what a CPU runs, and the reference of `triton`.

    token = argmax_v( filtered_logits[v] / T + G(seed, request, position, v) )

with G the Gumbel noise of `noise`. Always holds: a row's token is a function of its logits, its key and its settings
alone: any order or split of a batch, the CPU and the GPU give the same tokens for the same logits. Does not know
requests, pages or drafts: a row is a row.

Exactly:
- T < 1e-5 is greedy: the largest logit, the lowest index among equals, no filters, logprob 0.
- Otherwise logits are multiplied by the float32 reciprocal of T, in float32 (in float64 for float64 logits).
- top-k keeps every logit ≥ the k-th largest: equals at the threshold all stay. k ≤ 0 or k ≥ V keeps all.
- top-p then keeps every logit ≥ the largest threshold whose tokens hold at least top_p of what top-k left. Probability
  is counted in whole units of 2^-40 of the likeliest token, so the sum has no rounding and no order.
- min_p keeps, of what is left, every scaled logit ≥ the largest scaled logit + ln min_p.
- The likeliest token always stays. Equal sums of logit and noise: the lowest index wins.
- −inf is a token that cannot be drawn. A row with a NaN or +inf logit, or with no finite one, has no distribution: its
  token is −1 and both of its log-probabilities are NaN.

A new filter is a line in `_sample_chunk`, the same in `triton`, a field of `SamplingParams`, and a column of the rows'
state on its way here: docs/life_of_a_tick.md lists the places.
"""

from math import inf

import torch
from torch import Tensor

from tlt.kernels.sampling import noise

# R rows (one next token each), V vocabulary

GREEDY_BELOW = 1e-5  # smaller temperatures would push float32 logits out of range
WEIGHT_UNITS = 2.0**40  # of the likeliest token's probability in top-p; V < 2^22 keeps the sum below 2^63
_CHUNK = 16_000  # logits at a time: they stay in the cache, and are too few for torch to wake its other threads

Keys = tuple[Tensor, Tensor, Tensor]  # seed, request, position of the token to be drawn: int64 [R]
Settings = tuple[Tensor, Tensor, Tensor, Tensor]  # temperature, top-k (integer), top-p, ln min-p: float32 [R]
Out = tuple[Tensor, Tensor, Tensor]  # token int64, logprob float32, policy logprob float32: [R], written


def sample(logits_RV: Tensor, keys: Keys, settings: Settings, out: Out, *, filtered: bool, exact: bool = False) -> None:
    """Draws one token per row. `filtered`: some row may use a filter.

    `exact`: on a GPU a row's log-probabilities too have the same bits whatever the other rows are; here they always do.
    """
    rows, vocab_size = logits_RV.shape
    step = max(1, _CHUNK // vocab_size)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        drawn = _sample_chunk(
            logits_RV[part],
            (keys[0][part], keys[1][part], keys[2][part]),
            (settings[0][part], settings[1][part], settings[2][part], settings[3][part]),
            filtered,
        )
        for target_R, value_R in zip(out, drawn, strict=True):
            target_R[part] = value_R


def _sample_chunk(logits_RV: Tensor, keys: Keys, settings: Settings, filtered: bool) -> Out:
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    temperature_R, top_k_R, top_p_R, log_min_p_R = settings
    greedy_R1 = (temperature_R < GREEDY_BELOW).unsqueeze(-1)
    inverse_R1 = temperature_R.unsqueeze(-1).reciprocal().masked_fill_(greedy_R1, 1.0)
    scaled_RV = logits_RV * inverse_R1
    if filtered:
        threshold_R1 = filter_thresholds(logits_RV, inverse_R1, top_k_R, top_p_R).masked_fill_(greedy_R1, -inf)
        floor_R1 = scaled_RV.amax(-1, keepdim=True) + log_min_p_R.unsqueeze(-1).masked_fill(greedy_R1, -inf)
        scaled_RV.masked_fill_((logits_RV < threshold_R1) | (scaled_RV < floor_R1), -inf)
    noise_RV = noise.gumbel(*keys, logits_RV.shape[-1])
    perturbed_RV = noise_RV.mul_(~greedy_R1) + scaled_RV
    token_R1 = perturbed_RV.argmax(-1, keepdim=True)
    policy_R1 = logits_RV.log_softmax(-1).gather(-1, token_R1).float()
    logprob_R1 = scaled_RV.log_softmax(-1).gather(-1, token_R1).float()
    sum_R1 = logprob_R1 + policy_R1
    nan_R1 = sum_R1 != sum_R1  # with any NaN or +inf, or nothing finite, the softmax has no sum
    return (
        token_R1.masked_fill_(nan_R1, -1).squeeze(-1),
        logprob_R1.masked_fill_(greedy_R1, 0.0).masked_fill_(nan_R1, float("nan")).squeeze(-1),
        policy_R1.masked_fill_(nan_R1, float("nan")).squeeze(-1),
    )


def filter_thresholds(logits_RV: Tensor, inverse_R1: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """The smallest logit that top-k and top-p leave in each row, [R, 1]; −inf where both are off."""
    vocab_size = logits_RV.shape[-1]
    sorted_RV = logits_RV.sort(-1, descending=True).values
    top_k_R1 = top_k_R.long().unsqueeze(-1)
    no_top_k_R1 = (top_k_R1 <= 0) | (top_k_R1 >= vocab_size)
    by_count_R1 = sorted_RV.gather(-1, (top_k_R1 - 1).clamp(0, vocab_size - 1))
    by_count_R1.masked_fill_(no_top_k_R1, -inf)

    scaled_RV = sorted_RV * inverse_R1
    weight_RV = noise.exp((scaled_RV - scaled_RV[:, :1]).float()).mul_(WEIGHT_UNITS).long()
    mass_RV = weight_RV.masked_fill_(sorted_RV < by_count_R1, 0).cumsum(-1).double()
    top_p_R1 = top_p_R.unsqueeze(-1)
    wanted_R1 = (mass_RV[:, -1:] * top_p_R1.double()).clamp_(min=1.0)
    last_R1 = (mass_RV < wanted_R1).sum(-1, keepdim=True).clamp_(max=vocab_size - 1)
    by_mass_R1 = sorted_RV.gather(-1, last_R1)
    return torch.where(top_p_R1 < 1.0, by_mass_R1, by_count_R1)
