"""Which token goes with which state: the one place where a drafter's inputs and targets are lined up.

At position t the drafter reads the policy's states of t and the token that follows, x_{t+1}; it names the one after
that, x_{t+2}, which the policy knows at t + 1. Draft step s of the same entry reads x_{t+1+s} and names x_{t+2+s}.
Training, offline and online, and measuring ask `align`; in rollout `Eagle.extend` is handed the very same pairs: the
states of a position and the token drawn from them. Sequences lie end to end and nothing reaches from one into the next.
Works on host tensors, by numpy: torch would wake up all its threads for a few thousand numbers, many times a step.
Knows nothing of weights.
"""
# T positions with states, C sequences, S draft steps, N tokens to name

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.errors import TltError

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens the drafter learns to name, and from where."""

    state_N: Tensor  # int64: position whose policy state decides the token, and after which it stands
    entry_SN: Tensor  # int64: position whose entry names it in draft step s; 0 where there is none
    reached_SN: Tensor  # bool: there is one, and the token it starts from is one to learn


@dataclass(frozen=True, slots=True)
class Aligned:
    next_T: Tensor  # int64: the token that follows each position; 0 where nobody knows it
    learn_T: Tensor  # bool: that token is known, and one to learn
    index_T: Tensor  # int64: place within its own sequence, from 0
    lengths: tuple[int, ...]

    def targets(self, steps: int) -> Targets:
        """Every token to learn that some entry of the same answer can name within `steps` draft steps."""
        learn_T, index_T = self.learn_T.numpy(), self.index_T.numpy()
        known_N = np.flatnonzero(learn_T)
        back_S1 = np.arange(1, steps + 1)[:, None]
        inside_SN = index_T[known_N] >= back_S1
        entry_SN = (known_N - back_S1) * inside_SN
        reached_SN = learn_T[entry_SN] & inside_SN
        some = np.flatnonzero(reached_SN.any(axis=0))
        found = (known_N[some], entry_SN.take(some, axis=1), reached_SN.take(some, axis=1))
        return Targets(*map(torch.from_numpy, found))


def align(tokens_T: Tensor, learn_T: Tensor, lengths: Sequence[int], last_C: Tensor | None = None) -> Aligned:
    """Lines up packed sequences. Token t stands at position t, whose states the policy computed from it.

    `learn_T` marks the answers' tokens. `last_C` is the token drawn from each sequence's last position (its own state
    was never computed), UNKNOWN where there is none; without it the last positions have no successor.
    """
    sizes_C = np.array(lengths, dtype=np.int64)
    if len(tokens_T) != sizes_C.sum() or len(learn_T) != len(tokens_T) or sizes_C.min() < 1:
        raise TltError(
            f"{len(tokens_T)} tokens and {len(learn_T)} marks for sequences of {list(lengths)}; "
            "expected one of each per position, and no empty sequence"
        )
    ends_C = sizes_C.cumsum()
    drawn_C = np.full_like(ends_C, UNKNOWN) if last_C is None else last_C.numpy()
    next_T, follows_T = np.roll(tokens_T.numpy(), -1), np.roll(learn_T.numpy(), -1)
    next_T[ends_C - 1] = drawn_C.clip(min=0)
    follows_T[ends_C - 1] = drawn_C != UNKNOWN
    index_T = np.arange(len(next_T)) - np.repeat(ends_C - sizes_C, sizes_C)
    return Aligned(torch.from_numpy(next_T), torch.from_numpy(follows_T), torch.from_numpy(index_T), tuple(lengths))
