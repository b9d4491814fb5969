"""Keeping the policy's states for a drafter: rows of a ring, written from the layers that are tapped.

On a GPU one launch does it, as part of the tick's graph: `states_triton`, which is held equal to what stands here.
"""
# R rows, S steps of a row, W slots of a ring, F = sum of the taps' widths, T tokens of the forward

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """What a tick drew in each row, and from which states: one each, or those of a walk through the row's tree."""

    position_T: Tensor  # int64, of every state of the forward
    slot_T: Tensor  # int32, negative in idle rows: of these nothing is kept
    token_RS: Tensor  # drawn from each state; negative where there was no distribution
    at_RS: Tensor | None = None  # int64, which states of the forward they are; None: there is one of each row
    steps_R: Tensor | None = None  # int64, how many of the S count; None: all


def keep_states(
    states_RWF: Tensor, tokens_RW: Tensor, taps: Sequence[Tensor], kept: StatePlaces, *, pdl: bool = False
) -> None:
    """states[r, position % W] = the taps at that state, side by side; tokens[r, position % W] = the token drawn there.

    Of a walk longer than the ring the newest states stay. A row that drew −1 goes on with token 0 until it is taken
    out. `pdl` is a launch hint for the GPU and changes nothing here.
    """
    (rows, steps), window, device = kept.token_RS.shape, tokens_RW.shape[1], tokens_RW.device
    row_RS = torch.arange(rows, device=device)[:, None].expand(rows, steps)
    step_S = torch.arange(steps, device=device)
    steps_R1 = torch.full((rows, 1), steps, device=device) if kept.steps_R is None else kept.steps_R[:, None]
    source_RS = row_RS if kept.at_RS is None else kept.at_RS
    stays_RS = (kept.slot_T[source_RS] >= 0) & (step_S < steps_R1) & (step_S + window >= steps_R1)
    at = row_RS[stays_RS], (kept.position_T[source_RS] % window)[stays_RS]
    states_NF = torch.cat([tap[source_RS[stays_RS]] for tap in taps], dim=-1)
    states_RWF[at] = states_NF.to(states_RWF.dtype)
    tokens_RW[at] = kept.token_RS[stays_RS].clamp(min=0).to(tokens_RW.dtype)
