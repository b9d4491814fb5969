"""Packing: every token exactly once, nothing crosses, the budget holds, what cannot fit is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.errors import TltError
from tlt.train.packing import Example, pack, plan_rows

BUDGET = 64


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    lengths = draw(st.lists(st.integers(2, BUDGET), max_size=40))
    starts = [draw(st.integers(1, length - 1)) for length in lengths]
    # every token has its own number, so that a lost, doubled or moved token shows
    return [
        Example(tuple(range(1000 * i, 1000 * i + length)), start)
        for i, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]


@given(examples())
def test_every_example_stands_whole_in_exactly_one_row(given_examples: list[Example]) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for row in pack(given_examples, BUDGET):
        assert 0 < len(row.tokens_T) <= BUDGET
        assert row.starts[0] == 0
        assert row.starts[-1] == len(row.tokens_T) == len(row.positions_T) == len(row.mask_T)
        for member, start, end in zip(row.members, row.starts, row.starts[1:], strict=False):
            assert member not in seen
            seen[member] = tuple(row.tokens_T[start:end].tolist())
            assert row.positions_T[start:end].tolist() == list(range(end - start))
            answer_start = given_examples[member].answer_start
            assert row.mask_T[start:end].tolist() == [p >= answer_start for p in range(end - start)]
            assert not row.mask_T[start]  # nothing predicts the first token: loss cannot cross from the row's left
    assert seen == {i: example.tokens for i, example in enumerate(given_examples)}


@given(st.lists(st.integers(1, BUDGET), max_size=60))
def test_rows_are_few(lengths: list[int]) -> None:
    rows = plan_rows(lengths, BUDGET)
    fewest = -(-sum(lengths) // BUDGET)
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert len(rows) <= max(1, 2 * fewest)
    assert sum(load <= BUDGET // 2 for load in loads) <= 1  # two half-empty rows would have been one
    assert rows == plan_rows(lengths, BUDGET)


def test_a_mix_with_a_long_tail_wastes_little() -> None:
    lengths = [20] * 200 + [50] * 50 + [300] * 10 + [900] * 2
    rows = plan_rows(lengths, 1024)
    assert sum(lengths) / (len(rows) * 1024) > 0.9


def test_a_too_long_example_is_a_clear_error() -> None:
    with pytest.raises(TltError, match="example 1 has 5 tokens but a row holds 4"):
        pack([Example((1, 2), 1), Example((1, 2, 3, 4, 5), 1)], 4)


@pytest.mark.parametrize("example", [Example((), 0), Example((1,), 1), Example((1, 2), 0), Example((1, 2), 2)])
def test_an_example_without_prompt_or_answer_is_an_error(example: Example) -> None:
    with pytest.raises(TltError, match="example 0"):
        pack([example], 8)


def test_nothing_packs_into_nothing() -> None:
    assert pack([], 8) == []
