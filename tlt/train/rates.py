"""The learning rate of a policy where the recipe names none: by what is trained.

All weights of a real policy move little by little (1e-6 is usual); adapters start from nothing and take more; a policy
of a few million weights, and its adapters, far more. Decides from two numbers; knows no models.
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
