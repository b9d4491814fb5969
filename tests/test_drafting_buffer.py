"""The drafter's buffer: bounded, versioned, mixed as configured, and the same after a restart."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.config import DraftingSettings
from tlt.drafting.buffer import Buffer, Sample, States
from tlt.errors import TltError
from tlt.train.checkpoint import load_state, save_state

MIB = 2**20


def sample(answer: int, version: int = 0, *, name: str = "p", prompt: int = 3, width: int = 0) -> Sample:
    made = Sample.of(range(prompt), range(answer), name, version)
    if not width:
        return made
    states = States(torch.zeros(answer, 3 * width), torch.zeros(answer, width))
    return Sample(made.tokens_T, made.answer_start, name, version, states)


def drawn(buffer: Buffer, tokens: int, times: int) -> list[Sample]:
    return [one for _ in range(times) for one in buffer.draw(tokens)]


def true_bytes(samples: Sequence[Sample]) -> int:
    return sum(one.bytes for one in samples)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 40_000), st.integers(0, 5), st.sampled_from([0, 1, 4])), min_size=1, max_size=60)
)
def test_the_bound_holds_whatever_comes(arrivals: list[tuple[int, int, int]]) -> None:
    buffer = Buffer(DraftingSettings(buffer_mib=1))
    for answer, version, width in arrivals:
        buffer.add([sample(answer, version, width=width)])
        assert buffer.bytes == true_bytes(buffer.samples) <= MIB
        assert all(one.states is None or one.version == buffer.version for one in buffer.samples)
    assert len(buffer) + buffer.dropped == len(arrivals)
    for one in buffer.draw(5000):
        assert any(one is kept for kept in buffer.samples)


def test_the_oldest_go_first_and_of_these_the_shortest() -> None:
    buffer = Buffer(DraftingSettings(buffer_mib=1))
    buffer.add([sample(60_000, 0, name="old long"), sample(40_000, 0, name="old short"), sample(100_000, 1)])
    assert buffer.dropped == 0
    buffer.add([sample(100_000, 2)])
    assert [one.prompt_id for one in buffer.samples if one.version == 0] == ["old long"]
    buffer.add([sample(20_000, 2)])
    assert {one.version for one in buffer.samples} == {1, 2}
    buffer.add([sample(2 * MIB, 3)])  # larger than the buffer: nobody else is dropped for it
    assert {one.version for one in buffer.samples} == {1, 2}


def test_states_go_before_samples_and_with_their_version() -> None:
    buffer = Buffer(DraftingSettings(buffer_mib=1))
    buffer.add([sample(1000, 0, name="short", width=32), sample(1100, 0, name="long", width=32)])
    held = {one.prompt_id: one.states is not None for one in buffer.samples}
    assert held == {"short": False, "long": True}
    assert buffer.dropped == 0
    buffer.add([sample(10, 1)])
    assert all(one.states is None for one in buffer.samples)
    buffer.add([sample(10, 0, width=2)])  # late, of a policy that is no more
    assert all(one.states is None for one in buffer.samples)


@pytest.mark.parametrize("fresh", [0.0, 0.25, 0.75, 1.0])
def test_fresh_and_earlier_answers_are_mixed_as_configured(fresh: float) -> None:
    buffer = Buffer(DraftingSettings(fresh=fresh))
    buffer.add([sample(length, 0) for length in (10, 20, 200, 400)])
    buffer.add([sample(length, 1) for length in (5, 6, 7, 8) * 30])
    tokens = Counter[int]()
    for one in drawn(buffer, 1000, 400):
        tokens[one.version] += len(one.tokens_T)
    assert tokens[1] / tokens.total() == pytest.approx(fresh, abs=0.03)


def test_earlier_answers_are_mostly_long_and_fresh_ones_all_come_round() -> None:
    buffer = Buffer(DraftingSettings(fresh=0.5))
    buffer.add([sample(10, 0, name="short"), sample(400, 0, name="long")])
    buffer.add([sample(50, 1, name=str(number)) for number in range(20)])
    names = Counter(one.prompt_id for one in drawn(buffer, 600, 500))
    assert names["long"] > 10 * names["short"] > 0
    fresh = [names[str(number)] for number in range(20)]
    assert max(fresh) - min(fresh) <= 1


def test_without_earlier_answers_all_are_fresh_and_none_comes_twice_in_a_batch() -> None:
    buffer = Buffer(DraftingSettings(fresh=0.25))
    assert buffer.draw(100) == []
    buffer.add([sample(10, 7, name=str(number)) for number in range(5)])
    batch = buffer.draw(10_000)
    assert sorted(one.prompt_id for one in batch) == list("01234")


def test_batches_keep_to_their_tokens_and_a_longer_answer_comes_alone() -> None:
    buffer = Buffer(DraftingSettings())
    buffer.add([sample(length) for length in (10, 40, 90, 300)])
    for _ in range(50):
        batch = buffer.draw(100)
        assert sum(len(one.tokens_T) for one in batch) <= 100 or len(batch) == 1
    assert any(len(buffer.draw(100)[0].tokens_T) > 100 for _ in range(10))


def test_the_order_is_a_function_of_the_seed() -> None:
    orders = []
    for seed in (0, 0, 1):
        buffer = Buffer(DraftingSettings(), seed=seed)
        buffer.add([sample(10, 0, name=f"{number}") for number in range(30)])
        buffer.add([sample(10, 1, name=f"{number}+") for number in range(30)])
        orders.append([one.prompt_id for one in drawn(buffer, 100, 10)])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("empty", [False, True])
def test_a_restored_buffer_goes_on_as_the_saved_one(tmp_path: Path, empty: bool) -> None:
    buffer = Buffer(DraftingSettings(fresh=0.5))
    if not empty:
        buffer.add([sample(10 + number, 0, name=f"{number}") for number in range(30)])
        buffer.add([sample(9, 1, name=f"{number}+", width=2) for number in range(30)])
    drawn(buffer, 100, 3)
    save_state(buffer.state(), tmp_path, "buffer")
    other = Buffer(DraftingSettings(fresh=0.5))
    other.restore(load_state(tmp_path, "buffer"))
    assert [one.prompt_id for one in drawn(other, 100, 9)] == [one.prompt_id for one in drawn(buffer, 100, 9)]
    assert (len(other), other.version) == (len(buffer), buffer.version)
    assert other.bytes == true_bytes(other.samples) <= buffer.bytes
    for mine, theirs in zip(other.samples, buffer.samples, strict=True):
        assert torch.equal(mine.tokens_T, theirs.tokens_T)
        assert (mine.answer_start, mine.version) == (theirs.answer_start, theirs.version)


@pytest.mark.parametrize(("prompt", "answer"), [(0, 5), (3, 1), (3, 0)])
def test_nothing_to_draft_is_refused(prompt: int, answer: int) -> None:
    with pytest.raises(TltError, match="nothing to draft"):
        sample(answer, prompt=prompt)
