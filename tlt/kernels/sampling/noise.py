"""Keyed Gumbel noise in torch: G(seed, request, position, token), and the portable log and exp behind the sampler.

Always holds: the noise is a pure function of its key. It does not depend on the vocabulary size, on the batch or on the
device, and `noise_triton` gives the same bits, because every floating-point operation here is one IEEE addition or
multiplication (never fused) and every integer operation is exact.
Does not know logits, temperatures or filters.

The hash is Philox-4x32 with 7 rounds, the fewest its authors found to pass all of BigCrush (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011). The 3 further rounds of the usual 10 are a margin for adversarial use that a
sampler does not need; the tests hold both counts to published answers and look at the structured counters used here.
Key: the 64-bit seed. Counter: 64-bit request, 32-bit position, 32-bit token counter. Nothing is folded, so no two
(seed, request, position, token) share a number. One counter has four lanes, which serve four tokens of a 128-token
block: token = 128·block + 32·lane + i  <->  counter = 32·block + i. A lane is 32 contiguous tokens, so a GPU loads
logits in whole sectors and vectors, while a vocabulary of 100 costs only 32 counters.
"""

import torch
from torch import Tensor

# R rows, V vocabulary, N tokens asked for, C counters, 2 = two of Philox's four words, K rounds

ROUNDS = 7
LANES = 4
LANE_TOKENS = 32  # contiguous tokens served by one lane of a run of counters
BLOCK_TOKENS = LANES * LANE_TOKENS

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

# Every constant below is exactly a float32, so torch and Triton cannot round it differently.
LN2 = 0.693147182464599609375
SQRT_HALF_BITS = 0x3F3504F3  # float32 bits of √½: mantissas are taken in [√½, √2)
# log(1 + f) = f + f²·Q(f) on [√½ − 1, √2 − 1], minimax, relative error 2e-7
LOG_Q = (
    -0.5000028610229492,
    0.33335089683532715,
    -0.2497338354587555,
    0.1989399641752243,
    -0.17201580107212067,
    0.16278982162475586,
    -0.10347903519868851,
)
# exp(r) = 1 + r + r²·P(r) on [−½ ln 2, ½ ln 2], minimax, relative error 3e-9 before rounding
EXP_P = (0.5, 0.1666651964187622, 0.04166620969772339, 0.008368815295398235, 0.001395032275468111)
LOG2_E = 1.44269502162933349609375
LN2_HIGH = 0.693359375  # nine bits: times an integer below 2^15 it is exact
LN2_LOW = -0.00021219444170128554  # ln 2 − LN2_HIGH
EXP_LOWEST = -30.0  # exp is only ever asked for weights above 2^-40


# The constants as 0-dim CPU tensors, never written to: adding one is 2 µs quicker than adding a Python number, which on
# small vocabularies is half of the time.
def _constant(value: float | int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


_WORD, _HALF_WORD = _constant(WORD, torch.int64), _constant(32, torch.int64)
_SQRT_HALF_BITS, _MANTISSA, _MANTISSA_BITS, _ZERO = (
    _constant(value, torch.int32) for value in (SQRT_HALF_BITS, 0x7FFFFF, 23, 0)
)
_HALF, _ONE, _SCALE, _MINUS_SCALE, _MINUS_LN2 = (
    _constant(value, torch.float32) for value in (0.5, 1.0, 2.0**-32, -(2.0**-32), -LN2)
)
_LOG_Q, _EXP_P = ([_constant(coefficient, torch.float32) for coefficient in poly] for poly in (LOG_Q, EXP_P))
_LOG2_E, _LN2_HIGH, _LN2_LOW = (_constant(value, torch.float32) for value in (LOG2_E, LN2_HIGH, LN2_LOW))
# int64 holds a 32×32-bit product modulo 2^64, which is all that is needed of it.
_MULTIPLIERS = torch.tensor(PHILOX_MULTIPLIERS, dtype=torch.int64, device="cpu").view(2, 1, 1)
_ROUND_KEYS = torch.tensor(
    [[k * weyl & WORD for weyl in PHILOX_WEYL] for k in range(10)], dtype=torch.int64, device="cpu"
).view(10, 2, 1, 1)


def gumbel(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """The noise of `vocab_size` tokens from token `first` on, float32 [R, V]."""
    blocks, skipped = divmod(first, BLOCK_TOKENS)
    bits_RV = _bits(seed_R, request_R, position_R, skipped + vocab_size, blocks * LANE_TOKENS)
    return gumbel_from_bits(bits_RV[:, skipped:])


def gumbel_at(seed_R: Tensor, request_R: Tensor, position_R: Tensor, token_RN: Tensor) -> Tensor:
    """The noise of the named tokens, float32 [R, N]; equal to `gumbel(…)[row, token]`."""
    counter_RN = (token_RN // BLOCK_TOKENS) * LANE_TOKENS + token_RN % LANE_TOKENS
    lane_RN = token_RN // LANE_TOKENS % LANES
    words_4RN = torch.stack(philox(seed_R, request_R, position_R, counter_RN))
    return gumbel_from_bits(words_4RN.gather(0, lane_RN[None])[0])


def _bits(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int, first_counter: int = 0) -> Tensor:
    """32 random bits for each token of the blocks that begin with this counter, int64 [R, V]."""
    blocks, lanes = -(-vocab_size // BLOCK_TOKENS), min(LANES, -(-vocab_size // LANE_TOKENS))
    count = min(vocab_size, blocks * LANE_TOKENS)
    counter_C = torch.arange(first_counter, first_counter + count, device=seed_R.device)
    words = philox(seed_R, request_R, position_R, counter_C)[:lanes]
    if lanes == 1:
        return words[0]
    by_lane = torch.stack([word.view(-1, blocks, LANE_TOKENS) for word in words], dim=2)
    return by_lane.view(-1, blocks * lanes * LANE_TOKENS)[:, :vocab_size]


def philox(
    seed_R: Tensor, request_R: Tensor, position_R: Tensor, counter: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of each counter ([C] or [R, C]), as int64 [R, C].

    Words are kept as two pairs, even = (0, 2) and odd = (1, 3), so that one operation moves both halves of a round.
    High bits may hold rubbish until a word is multiplied next: only what enters a product needs masking.
    """
    multipliers, round_keys = _MULTIPLIERS.to(seed_R.device), _ROUND_KEYS.to(seed_R.device)
    high_R = torch.bitwise_right_shift(torch.stack((seed_R, request_R)), _HALF_WORD)
    key_K2R1 = (round_keys[:rounds] + torch.stack((seed_R, high_R[0])).unsqueeze(-1)).unbind()
    even = torch.stack((request_R, position_R)).bitwise_and_(_WORD).unsqueeze(-1)
    odd = counter.new_empty((2, seed_R.shape[0], counter.shape[-1]))
    odd[0] = high_R[1].unsqueeze(-1)
    odd[1] = counter
    for key_2R1 in key_K2R1:
        product = (even * multipliers).flip(0)
        even = torch.bitwise_right_shift(product, _HALF_WORD)
        even = even.bitwise_xor(odd).bitwise_xor_(key_2R1).bitwise_and_(_WORD)
        odd = product
    odd.bitwise_and_(_WORD)
    return even[0], odd[0], even[1], odd[1]


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """−log(−log(1 − w)) for w = (bits + ½)·2^-32, float32.

    The largest values come from the smallest w, where float32 is fine-grained: the upper tail keeps all 32 bits. Finite
    for every input: from −3.13 (bits = 2^32 − 1) to 22.87 (bits = 0).
    """
    minus_w = bits.float().add_(_HALF).mul_(_MINUS_SCALE)
    rest = bits.bitwise_xor(_WORD).float().add_(_HALF).mul_(_SCALE)  # 1 − w without cancellation at its small end
    exponent, f = _exponent_and_fraction(rest)
    f = torch.where(exponent == _ZERO, minus_w, f)  # rest ≥ √½: its distance from 1 is w itself, known exactly
    return _minus_log(*_exponent_and_fraction(_minus_log(exponent, f)))


def _exponent_and_fraction(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = (1 + f)·2^exponent with 1 + f in [√½, √2), for normal positive float32. Works in x's own memory."""
    offset = x.view(torch.int32).sub_(_SQRT_HALF_BITS)
    mantissa = torch.bitwise_and(offset, _MANTISSA).add_(_SQRT_HALF_BITS).view(torch.float32)
    return offset.bitwise_right_shift_(_MANTISSA_BITS), mantissa.sub_(_ONE)


def _minus_log(exponent: Tensor, f: Tensor) -> Tensor:
    """−log((1 + f)·2^exponent)."""
    q = f * _LOG_Q[-1]
    for coefficient in _LOG_Q[-2:0:-1]:
        q.add_(coefficient).mul_(f)
    q.add_(_LOG_Q[0]).mul_(f * f).add_(f)
    return exponent.float().mul_(_MINUS_LN2).sub_(q)


def exp(x: Tensor) -> Tensor:
    """e^x for float32 x ≤ 0, taken as −30 below that; e^0 is exactly 1."""
    x = x.clamp(min=EXP_LOWEST)
    power = (x * _LOG2_E).add_(_HALF).floor_()
    r = (x - power * _LN2_HIGH).sub_(power * _LN2_LOW)
    p = r * _EXP_P[-1]
    for coefficient in _EXP_P[-2:0:-1]:
        p.add_(coefficient).mul_(r)
    p.add_(_EXP_P[0]).mul_(r * r).add_(r).add_(_ONE)
    return p.mul_((power.int() + 127).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32))


def as_int64(word: int) -> int:
    """A 64-bit integer, signed or unsigned, as the int64 with the same bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
