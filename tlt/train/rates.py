"""The default learning rate, by the kind of training: full weights, LoRA adapters, or a tiny policy.

Usual rates are 1e-6 for the full weights of a language model, 1e-5 to 1e-4 for adapters, and far higher ones for a
policy of a few million weights. Decides from two numbers; does not know models.
"""

from dataclasses import dataclass

TINY = 20_000_000  # weights; no policy that was trained on text is so small
FULL_RATE, LORA_RATE, TINY_RATE = 1e-6, 3e-5, 5e-4
_FAR = 30.0  # times the usual rate


@dataclass(frozen=True, slots=True)
class UsualRate:
    rate: float
    kind: str  # what is trained, in words


def usual_rate(weights: int, lora_rank: int) -> UsualRate:
    """`weights`: of the policy; `lora_rank`: 0 if all of them are trained."""
    what = f"adapters of rank {lora_rank}" if lora_rank else "all weights"
    if weights < TINY:
        return UsualRate(TINY_RATE, f"{what} of a tiny policy")
    return UsualRate(LORA_RATE if lora_rank else FULL_RATE, what)


def is_far(rate: float, usual: float) -> bool:
    """Whether a rate is so much larger than the usual one that the policy may not survive it."""
    return rate > _FAR * usual
