"""The state of the batch's rows between forwards, in torch: what a CPU runs, and the reference of `triton`.

Owns four changes of that state: around a decode tick (row state → inputs, drawn tokens → row state), rows that move
when requests end, rows of new requests, and the policy's hidden states kept for a drafter.
Always holds: rows past `count` are idle, and nothing of them changes. Knows rows, slots and positions; knows nothing of
requests or drafters.
"""
# R rows, P pages of a row, E rows that move or that new requests take, W slots of a ring, F hidden state of one
# position (all taps side by side), S positions of a prefix or steps of a row, N positions of all prefixes, T tokens of
# the forward

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNUSED = -1  # a slot that holds no position

# ---- around a decode tick


def prepare_decode(
    ints_R5: Tensor, floats_R3: Tensor, pages_RP: Tensor, count: Tensor, rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [6, R]: token, position, position of the next, seed, request, top-k; int32 [2, R]: slot, context;
    float32 [3, R]: temperature, top-p, ln min-p."""
    token, position, seed, request, top_k = ints_R5[:rows].t()
    live = torch.arange(rows, device=count.device) < count
    page = pages_RP[:rows].gather(1, (position // page_size)[:, None]).squeeze(1)
    slot = (page * page_size + position % page_size).masked_fill(~live, -1)
    int64s = torch.stack((token, position, position + 1, seed, request, top_k))
    return int64s, torch.stack((slot, (position + 1) * live)).int(), floats_R3[:rows].t().contiguous()


def finish_decode(
    ints_R5: Tensor, count: Tensor, token_R: Tensor, logprob_R: Tensor, policy_logprob_R: Tensor, rows: int
) -> Tensor:
    """Advances the rows that are live; returns int32 [R, 3]: token and the bits of both log-probabilities."""
    live = torch.arange(rows, device=count.device) < count
    ints_R5[:rows, 0] = torch.where(live, token_R.clamp(min=0), ints_R5[:rows, 0])
    ints_R5[:rows, 1] += live
    bits = torch.stack((logprob_R, policy_logprob_R), dim=1).view(torch.int32)
    return torch.cat((token_R.int()[:, None], bits), dim=1)


# ---- rows that move


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """x[target] = x[source] of every tensor [R, …]. Callers ensure that no row is both."""
    for x in tensors:
        x[target_E] = x[source_E]


# ---- rows of new requests


@dataclass(frozen=True, slots=True)
class Memory:
    """The drafter's memory of every row. Position p lies in slot p modulo the window. Graphs hold these pointers."""

    states_RWF: Tensor
    tokens_RW: Tensor  # int64, drawn from each state
    held_R: Tensor  # int64, first position whose state was kept
    taken_R: Tensor  # int64, those before are in the drafter's ring
    ready_R: Tensor  # bool, whether the newest position is in the ring, so that the row can draft
    position_RW: Tensor  # int64, in each slot of the drafter's ring, which may have more of them

    @classmethod
    def empty(cls, position_RW: Tensor, width: int, dtype: torch.dtype) -> "Memory":
        """For a drafter's ring, which has one slot more than its window."""
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
    """The rows of new requests, with the hidden states of the last positions of a prefix that several may share."""

    columns_7E: Tensor  # int64: row, first position, positions, where their tokens begin, the last token, then …
    token_N: Tensor  # drawn from each state, prefix by prefix; a request's own token replaces its prefix's last
    states: Sequence[Tensor]  # [S, F] of each prefix: … which of them, and its address
    most: int  # positions of any


def enter_rows(memory: Memory, new: NewRows) -> None:
    """Writes the prefixes' states and tokens to the rows of new requests and forgets what the rows held before."""
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


# ---- hidden states for a drafter


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Tokens drawn in a tick and the states they were drawn from: one per row, or those of a walk through its tree."""

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
