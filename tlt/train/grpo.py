"""GRPO: what a group of rewards says about each answer, and what the policy is to make of it. Pure functions.

A rollout's advantage is its reward against its group's. A token's loss is the clipped surrogate of PPO,
−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A), with r the ratio of the policy's probability now to that when the answer
was written; to it come the divergence from a frozen reference (the k3 estimator) and truncated importance weights, each
where it is asked for. Each option is a knob of `GrpoSettings`.

Left out: a value model and per-token rewards; ratios of whole sequences (GSPO) and soft clips (CISPO, SAPO); a second
clip for bad answers (dual clip); division by a constant length (Dr. GRPO; its other half is `divide_by_std = false`);
an entropy bonus; length penalties (they belong into the reward); asking again where all rewards of a group agree
(DAPO's dynamic sampling: such groups teach nothing and cost no training).

Knows numbers and tensors of tokens; knows nothing of models, rows or optimizers.
"""
# N answer tokens

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.config import GrpoSettings
from tlt.errors import TltError
from tlt.types import Completion

STD_FLOOR = 1e-6  # added to the standard deviation of rewards that hardly differ
LARGEST_LOG_RATIO = 20.0  # e²⁰ is as good as infinite, and does not overflow


# ---- a group


def advantages(rewards: Sequence[float], settings: GrpoSettings) -> list[float]:
    """How much better each rollout of one group did than the group. Exactly 0 where all did equally well."""
    if len(rewards) < 2:
        raise TltError(
            f"a group of {len(rewards)} rollouts has nothing to be compared with; set task.group to 2 or more"
        )
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise TltError(f"rollout {index} of a group earned {reward}; expected finite rewards: check the reward")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    # with itself left out, a rollout is compared with (sum − r) / (count − 1)
    scale = count / (count - 1) if settings.leave_one_out else 1.0
    if settings.divide_by_std:
        scale /= standard_deviation(rewards) + STD_FLOOR
    return [(reward - mean) * scale for reward in rewards]


def standard_deviation(values: Sequence[float]) -> float:
    """Of a sample: the sum of squares is divided by one less than the count."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


# ---- what counts, and how much


@dataclass(frozen=True, slots=True)
class Totals:
    """What a batch holds: what its mean is taken over. Sums over the workers that share a batch."""

    answers: int
    tokens: int  # of those answers


def counts(completion: Completion, settings: GrpoSettings) -> bool:
    """Whether an answer is learned from at all. One that is not is missing from the totals, too."""
    return not (settings.mask_overlong and completion.finish_reason == "length")


def token_weight(tokens: int, totals: Totals, settings: GrpoSettings) -> float:
    """Weight of each token of an answer of so many: over the whole batch the weights add up to 1."""
    if settings.loss == "token":
        return 1.0 / totals.tokens
    return 1.0 / (tokens * totals.answers)


# ---- tokens


def clipped_surrogate(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether the clip took its gradient away."""
    ratio_N = (logprob_N - old_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    plain_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage_N
    return -torch.minimum(plain_N, held_N), plain_N.detach() > held_N.detach()


def settled(old_N: Tensor, start_N: Tensor, round_off: float) -> Tensor:
    """The old log-probabilities, and in place of those that differ by round-off alone the policy's own at the start.

    Which batch a token was written in then leaves no trace: the update is a function of the tokens.
    """
    return torch.where((start_N - old_N).abs() <= round_off, start_N, old_N)


def divergence(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """k3: e^d − d − 1 with d = reference − policy. Never negative, and on average KL(policy ‖ reference)."""
    d_N = (reference_N - logprob_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(d_N) - d_N


def importance(trainer_N: Tensor, engine_N: Tensor, cap: float) -> Tensor:
    """Weights that make tokens the engine drew count as if the trainer's policy had drawn them, cut off at `cap`."""
    return (trainer_N - engine_N).clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=cap)
