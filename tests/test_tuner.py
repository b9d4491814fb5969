"""The tuner in a small world with known truth, and the parts it decides from. Times are the world's, never the clock's.

Where a bound is asserted, something that must break it is shown to: a fixed shape, or the paper's bandit.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from statistics import mean

import pytest

from tests.tuning import (
    LEARNED,
    MODEL_FREE,
    Curve,
    World,
    costs,
    outcome,
    pad,
    policy_s,
    rollout,
    steady,
    tick_s,
)
from tlt.spec.acceptance import (
    Acceptance,
    AcceptResult,
    CollapseWatch,
    RankHits,
    Survival,
    likeliest_nodes,
    rank_hits_of,
    together,
)
from tlt.spec.bandit import Bandit
from tlt.spec.budget import TRY_SHARE
from tlt.spec.costs import CATCH_UP, DECODE, DRAFT, EXTEND, LOOKUP, POLICY, VERIFY, CostModel, Measured, TickTimes
from tlt.spec.shape import OFF, Draft, Shape
from tlt.spec.shape_policy import Fixed, Outcome, ShapePolicy, candidates
from tlt.spec.tuner import Tuner

SETS = [(LEARNED,), (MODEL_FREE,), (LEARNED, MODEL_FREE)]
SHAPES = candidates(SETS, depths=(1, 2, 4, 8), widths=(1, 4), verifies=(2, 3, 5, 9, 16, 32))


def learned(depth: int, width: int, verify: int) -> Shape:
    return Shape((LEARNED,), depth, width, verify)


def world(first: float, model_free: float = 0.1, **more: float) -> World:
    return World({LEARNED: Curve(first), MODEL_FREE: Curve(model_free, per_rank=0.2)}, **more)  # type: ignore[arg-type]


def tuner() -> Tuner:
    return Tuner(SHAPES, costs())


def bandit(seed: int = 0, last: int = 32) -> Bandit:
    shapes = [
        learned(8, 4, 32),
        learned(4, 4, 32),
        learned(4, 4, 16),
        learned(8, 4, 16),
        learned(4, 1, 5),
        learned(2, 4, 5),
    ]
    return Bandit(shapes, [4, 16, last], seed=seed)


def best_rate(here: World, batch: int) -> float:
    return max(here.rate(shape, batch) for shape in SHAPES)


def against_plain(policy: ShapePolicy, here: World, batch: int, ticks: int) -> float:
    """Time over that of plain decoding for the same number of (expected) tokens."""
    steady(policy, here, batch, ticks)
    tokens = sum(here.length(shape) * count for shape, count in here.ticks.items())
    return here.seconds / (tokens * tick_s(OFF, batch))


# ---- costs


# ---- acceptance


def test_a_track_follows_a_drafters_own_branches() -> None:
    draft = Draft(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 1, 1, 2), scores=(0.6, 0.3, 0.1, 0.2, 0.05))
    shape = Shape(("a",), depth=3, width=2, verify=6)
    assert rank_hits_of(draft, [6, 7, 9, 1], shape) == RankHits((2, 2, 1))
    assert rank_hits_of(draft, [6, 8, 1], shape) == RankHits((2, 1), missed_among=2)
    assert rank_hits_of(draft, [4], shape) == RankHits((), missed_among=2)
    assert rank_hits_of(draft, [5], shape) == RankHits((1,))  # the policy's next token is not known


def test_drafters_together_are_as_good_as_the_better_at_each_depth() -> None:
    assert together([RankHits((2, 1), 4), RankHits((1,), 4)]) == RankHits((1, 1), 4)
    assert together([RankHits((), 4), RankHits((3, 1, 1))]) == RankHits((3, 1, 1), 0)
    assert together([RankHits((), 4), RankHits((), 2)]) == RankHits((), 2)


def test_survival_counts_what_looked() -> None:
    """Ranks beyond what a verify looked at are not held against the drafter."""
    survival = Survival(depth=2, width=4, horizon=1e9)
    survival.see(
        [RankHits((1,), 0)] * 300 + [RankHits((), 1)] * 300 + [RankHits((2,), 0)] * 200 + [RankHits((), 4)] * 200
    )
    first = survival.ranks()[0]
    assert first[0] == pytest.approx(300 / 1000, abs=0.01)
    assert first[1] == pytest.approx(0.7 * 200 / 400, abs=0.01)  # of the 400 that looked at a second candidate
    assert first[2] < 0.01
    assert survival.evidence == pytest.approx(1000)
    assert survival.by_depth() == pytest.approx((0.5,))


def test_unmeasured_depths_follow_the_last_measured() -> None:
    survival = Survival(depth=4, width=1, horizon=1e9)
    survival.see([RankHits((1,))] * 400 + [RankHits((), 1)] * 100)
    assert [row[0] for row in survival.ranks()] == pytest.approx([0.8] * 4, abs=0.01)


def test_survival_forgets() -> None:
    survival = Survival(depth=1, width=1, horizon=100)
    survival.see([RankHits((1,))] * 10_000)
    assert survival.evidence == pytest.approx(101, rel=0.01)
    survival.see([RankHits((), 1)] * 300)
    assert survival.ranks()[0][0] < 0.1


def test_a_new_version_is_taken_to_be_as_good_as_the_old() -> None:
    survival = Survival(depth=3, width=2, horizon=1000)
    survival.see([RankHits((1, 1), 2)] * 300 + [RankHits((1,), 2)] * 100 + [RankHits((), 2)] * 100)
    before = survival.ranks()
    survival.fade(3)
    assert survival.evidence == pytest.approx(3)
    assert survival.ranks()[0][0] == pytest.approx(before[0][0], abs=0.02)
    survival.see([RankHits((), 2)] * 100)
    assert survival.ranks()[0][0] < 0.1


def test_the_likeliest_nodes_by_hand() -> None:
    """First candidate 0.6, second 0.3, the same at depth 2."""
    found = likeliest_nodes([[0.6, 0.3], [0.6, 0.3]], 6)
    assert found == [
        (pytest.approx(0.6), 1, 1),
        (pytest.approx(0.36), 2, 1),
        (pytest.approx(0.3), 1, 2),
        *([(pytest.approx(0.18), 2, 2)] * 2),
        (pytest.approx(0.09), 2, 2),
    ]


@pytest.mark.parametrize(
    "shape", [learned(1, 1, 2), learned(4, 1, 5), learned(2, 4, 9), learned(4, 4, 16), learned(8, 4, 32)]
)
def test_accept_lengths_come_out_right_for_shapes_never_run(shape: Shape) -> None:
    """A deep and wide shape speaks for the others. Half of the contexts are harder, which the rule does not know."""
    here, ran = world(0.7), learned(8, 4, 32)
    acceptance = Acceptance(SHAPES, horizon=1e9)
    for _ in range(300):
        acceptance.see(ran, [here.walk(ran, here.kept_cached(ran)) for _ in range(16)])
    acceptance.refresh()
    assert acceptance.length(shape) == pytest.approx(here.length(shape), rel=0.05)


def test_drafters_that_complement_each_other_get_credit_once_they_ran_together() -> None:
    here, both = world(0.5, 0.5), Shape((LEARNED, MODEL_FREE), 4, 4, 32)
    alone = (learned(4, 4, 32), Shape((MODEL_FREE,), 4, 4, 32))
    acceptance = Acceptance([both, *alone], horizon=1e9)
    for shape in alone:
        for _ in range(100):
            acceptance.see(shape, [here.walk(shape, here.kept_cached(shape)) for _ in range(16)])
    acceptance.refresh()
    apart = acceptance.length(both)
    assert apart == pytest.approx(max(acceptance.length(shape) for shape in alone), rel=0.05)
    for _ in range(100):
        acceptance.see(both, [here.walk(both, here.kept_cached(both)) for _ in range(16)])
    acceptance.refresh()
    assert acceptance.length(both) == pytest.approx(here.length(both), rel=0.05)
    assert here.length(both) > 1.1 * apart


def test_a_verification_measured_far_too_dear_is_found_out() -> None:
    """A machine that was busy for a moment when it was timed must not keep a shape out for ever."""
    here, shape = costs(told=[Measured(POLICY, 8, 0.010), Measured(POLICY, 64, 0.100)]), Shape((MODEL_FREE,), 4, 1, 8)
    before = here.seconds(shape, 8)
    for _ in range(3):
        here.observe(shape, 8, TickTimes({VERIFY: 0.020, LOOKUP: 1e-5}))
        here.observe(OFF, 8, TickTimes({DECODE: 0.010}))
    after = here.seconds(shape, 8)
    assert before is not None
    assert after is not None
    assert after < 0.3 * before
    assert here.seconds(OFF, 8) == pytest.approx(0.010, rel=0.1)


# ---- the alarm


def results(count: int, accepted: int) -> list[AcceptResult]:
    return [AcceptResult(accepted, (RankHits((1,) * accepted, 1),))] * count


@pytest.mark.parametrize(("baseline", "then", "fires"), [(4, 1, True), (1, 0, True), (4, 2, False), (2, 1, False)])
def test_the_alarm_fires_on_a_collapse_only(baseline: int, then: int, fires: bool) -> None:
    watch, shape = CollapseWatch(LEARNED), learned(8, 1, 9)
    assert [watch.see(shape, results(8, baseline)) for _ in range(40)] == [None] * 40
    alarms = [alarm for _ in range(20) if (alarm := watch.see(shape, results(8, then)))]
    assert bool(alarms) == fires
    if fires:
        assert (alarms[0].drafter, alarms[0].shape) == (LEARNED, shape)
        assert alarms[0].verifies >= 32
        assert alarms[0].recent < alarms[0].baseline <= 1 + baseline


def completions(chance: random.Random, rows: int, count: int, kept: float = 1.0) -> Iterator[list[AcceptResult]]:
    """Ticks of `rows` answers at a time. Answers differ: some repeat themselves, and are foreseen, some are all new;
    and there are stretches with more of these, or of those. `kept`: share of what is accepted that still is."""
    running: list[tuple[int, float, int]] = []  # number, chance of each token, verifies left
    level = 0.7
    for number in range(count):
        level = chance.choice((0.6, 0.8)) if number % 12 == 0 else level
        known = min(0.99, max(0.05, chance.gauss(level, 0.25)))
        running.append((number, known * kept, chance.choice((3, 10, 60))))
        while len(running) == rows:
            yield [
                AcceptResult(accepted, (RankHits((1,) * accepted, 1),), request=("answer", kept, number))
                for number, known, _ in running
                for accepted in [next((n for n in range(15) if chance.random() > known), 15)]
            ]
            running = [(number, known, left - 1) for number, known, left in running if left > 1]


@pytest.mark.parametrize("rows", [1, 4])
def test_answers_that_differ_are_no_collapse_and_a_collapse_among_them_is(rows: int) -> None:
    shape = learned(15, 1, 16)
    for seed in range(10):
        chance, watch = random.Random(seed), CollapseWatch(LEARNED)
        assert all(watch.see(shape, results) is None for results in completions(chance, rows, 400))
        told = [alarm for results in completions(chance, rows, 100, kept=0.05) if (alarm := watch.see(shape, results))]
        assert told
        assert told[0].recent < 0.5 * told[0].baseline
        assert told[0].verifies >= 32


def test_one_odd_answer_is_no_collapse() -> None:
    """However long it is: its verifies say all the same thing."""
    watch, shape = CollapseWatch(LEARNED), learned(4, 1, 5)
    for number in range(100):
        assert watch.see(shape, [AcceptResult(4, (RankHits((1,) * 4, 1),), request=number)] * 4) is None
    assert all(watch.see(shape, [AcceptResult(0, (RankHits((), 1),), request="odd")]) is None for _ in range(500))
    refused = [[AcceptResult(0, (RankHits((), 1),), request=f"refused {number}")] * 4 for number in range(40)]
    assert any(watch.see(shape, results) for results in refused)


def test_another_shape_is_no_collapse() -> None:
    watch = CollapseWatch(LEARNED)
    for _ in range(40):
        assert watch.see(learned(8, 1, 9), results(8, 6)) is None
    for _ in range(40):
        assert watch.see(learned(1, 1, 2), results(8, 1)) is None


# ---- the tuner in the world


def test_candidates_are_sensible() -> None:
    found = candidates([("b", "a"), ("a",)], depths=(1, 4), widths=(1, 2), verifies=(2, 4, 8))
    assert OFF in found
    assert Shape(("a", "b"), 4, 2, 8) in found
    assert Shape(("a",), 4, 1, 8) not in found  # four nodes can never fill it
    assert Shape(("a",), 4, 2, 4) not in found  # no branch of depth 4 fits
    assert len(found) == len(set(found))


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("first", [0.3, 0.6, 0.8])
def test_a_steady_drafter_is_used_nearly_as_well_as_in_hindsight(first: float, batch: int) -> None:
    """Loss against the best of all shapes, drafting costs and acceptance known: ≤ 3 % of the time after warm-up."""
    losses = []
    for seed in range(3):
        here, policy = world(first, seed=seed), tuner()
        steady(policy, here, batch, 500)
        losses.append(steady(policy, here, batch, 500, lambda h=here: best_rate(h, batch)))
        assert policy.report().switches <= 8
    assert mean(losses) <= 0.03
    assert steady(Fixed(learned(8, 1, 9)), world(first), batch, 5, lambda: best_rate(here, batch)) > 0.03


def test_on_average_the_loss_is_small() -> None:
    losses = []
    for seed in range(3):
        for first, batch in ((0.4, 8), (0.6, 2), (0.8, 16)):
            here, policy = world(first, seed=seed), tuner()
            steady(policy, here, batch, 400)
            losses.append(steady(policy, here, batch, 300, lambda h=here, b=batch: best_rate(h, b)))
    print(f"regret after warm-up: mean {mean(losses):.2%}, worst {max(losses):.2%}")
    assert mean(losses) <= 0.025


@pytest.mark.parametrize("batch", [1, 16, 256])
@pytest.mark.parametrize("first", [0.0, 0.05, 0.2])
def test_never_slower_than_plain(first: float, batch: int) -> None:
    """Useless and poor drafters, cold start included: ≤ 1 % above plain decoding."""
    assert against_plain(tuner(), world(first, first / 4), batch, 600) <= 1.01


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_learning_stays_within_its_budget(batch: int) -> None:
    """At every tick: half a percent of the time so far, and two plain ticks."""
    here, policy = world(0.0, 0.0, noise=0.0), tuner()
    for _ in range(30):
        steady(policy, here, batch, 20)
        report = policy.report()
        assert report.explored_s == pytest.approx(report.seconds - report.ticks * tick_s(OFF, batch), abs=1e-9)
        assert report.explored_s <= 0.005 * report.seconds + 2 * tick_s(OFF, batch)
    assert 0 < report.explored_ticks == report.ticks - here.ticks[OFF]


def test_the_bandit_is_slower_than_plain_with_a_useless_drafter() -> None:
    """It has no "off" below its last bucket: the bound above can be broken."""
    assert against_plain(bandit(), world(0.0), 16, 300) > 1.05


def test_verifying_that_is_too_dear_stays_off() -> None:
    """A good drafter, but 256 requests: every shape costs more than it gives."""
    here, policy = world(0.6), tuner()
    assert max(SHAPES, key=lambda shape: here.rate(shape, 256)) == OFF
    assert against_plain(policy, here, 256, 500) <= 1.01
    assert here.ticks[OFF] >= 0.97 * 500
    assert against_plain(bandit(last=256), world(0.6), 256, 100) > 1.2


@pytest.mark.parametrize("first", [0.0, 0.3, 0.6])
def test_a_cost_table_that_lies_is_found_out(first: float) -> None:
    """Drafting costs five times what capture said."""
    found = [against_plain(tuner(), world(first, 0.0, drafting=5.0, seed=seed), 16, 1000) for seed in range(4)]
    assert mean(found) <= 1.01


class Stalling(World):
    """The machine stands still in the first plain tick of some batch sizes; what comes after a capture seems short."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: set[tuple[Shape, int]] = set()
        self.drained = False

    def measured(self, shape: Shape, batch: int, true: float) -> float | None:
        first = (shape, pad(batch)) not in self.seen
        self.seen.add((shape, pad(batch)))
        drained, self.drained = self.drained, first and not shape.off
        if first:
            return None if not shape.off else 0.3 if pad(batch) in (24, 48, 96, 192) else true
        return 0.1 * true if drained and not shape.off else super().measured(shape, batch, true)


def test_a_moment_in_which_the_machine_stands_still_deceives_nobody() -> None:
    """Garbage is collected, a graph is captured: rollouts stay as fast as if every tick had told the truth."""
    chance = random.Random(3)
    lengths = [min(600, int(chance.lognormvariate(math.log(100), 0.6)) + 5) for _ in range(256)]
    told = []
    for size in (1, 8, 32, 64, 128, 256, 512, 1024):  # as capture does: the sizes between are reckoned
        for role, seconds in ((POLICY, policy_s(size)), (EXTEND, 0.35e-3), (DRAFT, 0.3e-3)):
            told.append(Measured(role, size, seconds))
    found = {}
    for kind in (World, Stalling):
        here = kind({LEARNED: Curve(0.5), MODEL_FREE: Curve(0.1, per_rank=0.2)})
        policy = Tuner(SHAPES, costs(True, told))
        found[kind] = [rollout(policy, here, lengths) for _ in range(3)]
    plain = rollout(Fixed(OFF), world(0.5), lengths)
    print(f"plain {plain:.3f}, true times {found[World]}, deceiving {found[Stalling]}")
    assert max(found[Stalling]) < 0.9 * plain
    assert mean(found[Stalling]) < 1.1 * mean(found[World])


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize(("first", "batch"), [(0.2, 8), (0.45, 64)])
def test_a_small_promise_is_compared_with_plain_decoding(first: float, batch: int, read_once: bool) -> None:
    """Trees become dearer while one is in use, and nobody says so."""
    here, policy = world(first, 0.0), Tuner(SHAPES, costs(read_once))
    steady(policy, here, batch, 400)
    here.trees = 1.5
    steady(policy, here, batch, 1200)
    before = here.ticks[OFF]
    steady(policy, here, batch, 400)
    assert here.ticks[OFF] - before > 380


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 8, 32])
def test_a_large_promise_is_compared_too(batch: int, read_once: bool) -> None:
    """What speculates becomes so dear that nothing of it is left: the factor that all share would never tell."""
    here, policy = world(0.8, 0.0), Tuner(SHAPES, costs(read_once))
    steady(policy, here, batch, 400)
    assert best_rate(here, batch) > 1.8 * here.rate(OFF, batch)
    here.trees = 4.0
    steady(policy, here, batch, 300)
    before = here.ticks[OFF]
    steady(policy, here, batch, 300)
    assert here.ticks[OFF] - before > 280


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize("slow", [4.0, 12.0])
def test_a_slow_moment_just_after_a_switch_is_forgotten(slow: float, read_once: bool) -> None:
    """A dozen ticks, the first of a shape, each several times as long: it was the machine, and the drafter is good."""
    here, policy = world(0.8, 0.0), Tuner(SHAPES, costs(read_once))
    while not here.ticks - Counter({OFF: here.ticks[OFF]}):
        here.tick(policy, 4)
    here.slow = slow
    steady(policy, here, 4, 12)
    here.slow = 1.0
    steady(policy, here, 4, 2500)
    before = here.ticks[OFF]
    steady(policy, here, 4, 500)
    assert here.ticks[OFF] - before < 50
    assert 0.0 < (policy.expected(OFF, 4)[1] or 0.0) < 2 * tick_s(OFF, 4)


@pytest.mark.parametrize("read_once", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_costs_stay_costs(seed: int, read_once: bool) -> None:
    """Chosen a tick ahead, times untold, batches that change, new drafters, slow spells, contexts that grow: nothing is
    ever free, learning stays within its share but for what one spell adds, and plain decoding is as fast at most."""
    chance = random.Random(seed)
    shared = costs(read_once)
    policy, here = Tuner(SHAPES, shared), world(chance.choice([0.02, 0.4, 0.85]), seed=seed)
    batch, spell, pending, plain_s = 32, 0, deque[Outcome](), 0.0
    for tick in range(2500):
        if chance.random() < 0.01:
            batch = chance.choice([1, 4, 16, 64, 256, max(1, batch // 2)])
        spell = chance.randint(3, 40) if not spell and chance.random() < 0.003 else max(0, spell - 1)
        if chance.random() < 0.002:
            policy.drafter_changed(LEARNED)
        shape = policy.choose(batch, chance.choice([0, 64]))
        true = here.true_s(shape, batch) + (3e-3 * (tick % 1000) / 1000 if read_once else 0.0)
        told = None if chance.random() < 0.05 else here.measured(shape, batch, true * (4.0 if spell else 1.0))
        results = [] if shape.off else [here.walk(shape, here.kept_cached(shape)) for _ in range(batch)]
        pending.append(outcome(shape, batch, results, told))
        here.seconds += true
        plain_s += here.length(shape) * (here.true_s(OFF, batch) + true - here.true_s(shape, batch))
        if len(pending) > 1:
            policy.observe(pending.popleft())
        assert all((shared.seconds(one, size) or 0.0) > 1e-4 for one in (OFF, shape) for size in (1, batch))
    assert here.seconds <= 1.035 * plain_s
    assert policy.report().explored_s <= 0.005 * policy.report().seconds + 0.2


def test_long_answers_are_worth_a_try_at_once_short_ones_not() -> None:
    """Of as many ticks as a completion may be long, tries may lose the same share in advance, of 256 at most."""
    tried = {}
    for most in (0, 32, 256, 4096):
        here, policy = world(0.8, noise=0.0), tuner()
        policy.set_max_len(most)
        tried[most] = next(tick for tick in range(10_000) if (here.tick(policy, 256), here.ticks[OFF] <= tick)[1])
        report = policy.report()
        assert report.explored_s <= 0.005 * report.seconds + 0.005 * min(256, most) * tick_s(OFF, 256) + 1e-9
    assert tried[4096] <= tried[256] < tried[32] <= tried[0]
    assert tried[4096] < 10 < tried[32]


def test_a_try_is_booked_at_whatever_size_it_ran() -> None:
    """Some of those it was chosen for may have ended."""
    policy = tuner()
    while (shape := policy.choose(16)).off:
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16)))
    policy.observe(outcome(shape, 8, [AcceptResult(0, ())] * 8, tick_s(shape, 8)))
    assert policy.report().explored_ticks == 1
    assert policy.report().explored_s > 0


def test_graphs_are_part_of_what_a_further_try_costs() -> None:
    """Of useless drafters, over batch sizes that all have graphs of their own: each is tried once, come what may, and
    again only where its graphs are there, or when their capture has been earned."""
    policy, ran, one_off_s, spent_s = tuner(), set[tuple[Shape, int]](), 0.0, 0.0
    for _ in range(12):
        for batch in range(96, 0, -1):
            for _ in range(3):
                shape = policy.choose(batch)
                captured_s = 0.02 if not shape.off and (shape, pad(batch)) not in ran else 0.0
                ran.add((shape, pad(batch)))
                results = (
                    [AcceptResult(0, (RankHits((), shape.width),) * len(shape.drafters))] * batch
                    if not shape.off
                    else []
                )
                policy.observe(outcome(shape, batch, results, tick_s(shape, batch), one_off_s=captured_s))
                one_off_s, spent_s = one_off_s + captured_s, spent_s + tick_s(shape, batch)
    assert policy.report().explored_ticks >= 3
    assert one_off_s <= 0.02 * 4 + 0.005 * spent_s


def test_requests_share_the_trees_of_one_drafter_that_hold_all_that_grows() -> None:
    found = candidates([("a",), ("a", "b")], (1, 3), (1, 2, 4), (2, 4, 8), shares=(1.5, 2.0, 6.0))
    shared = {str(shape) for shape in found if shape.share}
    assert shared == {"a 1x1/2~1.5", "a 1x2/4~1.5", "a 1x2/4~2", "a 3x1/4~1.5", "a 3x1/4~2", "a 3x2/8~2"}
    assert not [shape for shape in candidates([("a",)], (7,), (2,), (2, 8), (2.0,)) if shape.share], "15 nodes in 8"


def test_where_requests_share_room_that_nothing_grows_into_promises_nothing() -> None:
    shapes = [Shape(("a",), 2, 2, verify, 4.5) for verify in (4, 5, 8)]
    acceptance = Acceptance(shapes, 1000)
    acceptance.load_prior("a", [[0.5, 0.3, 0.1], [0.4, 0.3, 0.1]], 100.0)
    acceptance.refresh()
    four, five, eight = (acceptance.length(shape) for shape in shapes)
    assert four < five == eight, "two levels of two nodes"


def test_what_requests_share_is_what_a_tick_costs_and_may_give() -> None:
    shared, alone = Shape((LEARNED,), 3, 1, 4, 1.5), learned(3, 1, 4)
    assert [shared.tokens(n) for n in (1, 3, 64)] == [2, 5, 96]
    assert (shared.most_tokens, alone.most_tokens, OFF.most_tokens) == (1.5, 4.0, 1.0)
    known, found = costs().table, costs()
    difference = (found.seconds(alone, 64) or 0.0) - (found.seconds(shared, 64) or 0.0)
    tokens = (known.estimate(POLICY, pad(256)) or 0.0) - (known.estimate(POLICY, pad(96)) or 0.0)
    taken_in = (known.estimate(EXTEND, pad(256)) or 0.0) - (known.estimate(EXTEND, pad(96)) or 0.0)
    assert difference == pytest.approx(tokens + taken_in)


def test_sharing_is_foreseen_between_choosing_blindly_and_knowing() -> None:
    """And what it really gave counts more and more."""
    chain, shared = learned(3, 1, 4), Shape((LEARNED,), 3, 1, 4, 2.0)
    found = Acceptance([chain, shared], horizon=1000.0)
    for number in range(400):
        ranks = (1,) * (number % 4)  # half of what gets to a depth, about, goes on
        found.see(chain, [AcceptResult(len(ranks), (RankHits(ranks, 0 if len(ranks) == 3 else 1),))])
    found.refresh()
    first = found.by_depth(LEARNED)[0]
    assert 1.0 + first < found.length(shared) < min(2.0, found.length(chain))
    for _ in range(200):
        found.see(shared, [AcceptResult(1, (RankHits((1,)),))] * 32)
    assert found.length(shared) > 1.9


def test_what_is_known_of_deep_drafts_outlasts_ticks_that_say_nothing_of_them() -> None:
    """Where requests share, deeper drafts are verified only if much is expected of them: that teaches nothing."""
    chain, shared = learned(3, 1, 4), Shape((LEARNED,), 3, 1, 4, 2.0)
    found = Acceptance([chain, shared], horizon=1000.0)
    dice = random.Random(1)
    for _ in range(200):
        hits = [dice.random() < chance for chance in (0.6, 0.9, 0.9)]
        ranks = next((deep for deep, hit in enumerate(hits) if not hit), 3)
        found.see(chain, [AcceptResult(ranks, (RankHits((1,) * ranks, 0 if ranks == 3 else 1),))])
    found.refresh()
    before = found.length(chain)
    for _ in range(300):
        results = [
            AcceptResult(1, (RankHits((1, 1)),)) if dice.random() < 0.6 else AcceptResult(0, (RankHits((), 1),))
            for _ in range(32)
        ]
        found.see(shared, results)
    found.refresh()
    assert found.length(chain) == pytest.approx(before, rel=0.08)
    assert found.by_depth(LEARNED)[0] == pytest.approx(0.6, abs=0.05)


def test_acceptance_that_drifts_is_followed() -> None:
    """From very good to useless in 3,000 verifies per request: ≤ 3 % lost against the best shape of every moment."""
    here, policy, lost = world(0.85), tuner(), 0.0
    for step in range(20):
        here.curves[LEARNED] = Curve(0.85 - 0.04 * step)
        started = here.seconds
        lost += steady(policy, here, 16, 150, lambda: best_rate(here, 16)) * (here.seconds - started)
    print(f"regret under drift: {lost / here.seconds:.2%}")
    assert lost / here.seconds <= 0.03
    assert len(here.alarms) <= 1  # in the end less than half of what a shape used to give is left


@pytest.mark.parametrize(("first", "batch"), [(0.8, 1), (0.8, 16), (0.5, 1), (0.5, 32)])
def test_a_collapse_is_told_and_left_behind(first: float, batch: int) -> None:
    here, policy = world(first, 0.0), tuner()
    steady(policy, here, batch, 500)
    assert not here.alarms
    assert sum(count for shape, count in here.ticks.items() if not shape.off) > 350
    before = here.verifies
    here.curves[LEARNED] = Curve(0.0)
    while not here.alarms:
        here.tick(policy, batch)
        assert here.verifies - before <= 192 + batch  # three windows: it may change its shape in between
    assert LEARNED not in policy.choose(batch).drafters
    ((_, alarm),) = here.alarms
    assert alarm.drafter == LEARNED
    assert alarm.recent < alarm.baseline
    started = here.seconds
    steady(policy, here, batch, 400)
    assert here.seconds - started <= 1.02 * 400 * tick_s(OFF, batch)
    assert policy.report().alarms == len(here.alarms) == 1


def test_no_alarm_without_a_collapse() -> None:
    for first in (0.1, 0.3, 0.6, 0.85):
        here, policy = world(first, seed=7), tuner()
        steady(policy, here, 1, 2000)
        steady(policy, here, 16, 300)
        assert not here.alarms


def test_a_drafter_that_became_good_is_tried_at_once_when_told() -> None:
    told, untold = [], []
    for changed, loss in ((True, told), (False, untold)):
        here, policy = world(0.0, 0.0), tuner()
        steady(policy, here, 8, 1500)
        assert here.ticks[OFF] > 1250
        here.curves[LEARNED] = Curve(0.8)
        if changed:
            policy.drafter_changed(LEARNED)
        loss.append(steady(policy, here, 8, 100, lambda h=here: best_rate(h, 8)))
    assert told[0] < 0.12
    assert told[0] < untold[0]


@pytest.mark.parametrize("batch", [1, 16])
def test_a_new_version_of_a_good_drafter_stays_in_use(batch: int) -> None:
    """A swap at every step of the policy must not cost a warm-up each."""
    here, policy = world(0.7, 0.0), tuner()
    steady(policy, here, batch, 400)
    off, started, lost = here.ticks[OFF], here.seconds, 0.0
    for _ in range(10):
        policy.drafter_changed(LEARNED)
        now = here.seconds
        lost += steady(policy, here, batch, 100, lambda: best_rate(here, batch)) * (here.seconds - now)
    assert lost / (here.seconds - started) <= 0.04
    assert here.ticks[OFF] - off <= 10


def test_a_drafter_that_is_out_is_tried_now_and_then_for_a_thousandth_of_the_time() -> None:
    here, policy = world(0.0, 0.0), tuner()
    steady(policy, here, 64, 1500)
    begun_s, tried, lost_s = here.seconds, policy.report().explored_ticks, policy.report().explored_s
    steady(policy, here, 64, 10_000)
    assert policy.report().explored_ticks > tried
    assert policy.report().explored_s - lost_s <= len(SETS) * 0.001 * (here.seconds - begun_s) + tick_s(OFF, 64)


def test_no_flapping_between_equals() -> None:
    """Noise in time and acceptance, shapes that hardly differ: few changes of mind in 4,000 ticks."""
    here, policy = world(0.6, noise=0.06), tuner()
    steady(policy, here, 4, 4000)
    assert policy.report().switches <= 16


def test_the_long_tail_beats_every_fixed_shape_and_the_bandit() -> None:
    chance = random.Random(3)
    lengths = [min(1200, int(chance.lognormvariate(math.log(100), 1.0)) + 5) for _ in range(256)]
    policy = tuner()
    tuned = rollout(policy, world(0.6), lengths)
    plain = rollout(Fixed(OFF), world(0.6), lengths)
    fixed = {
        shape: rollout(Fixed(shape), world(0.6), lengths)
        for shape in (learned(1, 1, 2), learned(2, 1, 3), learned(4, 1, 5), learned(4, 4, 16))
    }
    paper = rollout(bandit(), world(0.6), lengths)
    print(f"tail: tuned {tuned:.3f} s, plain {plain:.3f}, best fixed {min(fixed.values()):.3f}, bandit {paper:.3f}")
    assert tuned < 0.75 * plain
    assert tuned < 0.95 * min(fixed.values())
    assert tuned < paper
    report = policy.report()
    assert len({size for size, shape in report.ticks_by_shape}) > 8
    assert report.saved_s == pytest.approx(plain - tuned, rel=0.25)


# ---- its books


def test_metrics_are_pooled() -> None:
    policy = tuner()
    shape = learned(2, 1, 3)
    walked = [
        AcceptResult(2, (RankHits((1, 1)),)),
        AcceptResult(0, (RankHits((), 1),)),
        AcceptResult(1, (RankHits((1,), 1),)),
        AcceptResult(0, (RankHits((), 1),)),
    ]
    policy.observe(outcome(shape, 4, walked, tick_s(shape, 4)))
    policy.observe(outcome(OFF, 4, (), tick_s(OFF, 4)))
    report = policy.report()
    assert (report.ticks, report.verifies, report.accepted, report.accept_length) == (2, 4, 3, 1.75)
    assert report.by_depth[LEARNED] == pytest.approx((0.5, 0.5), abs=0.01)
    assert report.ticks_by_shape == {(4, shape): 1, (4, OFF): 1}
    assert report.seconds == pytest.approx(tick_s(shape, 4) + tick_s(OFF, 4))
    assert report.saved_s == pytest.approx(1.75 * tick_s(OFF, 4) - tick_s(shape, 4), rel=0.01)


def test_choosing_is_nearly_free_once_things_are_known() -> None:
    """A choice is looked up; shapes are evaluated anew only every so many ticks."""
    here, policy = world(0.6), tuner()
    steady(policy, here, 8, 600)
    before = policy.evaluations
    steady(policy, here, 8, 512)
    assert (policy.evaluations - before) / 512 <= 32 * len(SHAPES) / 512
    before = policy.evaluations
    assert len({policy.choose(8) for _ in range(1000)}) <= 2
    assert policy.evaluations - before <= len(SHAPES)


def test_a_probe_is_booked_when_chosen() -> None:
    """Ticks may be chosen ahead of observing: a second probe waits for the first."""
    policy = tuner()
    assert all(policy.choose(4).off for _ in range(10))  # nothing was earned yet that could be lost
    seconds = policy.expected(OFF, 4)[1] or 0.0
    while policy.choose(4).off:
        policy.observe(outcome(OFF, 4, (), seconds))
    chosen = [policy.choose(4) for _ in range(10)]
    assert all(shape.off for shape in chosen)


def test_the_same_outcomes_give_the_same_choices() -> None:
    runs = []
    for _ in range(2):
        here, policy = world(0.6), tuner()
        steady(policy, here, 4, 300)
        runs.append(here.ticks)
    assert runs[0] == runs[1]


def test_nothing_to_speculate_with_is_plain_decoding() -> None:
    policy = Tuner([OFF], CostModel(pad))
    for batch in (1, 300):
        assert policy.choose(batch) == OFF
        assert policy.observe(outcome(OFF, batch, (), 0.01)) == ()
    with pytest.raises(ValueError, match="no shape uses drafter"):
        policy.drafter_changed("nobody")


# ---- the paper's bandit


def test_larger_groups_serve_smaller_batches() -> None:
    shapes = [OFF, learned(4, 1, 5), learned(8, 4, 32), learned(4, 4, 16), learned(2, 4, 5), learned(6, 4, 32)]
    found = Bandit(shapes, [4, 16, 32])
    groups = {batch: found.group(batch) for batch in (1, 4, 5, 16, 17, 32, 33)}
    assert groups[1] == groups[4] == [learned(8, 4, 32), learned(6, 4, 32)]
    assert groups[5] == groups[16] == [learned(4, 4, 16)]
    assert groups[17] == groups[32] == [learned(4, 1, 5), learned(2, 4, 5)]
    assert groups[33] == []
    assert found.choose(33) == OFF


@pytest.mark.parametrize("buckets", [[4, 16], [4, 16, 32, 64], [16, 4, 32], [0, 4, 16]])
def test_buckets_that_do_not_fit_are_refused(buckets: list[int]) -> None:
    with pytest.raises(ValueError, match="as many, rising"):
        Bandit([learned(4, 1, 5), learned(8, 4, 32), learned(4, 4, 16)], buckets)


def reward(policy: Bandit, shape: Shape, accepted: list[int], seconds: float) -> None:
    policy.observe(outcome(shape, len(accepted), [AcceptResult(n, (RankHits(),)) for n in accepted], seconds))


def test_a_shapes_worth_is_the_median_of_its_window() -> None:
    shape = learned(2, 1, 3)
    policy = Bandit([shape], [8], window=3)
    assert policy.worth(shape) is None
    reward(policy, shape, [2, 0, 1, 1], 0.5)  # (4/4 + 1) · 4 / 0.5 = 16
    assert policy.worth(shape) == 16.0
    reward(policy, shape, [0, 0], 1.0)  # (0 + 1) · 2 / 1 = 2
    assert policy.worth(shape) == 9.0
    reward(policy, shape, [3], 0.1)  # 40
    assert policy.worth(shape) == 16.0
    reward(policy, shape, [0], 0.25)  # 4; the 16 leaves the window
    assert policy.worth(shape) == 4.0


def test_unseen_first_then_the_best_but_for_epsilon() -> None:
    shapes = [learned(depth, 1, 5) for depth in (1, 2, 3, 4)]
    policy = Bandit(shapes, [8], epsilon=0.3, seed=5)
    for expected, accepted in zip(shapes, (0, 3, 1, 2), strict=True):
        assert policy.choose(2) == expected
        reward(policy, expected, [accepted], 1.0)
    draws = random.Random(5)
    expected_choices = [draws.choice(shapes) if draws.random() < 0.3 else shapes[1] for _ in range(200)]
    assert [policy.choose(2) for _ in range(200)] == expected_choices
    assert 0.6 < expected_choices.count(shapes[1]) / 200 < 0.9


def test_the_bandit_learns_which_shape_of_a_bucket_is_best() -> None:
    here, policy = world(0.8), bandit()
    steady(policy, here, 12, 300)
    good, bad = learned(4, 4, 16), learned(8, 4, 16)
    assert here.rate(good, 12) > here.rate(bad, 12)
    assert here.ticks[good] > 0.6 * 300
    assert set(here.ticks) == {good, bad}


def test_a_drafter_that_must_catch_up_is_tried_when_that_is_affordable() -> None:
    """What it takes in first counts as lost: the more it is, the later the first try; and it is booked as it went."""
    waited = []
    for lag in (0, 4):
        policy = tuner()
        policy.load_costs([Measured(CATCH_UP, 1, 0.0005)])
        spent = 0.0
        while (shape := policy.choose(16, lag)).off:
            spent += policy.expected(OFF, 16)[1] or 0.0
            policy.observe(outcome(OFF, 16, (), policy.expected(OFF, 16)[1]))
        waited.append(spent)
    assert waited[1] >= 0.05 / TRY_SHARE > waited[0]
    before = policy.report().explored_s
    policy.observe(outcome(shape, 16, [AcceptResult(0, ())] * 16, 0.01, ingest_s=0.08, lag=100.0))
    assert policy.report().explored_s > before + 0.07
