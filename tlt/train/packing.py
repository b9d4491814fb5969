"""Packing: sequences of unequal length, concatenated in rows of at most `budget` tokens without padding.

Every token of every example is in exactly one row. Examples are never cut. Positions restart at 0 with each example,
and the first token of an example never counts in the loss, as no token precedes it. Uses numpy for the layout: torch
would wake all its threads for a few thousand numbers, many times per step.
Knows lengths and integers; does not know models, losses or text.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tlt.errors import TltError

# T tokens of a row, S examples in it


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence: a prompt and, from `answer_start` on, the completion whose tokens count in the loss."""

    tokens: tuple[int, ...]
    answer_start: int
    loss_mask: bytes = b""  # of the completion's tokens: 0 where one does not count; empty: all count


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Several examples as one flat row. Tensors are on the host."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, 0 at the start of each example
    mask_T: Tensor  # bool: the token belongs to the completion and counts in the loss
    starts: tuple[int, ...]  # S + 1 offsets: example s is [starts[s], starts[s + 1])
    members: tuple[int, ...]  # S indices into the examples that were packed

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.starts, self.starts[1:], strict=False))


def plan_rows(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """The examples of each row, by best-fit decreasing: each goes into the fullest row with room for it.

    Uses at most 11/9 of the minimal number of rows, plus one. Deterministic; ties keep the given order.
    """
    _check_lengths(lengths, budget)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending, so that the first that fits fits best
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = bisect_left(room, (lengths[index], -1))
        if slot == len(room):
            rows.append([])
            left, row = budget, len(rows) - 1
        else:
            left, row = room.pop(slot)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return [tuple(row) for row in rows]


def pack(examples: Sequence[Example], budget: int) -> list[PackedRow]:
    """The examples as rows of at most `budget` tokens each."""
    for index, example in enumerate(examples):
        _check_answer(index, example)
    plan = plan_rows([len(example.tokens) for example in examples], budget)
    return [_lay_out(examples, members) for members in plan]


def _lay_out(examples: Sequence[Example], members: tuple[int, ...]) -> PackedRow:
    chosen = [examples[index] for index in members]
    sizes_S = np.array([len(example.tokens) for example in chosen])
    ends_S = sizes_S.cumsum()
    answers_S = np.array([example.answer_start for example in chosen])
    # torch reads an array several times faster than a list
    tokens = array("q", chain.from_iterable(example.tokens for example in chosen))
    positions_T = np.arange(len(tokens)) - np.repeat(ends_S - sizes_S, sizes_S)
    mask_T = positions_T >= np.repeat(answers_S, sizes_S)
    for example, end in zip(chosen, ends_S, strict=True):
        if example.loss_mask:
            mask_T[end - len(example.loss_mask) : end] = np.frombuffer(example.loss_mask, dtype=bool)
    return PackedRow(
        tokens_T=torch.frombuffer(tokens, dtype=torch.int64),
        positions_T=torch.from_numpy(positions_T),
        mask_T=torch.from_numpy(mask_T),
        starts=(0, *ends_S.tolist()),
        members=members,
    )


def _check_lengths(lengths: Sequence[int], budget: int) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise TltError(f"example {index} has no tokens; leave empty examples out")
        if length > budget:
            raise TltError(
                f"example {index} has {length} tokens but a row holds {budget}; "
                "raise the tokens per row, or leave out or shorten the example"
            )


def _check_answer(index: int, example: Example) -> None:
    if not 1 <= example.answer_start < len(example.tokens):
        raise TltError(
            f"example {index}: the answer starts at token {example.answer_start} of {len(example.tokens)}; "
            "expected at least one token of prompt before it and one token of answer"
        )
    if example.loss_mask and len(example.loss_mask) != len(example.tokens) - example.answer_start:
        raise TltError(
            f"example {index}: a loss mask of {len(example.loss_mask)} for an answer of "
            f"{len(example.tokens) - example.answer_start} tokens; expected one mark per token"
        )
