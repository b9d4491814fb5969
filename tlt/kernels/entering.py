"""Requests that come into rows of a batch, with what is known of their prompts, in torch: the reference of
`entering_triton`, which does it in one launch and makes nobody wait.
"""
# R rows, W slots of a ring, F states of one position, E newcomers, S positions of a prefix, N those of all prefixes

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNUSED = -1  # a slot that holds no position


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of every row. Position p lies in slot p modulo the window. Graphs hold these pointers."""

    states_RWF: Tensor
    tokens_RW: Tensor  # int64, drawn from each state
    held_R: Tensor  # int64, first position whose state was kept
    taken_R: Tensor  # int64, those before are in the drafter's ring
    ready_R: Tensor  # bool, whether the newest position is in the ring: then it can guess
    position_RW: Tensor  # int64, in each slot of the drafter's ring, which may have more of them

    @classmethod
    def empty(cls, position_RW: Tensor, width: int, dtype: torch.dtype) -> "Memory":
        """Beside a drafter's ring, which has a slot more than its window."""
        (rows, slots), device = position_RW.shape, position_RW.device
        return cls(
            torch.zeros((rows, slots - 1, width), dtype=dtype, device=device),
            torch.zeros((rows, slots - 1), dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            position_RW,
        )

    @property
    def rows(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Who comes into which row, with the states of the last positions of a prefix that several may share."""

    columns_7E: Tensor  # int64: row, first position, positions, where their tokens begin, the last token, then …
    token_N: Tensor  # drawn from each state, prefix by prefix; a newcomer's own stands instead of a prefix's last
    states: Sequence[Tensor]  # [S, F] of each prefix: … which of them, and its address
    most: int  # positions of any


def enter_rows(memory: Memory, new: NewRows) -> None:
    """Puts the prefixes' states and tokens into the newcomers' rows; of what was there before nothing is known."""
    row_E, first_E, _, start_E, last_E, own_E, _ = new.columns_7E
    window = memory.tokens_RW.shape[1]
    for own, states_SF in enumerate(new.states):
        mine = (own_E == own).nonzero()[:, 0]
        if not len(states_SF) or not len(mine):
            continue
        row_M1, start = row_E[mine][:, None], int(start_E[mine[0]])
        slot_S = (first_E[mine[0]] + torch.arange(len(states_SF), device=row_E.device)) % window
        memory.states_RWF[row_M1, slot_S] = states_SF
        memory.tokens_RW[row_M1, slot_S] = new.token_N[start : start + len(states_SF)]
        memory.tokens_RW[row_M1[:, 0], slot_S[-1]] = last_E[mine]
    memory.held_R[row_E] = first_E
    memory.taken_R[row_E] = first_E
    memory.ready_R[row_E] = False
    memory.position_RW[row_E] = UNUSED
