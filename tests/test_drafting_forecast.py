"""Whether drafter training pays: by formula where it can be reckoned by hand, and in simulated runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tuning
from tlt.config import DraftingSettings
from tlt.drafting.forecast import (
    Choices,
    Costs,
    LearningCurve,
    Situation,
    chance_of,
    forecast,
    makespan,
    ticks_by_size,
)
from tlt.drafting.planner import DrafterStatus, DraftShapes, TrainingPlanner
from tlt.event_builders import training_forecast
from tlt.spec.budget import PAYBACK, SHARE, CostKind
from tlt.spec.shape import OFF, Shape
from tlt.watch.summary import forecast_in_words

SHAPES = [Shape(("eagle",), depth, 1, depth + 1) for depth in (1, 3, 7)]


def expected(shape: Shape, batch: int) -> tuple[float, float | None]:
    """A 7B policy on one card."""
    return 1.0, tuning.tick_s(shape, tuning.pad(batch))


# ---- by hand


def test_a_chance_is_what_a_chain_of_an_accept_length_has() -> None:
    assert chance_of(1.0, 5) == pytest.approx(0.0, abs=1e-6)
    assert chance_of(1.75, 2) == pytest.approx(0.5)
    assert chance_of(9.0, 2) == pytest.approx(1.0)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 50))
def test_every_token_is_in_the_makespan_once(lengths: Sequence[int], rows: int) -> None:
    ticks = ticks_by_size(lengths, rows, lambda running: running)
    assert sum(lengths) <= sum(running * count for running, count in ticks.items()) + 1e-6
    if rows >= len(lengths):
        assert sum(ticks.values()) == pytest.approx(max(lengths))
    else:
        assert sum(ticks.values()) >= sum(lengths) / rows - 1e-6


def test_a_rollout_takes_the_best_shape_at_every_batch_size() -> None:
    ticks = {1: 100.0, 64: 10.0}
    choices = {1: Choices(1.0, (1.5, 3.0)), 64: Choices(2.0, (6.0, 9.0))}
    assert makespan(ticks, choices, ()) == 120.0
    assert makespan(ticks, choices, (2.0, 3.0)) == 75.0 + 20.0


def test_a_drafter_learns_as_this_run_has_shown_rather_than_as_others_did() -> None:
    prior, quick, slow = LearningCurve(), LearningCurve(), LearningCurve()
    for _ in range(4):
        quick.see(0.0, 50_000, 0.8)
        slow.see(0.0, 50_000, 0.02)
    found = [curve.after(0.0, 100_000) for curve in (slow, prior, quick)]
    assert found[0] < 0.5 * found[1] < 0.25 * found[2]
    assert all(curve.after(0.9, 0) == 0.9 for curve in (prior, quick, slow))
    assert prior.after(0.3, 1 << 40) <= 0.95


def situation(**changes: object) -> Situation:
    """Answers of 20,000 tokens, one at a time; a tick takes 10 ms, verifying a chain of 7 takes 20 ms."""
    now = Situation(
        ticks={1: 20_000.0},
        choices={1: Choices(0.01, (0.02,))},
        accept_lengths=lambda chance: [sum(chance**depth for depth in range(8))],
        chance=0.0,
        costs=Costs(micro_s=0.2, micro_tokens=8192, look_s=0.3, check=16),
        steps_left=100,
        step_s=250.0,
    )
    return replace(now, **changes)  # type: ignore[arg-type]


def test_training_pays_where_much_comes_back_and_not_at_the_end_of_a_run() -> None:
    curve = LearningCurve()
    many = forecast(situation(), curve)
    assert many.pays
    assert many.returns_s > 1.5 * many.cost_s > 0
    few = forecast(situation(steps_left=2, ticks={1: 2_000.0}), curve)
    assert not few.pays
    assert forecast_in_words(training_forecast(98, few)).startswith("no drafter training: expected -")
    assert not forecast(situation(steps_left=0), curve).pays
    assert not forecast(situation(costs=replace(situation().costs, micro_s=1e5)), curve).pays
    assert not forecast(situation(choices={1: Choices(0.01, (0.2,))}), curve).pays, "drafts are too dear"


@given(st.floats(0.0, 0.9), st.integers(1, 100), st.floats(0.01, 5.0), st.floats(0.0, 1.0))
def test_what_is_proposed_brings_back_a_multiple_of_its_cost(
    chance: float, steps_left: int, micro_s: float, look_s: float
) -> None:
    costs = Costs(micro_s=micro_s, micro_tokens=2048, look_s=look_s, check=16)
    found = forecast(situation(chance=chance, steps_left=steps_left, costs=costs), LearningCurve())
    if found.pays:
        assert found.returns_s > PAYBACK * found.cost_s >= costs.of(16)
        assert found.gain > 0


# ---- a run, by a clock that costs nothing


@dataclass
class SimulatedRun:
    """A policy and a drafter whose chance rises with what it has learned from. Truth is kept from the planner."""

    lengths: Sequence[int]
    steps: int
    ceiling: float  # chance that the drafter comes to
    half: float  # tokens that bring it half of the way
    other_s: float = 1.0  # of a step, beside rollout and drafter
    micro_s: float = 0.15

    def __post_init__(self) -> None:
        known = DraftShapes([OFF, *SHAPES], "eagle", expected)
        settings = DraftingSettings()
        self.planner = TrainingPlanner(settings, self.steps, 5, 256, tuning.pad, known)
        self.shapes, self.tokens = known, 0.0
        self.plain_s = self.total_s = self.trained_s = 0.0
        self.said: list[str] = []
        self.micro_steps = 0

    @property
    def chance(self) -> float:
        return self.ceiling * self.tokens / (self.tokens + self.half)

    def go(self) -> "SimulatedRun":
        ticks = ticks_by_size(self.lengths, 256, tuning.pad)
        choices = {size: found for size in ticks if (found := self.shapes.choices(size))}
        plain_s = makespan(ticks, choices, ())
        for step in range(1, self.steps + 1):
            rollout_s = makespan(ticks, choices, self.shapes.accept_lengths(self.chance))
            step_s = rollout_s + self.other_s
            self.plain_s, self.total_s = self.plain_s + plain_s + self.other_s, self.total_s + step_s
            self.planner.rolled_out(self.lengths, rollout_s, step_s, plain_s - rollout_s)
            self._train(step)
        return self

    def _train(self, step: int) -> None:
        length = sum(self.chance**depth for depth in range(6))
        status = DrafterStatus(length, True, 8192, self.micro_s, 0.3, 16 * self.micro_s + 0.6)
        decision = self.planner.decide(step, status)
        assert decision.forecast is not None
        self.said += [forecast_in_words(training_forecast(step, decision.forecast))]
        micro_steps = int((decision.seconds - 0.6) / self.micro_s) if decision.trains else 0
        if micro_steps > 0:
            spent_s = 0.6 + micro_steps * self.micro_s
            self.tokens += 8192 * micro_steps
            self.total_s, self.trained_s = self.total_s + spent_s, self.trained_s + spent_s
            self.planner.account.charge(CostKind.MEASURING, 0.6)
            self.planner.account.charge(CostKind.TRAINING, micro_steps * self.micro_s)
            self.planner.trained(length, 8192 * micro_steps, sum(self.chance**depth for depth in range(6)))
            self.micro_steps += micro_steps


def test_short_answers_in_a_short_run_train_no_drafter() -> None:
    """Training would take most of what can be won, as for a small policy on questions of grade-school arithmetic."""
    run = SimulatedRun([200] * 200 + [300] * 40 + [400] * 16, steps=40, ceiling=0.5, half=2e6).go()
    assert run.micro_steps == 0
    assert run.total_s == run.plain_s
    assert run.said[0].startswith("no drafter training: expected ")
    assert run.said[0].endswith("over the 39 steps left")


def test_long_answers_train_a_drafter_and_bring_much_more_back() -> None:
    run = SimulatedRun([500 * (1 + n % 8) for n in range(60)] + [16_000] * 4, steps=100, ceiling=0.85, half=1e6).go()
    assert run.micro_steps > 100
    assert run.total_s < 0.6 * run.plain_s
    assert run.trained_s < 0.15 * (run.plain_s - run.total_s)


def test_a_drafter_that_learns_nothing_costs_a_hundredth_however_long_answers_are() -> None:
    run = SimulatedRun([500 * (1 + n % 8) for n in range(60)] + [16_000] * 4, steps=100, ceiling=0.02, half=1e6).go()
    assert run.total_s <= (1 + SHARE) * run.plain_s
    assert "no drafter training" in run.said[-1], "what it learned has shown that it does not pay"
    assert run.trained_s <= 0.01 * run.plain_s


@given(
    st.lists(st.integers(50, 8000), min_size=4, max_size=20),
    st.integers(2, 40),
    st.floats(0.0, 0.95),
    st.floats(1e4, 1e8),
    st.floats(0.0, 30.0),
)
def test_no_run_is_slower_than_the_account_allows(
    lengths: Sequence[int], steps: int, ceiling: float, half: float, other_s: float
) -> None:
    run = SimulatedRun(lengths, steps, ceiling, half, other_s).go()
    assert run.total_s <= (1 + SHARE) * run.plain_s + 1e-6  # the loan is paid back by the end


# ---- around a forecast


def planner(**changes: object) -> TrainingPlanner:
    settings = replace(DraftingSettings(), **changes)  # type: ignore[arg-type]
    return TrainingPlanner(settings, 100, 5, 256, tuning.pad, DraftShapes([OFF, *SHAPES], "eagle", expected))


COLD = DrafterStatus(1.0, True, 8192, 0.15, 0.3, 3.0)


def test_a_share_is_spent_whether_it_pays_or_not() -> None:
    forced, usual = planner(forced_share=0.1), planner()
    for one in (forced, usual):
        one.rolled_out([100] * 8, 1.0, 10.0, 0.0)
    assert not usual.decide(1, COLD).trains
    assert forced.decide(1, COLD).seconds == pytest.approx(1.0)
    forced.account.charge(CostKind.TRAINING, 0.7)
    assert forced.decide(1, COLD).seconds == pytest.approx(0.1 * 10.7 - 0.7)


def test_savings_that_replays_do_not_show_are_not_spent() -> None:
    believed, seen = planner(), planner()
    for one in (believed, seen):
        one.rolled_out([16_000] * 4, 60.0, 100.0, 40.0)
    seen.replayed(plain_s=50.0)  # the rollout was slower than plain decoding
    for one in (believed, seen):
        one.rolled_out([16_000] * 4, 60.0, 100.0, 40.0)
    assert seen.account.saved_s == pytest.approx(believed.account.saved_s - 40.0)


def test_a_drafter_that_gains_nothing_more_is_left_alone_though_it_would_pay() -> None:
    one = planner()
    for _ in range(4):
        one.rolled_out([16_000] * 4, 60.0, 100.0, 0.0)
    assert one.decide(4, COLD).trains
    assert not one.decide(4, replace(COLD, due=False)).trains


def test_no_more_is_expected_of_a_drafter_than_was_shown() -> None:
    curve = LearningCurve()
    record = curve.after(0.0, 1_150_000)
    assert curve.after(0.0, 10**9) == pytest.approx(record), "the recorded curve ends there"
    curve.see(0.0, 10_000_000, 0.8)
    assert curve.after(0.8, 10**9) == pytest.approx(curve.after(0.8, 30_000_000))
    assert curve.after(0.8, 10_000_000) > 0.8, "twice what this run has trained on"
