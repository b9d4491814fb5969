"""The account of a run: whatever happens, and whatever is spent on, it is hardly slower than plain training."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.drafting.budget import SHARE, CostKind, RunBudget


@dataclass(frozen=True)
class Turn:
    """A step, and what somebody would like to do behind it."""

    plain_s: float
    faster: float  # share of it that speculation saves; negative if it loses
    wishes: Sequence[tuple[CostKind, float, float]]  # kind, worst case in seconds, share of it that is needed


WISHES = st.lists(st.tuples(st.sampled_from(CostKind), st.floats(0.0, 5.0), st.floats(0.0, 1.0)), max_size=8)
TURNS = st.lists(st.builds(Turn, st.floats(0.1, 20.0), st.floats(-SHARE, 0.7), WISHES), min_size=1, max_size=30)


def overrun(turns: Sequence[Turn], left_out: CostKind | None = None) -> float:
    """Seconds by which everything that fits makes a run take longer than it may, at its worst moment."""
    account = RunBudget()
    plain_s = total_s = worst_s = 0.0
    for turn in turns:
        saved_s = turn.faster * turn.plain_s
        plain_s, total_s = plain_s + turn.plain_s, total_s + turn.plain_s - saved_s
        account.finished(turn.plain_s - saved_s, saved_s)
        for kind, longest_s, part in turn.wishes:
            if account.affords(longest_s):
                total_s += part * longest_s
                if kind is not left_out:
                    account.charge(kind, part * longest_s)
        worst_s = max(worst_s, total_s - (1 + SHARE) * plain_s)
    return worst_s


@given(TURNS)
@settings(max_examples=300, deadline=None)
def test_a_run_takes_at_most_a_hundredth_longer_at_any_moment(turns: Sequence[Turn]) -> None:
    assert overrun(turns) <= 1e-9


@pytest.mark.parametrize("kind", list(CostKind))
def test_no_kind_of_cost_may_be_left_out_of_the_account(kind: CostKind) -> None:
    turns = [Turn(10.0, 0.0, [(kind, 0.1, 1.0)] * 20)] * 100
    assert overrun(turns) <= 1e-9
    assert overrun(turns, left_out=kind) > 100.0


def test_what_nothing_waits_for_is_free_and_nothing_is_lent() -> None:
    account = RunBudget()
    assert not account.affords(1e-6), "nothing is known of a run that has not begun"
    account.finished(2.0, 0.0)
    account.charge(CostKind.TRAINING, -3.0)
    assert account.balance_s == pytest.approx(0.02)


def test_savings_are_spent_up_to_a_limit_and_losses_are_paid_back_first() -> None:
    account = RunBudget()
    account.finished(30.0, 70.0)
    assert account.balance_s == pytest.approx(1.0 + 10.0)
    account.finished(200.0, -100.0)
    assert not account.affords(0.0)
