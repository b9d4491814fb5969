"""Keyed sampling in Triton, fused over the vocabulary: noise, argmax and both softmax sums in one read of the logits.

Always holds: tokens and noise are bit-equal to the torch path (`noise.py`, `reference.py`), because both use the
same IEEE additions and multiplications in the same order; every launch therefore sets `enable_fp_fusion=False`, or the
compiler would fuse them. Sums of probabilities are only close. No noise or probability tensor is ever stored, nothing
waits for the device, and with `out` tensors given every launch can be captured in a CUDA graph.
Does not know requests or SamplingParams: rows come as tensors.

Plain: `scan` (rows × vocabulary splits) leaves one partial result per split, `combine` (rows) joins them.
Filtered: the top-k and top-p thresholds are found first, by exact radix selection on the float bit patterns: each
`select` pass over the row (which stays in L2) settles the next 4 bits by counting tokens, or their probability in whole
units, at or above 16 pivots. Integer sums have no order, so thresholds too are equal on every device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.sampling import noise
from tlt.kernels.sampling.noise_triton import exp, first_token, gumbel_lanes
from tlt.kernels.sampling.reference import GREEDY_BELOW, WEIGHT_UNITS, Keys, Out, Settings

# R rows, V vocabulary, S splits of the vocabulary, one program each

COUNTERS = 512  # Philox counters per tile: 2,048 tokens, 16 per thread at 4 warps
PROGRAMS = 2048  # wanted at least: some 16 for each of an H200's 132 processors keep the last wave short
MOST_TILES = 8  # per program
SELECT_TOKENS = 4096  # per program of a select pass
DIGITS = 8  # hexadecimal digits of a float32

_LANE_TOKENS, _WORD = tl.constexpr(noise.LANE_TOKENS), tl.constexpr(noise.WORD)
_BLOCK_TOKENS = tl.constexpr(noise.BLOCK_TOKENS)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a finite start for running maxima: no −inf − −inf
_NO_TOKEN = tl.constexpr(2**31 - 1)
_DIGITS = tl.constexpr(DIGITS)


@triton.jit
def _inverse_temperature(temperature, GREEDY_BELOW: tl.constexpr):
    return tl.where(temperature < GREEDY_BELOW, 1.0, tl.div_rn(1.0, temperature))


@triton.jit
def _better(best, best_token, value, token):
    # Tokens of one slot come in rising order: strictly greater keeps the lowest of equals.
    wins = value > best
    return tl.where(wins, value, best), tl.where(wins, token, best_token)


@triton.jit
def _rescaled_sum(total, old_top, top, x0, x1, x2, x3):
    return total * tl.exp(old_top - top) + (
        (tl.exp(x0 - top) + tl.exp(x1 - top)) + (tl.exp(x2 - top) + tl.exp(x3 - top))
    )


@triton.jit
def _load_logits(row_ptr, token, V, FIRST: tl.constexpr = 0):
    mask = token < V
    if FIRST:
        mask = mask & (token >= FIRST)
    return tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _laid_out_like(counter, x):
    # Adds nothing: no x is above +inf. Triton sees a counter that depends on loaded logits and computes the noise in
    # their register layout (otherwise every tile goes through shared memory); LLVM then removes the comparison.
    return counter + (x > float("inf")).to(tl.int32)


@triton.jit
def _scaled(x, inverse, threshold, floor, FILTERED: tl.constexpr):
    scaled = x * inverse
    if FILTERED:
        scaled = tl.where((x < threshold) | (scaled < floor), float("-inf"), scaled)
    return scaled


@triton.jit
def _scan(
    logits_ptr, row_stride, V,
    seed_ptr, request_ptr, position_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, row_top_ptr, sums_ptr,
    best_ptr, token_ptr, top_ptr, mass_ptr, policy_mass_ptr,
    C: tl.constexpr, TILES: tl.constexpr,
    FILTERED: tl.constexpr, SELECT_DIGITS: tl.constexpr, GREEDY_BELOW: tl.constexpr,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    # The row's logits are those of tokens FIRST … V − 1.
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * row_stride - FIRST
    seed, request, position = tl.load(seed_ptr + row), tl.load(request_ptr + row), tl.load(position_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < GREEDY_BELOW
    inverse = _inverse_temperature(temperature, GREEDY_BELOW)
    threshold, floor = float("-inf"), float("-inf")
    if FILTERED:
        if not greedy:
            threshold = _threshold(sums_ptr, row, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), V, SELECT_DIGITS)
            floor = _row_top(row_top_ptr + row) * inverse + tl.load(log_min_p_ptr + row)

    # One slot per counter: everything below runs per slot and meets only after the loop.
    best = tl.full((C,), float("-inf"), tl.float32)
    best_token = tl.full((C,), _NO_TOKEN, tl.int32)
    top = tl.full((C,), _LOWEST, tl.float32)
    mass = tl.zeros((C,), tl.float32)
    policy_mass = tl.zeros((C,), tl.float32)
    for tile in range(TILES):
        counter = FIRST // _BLOCK_TOKENS * _LANE_TOKENS + (split * TILES + tile) * C + tl.arange(0, C)
        t0 = first_token(counter)
        t1, t2, t3 = t0 + _LANE_TOKENS, t0 + 2 * _LANE_TOKENS, t0 + 3 * _LANE_TOKENS
        x0, x1 = _load_logits(logits_ptr, t0, V, FIRST), _load_logits(logits_ptr, t1, V, FIRST)
        x2, x3 = _load_logits(logits_ptr, t2, V, FIRST), _load_logits(logits_ptr, t3, V, FIRST)

        new_top = tl.maximum(top, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
        policy_mass = _rescaled_sum(policy_mass, top, new_top, x0, x1, x2, x3)
        s0, s1 = _scaled(x0, inverse, threshold, floor, FILTERED), _scaled(x1, inverse, threshold, floor, FILTERED)
        s2, s3 = _scaled(x2, inverse, threshold, floor, FILTERED), _scaled(x3, inverse, threshold, floor, FILTERED)
        if FILTERED or inverse != 1.0:
            # scaling is monotone: the top of the scaled logits is the scaled top
            old_scaled_top, scaled_top = tl.maximum(top * inverse, _LOWEST), tl.maximum(new_top * inverse, _LOWEST)
            mass = _rescaled_sum(mass, old_scaled_top, scaled_top, s0, s1, s2, s3)
        top = new_top

        if not greedy:
            g0, g1, g2, g3 = gumbel_lanes(seed, request, position, _laid_out_like(counter, x0).to(tl.uint32))
            s0, s1, s2, s3 = g0 + s0, g1 + s1, g2 + s2, g3 + s3
        best, best_token = _better(best, best_token, s0, t0)
        best, best_token = _better(best, best_token, s1, t1)
        best, best_token = _better(best, best_token, s2, t2)
        best, best_token = _better(best, best_token, s3, t3)
    if not FILTERED:
        mass = tl.where(inverse == 1.0, policy_mass, mass)

    at = row * tl.num_programs(1) + split
    row_best, row_top = tl.max(best), tl.max(top)
    tl.store(best_ptr + at, row_best)
    tl.store(token_ptr + at, tl.min(tl.where(best == row_best, best_token, _NO_TOKEN)))
    tl.store(top_ptr + at, row_top)
    tl.store(policy_mass_ptr + at, tl.sum(policy_mass * tl.exp(top - row_top)))
    scaled_top, row_scaled_top = tl.maximum(top * inverse, _LOWEST), tl.maximum(row_top * inverse, _LOWEST)
    tl.store(mass_ptr + at, tl.sum(mass * tl.exp(scaled_top - row_scaled_top)))


@triton.jit(do_not_specialize=["splits"])
def _combine(
    logits_ptr, row_stride, V, temperature_ptr,
    best_ptr, token_ptr, top_ptr, mass_ptr, policy_mass_ptr,
    out_token_ptr, out_logprob_ptr, out_policy_ptr, splits,
    S: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, mask = row * splits + tl.arange(0, S), tl.arange(0, S) < splits
    best = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
    top = tl.load(top_ptr + at, mask=mask, other=_LOWEST)
    mass = tl.load(mass_ptr + at, mask=mask, other=0.0)
    policy_mass = tl.load(policy_mass_ptr + at, mask=mask, other=0.0)
    token = tl.load(token_ptr + at, mask=mask, other=_NO_TOKEN)
    temperature = tl.load(temperature_ptr + row)
    inverse = _inverse_temperature(temperature, GREEDY_BELOW)

    row_top = tl.max(top)
    scaled_top, row_scaled_top = tl.maximum(top * inverse, _LOWEST), tl.maximum(row_top * inverse, _LOWEST)
    policy_mass = tl.sum(policy_mass * tl.exp(top - row_top))
    mass = tl.sum(mass * tl.exp(scaled_top - row_scaled_top))
    token = tl.min(tl.where(best == tl.max(best), token, _NO_TOKEN))
    # NaN and +inf logits turn the sums into NaN, a row of −inf leaves them 0: neither is a distribution
    ok = (mass > 0.0) & (policy_mass > 0.0) & (token < V)
    token = tl.where(ok, token, 0)
    x = tl.load(logits_ptr + row * row_stride + token).to(tl.float32)
    policy = (x - row_top) - tl.log(policy_mass)
    logprob = tl.where(temperature < GREEDY_BELOW, 0.0, (x * inverse - row_scaled_top) - tl.log(mass))
    tl.store(out_token_ptr + row, tl.where(ok, token, -1).to(tl.int64))
    tl.store(out_logprob_ptr + row, tl.where(ok, logprob, float("nan")))
    tl.store(out_policy_ptr + row, tl.where(ok, policy, float("nan")))


# Filters. sums_ptr holds int64 [R, 2, DIGITS, 16]: for top-k (0) and top-p (1), for each digit, how much lies at or
# above each of its 16 values among the tokens that share the digits before it. Everything else (digit, prefix,
# threshold) is derived from these sums where it is needed.


@triton.jit
def _ordered(x):
    """float32 as uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ _WORD, bits | 0x80000000)


@triton.jit
def _prefix(sums_ptr, wanted, passes, SELECT_DIGITS: tl.constexpr):
    """The first `passes` digits of the largest pattern at or above which `wanted` still lies."""
    digit = tl.arange(0, 16)
    prefix = tl.full((), 0, tl.uint32)
    above = tl.full((), 0, tl.int64)  # what lies above every pattern with this prefix
    for k in tl.static_range(SELECT_DIGITS):
        amount = tl.load(sums_ptr + k * 16 + digit)
        reached = ((amount + above).to(tl.float64) >= wanted) & (digit > 0) & (k < passes)
        settled = tl.sum(reached.to(tl.int32))
        above += tl.sum(tl.where((digit == settled + 1) & (k < passes), amount, 0))
        prefix = prefix | (settled.to(tl.uint32) << (28 - 4 * k))
    return prefix


@triton.jit
def _filters_by_count(top_k, V):
    return (top_k > 0) & (top_k < V)


@triton.jit
def _wanted_mass(mass_sums_ptr, top_p):
    return tl.maximum(tl.load(mass_sums_ptr).to(tl.float64) * top_p.to(tl.float64), 1.0)


@triton.jit
def _as_threshold(prefix):
    bits = tl.where((prefix >> 31) == 1, prefix ^ 0x80000000, prefix ^ _WORD)
    value = bits.to(tl.float32, bitcast=True)
    # With bf16 only four digits are settled, and −inf with ones in the low half reads as NaN.
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _count_threshold(sums_ptr, row, top_k, V, SELECT_DIGITS: tl.constexpr):
    prefix = _prefix(sums_ptr + row * (2 * _DIGITS * 16), top_k.to(tl.float64), SELECT_DIGITS, SELECT_DIGITS)
    return tl.where(_filters_by_count(top_k, V), _as_threshold(prefix), float("-inf"))


@triton.jit
def _threshold(sums_ptr, row, top_k, top_p, V, SELECT_DIGITS: tl.constexpr):
    mass_sums_ptr = sums_ptr + (row * 2 + 1) * (_DIGITS * 16)
    wanted = _wanted_mass(mass_sums_ptr, top_p)
    by_mass = _as_threshold(_prefix(mass_sums_ptr, wanted, SELECT_DIGITS, SELECT_DIGITS))
    return tl.where(top_p < 1.0, by_mass, _count_threshold(sums_ptr, row, top_k, V, SELECT_DIGITS))


@triton.jit
def _row_tops(logits_ptr, row_stride, V, top_ptr, TOKENS: tl.constexpr):
    """The largest logit of each row, as an ordered int32 so that an integer atomic can find it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * TOKENS + tl.arange(0, TOKENS)
    x = _load_logits(logits_ptr + row * row_stride, token, V)
    tl.atomic_max(top_ptr + row, (tl.max(_ordered(x)) ^ 0x80000000).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _row_top(top_ptr):
    return _as_threshold(tl.load(top_ptr).to(tl.uint32, bitcast=True) ^ 0x80000000)


@triton.jit(do_not_specialize=["passes"])
def _select(
    logits_ptr, row_stride, V, temperature_ptr, top_k_ptr, top_p_ptr, top_ptr, sums_ptr, passes,
    BY_MASS: tl.constexpr, SELECT_DIGITS: tl.constexpr, TOKENS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr, WEIGHT_UNITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if temperature < GREEDY_BELOW:
        return
    if BY_MASS:
        if top_p >= 1.0:
            return
    else:
        if not _filters_by_count(top_k, V):
            return
    own_sums_ptr = sums_ptr + (row * 2 + BY_MASS) * (_DIGITS * 16)
    if BY_MASS:
        wanted = _wanted_mass(own_sums_ptr, top_p)
    else:
        wanted = top_k.to(tl.float64)
    prefix = _prefix(own_sums_ptr, wanted, passes, SELECT_DIGITS)
    shift = (28 - 4 * passes).to(tl.uint32)
    token = split * TOKENS + tl.arange(0, TOKENS)
    x = _load_logits(logits_ptr + row * row_stride, token, V)
    digit = (_ordered(x) ^ prefix) >> shift  # 16 and more: another prefix
    if tl.min(digit) >= 16:
        return
    if BY_MASS:
        inverse = _inverse_temperature(temperature, GREEDY_BELOW)
        top = _row_top(top_ptr + row)
        weight = (exp(x * inverse - top * inverse) * WEIGHT_UNITS).to(tl.int64)
        weight = tl.where(x < _count_threshold(sums_ptr, row, top_k, V, SELECT_DIGITS), 0, weight)
    else:
        weight = (token < V).to(tl.int32)
    weight = tl.where(digit < 16, weight, 0)
    for d in tl.static_range(16):
        amount = tl.sum(tl.where(digit >= d, weight, 0))
        tl.atomic_add(own_sums_ptr + passes * 16 + d, amount.to(tl.int64), sem="relaxed")


def sample(
    logits_RV: Tensor,
    keys: Keys,
    settings: Settings,
    out: Out,
    *,
    filtered: bool,
    exact: bool = False,
    counters: int = COUNTERS,
    tiles: int | None = None,
    warps: int = 4,
) -> None:
    """`reference.sample` in two launches (plain) or some more (filtered). The last three are for benchmarks.

    Exact: a row's log-probabilities too are the same bit for bit in any company: the vocabulary is always cut alike,
    and rows without filters go through the kernel of those with, where their thresholds are −inf.
    """
    _check(logits_RV, keys + settings + out)
    rows, vocab_size = logits_RV.shape
    if rows == 0:
        return
    row_tiles = triton.cdiv(vocab_size, counters * noise.LANES)
    tiles = tiles or (1 if exact else _tiles(rows * row_tiles))
    splits = triton.cdiv(row_tiles, tiles)
    partial_4RS = torch.empty((4, rows, splits), dtype=torch.float32, device=logits_RV.device)
    token_RS = torch.empty((rows, splits), dtype=torch.int32, device=logits_RV.device)
    best_RS, top_RS, mass_RS, policy_mass_RS = partial_4RS.unbind()
    temperature_R = settings[0]
    digits = _digits(logits_RV.dtype)
    sums = row_top_R = token_RS  # never read unless filtered
    if filtered:
        sums, row_top_R = _select_sums(logits_RV, settings, digits)
    elif exact:
        sums = torch.zeros((rows, 2, DIGITS, 16), dtype=torch.int64, device=logits_RV.device)
        row_top_R = torch.zeros(rows, dtype=torch.int32, device=logits_RV.device)  # 0: ln min-p is −inf in every row
    _scan[(rows, splits)](
        logits_RV, logits_RV.stride(0), vocab_size, *keys, *settings, row_top_R, sums,
        best_RS, token_RS, top_RS, mass_RS, policy_mass_RS,
        C=counters, TILES=tiles, FILTERED=filtered or exact, SELECT_DIGITS=digits, GREEDY_BELOW=GREEDY_BELOW,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    _combine[(rows,)](
        logits_RV, logits_RV.stride(0), vocab_size, temperature_R,
        best_RS, token_RS, top_RS, mass_RS, policy_mass_RS, *out, splits,
        S=triton.next_power_of_2(splits), GREEDY_BELOW=GREEDY_BELOW,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _select_sums(logits_RV: Tensor, settings: Settings, digits: int) -> tuple[Tensor, Tensor]:
    """The sums from which every row's threshold is read, int64 [R, 2, DIGITS, 16]; and its largest logit, ordered."""
    rows, vocab_size = logits_RV.shape
    sums = torch.zeros((rows, 2, DIGITS, 16), dtype=torch.int64, device=logits_RV.device)
    top_R = torch.full((rows,), torch.iinfo(torch.int32).min, dtype=torch.int32, device=logits_RV.device)
    grid = (rows, triton.cdiv(vocab_size, SELECT_TOKENS))
    _row_tops[grid](logits_RV, logits_RV.stride(0), vocab_size, top_R, TOKENS=SELECT_TOKENS)
    for by_mass in (False, True):
        for passes in range(digits):
            _select[grid](
                logits_RV, logits_RV.stride(0), vocab_size, *settings[:3], top_R, sums, passes,
                BY_MASS=by_mass, SELECT_DIGITS=digits, TOKENS=SELECT_TOKENS,
                GREEDY_BELOW=GREEDY_BELOW, WEIGHT_UNITS=WEIGHT_UNITS, enable_fp_fusion=False,
            )  # fmt: skip
    return sums, top_R


def _tiles(total: int) -> int:
    """Tiles per program: a power of two, so that few kernels are ever compiled."""
    tiles = 1
    while tiles < MOST_TILES and total // (2 * tiles) >= PROGRAMS:
        tiles *= 2
    return tiles


def _digits(dtype: torch.dtype) -> int:
    """Hexadecimal digits of the float32 pattern that can differ between two logits."""
    return 4 if dtype == torch.bfloat16 else DIGITS


def _check(logits_RV: Tensor, row_tensors: tuple[Tensor, ...]) -> None:
    if logits_RV.dtype not in (torch.bfloat16, torch.float16, torch.float32) or logits_RV.stride(1) != 1:
        raise ValueError(
            f"logits are {logits_RV.dtype} with strides {logits_RV.stride()}; expected bfloat16, float16 or float32 "
            "with the vocabulary contiguous; call .contiguous() or convert them first"
        )
    for tensor in row_tensors:
        if tensor.shape != logits_RV.shape[:1] or not tensor.is_contiguous():
            raise ValueError(
                f"a row tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected one contiguous "
                f"entry for each of the {logits_RV.shape[0]} rows of logits"
            )
