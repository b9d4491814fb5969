"""Keeping the policy's states for a drafter: rows of a ring, written from the layers that are tapped.

On a GPU one launch does it, as part of the tick's graph; `states_triton` is held equal to what stands here.
"""
# R rows, S positions of a row, W slots of a ring, F = sum of the taps' widths, T tokens of the forward

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_states(
    states_RWF: Tensor, tokens_RW: Tensor, taps: Sequence[Tensor], source_RS: Tensor, slot_RS: Tensor, token_RS: Tensor
) -> None:
    """states[r, slot[r, s]] = the taps at row source[r, s], side by side; tokens[r, slot[r, s]] = token[r, s].

    Where several s of a row name one slot, any of them may stay.
    """
    if states_RWF.is_cuda:
        from tlt.kernels import states_triton  # Triton is installed only where there is a GPU

        states_triton.keep_states(states_RWF, tokens_RW, taps, source_RS, slot_RS, token_RS)
        return
    row_R1 = torch.arange(len(slot_RS), device=slot_RS.device)[:, None]
    states_RSF = torch.cat([tap[source_RS] for tap in taps], dim=-1)
    states_RWF[row_R1, slot_RS] = states_RSF.to(states_RWF.dtype)
    tokens_RW[row_R1, slot_RS] = token_RS.to(tokens_RW.dtype)
