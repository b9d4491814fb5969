"""Sampling as the engine uses it: keys and settings of the rows of a batch, and the drawn tokens.

Which token is drawn is defined in `tlt.kernels.sampling.reference`. Always holds: nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.sampling import noise, reference, slices
from tlt.kernels.sampling.reference import Keys, Out, Settings
from tlt.model.parallel import Alone
from tlt.types import Key, SamplingParams

# R rows (one next token each), V vocabulary


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
        """Rows of requests, given their keys, positions and sampling parameters."""

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

    @property
    def keys(self) -> Keys:
        return self.seed_R, self.request_R, self.position_R

    @property
    def settings(self) -> Settings:
        return self.temperature_R, self.top_k_R, self.top_p_R, self.log_min_p_R


def log_min_p(params: SamplingParams) -> float:
    """ln min_p ≤ 0: how far below the largest scaled logit a token may lie; −inf: off."""
    return log(params.min_p) if params.min_p else -inf


@dataclass(frozen=True)
class Sampled:
    """The drawn token of each row."""

    token_R: Tensor  # int64; −1 where the logits describe no distribution
    logprob_R: Tensor  # float32, under the distribution drawn from (temperature and filters); 0 when greedy
    policy_logprob_R: Tensor  # float32, under temperature 1 without filters

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> "Sampled":
        """Room for the results of `rows` rows, for `sample(…, out=…)`."""
        return cls(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @property
    def parts(self) -> Out:
        return self.token_R, self.logprob_R, self.policy_logprob_R


def sample(logits_RV: Tensor, rows: SamplingRows, out: Sampled | None = None, *, exact: bool = False) -> Sampled:
    """Draws one token per row. With `out`, the results are written there and `out` is returned.

    `exact`: on CUDA a row's log-probabilities too do not depend on the other rows, to the bit.
    On CUDA a fused Triton kernel runs (bf16, fp16 and fp32 logits); it can be captured in a CUDA graph.
    """
    out = out or Sampled.empty(len(logits_RV), logits_RV.device)
    in_triton = logits_RV.is_cuda and logits_RV.dtype != torch.float64
    dispatch(reference.sample, in_triton)(
        logits_RV, rows.keys, rows.settings, out.parts, filtered=rows.filtered, exact=exact
    )
    return out


def sample_slices(
    logits_Rv: Tensor, rows: SamplingRows, parallel: Alone, vocab: int, *, exact: bool = False
) -> Sampled:
    """Draws one token per row from logits of which each rank has those of its own tokens: the same on every rank.

    Filters need whole rows of logits, which the ranks then exchange; otherwise they exchange six numbers a row.
    """
    if parallel.size == 1:
        return sample(logits_Rv, rows, exact=exact)
    if rows.filtered:
        return sample(_whole_rows(logits_Rv, parallel, vocab), rows)
    out = Sampled.empty(len(logits_Rv), logits_Rv.device)
    in_triton = logits_Rv.is_cuda and logits_Rv.dtype != torch.float64
    first = parallel.tokens(vocab).start
    parts_R6 = dispatch(slices.scan, in_triton)(logits_Rv, rows.keys, rows.temperature_R, first)
    slices.join(parallel.gather(parts_R6), rows.temperature_R, out.parts)
    return out


def _whole_rows(logits_Rv: Tensor, parallel: Alone, vocab: int) -> Tensor:
    """All ranks' logits side by side. Slices may differ by a token: the shorter ones are padded for the exchange."""
    widest = -(-vocab // parallel.size)
    padded_Rv = torch.nn.functional.pad(logits_Rv, (0, widest - logits_Rv.shape[1]))
    found_nRv = parallel.gather(padded_Rv)
    sizes = [_length(parallel.tokens_of(rank, vocab)) for rank in range(parallel.size)]
    return torch.cat([found_Rv[:, :size] for found_Rv, size in zip(found_nRv, sizes, strict=True)], dim=1)


def _length(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)
