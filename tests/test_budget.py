"""The account of a run: whatever happens, and whatever is spent on, it is hardly slower than without speculation."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_tuner import learned, tuner
from tests.tuning import LEARNED, outcome, parts_s, tick_s
from tlt.spec.acceptance import AcceptResult, RankHits
from tlt.spec.budget import PROMISED_TICKS, SHARE, TRY_SHARE, Budget, CostKind
from tlt.spec.costs import DECODE, EXTEND, KEEP, Measured, TickTimes
from tlt.spec.shape import OFF
from tlt.spec.shape_policy import Outcome
from tlt.spec.tuner import plain_ticks

TICK_S = 0.01


@dataclass(frozen=True)
class Turn:
    """A step, ticks in it that would like to speculate, and what somebody would like to do behind it."""

    plain_s: float
    ticks: Sequence[tuple[float, float, float]]  # plain ticks lost at worst; share of them lost; gain that is promised
    wishes: Sequence[tuple[CostKind, float, float]]  # kind, worst case in seconds, share of it that is needed


TICKS = st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(-3.0, 1.0), st.floats(0.0, 0.9)), max_size=30)
WISHES = st.lists(st.tuples(st.sampled_from(CostKind), st.floats(0.0, 5.0), st.floats(0.0, 1.0)), max_size=8)
TURNS = st.lists(st.builds(Turn, st.floats(0.1, 20.0), TICKS, WISHES), min_size=1, max_size=30)
TRIES = "tries"  # ticks that speculate


def overrun(turns: Sequence[Turn], left_out: str | None = None) -> float:
    """Seconds by which everything that fits makes a run take longer than it may, at its worst moment."""
    account = Budget(tick_s=TICK_S)
    plain_s = total_s = worst_s = 0.0
    for turn in turns:
        plain_s, total_s = plain_s + turn.plain_s, total_s + turn.plain_s
        account.ran(turn.plain_s, turn.plain_s)
        for longest, part, gain in turn.ticks:
            if account.affords(longest * TICK_S, gain):
                took_s = max(0.1, 1.0 + part * longest) * TICK_S
                plain_s, total_s = plain_s + TICK_S, total_s + took_s
                account.ran(took_s if left_out != TRIES else TICK_S, TICK_S)
        for kind, longest_s, part in turn.wishes:
            if account.affords(longest_s):
                total_s += part * longest_s
                if kind is not left_out:
                    account.charge(kind, part * longest_s)
        worst_s = max(worst_s, total_s - (1 + SHARE) * plain_s - PROMISED_TICKS * TICK_S)
    return worst_s


def test_workers_go_on_from_the_mean_of_the_accounts_that_were_saved() -> None:
    """Of other numbers of workers, too: the free share is not to be spent again, nor more than once."""
    accounts = [Budget() for _ in range(3)]
    for number, account in enumerate(accounts, start=1):
        account.ran(9.0 * number, 10.0 * number)
        account.charge(CostKind.CAPTURES, float(number))
        account.tried(0.5 * number)
    saved = [{**account.state(), "of another version": 7.0} for account in accounts]
    restored = Budget(longest=3)
    restored.restore(saved)
    assert restored.balance_s == pytest.approx(accounts[1].balance_s)
    assert restored.state() == pytest.approx(accounts[1].state())
    assert restored.longest == 3


def test_the_mean_of_accounts_does_not_depend_on_their_order() -> None:
    accounts = [Budget(plain_s=seconds).state() for seconds in (0.1, 1e16, 0.7, -1e16, 0.3)]
    assert Budget.mean(accounts).plain_s == Budget.mean(accounts[::-1]).plain_s == pytest.approx(0.22)


@given(TURNS)
@settings(max_examples=200, deadline=None)
def test_a_run_takes_at_most_a_hundredth_longer_at_any_moment(turns: Sequence[Turn]) -> None:
    assert overrun(turns) <= 1e-9


@pytest.mark.parametrize("kind", [*CostKind, TRIES])
def test_no_kind_of_cost_may_be_left_out_of_the_account(kind: str) -> None:
    wishes = [(CostKind(kind), 0.1, 1.0)] * 20 if kind != TRIES else []
    turns = [Turn(10.0, [(2.0, 1.0, 0.0)] * 100 if kind == TRIES else [], wishes)] * 100
    assert overrun(turns) <= 1e-9
    assert overrun(turns, left_out=kind) > 90.0


def test_what_nothing_waits_for_is_free_and_nothing_is_lent() -> None:
    account = Budget()
    assert not account.affords(1e-6), "nothing is known of a run that has not begun"
    account.ran(2.0, 2.0)
    account.charge(CostKind.TRAINING, -3.0)
    assert account.balance_s == pytest.approx(SHARE * 2.0)


def test_savings_are_spent_up_to_a_limit_and_losses_are_paid_back_first() -> None:
    account = Budget()
    account.ran(30.0, 100.0)
    assert account.balance_s == pytest.approx(SHARE * 100.0 + 10.0)
    account.ran(200.0, 100.0)
    assert not account.affords(0.0)


def test_a_promise_pays_for_as_much_as_it_would_have_saved_so_far() -> None:
    budget = Budget(tick_s=0.01)
    assert not budget.affords(0.1, 0.5)
    budget.ran(0.25, 0.25)
    assert budget.affords(0.1, 0.5)
    assert not budget.affords(0.1, 0.1)
    budget.charge(CostKind.CAPTURES, 0.1)
    assert not budget.affords(0.1, 0.5)
    budget.ran(0.0, 0.1)
    assert budget.affords(0.1, 0.5)
    budget.ran(1000.0, 990.0)
    budget.charge(CostKind.CAPTURES, 10.0)
    assert not budget.affords(0.1, 0.5), "a promise is not trusted for ever: it should have been kept by now"


def test_what_was_lent_is_paid_back_before_more_is_tried() -> None:
    budget = Budget(tick_s=2.0 / (TRY_SHARE * 256), longest=256)
    assert budget.affords_try(2.0)
    budget.tried(2.0)
    budget.ran(300.0, 298.0)
    assert not budget.affords_try(0.1)
    budget.ran(900.0, 900.0)
    assert budget.affords_try(TRY_SHARE * 1200.0 - 2.0 - 0.1)
    assert not budget.affords_try(TRY_SHARE * 1200.0 - 2.0 + 0.1)


# ---- the tuner on it


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 8), st.sampled_from([1, 8, 64])), min_size=1, max_size=25))
@settings(max_examples=40, deadline=None)
def test_no_sequence_of_acceptances_makes_a_rollout_slower_than_that(spells: Sequence[tuple[int, int, int]]) -> None:
    """So many ticks each, in which every request accepts so many tokens if there are as many; then a long one in which
    nothing is accepted. Requests resemble nobody: what was accepted says nothing of what will be."""
    policy, took_s, plain_s = tuner(), 0.0, 0.0
    policy.set_max_len(4096)
    most_s = 0.0
    for ticks, accepted, batch in [*spells, (60, 0, spells[-1][2])]:
        for _ in range(ticks):
            shape = policy.choose(batch)
            seconds, taken = tick_s(shape, batch), min(accepted, shape.depth)
            hits = RankHits((1,) * taken, 0 if taken == shape.depth else shape.width)
            results = [] if shape.off else [AcceptResult(taken, (hits,) * len(shape.drafters))] * batch
            policy.observe(outcome(shape, batch, results, seconds))
            took_s, plain_s = took_s + seconds, plain_s + (1 + taken) * tick_s(OFF, batch)
            most_s = max(most_s, tick_s(OFF, batch))
            assert took_s <= (1.0 + SHARE) * plain_s + PROMISED_TICKS * most_s


def test_what_a_tuner_does_beside_ticks_is_charged() -> None:
    shape = learned(2, 1, 3)
    results = [AcceptResult(1, (RankHits((1,), 1),))] * 8
    policy = tuner()
    policy.load_costs([Measured(KEEP, 8, 1e-5)])
    policy.observe(outcome(shape, 8, results, tick_s(shape, 8), one_off_s=0.05, ingest_s=0.3, lag=64))
    spent = policy.budget.spent
    assert (spent[CostKind.CAPTURES], spent[CostKind.CATCHING_UP], spent[CostKind.STATES]) == pytest.approx(
        (0.05, 0.3, 1e-5)
    )
    assert policy.budget.saved_s == pytest.approx(2 * tick_s(OFF, 8) - tick_s(shape, 8))
    assert policy.budget.took_s == pytest.approx(tick_s(shape, 8) + 0.35)
    policy.observe(Outcome(OFF, 8, (), TickTimes({DECODE: 0.004, EXTEND: 0.001}, 0.006)))
    assert policy.budget.saved_s == pytest.approx(2 * tick_s(OFF, 8) - tick_s(shape, 8) - 0.001), "drafted in vain"


def test_a_promise_that_is_not_kept_ends_when_the_budget_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tuner believes: here, that everything is accepted for ever."""
    policy, took_s, plain_s = tuner(), 0.0, 0.0
    policy.load_prior(LEARNED, [[1.0]] * 8)
    monkeypatch.setattr(type(policy._acceptance), "see", lambda *_: None)
    for _ in range(3000):
        shape = policy.choose(16)
        results = [] if shape.off else [AcceptResult(0, ())] * 16
        policy.observe(Outcome(shape, 16, results, TickTimes(parts_s(shape, 16), tick_s(shape, 16))))
        took_s, plain_s = took_s + tick_s(shape, 16), plain_s + tick_s(OFF, 16)
    assert 1.02 * plain_s < took_s <= (1.0 + SHARE) * plain_s + PROMISED_TICKS * tick_s(OFF, 16)


# ---- the plain time of a rollout


@pytest.mark.parametrize("seed", range(6))
def test_plain_ticks_are_those_of_a_queue_with_so_many_rows(seed: int) -> None:
    chance = random.Random(seed)
    lengths, rows = [chance.randint(1, 60) for _ in range(chance.randint(1, 80))], chance.choice([1, 7, 32, 100])
    waiting, running, expected = list(lengths), list[int](), Counter[int]()
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        expected[len(running)] += 1
        running = [left - 1 for left in running if left > 1]
    assert plain_ticks(lengths, rows, lambda requests: requests) == expected


def test_a_rollout_is_booked_by_its_lengths_as_drafts_may_help_those_alone_that_end_first() -> None:
    """Half of the requests accept everything, and end early; of the others nothing is accepted. Tick by tick, drafts
    seem to save time that the slow half needs all the same."""
    shape, policy = learned(2, 1, 3), tuner()
    right, wrong = AcceptResult(2, (RankHits((1, 1)),)), AcceptResult(0, (RankHits((), 1),))
    took_s = 0.0
    for tick in range(60):
        results = [right] * 8 * (tick < 20) + [wrong] * 8
        took_s += tick_s(shape, len(results))
        policy.observe(outcome(shape, len(results), results, tick_s(shape, len(results))))
    plain_s = 60 * tick_s(OFF, 16)
    assert policy.budget.plain_s > 1.25 * plain_s, "tick by tick"
    policy.rollout_ended([60] * 16)
    assert policy.budget.plain_s == pytest.approx(plain_s, rel=0.01)
    assert policy.budget.saved_s == policy.report().saved_s == pytest.approx(plain_s - took_s, rel=0.05)
    assert policy.budget.saved_s < 0.0


def test_a_plain_rollout_keeps_its_own_time() -> None:
    policy = tuner()
    for _ in range(50):
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16)))
    before = policy.budget.plain_s
    policy.rollout_ended([70] * 16)
    assert (policy.budget.plain_s, policy.budget.saved_s) == (before, 0.0)


def test_ticks_that_nothing_waited_for_are_not_corrected_either() -> None:
    shape, policy = learned(2, 1, 3), tuner()
    policy.budget.nothing_waits = True
    for _ in range(20):
        policy.observe(outcome(shape, 16, [AcceptResult(2, (RankHits((1, 1)),))] * 16, tick_s(shape, 16)))
    policy.rollout_ended([90] * 16)
    assert (policy.budget.plain_s, policy.budget.saved_s) == (0.0, 0.0)
