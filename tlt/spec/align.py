"""Aligns a drafter's inputs and targets: the only module that says which token goes with which hidden state.

At position t the drafter reads the policy's hidden states of t and the next token x_{t+1}, and predicts x_{t+2}, whose
distribution the policy computes at t + 1. Draft step s of the same entry reads x_{t+1+s} and predicts x_{t+2+s}.
Training, offline and online, and measuring use `align`; in rollout `Eagle.extend` gets the same pairs: the states of a
position and the token drawn from them. Sequences are concatenated and never attend to each other. Works on host tensors
with numpy, as torch would wake all its threads for a few thousand numbers many times a step. Does not know weights.
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
    """The target tokens of the drafter, and the entries that predict them."""

    state_N: Tensor  # int64: position before the token, whose policy state gives the token's distribution
    entry_SN: Tensor  # int64: position of the entry that predicts it in draft step s; 0 if there is none
    reached_SN: Tensor  # bool: there is such an entry, and it lies in the completion


@dataclass(frozen=True, slots=True)
class Aligned:
    next_T: Tensor  # int64: the token that follows each position; 0 if it is unknown
    learn_T: Tensor  # bool: that token is known and part of a completion
    index_T: Tensor  # int64: position within its own sequence, from 0
    lengths: tuple[int, ...]

    def targets(self, steps: int) -> Targets:
        """All target tokens that an entry of the same completion can predict within `steps` draft steps."""
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
    """Aligns packed sequences. The hidden states of position t are those that the policy computed from token t.

    `learn_T` marks the tokens of completions. `last_C` is the token drawn from each sequence's last position (its own
    state was never computed), or UNKNOWN; without `last_C` the last positions have no successor.
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
