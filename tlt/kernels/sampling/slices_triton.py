"""Keyed sampling over a slice of the vocabulary, in Triton: `slices.scan` by the kernel that scans whole rows.

Always holds: noise and tokens are bit-equal to the torch path, as in `triton`; nothing waits for the device, and all
launches can be captured in a CUDA graph.
"""

# R rows, v tokens of a slice, S splits of it, one program each

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.sampling import noise
from tlt.kernels.sampling.reference import GREEDY_BELOW, Keys
from tlt.kernels.sampling.slices import PARTS
from tlt.kernels.sampling.triton import COUNTERS, _inverse_temperature, _scan, _tiles

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["splits"])
def _reduce(
    logits_ptr, row_stride, temperature_ptr, best_ptr, token_ptr, top_ptr, mass_ptr, policy_mass_ptr, parts_ptr, splits,
    S: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, mask = row * splits + tl.arange(0, S), tl.arange(0, S) < splits
    best = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
    top = tl.load(top_ptr + at, mask=mask, other=_LOWEST)
    mass = tl.load(mass_ptr + at, mask=mask, other=0.0)
    policy_mass = tl.load(policy_mass_ptr + at, mask=mask, other=0.0)
    token = tl.load(token_ptr + at, mask=mask, other=_NO_TOKEN)
    inverse = _inverse_temperature(tl.load(temperature_ptr + row), GREEDY_BELOW)

    row_best, row_top = tl.max(best), tl.max(top)
    scaled_top, row_scaled_top = tl.maximum(top * inverse, _LOWEST), tl.maximum(row_top * inverse, _LOWEST)
    token = tl.min(tl.where(best == row_best, token, _NO_TOKEN))
    there = token < _NO_TOKEN  # else every logit of the slice is −inf, or NaN
    x = tl.load(logits_ptr + row * row_stride + tl.where(there, token - FIRST, 0)).to(tl.float32)
    parts_ptr += row * PARTS
    tl.store(parts_ptr, row_best)
    tl.store(parts_ptr + 1, token.to(tl.float32))
    tl.store(parts_ptr + 2, x)
    tl.store(parts_ptr + 3, row_top)
    tl.store(parts_ptr + 4, tl.sum(policy_mass * tl.exp(top - row_top)))
    tl.store(parts_ptr + 5, tl.sum(mass * tl.exp(scaled_top - row_scaled_top)))


def scan(logits_Rv: Tensor, keys: Keys, temperature_R: Tensor, first: int) -> Tensor:
    """`slices.scan` in two launches, float32."""
    rows, count = logits_Rv.shape
    partial_4RS, token_RS, splits, tiles = _room(rows, count, first, logits_Rv.device)
    best_RS, top_RS, mass_RS, policy_mass_RS = partial_4RS.unbind()
    parts_R6 = torch.empty((rows, PARTS), dtype=torch.float32, device=logits_Rv.device)
    _scan[(rows, splits)](
        logits_Rv, logits_Rv.stride(0), first + count, *keys, temperature_R,
        token_RS, token_RS, token_RS, token_RS, token_RS,  # of filters: never read
        best_RS, token_RS, top_RS, mass_RS, policy_mass_RS,
        C=COUNTERS, TILES=tiles, FILTERED=False, SELECT_DIGITS=1, GREEDY_BELOW=GREEDY_BELOW, FIRST=first,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _reduce[(rows,)](
        logits_Rv, logits_Rv.stride(0), temperature_R,
        best_RS, token_RS, top_RS, mass_RS, policy_mass_RS, parts_R6, splits,
        S=triton.next_power_of_2(splits), FIRST=first, PARTS=PARTS, GREEDY_BELOW=GREEDY_BELOW,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return parts_R6


def _room(rows: int, count: int, first: int, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """For what each split finds; the splits of a row, and the tiles of a split."""
    row_tiles = triton.cdiv(first % noise.BLOCK_TOKENS + count, COUNTERS * noise.LANES)
    tiles = _tiles(rows * row_tiles)
    splits = triton.cdiv(row_tiles, tiles)
    partial_4RS = torch.empty((4, rows, splits), dtype=torch.float32, device=device)
    return partial_4RS, torch.empty((rows, splits), dtype=torch.int32, device=device), splits, tiles
