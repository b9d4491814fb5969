"""GRPO and its relatives: advantages from the rewards of a group, and the loss of each token. Pure functions.

A rollout's advantage A compares its reward with its group's rewards. A token's loss follows from the ratio r of the
token's probability now to its probability when it was sampled, clipped to c(r) within 1 − ε_low … 1 + ε_high:
−min(r·A, c(r)·A) (PPO; GSPO with the ratio of the whole completion), or −c(r)·A·log p where c(r) has no gradient
(CISPO). Optional terms: the divergence from a frozen reference (the k3 estimator), and truncated importance weights.
Each option is a knob of `GrpoSettings`; GRPO, Dr. GRPO, DAPO, RLOO, GSPO and CISPO are recipes.

Not implemented: a value model and per-token rewards; soft clips (SAPO); a second clip for negative advantages (dual
clip); an entropy bonus.

Works on numbers and tensors of tokens; does not know models, rows or optimizers.
"""
# N answer tokens

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from tlt.config import GrpoSettings
from tlt.errors import TltError
from tlt.types import Completion

STD_FLOOR = 1e-6  # added to the standard deviation, which may be close to 0
LARGEST_LOG_RATIO = 20.0  # bounds the ratio at e²⁰, so that it does not overflow


# ---- a group


def advantages(rewards: Sequence[float], settings: GrpoSettings) -> list[float]:
    """The advantage of each rollout of one group. Exactly 0 where all rewards are equal."""
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
    mean = fmean(rewards)
    # leave-one-out: a rollout is compared with (sum − r) / (count − 1)
    scale = count / (count - 1) if settings.leave_one_out else 1.0
    if settings.divide_by_std:
        scale /= stdev(rewards, mean) + STD_FLOOR
    return [(reward - mean) * scale for reward in rewards]


# ---- what counts, and how much


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of a batch, summed over all workers: the denominators of its means."""

    answers: int
    tokens: int  # of those answers
    limit: int = 1  # of an answer, in tokens


def counts(completion: Completion, settings: GrpoSettings) -> bool:
    """Whether a completion counts in the loss. A masked completion is not counted in the totals either."""
    return not (settings.mask_overlong and completion.finish_reason == "length")


def token_weight(tokens: int, totals: Totals, settings: GrpoSettings) -> float:
    """Loss weight of each token of a completion with `tokens` tokens. Of `token` and `sequence` they sum to 1."""
    match settings.loss:
        case "token":
            return 1.0 / totals.tokens
        case "sequence":
            return 1.0 / (tokens * totals.answers)
        case "constant":
            return 1.0 / (totals.limit * totals.answers)
        case "sum":
            return 1.0 / totals.answers


# ---- tokens


def token_losses(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether its ratio was clipped. For GSPO `old_N` is that of `sequence_old`."""
    loss = clipped_weight if settings.objective == "cispo" else clipped_surrogate
    return loss(logprob_N, old_N, advantage_N, settings)


def clipped_weight(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor]:
    """CISPO: the log-probability, weighted by the clipped ratio. Every token has a gradient."""
    ratio_N = (logprob_N - old_N).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    held_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -held_N * advantage_N * logprob_N, held_N != ratio_N


def sequence_old(now_N: Tensor, old_N: Tensor, sizes_S: Tensor) -> Tensor:
    """GSPO: old log-probabilities that give each token the mean log ratio of its completion, of `sizes_S` tokens each.

    `now_N` are the present log-probabilities: their gradient is then that of the mean.
    """
    mean_S = torch.segment_reduce(now_N - old_N, "mean", lengths=sizes_S, unsafe=True)  # no check that waits for it
    return now_N - mean_S.repeat_interleave(sizes_S, output_size=len(now_N))


def clipped_surrogate(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether clipping removed its gradient."""
    ratio_N = (logprob_N - old_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    plain_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage_N
    return -torch.minimum(plain_N, held_N), plain_N.detach() > held_N.detach()


def settled(old_N: Tensor, start_N: Tensor, round_off: float) -> Tensor:
    """The engine's log-probabilities, replaced by the trainer's own where both agree within `round_off`.

    The update is then a function of the tokens, independent of the batch in which the engine decoded them.
    """
    return torch.where((start_N - old_N).abs() <= round_off, start_N, old_N)


def divergence(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """The k3 estimator: e^d − d − 1 with d = reference − policy. Never negative; its mean is KL(policy ‖ reference)."""
    d_N = (reference_N - logprob_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(d_N) - d_N


def importance(trainer_N: Tensor, engine_N: Tensor, cap: float) -> Tensor:
    """Importance weights: the trainer's probability over the engine's, at most `cap`."""
    return (trainer_N - engine_N).clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=cap)
