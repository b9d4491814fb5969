"""Requests come into rows: what is known of their prompts comes with them, of those before them nothing stays."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tlt.kernels.batch_state import reference as batch_state
from tlt.kernels.batch_state.reference import UNUSED, Memory
from tlt.spec.drafter import Entered
from tlt.spec.prompt_states import EnteringRows, PromptStates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOW = 8


def memory(rows: int, width: int, dtype: torch.dtype) -> Memory:
    """Full of what must go, or must stay."""
    generator = torch.Generator().manual_seed(1)
    numbers = (torch.randint(100, shape, generator=generator) for shape in ((rows, WINDOW), (rows,), (rows,)))
    filled = (
        torch.randn((rows, WINDOW, width), generator=generator).to(dtype),
        *numbers,
        torch.ones(rows, dtype=torch.bool),
        torch.randint(100, (rows, WINDOW + 1), generator=generator),
    )
    return Memory(*(x.to(DEVICE) for x in filled))


def newcomers(
    width: int, dtype: torch.dtype
) -> tuple[list[Entered], PromptStates, dict[tuple[int, ...], torch.Tensor]]:
    """Two with a prefix that fits the window, one with a longer one, one of whose prefix nothing was kept."""
    generator = torch.Generator().manual_seed(2)
    short, long, lost = tuple(range(10, 15)), tuple(range(20, 33)), (40, 41)
    prompts = PromptStates(WINDOW, torch.empty((0, width), dtype=dtype, device=DEVICE))
    states = {prefix: torch.randn((len(prefix), width), generator=generator).to(dtype) for prefix in (short, long)}
    for prefix, states_SF in states.items():
        prompts.add(prefix, 0, states_SF.to(DEVICE))
    entered = [Entered(4, 5, 71, short), Entered(2, 13, 72, long), Entered(0, 2, 73, lost), Entered(6, 5, 74, short)]
    return entered, prompts, states


def enter_by_triton(memory: Memory, new: batch_state.NewRows) -> None:
    pytest.importorskip("tlt.kernels.batch_state.triton").enter_rows(memory, new)


@pytest.mark.parametrize("enter", [batch_state.enter_rows, enter_by_triton])
@pytest.mark.parametrize(("width", "dtype"), [(6, torch.float32), (1500, torch.float32), (1500, torch.bfloat16)])
def test_what_is_known_of_a_prompt_comes_with_who_enters(enter, width: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    entered, prompts, states = newcomers(width, dtype)
    before = memory(7, width, dtype)
    after = copy.deepcopy(before)
    enter(after, EnteringRows.of(entered, prompts).sent(DEVICE))
    for row in (1, 3, 5):
        for was, now in zip(before.rows, after.rows, strict=True):
            assert torch.equal(now[row], was[row]), "who is there already is not touched"
    for entry in entered:
        first = max(0, len(entry.prefix) - WINDOW) if entry.prefix in states else len(entry.prefix)
        text = (*entry.prefix, entry.token)
        for position in range(first, len(entry.prefix)):
            assert after.tokens_RW[entry.row, position % WINDOW] == text[position + 1]
            found = after.states_RWF[entry.row, position % WINDOW].cpu()
            assert torch.equal(found, states[entry.prefix][position])
        assert after.held_R[entry.row] == after.taken_R[entry.row] == first
        assert not after.ready_R[entry.row]
        assert (after.position_RW[entry.row] == UNUSED).all(), "nothing is in the drafter's ring yet"
    short = {position % WINDOW for position in range(5)}
    for slot in set(range(WINDOW)) - short:
        assert torch.equal(after.states_RWF[4, slot], before.states_RWF[4, slot]), "slots nobody knows are not written"


@pytest.mark.parametrize("enter", [batch_state.enter_rows, enter_by_triton])
def test_a_ring_of_any_length_is_forgotten(enter) -> None:  # type: ignore[no-untyped-def]
    entered, prompts, _ = newcomers(6, torch.float32)
    ring = torch.arange(7 * 1100, device=DEVICE).view(7, 1100)
    after = replace(memory(7, 6, torch.float32), position_RW=ring)
    enter(after, EnteringRows.of(entered, prompts).sent(DEVICE))
    forgotten = (ring == UNUSED).all(dim=1).tolist()
    assert forgotten == [row in (0, 2, 4, 6) for row in range(7)]
    assert (ring[[1, 3, 5]] != UNUSED).all()


def test_newcomers_are_told_apart_by_their_prefix() -> None:
    entered, prompts, _ = newcomers(6, torch.float32)
    entering = EnteringRows.of(entered, prompts)
    assert entering.rows_by_positions == {5: 2, 8: 1, 0: 1}
    row, first, _, start, last, own, address = entering.columns_7E
    assert row.tolist() == [4, 6, 2, 0]
    assert first.tolist() == [0, 0, 5, 2]
    assert start.tolist() == [0, 0, 5, 13]
    assert last.tolist() == [71, 74, 72, 73]
    assert own.tolist() == [0, 0, 1, 2]
    assert address[:3].tolist() == [entering.states[0].data_ptr()] * 2 + [entering.states[1].data_ptr()]
    assert entering.token_N.dtype == np.int64
    assert entering.token_N.tolist() == [11, 12, 13, 14, 0, *range(26, 33), 0]
