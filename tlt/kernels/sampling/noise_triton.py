"""Keyed Gumbel noise in Triton: device functions for any kernel that perturbs logits, and a table of them for drafters.

Always holds: bit-equal to `noise.py`, if the kernel that calls them is launched with `enable_fp_fusion=False`: the same
IEEE additions and multiplications in the same order. Otherwise the compiler fuses them and tokens differ now and then.
Does not know logits, temperatures or filters. `noise.py` says what the key is and why it is computed like this.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.sampling import noise

# R rows, N tokens asked for

_LANE_TOKENS = tl.constexpr(noise.LANE_TOKENS)
_BLOCK_TOKENS = tl.constexpr(noise.BLOCK_TOKENS)
_ROUNDS, _WORD = tl.constexpr(noise.ROUNDS), tl.constexpr(noise.WORD)
_M0, _M1 = (tl.constexpr(multiplier) for multiplier in noise.PHILOX_MULTIPLIERS)
_W0, _W1 = (tl.constexpr(step) for step in noise.PHILOX_WEYL)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6 = (tl.constexpr(coefficient) for coefficient in noise.LOG_Q)
_P0, _P1, _P2, _P3, _P4 = (tl.constexpr(coefficient) for coefficient in noise.EXP_P)
_MINUS_LN2 = tl.constexpr(-noise.LN2)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_TO_UNIT = tl.constexpr(2.0**-32)
_LOG2_E, _LN2_HIGH, _LN2_LOW = tl.constexpr(noise.LOG2_E), tl.constexpr(noise.LN2_HIGH), tl.constexpr(noise.LN2_LOW)
_EXP_LOWEST = tl.constexpr(noise.EXP_LOWEST)


@triton.jit
def philox(seed, request, position, counter):
    """The four random 32-bit words of each counter (uint32 tensor); seed, request and position are int64 scalars or
    tensors that broadcast against it. Reusable by any kernel."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = request.to(tl.uint32), (request >> 32).to(tl.uint32), position.to(tl.uint32), counter
    for _ in tl.static_range(_ROUNDS):
        p0, p1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c1, c2, c3 = (
            (p1 >> 32).to(tl.uint32) ^ c1 ^ k0,
            p1.to(tl.uint32),
            (p0 >> 32).to(tl.uint32) ^ c3 ^ k1,
            p0.to(tl.uint32),
        )
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _exponent_and_fraction(x):
    offset = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    mantissa = ((offset & 0x7FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return offset >> 23, mantissa - 1.0


@triton.jit
def _minus_log(exponent, f):
    q = f * _Q6
    q = (q + _Q5) * f
    q = (q + _Q4) * f
    q = (q + _Q3) * f
    q = (q + _Q2) * f
    q = (q + _Q1) * f
    q = (q + _Q0) * (f * f) + f
    return exponent.to(tl.float32) * _MINUS_LN2 - q


@triton.jit
def gumbel_from_bits(bits):
    """Standard Gumbel noise from uint32 bits; see noise.gumbel_from_bits for why it is computed like this."""
    minus_w = (bits.to(tl.float32) + 0.5) * -_TO_UNIT
    rest = ((bits ^ _WORD).to(tl.float32) + 0.5) * _TO_UNIT
    exponent, f = _exponent_and_fraction(rest)
    f = tl.where(exponent == 0, minus_w, f)
    exponent, f = _exponent_and_fraction(_minus_log(exponent, f))
    return _minus_log(exponent, f)


@triton.jit
def gumbel_lanes(seed, request, position, counter):
    """The noise of tokens `first_token(counter)` + 0, 32, 64 and 96, from one hash: what a scan over blocks wants."""
    b0, b1, b2, b3 = philox(seed, request, position, counter)
    return gumbel_from_bits(b0), gumbel_from_bits(b1), gumbel_from_bits(b2), gumbel_from_bits(b3)


@triton.jit
def first_token(counter):
    """The token that lane 0 of a counter serves; the other lanes are 32, 64 and 96 further on."""
    return (counter // _LANE_TOKENS) * _BLOCK_TOKENS + counter % _LANE_TOKENS


@triton.jit
def gumbel_of(seed, request, position, token):
    """The noise of any tokens (non-negative integers), one hash each: what a drafter with few candidates wants."""
    token = token.to(tl.uint32)
    counter = (token // _BLOCK_TOKENS) * _LANE_TOKENS + token % _LANE_TOKENS
    lane = token // _LANE_TOKENS % 4
    b0, b1, b2, b3 = philox(seed, request, position, counter)
    return gumbel_from_bits(tl.where(lane < 2, tl.where(lane == 0, b0, b1), tl.where(lane == 2, b2, b3)))


@triton.jit
def exp(x):
    """noise.exp, to the bit."""
    x = tl.maximum(x, _EXP_LOWEST)
    power = tl.floor(x * _LOG2_E + 0.5)
    r = (x - power * _LN2_HIGH) - power * _LN2_LOW
    p = r * _P4
    p = (p + _P3) * r
    p = (p + _P2) * r
    p = (p + _P1) * r
    p = ((p + _P0) * (r * r) + r) + 1.0
    return p * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["N"])
def _gumbel_table(seed_ptr, request_ptr, position_ptr, token_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row * N + n, mask=n < N, other=0)
    seed, request, position = tl.load(seed_ptr + row), tl.load(request_ptr + row), tl.load(position_ptr + row)
    tl.store(out_ptr + row * N + n, gumbel_of(seed, request, position, token), mask=n < N)


def gumbel_at(seed_R: Tensor, request_R: Tensor, position_R: Tensor, token_RN: Tensor) -> Tensor:
    """noise.gumbel_at on the GPU, for drafters that rank a few tokens of their own."""
    rows, count = token_RN.shape
    noise_RN = torch.empty((rows, count), dtype=torch.float32, device=token_RN.device)
    block = min(1024, triton.next_power_of_2(count))
    _gumbel_table[(rows, triton.cdiv(count, block))](
        seed_R, request_R, position_R, token_RN.contiguous(), noise_RN, count, BLOCK=block, enable_fp_fusion=False
    )
    return noise_RN
