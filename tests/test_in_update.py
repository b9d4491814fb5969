"""Drafter training inside a policy update: the states are the update's own, and the update does not notice."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_drafting_trainer import DRAFT, DRAFTING, answers, eagle
from tlt.config import DraftingSettings, GrpoSettings, TrainSettings
from tlt.drafting import trainer
from tlt.drafting.in_update import MicroBatch, batch_of, plan_update, steps_within
from tlt.drafting.trainer import OnlineDrafter
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.train.drafter import DrafterDiverged, DrafterTrainer, policy_states
from tlt.train.packing import Example, PackedRow, pack
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Experience, Message, Prompt, Rollout, SamplingParams

IN_UPDATE = replace(DRAFTING, states="update", tokens=80, held_out=40, check=2)


def rows_of(lengths: Sequence[tuple[int, int]], budget: int = 64) -> list[PackedRow]:
    """Rows of (prompt number, completion tokens)."""
    examples = [Example((5, 2 + prompt, *[7] * length), 2) for prompt, length in lengths]
    return pack(examples, budget)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=40), st.integers(0, 20))
def test_what_is_measured_shares_no_prompt_with_what_is_learned(lengths: list[tuple[int, int]], most: int) -> None:
    rows = rows_of(lengths)
    plan = plan_update(rows, tokens=30, held_tokens=20, most=most, seed="0")
    assert len(plan.learned) <= most
    if not most or len(lengths) == 1:
        assert plan.held is None
        assert not plan.learned
        return
    assert plan.learned
    assert plan.held is not None
    assert plan.held.row == 0
    used = [(batch.row, place) for batch in (plan.held, *plan.learned) for place in batch.members]
    assert len(used) == len(set(used)), "no sequence twice"
    assert [batch.row for batch in plan.learned] == sorted(batch.row for batch in plan.learned)
    for batch in plan.learned:
        sizes = [rows[batch.row].lengths[place] for place in batch.members]
        assert len(sizes) == 1 or sum(sizes) <= 30
    if len({prompt for prompt, _ in lengths}) > 1:
        held = {_second(rows[0], place) for place in plan.held.members}
        learned = {_second(rows[batch.row], place) for batch in plan.learned for place in batch.members}
        alone = {prompt for prompt, _ in lengths} <= {second - 2 for second in held}
        assert alone or not held & learned


def _second(row: PackedRow, place: int) -> int:
    return int(row.tokens_T[row.starts[place] + 1])


def test_few_micro_steps_are_spread_over_the_rows() -> None:
    rows = rows_of([(number % 10, 20 + number % 7) for number in range(60)])
    every = plan_update(rows, tokens=30, held_tokens=20, most=1000, seed="0").learned
    few = plan_update(rows, tokens=30, held_tokens=20, most=4, seed="0").learned
    assert len(few) == 4 < len(every)
    assert set(few) <= set(every)
    assert max(batch.row for batch in few) - min(batch.row for batch in few) > len(rows) // 2


def test_a_batch_holds_what_a_forward_of_its_sequences_gives() -> None:
    policy = tiny.policy()
    taps = eagle(policy).config.taps
    luck = random.Random(0)
    examples = [Example(tuple(luck.randrange(40) for _ in range(size)), 3) for size in (9, 14, 6, 20)]
    (row,) = pack(examples, 64)
    with torch.no_grad():
        states = policy(row.tokens_T, PackedLayout.from_lengths(row.lengths, "cpu"), taps)
    batch = batch_of(MicroBatch(0, (1, 3)), row, states)
    (alone,) = pack([examples[row.members[1]], examples[row.members[3]]], 64)
    expected = policy_states(policy, alone, taps)
    torch.testing.assert_close(batch.features_TF, expected.features_TF)
    torch.testing.assert_close(batch.hidden_TD, expected.hidden_TD)
    assert torch.equal(batch.aligned.next_T, expected.aligned.next_T)
    assert torch.equal(batch.aligned.learn_T, expected.aligned.learn_T)
    assert batch.aligned.lengths == expected.aligned.lengths


# ---- inside an update


def experiences(found: Sequence[Completion]) -> list[Experience]:
    prompts = [Prompt("p", (Message("user", "?"),), None) for _ in found]
    return [
        Experience(Rollout(prompt, completion, float(number % 2)), 1.0 if number % 2 else -1.0)
        for number, (prompt, completion) in enumerate(zip(prompts, found, strict=True))
    ]


def policy_trainer(policy: Transformer) -> PolicyTrainer:
    return PolicyTrainer(policy, TrainSettings(row_tokens=128), GrpoSettings(), sampling=SamplingParams())


def learner(policy: Transformer, settings: DraftingSettings = IN_UPDATE) -> OnlineDrafter:
    return OnlineDrafter(policy, eagle(policy), DRAFT, settings, cold=True)


def test_the_update_is_the_same_with_and_without_it_and_the_drafter_learns() -> None:
    plain, policy = tiny.policy(), tiny.policy()
    found = answers(policy)
    expected = policy_trainer(plain).update(experiences(found))
    drafter = learner(policy)
    drafter.learn_from(found, 0)
    drafter.sort_arrived()
    training = drafter.in_update(1e9)
    update = policy_trainer(policy).update(experiences(found), training)
    result = training.finish()
    assert update == expected
    for one, other in zip(plain.parameters(), policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (result.began, result.ended, result.micro_steps) == ("cold", "stopped", trainer._FIRST_STEPS)
    assert result.published
    assert drafter.version == 1
    assert 0 < result.measuring_s < result.seconds == result.waited_s
    again = drafter.in_update(1e9)
    policy_trainer(policy).update(experiences(found), again)
    assert again.finish().micro_steps > trainer._FIRST_STEPS, "now it is known how long they take"
    assert drafter.status().micro_s > 0


def test_what_it_may_take_bounds_its_micro_steps() -> None:
    policy = tiny.policy()
    found = answers(policy)
    drafter = learner(policy)
    drafter.learn_from(found, 0)
    drafter.sort_arrived()
    drafter._in_updates.append((1.0, 1))
    training = drafter.in_update(3.5)
    policy_trainer(policy).update(experiences(found), training)
    assert training.finish().micro_steps == 3


@given(
    st.floats(0.0, 10.0),
    st.floats(0.01, 2.0),
    st.floats(0.0, 2.0),
    st.integers(0, 7),
    st.integers(1, 8),
    st.integers(1, 2),
)
def test_micro_steps_and_the_measurements_behind_them_fit_into_the_time(
    seconds: float, micro_s: float, look_s: float, before: int, check: int, looks: int
) -> None:
    before = min(before, check - 1)
    steps, measures = steps_within(seconds, micro_s, look_s, before, check, looks)
    assert steps >= 0
    assert steps * micro_s + measures * looks * look_s <= seconds + 1e-9 or steps == 0
    assert measures == (before + steps >= check) or steps == 0
    assert steps + 1 + before >= check or (steps + 1) * micro_s > seconds - 1e-9, "no time is left unused"


def test_short_sessions_are_measured_together_and_then_give_a_drafter_out() -> None:
    policy = tiny.policy()
    found = answers(policy)
    drafter = learner(policy, replace(IN_UPDATE, check=5))
    results = []
    for _ in range(3):
        drafter.learn_from(found, 0)
        drafter.sort_arrived()
        drafter._in_updates.extend([(1.0, 1)] * 3)
        training = drafter.in_update(2.0)
        policy_trainer(policy).update(experiences(found), training)
        results.append(training.finish())
    assert [result.micro_steps for result in results] == [2, 2, 2]
    assert [result.published for result in results] == [False, False, True]
    assert [result.after.tokens > 0 for result in results] == [False, False, True]
    last = results[-1]
    assert last.tokens > results[0].tokens + results[1].tokens, "all that was learned since the last measurement"
    assert last.after.accept_length > last.before.accept_length == 1.0


def test_a_drafter_that_fails_does_not_fail_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, policy = tiny.policy(), tiny.policy()
    found = answers(policy)
    policy_trainer(plain).update(experiences(found))
    drafter = learner(policy)
    drafter.learn_from(found, 0)
    drafter.sort_arrived()

    def fails(*_: object) -> None:
        raise DrafterDiverged("no finite numbers")

    monkeypatch.setattr(DrafterTrainer, "launch", fails)
    training = drafter.in_update(1e9)
    policy_trainer(policy).update(experiences(found), training)
    result = training.finish()
    assert (result.ended, result.alarm, result.published) == ("diverged", "no finite numbers", False)
    for one, other in zip(plain.parameters(), policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_learned_where_nothing_arrived() -> None:
    policy = tiny.policy()
    drafter = learner(policy)
    training = drafter.in_update(1e9)
    policy_trainer(policy).update(experiences(answers(policy)), training)
    result = training.finish()
    assert (result.ended, result.micro_steps, result.seconds) == ("no answers", 0, 0.0)
