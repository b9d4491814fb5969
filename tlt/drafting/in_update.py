"""Selects the sequences of a policy update that the drafter learns from, and those that it is measured on.

An update computes the policy's hidden states of every packed row anyway, so a drafter that learns from them needs no
forward pass of the policy. Always holds: measured and learned sequences share no prompt, unless there is only one;
every micro-batch lies in one row; the choice is a function of the rows and the seed. Knows lengths and tokens, neither
models nor training.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.model.device import upload
from tlt.model.transformer import Output
from tlt.spec.align import align
from tlt.spec.eagle import gather_taps
from tlt.train.drafter import DrafterBatch
from tlt.train.packing import PackedRow

_HELD_SHARE = 8  # at most one sequence in 8 of the first row is held out


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one row that make one batch of the drafter."""

    row: int
    members: tuple[int, ...]  # indices of the sequences in the row, ascending


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    held: MicroBatch | None  # to measure on; None: too few sequences
    learned: tuple[MicroBatch, ...]  # one micro-step each, in the order of the rows


def steps_within(
    seconds: float, micro_s: float, look_s: float, unchecked: int, check: int, looks: int
) -> tuple[int, bool]:
    """Number of micro-steps that fit into `seconds`, and whether the drafter is measured after them.

    It is measured after `check` micro-steps, of which `unchecked` were taken before, by `looks` measurements.
    """
    measured = int((seconds - looks * look_s) / micro_s)
    if unchecked + measured >= check:
        return max(0, measured), True
    return max(0, min(int(seconds / micro_s), check - 1 - unchecked)), False


def plan_update(rows: Sequence[PackedRow], tokens: int, held_tokens: int, most: int, seed: str) -> UpdatePlan:
    """At most `most` micro-batches of about `tokens` tokens, spread evenly over the rows.

    One more, of `held_tokens` tokens in the first row, is held out for measurements.
    """
    if not rows or most < 1:
        return UpdatePlan(None, ())
    luck = random.Random(seed)
    order = luck.sample(range(len(rows[0].lengths)), len(rows[0].lengths))
    held = sorted(next(_grouped(rows[0], order[: max(1, len(order) // _HELD_SHARE)], held_tokens)))
    prompts = {_prompt(rows[0], place) for place in held}
    others = [[place for place in range(len(row.lengths)) if _prompt(row, place) not in prompts] for row in rows]
    if not any(others):  # there is one prompt only
        others = [
            [place for place in range(len(row.lengths)) if row is not rows[0] or place not in held] for row in rows
        ]
    parts = list[MicroBatch]()
    for number, (row, left) in enumerate(zip(rows, others, strict=True)):
        luck.shuffle(left)
        parts += [MicroBatch(number, tuple(sorted(group))) for group in _grouped(row, left, tokens)]
    if not parts:
        return UpdatePlan(None, ())
    count = min(most, len(parts))
    return UpdatePlan(MicroBatch(0, tuple(held)), tuple(parts[index * len(parts) // count] for index in range(count)))


def _grouped(row: PackedRow, places: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Groups consecutive sequences to at most `tokens` tokens; a longer sequence is a group of its own."""
    group, used = list[int](), 0
    for place in places:
        if group and used + row.lengths[place] > tokens:
            yield group
            group, used = [], 0
        group.append(place)
        used += row.lengths[place]
    if group:
        yield group


def _prompt(row: PackedRow, place: int) -> bytes:
    span = slice(row.starts[place], row.starts[place + 1])
    prompt_tokens = int(row.mask_T[span].numpy().argmax())
    return row.tokens_T[span][:prompt_tokens].numpy().tobytes()


def batch_of(part: MicroBatch, row: PackedRow, states: Output) -> DrafterBatch:
    """The sequences of a micro-batch and copies of their hidden states: the row's own are freed after its pass."""
    spans = [np.arange(row.starts[place], row.starts[place + 1]) for place in part.members]
    at_T = torch.from_numpy(np.concatenate(spans))
    here_T = upload(at_T, states.hidden_TD.device)
    taps: list[Tensor] = [tap.index_select(0, here_T) for tap in states.taps]
    aligned = align(row.tokens_T[at_T], row.mask_T[at_T], [row.lengths[place] for place in part.members])
    return DrafterBatch(aligned, gather_taps(taps), states.hidden_TD.index_select(0, here_T))
