"""The tuner where what ticks cost changes while it runs, for good or for a moment, for trees alone or for all.

Times are the world's, never the clock's. What is asked for is compared with the best choice in hindsight, which may be
plain decoding.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product
from statistics import mean

import pytest

from tests.test_tuner import SHAPES, best_rate
from tests.tuning import LEARNED, MODEL_FREE, Curve, World, pad, steady, table, tick_s
from tlt.spec.budget import BatchSizeState, Budget
from tlt.spec.costs import TickCosts
from tlt.spec.shape import OFF, Shape
from tlt.spec.tuner import Tuner, TunerSettings


class Changing(World):
    """All ticks may become slower, by a factor and by so many seconds; or only those of some moments."""

    times = 1.0
    more_s = 0.0
    spell, spells, doubled = 0, 0.0, 0.0  # ticks left of a bad moment; how likely one is, and a tick twice as long

    def true_s(self, shape: Shape, batch: int) -> float:
        return super().true_s(shape, batch) * self.times + self.more_s

    def measured(self, shape: Shape, batch: int, true: float) -> float | None:
        begins = self.random.random() < self.spells
        self.spell = self.random.randint(3, 40) if begins and not self.spell else max(0, self.spell - 1)
        true *= 2.0 if self.random.random() < self.doubled else 1.0
        return super().measured(shape, batch, true * (4.0 if self.spell else 1.0))


def changing(first: float, seed: int = 0) -> Changing:
    return Changing({LEARNED: Curve(first), MODEL_FREE: Curve(0.1, per_rank=0.2)}, seed=seed)


def tuner(read_once: bool, settings: TunerSettings | None = None) -> Tuner:
    return Tuner(SHAPES, TickCosts(table(), pad, [LEARNED], context_read_once=read_once), settings)


def over(here: World, batch: int, ticks: int, policy: Tuner, rate: Callable[[], float]) -> float:
    """Time over that of a choice that gives so many tokens a second, for the same (expected) tokens."""
    return 1.0 / (1.0 - steady(policy, here, batch, ticks, rate))


FEW = {(1.5, 8), (2.0, 8), (3.0, 1), (3.0, 8)}  # the others take long


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize(
    ("factor", "batch"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in product((1.5, 2.0, 3.0), (1, 8, 32))
    ],
)
def test_trees_that_become_dearer_for_good_are_left_if_plain_ticks_are_better(
    factor: float, batch: int, read_once: bool
) -> None:
    """2,900 ticks after it: hardly slower than with the best shape in hindsight, or than plain decoding."""
    found = []
    for first in (0.6, 0.8):
        here, policy = changing(first), tuner(read_once)
        steady(policy, here, batch, 500)
        here.trees = factor
        found.append(over(here, batch, 2900, policy, lambda h=here: best_rate(h, batch)))
        report = policy.report()
        assert report.explored_s <= 0.005 * report.seconds + 8 * tick_s(OFF, batch)
    print(f"trees × {factor}, batch {batch}: {found}")
    assert max(found) <= (1.03 if factor < 3 else 1.04)


def test_without_a_look_nobody_would_notice() -> None:
    """The bound above can be broken: ticks of one shape alone do not tell whether plain ones are slower too."""
    here, policy = changing(0.8), tuner(True, TunerSettings(slower_ticks=10**6))
    steady(policy, here, 32, 500)
    here.trees = 3.0
    assert over(here, 32, 1000, policy, lambda: here.rate(OFF, 32)) > 1.3


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize(("first", "batch"), [(0.6, 8), (0.8, 1), pytest.param(0.8, 32, marks=pytest.mark.slow)])
def test_it_is_found_out_in_a_hundred_ticks_and_forgotten_when_it_is_over(
    first: float, batch: int, read_once: bool
) -> None:
    here, policy = changing(first), tuner(read_once)
    steady(policy, here, batch, 2000)
    here.trees = 3.0
    steady(policy, here, batch, 100)
    before = here.ticks[OFF]
    steady(policy, here, batch, 500)
    assert here.ticks[OFF] - before > 470
    here.trees = 1.0
    steady(policy, here, batch, 2500)
    assert steady(policy, here, batch, 500, lambda: best_rate(here, batch)) < 0.1


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize("batch", [1, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_contexts_that_grow_are_no_reason_to_look_again_and_again(batch: int, read_once: bool) -> None:
    """All ticks become twice as long in 3,000 ticks."""
    losses = []
    for seed in range(2):
        here, policy, lost = changing(0.8, seed), tuner(read_once), 0.0
        steady(policy, here, batch, 500)
        started, plain = here.seconds, here.ticks[OFF]
        for step in range(1, 61):
            here.more_s, here.times = (tick_s(OFF, batch) * step / 60, 1.0) if read_once else (0.0, 1.0 + step / 60)
            now = here.seconds
            lost += steady(policy, here, batch, 50, lambda h=here: best_rate(h, batch)) * (here.seconds - now)
        losses.append(lost / (here.seconds - started))
        assert here.ticks[OFF] - plain <= 36
    print(f"growing contexts, batch {batch}: {losses}")
    assert mean(losses) < 0.01


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize(("spells", "doubled", "most"), [(0.0, 0.2, 0.03), (0.003, 0.0, 0.07)])
def test_bad_moments_are_not_the_shapes_fault(spells: float, doubled: float, most: float, read_once: bool) -> None:
    """Single ticks twice as long, or every now and then some in a row four times: plain ones would be as slow."""
    losses = []
    for seed in range(2):
        for first, batch in ((0.5, 8), (0.8, 1), (0.8, 16)):
            here, policy = changing(first, seed), tuner(read_once)
            here.spells, here.doubled = spells, doubled
            steady(policy, here, batch, 500)
            losses.append(steady(policy, here, batch, 1500, lambda h=here, b=batch: best_rate(h, b)))
    print(f"bad moments: {losses}")
    assert mean(losses) <= most


def test_a_slower_machine_is_no_slower_shape() -> None:
    """All ticks take twice as long from one tick to the next: it is looked at, and nothing else changes."""
    for read_once in (False, True):
        here, policy = changing(0.8), tuner(read_once)
        steady(policy, here, 8, 600)
        before = Counter(here.ticks)
        here.times = 2.0
        steady(policy, here, 8, 1000)
        assert 4 <= (here.ticks - before)[OFF] <= 24


def test_plain_ticks_that_are_quick_are_believed_and_the_shape_is_measured_anew() -> None:
    for read_once in (False, True):
        found, shape = TickCosts(table(), pad, [LEARNED], context_read_once=read_once), Shape((LEARNED,), 4, 4, 16)
        true = {one: tick_s(one, 8) for one in (OFF, shape)}
        for times in (1.0, 3.0):
            for _ in range(60):
                found.observe(shape, 8, times * true[shape])
        assert (found.seconds(OFF, 8) or 0.0) > 1.5 * true[OFF]
        for _ in range(4):
            found.observe(OFF, 8, true[OFF])
        for _ in range(8):
            found.observe(shape, 8, 3.0 * true[shape])
        assert found.seconds(OFF, 8) == pytest.approx(true[OFF], rel=0.02)
        assert found.seconds(shape, 8) == pytest.approx(3.0 * true[shape], rel=0.02)


def test_nothing_is_learned_of_a_shape_in_a_bad_moment() -> None:
    for read_once in (False, True):
        found, shape = TickCosts(table(), pad, [LEARNED], context_read_once=read_once), Shape((LEARNED,), 4, 4, 16)
        for times in (1.0, 4.0):
            for one in (shape, OFF, shape):
                for _ in range(12 if one == shape else 4):
                    found.observe(one, 8, times * tick_s(one, 8))
        for _ in range(200):
            found.observe(shape, 8, tick_s(shape, 8))
        for one in (OFF, shape):
            assert found.seconds(one, 8) == pytest.approx(tick_s(one, 8), rel=0.1)


def test_slow_ticks_are_a_reason_if_nearly_all_are() -> None:
    settings, state = TunerSettings(), BatchSizeState(usual_s=1.0)
    for tick in range(400):
        state.took(2.0 if tick % 3 == 0 else 1.05, settings)
        assert not state.is_slower(tick, settings)
    for _ in range(settings.slower_ticks):
        state.took(1.2, settings)
    assert state.is_slower(400, settings)
    for asked in range(5):
        state.compare(400, 4, 0.0, True, settings)
        assert state.wary == 400 + min(settings.check_pause << asked + 1, settings.slower_pause)
        assert not state.is_slower(10**6, settings), "what comes after it is the new measure"


def test_a_comparison_that_has_a_reason_is_lent_if_those_before_lost_little() -> None:
    budget = Budget(0.01, spent=1000.0, lost=10.0)
    assert budget.left == 0.0
    assert budget.lends(3.0)
    budget.book(3.0, True)
    assert not budget.lends(3.0)
    budget.book(-3.5, True)
    assert (budget.compared, budget.lost) == (0.0, 9.5)
    assert budget.lends(3.0)


@pytest.mark.parametrize("read_once", [False, True])
def test_batches_that_grow_are_no_bad_moment(read_once: bool) -> None:
    """Plain ticks of more and more requests, each as foreseen: what comes after them shows what it costs."""
    costs = TickCosts(table(), pad, [LEARNED], context_read_once=read_once)
    used, other = (Shape((LEARNED,), depth, 1, depth + 1) for depth in (3, 1))
    for shape, batch, ticks in ((used, 8, 40), (OFF, 8, 1), (OFF, 16, 1), (OFF, 32, 1)):
        for _ in range(ticks):
            costs.observe(shape, batch, costs.seconds(shape, batch) or 0.0)
    plain, twice = costs.seconds(OFF, 32), 2 * (costs.seconds(other, 32) or 0.0)
    for _ in range(6):
        costs.observe(other, 32, twice)
    assert costs.seconds(other, 32) == pytest.approx(twice, rel=0.05)
    assert costs.seconds(OFF, 32) == pytest.approx(plain, rel=0.05)
