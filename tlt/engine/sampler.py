"""Keyed sampling: which token comes next, and how probable it was.

    token = argmax_v( filtered_logits[v] / T + G(seed, request, position, v) )

with G the Gumbel noise of tlt.kernels.sampling.noise.

Always holds: a row's token is a function of its logits, its key and its settings alone: any order or split of a batch,
the CPU and the GPU give the same tokens for the same logits. Nothing here waits for the device.
Does not know requests, pages or drafts: a row is a row.

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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from tlt.kernels.sampling import noise
from tlt.types import Key, SamplingParams

# R rows (one next token each), V vocabulary

GREEDY_BELOW = 1e-5  # smaller temperatures would push float32 logits out of range
WEIGHT_UNITS = 2.0**40  # what the likeliest token weighs in top-p; V < 2^22 keeps the sum below 2^63
_CHUNK = 16_000  # logits at a time on the torch path: in cache, and too few for torch to wake its other threads


@dataclass(frozen=True)
class SamplingRows:
    """Key and settings of each row, on the device of the logits."""

    seed_R: Tensor  # int64
    request_R: Tensor  # int64
    position_R: Tensor  # int64, of the token to be drawn, below 2^32
    temperature_R: Tensor  # float32
    top_k_R: Tensor  # int64; ≤ 0 is off
    top_p_R: Tensor  # float32 in (0, 1]; 1 is off
    log_min_p_R: Tensor  # float32, ln min_p ≤ 0; −inf is off
    filtered: bool  # whether any row may use a filter; known on the host, so choosing the path needs no sync

    @classmethod
    def of(
        cls,
        keys: Sequence[Key],
        positions: Sequence[int],
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
    ) -> "SamplingRows":
        """Rows from the requests' own words."""

        def on_device(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            seed_R=on_device([noise.as_int64(key.seed) for key in keys], torch.int64),
            request_R=on_device([noise.as_int64(key.request) for key in keys], torch.int64),
            position_R=on_device(list(positions), torch.int64),
            temperature_R=on_device([p.temperature for p in params], torch.float32),
            top_k_R=on_device([p.top_k for p in params], torch.int64),
            top_p_R=on_device([p.top_p for p in params], torch.float32),
            log_min_p_R=on_device([log_min_p(p) for p in params], torch.float32),
            filtered=any(p.filtered for p in params),
        )

    def slice(self, start: int, stop: int) -> "SamplingRows":
        """Rows start … stop − 1, as views."""
        return SamplingRows(
            self.seed_R[start:stop],
            self.request_R[start:stop],
            self.position_R[start:stop],
            self.temperature_R[start:stop],
            self.top_k_R[start:stop],
            self.top_p_R[start:stop],
            self.log_min_p_R[start:stop],
            self.filtered,
        )


def log_min_p(params: SamplingParams) -> float:
    """As rows hold it: how far below the largest scaled logit a token may lie, as a number ≤ 0."""
    return log(params.min_p) if params.min_p else -inf


@dataclass(frozen=True)
class Sampled:
    """The drawn token of each row."""

    token_R: Tensor  # int64; −1 where the logits describe no distribution
    logprob_R: Tensor  # float32, under the distribution drawn from (temperature and filters); 0 when greedy
    policy_logprob_R: Tensor  # float32, under temperature 1 without filters

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> "Sampled":
        """Room for the answers of `rows` rows, for `sample(…, out=…)`."""
        return cls(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


def sample(logits_RV: Tensor, rows: SamplingRows, out: Sampled | None = None, *, exact: bool = False) -> Sampled:
    """Draws one token per row. With `out`, the answers are written there and `out` is returned.

    `exact`: on CUDA a row's log-probabilities too do not depend on the other rows, to the bit.
    On CUDA a fused Triton kernel runs (bf16, fp16 and fp32 logits); it can be captured in a CUDA graph.
    """
    if logits_RV.is_cuda and logits_RV.dtype != torch.float64:
        return _sample_fused(logits_RV, rows, out, exact)
    sampled = _sample_torch(logits_RV, rows)
    if out is None:
        return sampled
    out.token_R.copy_(sampled.token_R)
    out.logprob_R.copy_(sampled.logprob_R)
    out.policy_logprob_R.copy_(sampled.policy_logprob_R)
    return out


def _sample_fused(logits_RV: Tensor, rows: SamplingRows, out: Sampled | None, exact: bool = False) -> Sampled:
    from tlt.kernels.sampling import triton as sampling_triton  # only where there is a GPU is there sure to be a Triton

    out = out or Sampled.empty(logits_RV.shape[0], logits_RV.device)
    sampling_triton.sample(
        logits_RV,
        (rows.seed_R, rows.request_R, rows.position_R),
        (rows.temperature_R, rows.top_k_R, rows.top_p_R, rows.log_min_p_R),
        (out.token_R, out.logprob_R, out.policy_logprob_R),
        filtered=rows.filtered,
        greedy_below=GREEDY_BELOW,
        weight_units=WEIGHT_UNITS,
        exact=exact,
    )
    return out


def _sample_torch(logits_RV: Tensor, rows: SamplingRows) -> Sampled:
    row_count, vocab_size = logits_RV.shape
    step = max(1, _CHUNK // vocab_size)
    if row_count <= step:
        return _sample_chunk(logits_RV, rows)
    chunks = [
        _sample_chunk(logits_RV[start : start + step], rows.slice(start, start + step))
        for start in range(0, row_count, step)
    ]
    return Sampled(
        torch.cat([chunk.token_R for chunk in chunks]),
        torch.cat([chunk.logprob_R for chunk in chunks]),
        torch.cat([chunk.policy_logprob_R for chunk in chunks]),
    )


def _sample_chunk(logits_RV: Tensor, rows: SamplingRows) -> Sampled:
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    greedy_R1 = (rows.temperature_R < GREEDY_BELOW).unsqueeze(-1)
    inverse_R1 = rows.temperature_R.unsqueeze(-1).reciprocal().masked_fill_(greedy_R1, 1.0)
    scaled_RV = logits_RV * inverse_R1
    if rows.filtered:
        threshold_R1 = filter_thresholds(logits_RV, inverse_R1, rows).masked_fill_(greedy_R1, float("-inf"))
        floor_R1 = scaled_RV.amax(-1, keepdim=True) + rows.log_min_p_R.unsqueeze(-1).masked_fill(greedy_R1, -inf)
        scaled_RV.masked_fill_((logits_RV < threshold_R1) | (scaled_RV < floor_R1), -inf)
    noise_RV = noise.gumbel(rows.seed_R, rows.request_R, rows.position_R, logits_RV.shape[-1])
    perturbed_RV = noise_RV.mul_(~greedy_R1) + scaled_RV
    token_R1 = perturbed_RV.argmax(-1, keepdim=True)
    policy_R1 = logits_RV.log_softmax(-1).gather(-1, token_R1).float()
    logprob_R1 = scaled_RV.log_softmax(-1).gather(-1, token_R1).float()
    sum_R1 = logprob_R1 + policy_R1
    nan_R1 = sum_R1 != sum_R1  # any NaN or +inf, or nothing finite: the softmax has no sum and says so here
    return Sampled(
        token_R1.masked_fill_(nan_R1, -1).squeeze(-1),
        logprob_R1.masked_fill_(greedy_R1, 0.0).masked_fill_(nan_R1, float("nan")).squeeze(-1),
        policy_R1.masked_fill_(nan_R1, float("nan")).squeeze(-1),
    )


def filter_thresholds(logits_RV: Tensor, inverse_R1: Tensor, rows: SamplingRows) -> Tensor:
    """The smallest logit that top-k and top-p leave in each row, [R, 1]; −inf where both are off."""
    vocab_size = logits_RV.shape[-1]
    sorted_RV = logits_RV.sort(-1, descending=True).values
    top_k_R1 = rows.top_k_R.long().unsqueeze(-1)
    no_top_k_R1 = (top_k_R1 <= 0) | (top_k_R1 >= vocab_size)
    by_count_R1 = sorted_RV.gather(-1, (top_k_R1 - 1).clamp(0, vocab_size - 1))
    by_count_R1.masked_fill_(no_top_k_R1, float("-inf"))

    scaled_RV = sorted_RV * inverse_R1
    weight_RV = noise.exp((scaled_RV - scaled_RV[:, :1]).float()).mul_(WEIGHT_UNITS).long()
    mass_RV = weight_RV.masked_fill_(sorted_RV < by_count_R1, 0).cumsum(-1).double()
    top_p_R1 = rows.top_p_R.unsqueeze(-1)
    wanted_R1 = (mass_RV[:, -1:] * top_p_R1.double()).clamp_(min=1.0)
    last_R1 = (mass_RV < wanted_R1).sum(-1, keepdim=True).clamp_(max=vocab_size - 1)
    by_mass_R1 = sorted_RV.gather(-1, last_R1)
    return torch.where(top_p_R1 < 1.0, by_mass_R1, by_count_R1)
