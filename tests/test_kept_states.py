"""States that are kept: what a batch holds, when they are kept at all, and that nothing is computed twice."""

import random
from collections.abc import Iterator, Sequence

import pytest
import tiny
import torch

from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.train import kept_states
from tlt.train.drafter import DrafterBatch, DrafterTrainer, stream_states
from tlt.train.kept_states import KeptStates, free_room, states_for
from tlt.train.packing import Example, PackedRow, pack

POLICY = tiny.policy()
SHAPE = EagleConfig.of_policy(POLICY.config, window=16)
TAPS = SHAPE.taps
SOURCE = random.Random(3)
LEARNED = [
    Example(tuple(SOURCE.choices(range(tiny.VOCAB), k=length)), 1 + length // 3) for length in (20, 9, 31, 4, 17, 26)
]
POSITION_BYTES = 8 * 4 * POLICY.config.hidden  # float64, three layers and the last


def rows_of(*orders: Sequence[int]) -> list[PackedRow]:
    return [row for order in orders for row in pack([LEARNED[index] for index in order], 64)]


def same(found: DrafterBatch, expected: DrafterBatch) -> None:
    assert torch.equal(found.aligned.next_T, expected.aligned.next_T)
    assert torch.equal(found.aligned.learn_T, expected.aligned.learn_T)
    assert found.aligned.lengths == expected.aligned.lengths
    torch.testing.assert_close(found.features_TF, expected.features_TF, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.hidden_TD, expected.hidden_TD, rtol=1e-9, atol=1e-9)


def test_kept_states_are_those_computed_row_by_row() -> None:
    rows = rows_of((0, 1, 2), (5, 3), (2, 4, 0, 1), (3,))
    for found, expected in zip(
        KeptStates(POLICY, LEARNED, TAPS).stream(rows), stream_states(POLICY, rows, TAPS), strict=True
    ):
        same(found, expected)


def test_equal_sequences_share_their_states_whatever_counts_in_them() -> None:
    tokens = LEARNED[0].tokens
    twins = [Example(tokens, 3), Example(tokens, 9)]
    rows = pack(twins, 64)
    for found, expected in zip(
        KeptStates(POLICY, twins, TAPS).stream(rows), stream_states(POLICY, rows, TAPS), strict=True
    ):
        same(found, expected)


def test_the_policy_runs_over_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def counted(model: object, rows: Sequence[PackedRow], taps: Sequence[int]) -> object:
        nonlocal computed
        computed += sum(len(row.tokens_T) for row in rows)
        return stream_states(POLICY, rows, taps)

    monkeypatch.setattr(kept_states, "stream_states", counted)
    rows = rows_of((0, 1, 2), (5, 3, 4), (1, 0, 5), (4, 3, 2))
    assert len(list(states_for(POLICY, LEARNED, TAPS, passes=2.0)(rows))) == len(rows)
    assert computed == sum(len(example.tokens) for example in LEARNED)


@pytest.mark.parametrize(("passes", "short", "kept"), [(2.0, 0, True), (1.9, 0, False), (50.0, 1, False)])
def test_states_are_kept_where_they_fit_and_are_wanted_again(
    monkeypatch: pytest.MonkeyPatch, passes: float, short: int, kept: bool
) -> None:
    made: list[object] = []

    class Noticed(KeptStates):
        def __init__(self, *arguments: object) -> None:
            made.append(self)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_states, "KeptStates", Noticed)
    room = POSITION_BYTES * sum(len(example.tokens) for example in LEARNED) - short
    rows = rows_of((0, 1), (2, 3))
    found = list(states_for(POLICY, LEARNED, TAPS, passes=passes, room=room)(rows))
    assert bool(made) == kept
    for batch, expected in zip(found, stream_states(POLICY, rows, TAPS), strict=True):
        same(batch, expected)


def test_a_host_gives_states_some_room_and_no_more() -> None:
    assert free_room(torch.device("cpu")) == 2**30


def test_a_drafter_learns_the_same_from_kept_states() -> None:
    settings = DraftSettings(steps=12, tokens_per_batch=64, unroll=2, single_steps=4, warmup_steps=2)
    rows = rows_of(*[(0, 1, 2), (5, 3), (2, 4), (1, 0, 5)] * 3)

    def losses(states: Iterator[DrafterBatch]) -> list[float]:
        drafter = Eagle(SHAPE, dtype=torch.float64)
        drafter.init_weights(seed=0)
        trainer = DrafterTrainer(drafter, POLICY.head_weight, POLICY.embed, settings)
        return [result.loss for result in trainer.micro_steps(states)]

    kept = losses(states_for(POLICY, LEARNED, TAPS, passes=3.0)(rows))
    assert kept == pytest.approx(losses(stream_states(POLICY, rows, TAPS)), rel=1e-9)
    assert kept[-1] < kept[0]
