"""What ticks cost, from the times of their parts: nothing is believed at once, and nothing for ever."""

import math
import random

import pytest

from tests.tuning import LEARNED, MODEL_FREE, costs, measured, outcome, pad, parts_s, policy_s, tick_s
from tlt.spec.costs import (
    CATCH_UP,
    DECODE,
    DRAFT,
    EXTEND,
    INGEST,
    LOOKUP,
    POLICY,
    VERIFY,
    CostModel,
    CostTable,
    Measured,
    TickTimes,
    never_falling,
)
from tlt.spec.shape import OFF, Shape

SHORT, WIDE = Shape((LEARNED,), 2, 1, 3), Shape((LEARNED,), 4, 4, 16)


def see(found: CostModel, shape: Shape, batch: int, seconds: float, ticks: int = 1, context: float = 0.0) -> None:
    for _ in range(ticks):
        found.observe(shape, batch, outcome(shape, batch, (), seconds).times, context)


def known(found: CostModel, shape: Shape, batch: int) -> float:
    seconds = found.seconds(shape, batch)
    assert seconds is not None
    return seconds


# ---- as measured beforehand


def test_an_estimate_lies_between_its_neighbours() -> None:
    costs = CostTable()
    assert costs.estimate(POLICY, 8) is None
    costs.record(POLICY, 16, 2.0)
    assert [costs.estimate(POLICY, size) for size in (1, 16, 32)] == [2.0, 2.0, 4.0]
    costs.record(POLICY, 64, 5.0)
    assert [costs.estimate(POLICY, size) for size in (8, 16, 40, 64, 128)] == [2.0, 2.0, 3.5, 5.0, 10.0]
    assert costs.estimate(DRAFT, 16) is None


def test_estimates_never_fall_with_size() -> None:
    chance = random.Random(0)
    costs = CostTable()
    for size in range(1, 200, 7):
        costs.record(POLICY, size, 1.0 + size / 100 + chance.uniform(-0.5, 0.5))
    found = [costs.estimate(POLICY, size) or 0.0 for size in range(1, 400)]
    assert found == sorted(found)
    assert never_falling([1.0, 3.0, 2.0, 4.0, 0.0]) == [1.0, 2.25, 2.25, 2.25, 2.25]


def test_a_measured_time_is_one() -> None:
    with pytest.raises(ValueError, match="finite"):
        CostTable().record(POLICY, 8, math.nan)


def test_a_tick_is_the_sum_of_its_parts() -> None:
    found, table = costs(), costs().table
    summed = (
        (table.estimate(POLICY, 8 * 16) or 0)  # of 6 requests, padded to 8 rows, and to nothing more
        + (table.estimate(EXTEND, 8 * 5) or 0)  # a walk of depth 4 emits 5 tokens at most
        + 3 * (table.estimate(DRAFT, 8 * 4) or 0)
    )
    assert found.seconds(WIDE, 6) == pytest.approx(summed)
    both = Shape((LEARNED, MODEL_FREE), 4, 4, 16)
    assert found.seconds(both, 6) == pytest.approx(summed + 8 * 3e-5), "before a lookup was timed"
    assert found.seconds(OFF, 6) == pytest.approx(policy_s(8), rel=1e-3)
    shapes = [OFF, SHORT, WIDE, both]
    see(found, WIDE, 6, 0.01, 5)
    assert found.seconds_of(shapes, 6) == pytest.approx([found.seconds(shape, 6) for shape in shapes])


def test_without_a_measurement_plain_ticks_tell_and_unknown_drafting_is_dear() -> None:
    found = costs(told=())
    assert found.seconds(OFF, 4) is None
    see(found, OFF, 4, 2.0)
    assert found.seconds(OFF, 4) == 2.0
    assert found.seconds(SHORT, 4) == pytest.approx(2.0 * 12 / 4 + 2.0 * 12 / 4 + 2.0)


def test_sizes_that_nobody_measured_are_learned_from_ticks() -> None:
    """Costs that rise by a half per doubling: seen at every batch, they are known for every verify."""
    found = CostModel(lambda size: size)
    for batch in (16, 8, 4, 2, 1):
        for _ in range(20):
            found.observe(OFF, batch, TickTimes({DECODE: 1.0 + batch / 16}))
    for batch, verify in ((1, 16), (2, 4), (4, 2)):
        expected = 1 + batch * verify / 16 + 3e-5 * batch
        assert found.seconds(Shape(("suffix",), 1, 1, verify), batch) == pytest.approx(expected, rel=0.02)


# ---- as ticks took it


def test_a_part_costs_what_it_took_of_late_and_outliers_say_nothing() -> None:
    found = costs()
    see(found, SHORT, 8, tick_s(SHORT, 8), 9)
    see(found, SHORT, 8, 50 * tick_s(SHORT, 8), 3)
    assert found.seconds(SHORT, 8) == pytest.approx(tick_s(SHORT, 8))
    see(found, SHORT, 8, 2 * tick_s(SHORT, 8), 5)
    assert found.seconds(SHORT, 8) == pytest.approx(2 * tick_s(SHORT, 8))
    assert found.seconds(OFF, 8) == pytest.approx(tick_s(OFF, 8))


def test_the_first_time_at_a_size_is_not_believed() -> None:
    found = costs()
    see(found, OFF, 24, 0.3)
    assert found.seconds(OFF, 24) == pytest.approx(tick_s(OFF, 24))
    assert found.seconds(OFF, 32) == pytest.approx(tick_s(OFF, 32))


def test_shapes_that_never_ran_cost_what_their_parts_cost_elsewhere() -> None:
    """Drafting takes five times what was measured beforehand, and verifying half as much again."""
    found, never = costs(), Shape((LEARNED,), 8, 1, 9)
    for _ in range(6):
        parts = parts_s(SHORT, 8, 5.0)
        found.observe(SHORT, 8, TickTimes(parts | {VERIFY: 1.5 * parts[VERIFY]}))
    true = parts_s(never, 16, 5.0)
    assert found.seconds(never, 16) == pytest.approx(sum(true.values()) + 0.5 * true[VERIFY], rel=0.02)
    assert found.seconds(OFF, 16) == pytest.approx(tick_s(OFF, 16))


def test_what_is_beside_all_parts_is_a_cost_of_its_kind() -> None:
    found, before = costs(), {one: known(costs(), one, 8) for one in (OFF, SHORT, WIDE)}
    for _ in range(6):
        found.observe(SHORT, 8, TickTimes(parts_s(SHORT, 8), tick_s(SHORT, 8) + 1e-3))
    assert found.seconds(WIDE, 8) == pytest.approx(before[WIDE] + 1e-3, rel=0.01)
    assert found.seconds(WIDE, 16) == pytest.approx(known(costs(), WIDE, 16) + 1e-3, rel=0.01), "the nearest size"
    assert found.seconds(OFF, 8) == before[OFF]
    for _ in range(20):  # a capture on the way, or a prefill: the parts tell all the same
        found.observe(SHORT, 8, TickTimes(parts_s(SHORT, 8), 9.0, one_off_s=2.0))
        found.observe(SHORT, 8, TickTimes(parts_s(SHORT, 8), None))
    assert found.seconds(WIDE, 8) == pytest.approx(before[WIDE] + 1e-3, rel=0.01)


def test_no_part_is_ever_free() -> None:
    """Ticks that seem to take no time at all, plain ones or others: the machine's clock, not the machine."""
    for ran in (OFF, SHORT):
        found = costs(True)
        see(found, ran, 8, 0.0, 300)
        for one in (OFF, SHORT):
            assert known(found, one, 8) >= 0.099 * tick_s(one, 8)
        see(found, OFF, 8, tick_s(OFF, 8), 60)
        assert found.seconds(OFF, 8) == pytest.approx(tick_s(OFF, 8), rel=0.02)


def test_what_was_timed_long_ago_is_forgotten() -> None:
    found = costs()
    see(found, SHORT, 8, 4 * tick_s(SHORT, 8), 20)
    assert known(found, WIDE, 8) > 3 * tick_s(WIDE, 8)
    see(found, OFF, 8, tick_s(OFF, 8), 1100)
    for one in (SHORT, WIDE):
        assert found.seconds(one, 8) == pytest.approx(known(costs(), one, 8))


# ---- contexts


@pytest.mark.parametrize("read_once", [True, False])
def test_a_tree_pays_for_its_context_as_often_as_it_reads_it(read_once: bool) -> None:
    """Seen in plain ticks alone. On a GPU 16 nodes cost as many seconds more as a single token does."""
    found, noise = costs(read_once), random.Random(1)
    before = {one: known(found, one, 8) for one in (OFF, WIDE)}
    for tick in range(400):
        context = 1000.0 * tick / 400
        seconds = (tick_s(OFF, 8) + 8 * context * 0.4e-6) * noise.uniform(0.98, 1.02)
        see(found, OFF, 8, seconds, context=context)
    more = 8 * 1000.0 * 0.4e-6
    assert found.seconds(OFF, 8) == pytest.approx(before[OFF] + more, rel=0.02)
    assert found.seconds(WIDE, 8) == pytest.approx(before[WIDE] + more * (1 if read_once else 16), rel=0.1)


def test_what_was_timed_with_short_contexts_is_known_for_long_ones() -> None:
    found = costs(True)
    see(found, OFF, 8, tick_s(OFF, 8), 20)
    for tick in range(400):
        see(found, SHORT, 8, tick_s(SHORT, 8) * (1 + tick / 400), context=float(tick))
    grown = parts_s(SHORT, 8)[VERIFY]
    assert found.seconds(OFF, 8) == pytest.approx(tick_s(OFF, 8) + grown, rel=0.1)


# ---- what is ingested first


def test_what_catching_up_took_is_what_it_is_expected_to_take() -> None:
    found = costs(False, [*measured(), Measured(CATCH_UP, 16, 0.0005)])
    assert found.catching_up(SHORT, OFF, 16, 100) == pytest.approx(0.05)
    assert found.catching_up(SHORT, WIDE, 16, 100) == 0.0 == found.catching_up(Shape(("suffix",), 2, 1, 3), OFF, 16, 9)
    for _ in range(20):
        found.caught_up(16, 64, 0.064)
    assert found.catching_up(SHORT, OFF, 16, 100) == pytest.approx(0.1, rel=0.05)


def test_live_rows_are_taken_to_be_dearer_than_idle_ones_until_they_were_seen() -> None:
    on_cpu, on_gpu = (costs(once, [Measured(CATCH_UP, 16, 0.0005)]) for once in (False, True))
    assert on_gpu.catching_up(SHORT, OFF, 16, 100) == 8 * on_cpu.catching_up(SHORT, OFF, 16, 100)
    on_gpu.caught_up(16, 64, 30.0)
    assert on_gpu.catching_up(SHORT, OFF, 16, 100) < 3 * 0.4, "a stall counts as four times what was expected"
    for _ in range(30):
        on_gpu.caught_up(16, 64, 0.032)
    assert on_gpu.catching_up(SHORT, OFF, 16, 100) == pytest.approx(0.05, rel=0.2)


def test_what_new_requests_cost_is_learned_from_the_ticks_that_ingested_them() -> None:
    found = costs(False, [*measured(), Measured(CATCH_UP, 1, 0.0001 / 16), Measured(CATCH_UP, 16, 0.0001)])
    for took_s in (0.5, *[0.010, 0.012, 0.008, 0.010] * 4):  # once the machine stands still
        found.observe(SHORT, 16, TickTimes(parts_s(SHORT, 16) | {INGEST: took_s}), positions=5.0)
        assert found.entering(SHORT, 16, 2.0) < 5 * 0.004, "a moment says little"
    assert found.entering(SHORT, 16, 2.0) == pytest.approx(2.0 * 0.002, rel=0.1)
    assert found.entering(SHORT, 1, 2.0) == pytest.approx(2.0 * 0.002 / 16, rel=0.1), "of one row, what one row costs"
    assert found.catching_up(SHORT, OFF, 16, 10) == pytest.approx(0.001), "all at once is another matter"
    assert found.seconds(SHORT, 16) == pytest.approx(tick_s(SHORT, 16)), "and so is a tick without them"
    assert found.entering(Shape(("suffix",), 2, 1, 3), 16, 10.0) == 0.0 == found.entering(OFF, 16, 10.0)


def test_few_who_come_at_a_time_do_not_stand_for_many() -> None:
    """Room comes in steps: one new request costs half as much as sixteen. What counts is what all cost together."""
    found = costs(False, [*measured(), Measured(CATCH_UP, 16, 0.0001)])
    for number in range(24):
        positions, took_s = (0.4, 0.0005) if number % 2 else (6.0, 0.001)
        found.observe(SHORT, 16, TickTimes({INGEST: took_s}), positions=positions)
    assert found.entering(SHORT, 16, 6.4) == pytest.approx(0.0015, rel=0.15)


def test_lookups_are_timed_by_their_batch() -> None:
    found, shape = costs(), Shape((LEARNED, MODEL_FREE), 1, 1, 2)
    for _ in range(3):
        found.observe(shape, 4, TickTimes({LOOKUP: 0.25}))
    assert found.seconds(Shape((MODEL_FREE,), 1, 1, 2), 4) == pytest.approx(policy_s(pad(8)) + 0.25, rel=0.01)


def test_new_requests_bring_positions_for_each_emitted_token() -> None:
    found = costs()
    assert found.arrived_per_token == 0.0
    found.arrived(256 * 100, 256)
    assert found.arrived_per_token == 1.0, "at first, no more than a position for each token"
    for _ in range(4000):
        found.arrived(128, 256)
    assert found.arrived_per_token == pytest.approx(0.5, rel=0.01)
    for _ in range(4000):
        found.arrived(0, 256)
    assert found.arrived_per_token < 0.01


def test_a_plain_tick_on_a_cpu_costs_what_its_requests_do_without_padding() -> None:
    on_gpu, on_cpu = costs(True), costs(False)
    assert on_gpu.plain_s(70) == on_gpu.seconds(OFF, 70) == on_gpu.seconds(OFF, 96)
    assert on_cpu.plain_s(96) == on_cpu.seconds(OFF, 96)
    assert on_cpu.plain_s(70) == pytest.approx(policy_s(70), rel=0.01)
    assert on_cpu.plain_s(70) < 0.99 * (on_cpu.seconds(OFF, 70) or 0.0)
