"""A tuner that has seen little: what it is told beforehand, and what it may invest before anything was earned."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from tests.test_tuner import SHAPES, learned, tuner, world
from tests.tuning import LEARNED, Curve, World, costs, outcome, pad, tick_s
from tlt.spec.acceptance import Acceptance, AcceptResult, RankHits
from tlt.spec.budget import Budget, CostKind
from tlt.spec.costs import CAPTURE, CATCH_UP, CostModel, Measured
from tlt.spec.fixed import Fixed
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import precapture_plan
from tlt.spec.tuner import Tuner

CAPTURED_S = 0.2  # for all graphs of a shape at a batch size


def record(first: float) -> list[list[float]]:
    """p_d(r) of a curve, as somebody measured it: easy and hard contexts alike."""
    easy, hard = (Curve(first).ranks(hard) for hard in (False, True))
    return [[(e + h) / 2 for e, h in zip(a, b, strict=True)] for a, b in zip(easy[:8], hard[:8], strict=True)]


@dataclass
class Capturing(World):
    """Where a shape's first tick at a batch size waits for its graphs, unless those of a larger size serve."""

    captured: Counter[tuple[Shape, int]] = field(default_factory=Counter)  # ticks, up to those that have none
    capture_s: float = CAPTURED_S
    bare: int = 1  # ticks at a batch size that have no graphs, each as dear as the last one, which captures them
    one_off_s: float = 0.0

    def run(self, policy: Tuner, batch: int, ticks: int, arrived: int = 0, lag: int = 0) -> float:
        """Seconds over those that plain decoding takes for the same tokens."""
        started = self.seconds
        plain_s = 0.0
        for _ in range(ticks):
            shape = policy.choose(batch, lag)
            kept = self.kept_cached(shape)
            results = [] if shape.off else [self.walk(shape, kept) for _ in range(batch)]
            size = pad(batch)
            served = (
                n >= self.bare for (one, at), n in self.captured.items() if one == shape and size <= at <= 2 * size
            )
            new = not shape.off and not any(served)
            self.captured[shape, size] += 1
            one_off_s = self.capture_s if new else 0.0
            true = self.true_s(shape, batch)
            self.seconds, self.one_off_s = self.seconds + true + one_off_s, self.one_off_s + one_off_s
            self.ticks[shape] += 1
            plain_s += tick_s(OFF, batch) * (1.0 + sum(walked.accepted for walked in results) / batch)
            seconds = None if new else self.measured(shape, batch, true)
            policy.observe(outcome(shape, batch, results, seconds, one_off_s=one_off_s, arrived=arrived))
        return (self.seconds - started) / plain_s


def capturing(first: float) -> Capturing:
    return Capturing({LEARNED: Curve(first), "suffix": Curve(0.05, per_rank=0.2)})


def young(*told: Measured) -> Tuner:
    policy = tuner()
    policy.load_costs([Measured(CAPTURE, 1, CAPTURED_S / 2), *told])
    return policy


def have_graphs(policy: Tuner, *sizes: int) -> None:
    for shape in SHAPES:
        for size in sizes:
            policy._costs.captures.captured(shape, size)


# ---- what it is told beforehand


def test_a_drafter_that_was_measured_needs_no_try() -> None:
    here, policy = world(0.8), tuner()
    policy.load_prior(LEARNED, record(0.8))
    for _ in range(40):
        here.tick(policy, 16)
    untold, other = world(0.8), tuner()
    for _ in range(40):
        untold.tick(other, 16)
    assert policy.report().explored_ticks == 0
    assert here.ticks[OFF] < 20 < untold.ticks[OFF]
    assert policy.expected(learned(4, 1, 5), 16)[0] == pytest.approx(here.length(learned(4, 1, 5)), rel=0.1)


def test_a_record_that_promises_too_much_is_found_out_at_once() -> None:
    """Of another temperature, or of another policy: a few ticks, and hardly any time."""
    here, policy = world(0.05, 0.0), tuner()
    policy.load_prior(LEARNED, record(0.9))
    for _ in range(2000):
        here.tick(policy, 16)
    assert 0 < sum(ticks for shape, ticks in here.ticks.items() if not shape.off) < 150
    assert here.seconds < 1.01 * sum(here.ticks.values()) * tick_s(OFF, 16) + 0.05


def test_nobody_is_told_of_a_drafter_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no shape uses"):
        tuner().load_prior("oracle", record(0.5))


# ---- what it may invest


@pytest.mark.parametrize("first", [0.3, 0.45, 0.6, 0.9])
@pytest.mark.parametrize("ticks", [30, 100, 300, 1000])
def test_a_rollout_that_ends_at_any_time_has_lost_little_by_graphs(first: float, ticks: int) -> None:
    """Told what the drafter is worth: whatever the promise, graphs never cost more than it would have saved so far."""
    here, policy = capturing(first), young()
    policy.load_prior(LEARNED, record(first))
    ratio = here.run(policy, 32, ticks)
    best = max(here.rate(shape, 32) for shape in SHAPES) / here.rate(OFF, 32)
    assert ratio <= 1.01 + max(0.0, 1.0 - 1.0 / best)
    if ticks * tick_s(OFF, 32) * (1.0 - 1.0 / best) < CAPTURED_S:
        assert here.one_off_s == 0.0, "too short for any graph"
    if first == 0.9 and ticks == 1000:
        assert ratio < 1.3 / best


@pytest.mark.parametrize("times", [1, 6])
def test_many_sizes_in_a_row_are_not_all_worth_graphs(times: int) -> None:
    """A tail in which every batch size lasts a few ticks: what is saved pays for what is captured, in the first rollout
    and in all together."""
    here, policy = capturing(0.75), young()
    policy.load_prior(LEARNED, record(0.75))
    plain_s = 0.0
    for batch in [*range(64, 0, -1)] * times:
        before = here.seconds
        ratio = here.run(policy, batch, 6)
        plain_s += (here.seconds - before) / ratio
    assert (here.one_off_s > 0.0) == (times > 1), "in a single rollout none is"
    assert here.seconds < plain_s * (1.03 if times == 1 else 0.9)


def test_a_graph_that_serves_a_tick_or_two_is_not_captured() -> None:
    """However much was saved: so few requests there never are for long."""
    here, policy = capturing(0.9), young()
    policy.load_prior(LEARNED, record(0.9))
    for _ in range(20):
        here.run(policy, 32, 100)
        here.run(policy, 3, 1)
    assert policy.report().saved_s > 5.0
    assert not [shape for shape, size in here.captured if size == pad(3) and not shape.off]
    here.run(policy, 3, 400)
    assert [shape for shape, size in here.captured if size == pad(3) and not shape.off]


@pytest.mark.parametrize("captures", [1.0, 1.5])
@pytest.mark.parametrize("bare", [1, 3])
def test_tries_of_a_useless_drafter_pay_for_their_graphs_out_of_what_learning_may_cost(
    captures: float, bare: int
) -> None:
    """Rollouts that end in a tail, one after the other: what ticks without graphs take counts, up to two captures."""
    here = Capturing({LEARNED: Curve(0.003), "suffix": Curve(0.003)}, capture_s=captures * 0.025, bare=bare)
    policy = tuner()
    policy.load_costs([Measured(CAPTURE, 1, 0.025)])
    policy.set_max_len(1024)
    plain_s = 0.0
    for _ in range(10):
        for batch in [256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1]:
            before = here.seconds
            ratio = here.run(policy, batch, 40)
            plain_s += (here.seconds - before) / ratio
    assert here.one_off_s > 0.0, "it is tried"
    assert here.seconds <= 1.01 * plain_s + here.capture_s


def test_catching_up_must_pay_before_the_last_answer_is_in() -> None:
    used = {}
    for remaining_ticks in (20.0, 2000.0):
        policy = Tuner(SHAPES, costs(False))
        policy.load_costs([Measured(CAPTURE, 1, CAPTURED_S / 2), Measured(CATCH_UP, 16, 0.001)])
        policy.load_prior(LEARNED, record(0.8))
        have_graphs(policy, 16)  # graphs are there
        for _ in range(400):
            shape = policy.choose(16, lag=256)
            if not shape.off:
                break
            policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), remaining_ticks=lambda left=remaining_ticks: left))  # type: ignore[misc]
        used[remaining_ticks] = not shape.off
    assert used == {20.0: False, 2000.0: True}


# ---- what is made ready


def test_what_a_record_promises_is_made_ready_and_used() -> None:
    """With graphs for every other size, a tick of any size finds some; nothing has to be paid for first."""
    here, policy = capturing(0.8), young()
    assert policy.precapture([1, 2, 4, 8, 16, 32]) == [], "nothing is known"
    policy.load_prior(LEARNED, record(0.8))
    ready = policy.precapture([1, 2, 4, 8, 16, 32])
    assert [size for _, size in ready][:6] == [1, 2, 4, 8, 16, 32], "what is likeliest comes first"
    best = [max(SHAPES, key=lambda shape, size=size: here.rate(shape, size)) for _, size in ready[:6]]
    for (shape, size), wanted in zip(ready[:6], best, strict=True):
        assert here.rate(shape, size) > 0.93 * here.rate(wanted, size)
    here.captured = Counter(ready)
    assert here.run(policy, 24, 60) < 0.75
    assert here.one_off_s == 0.0


@pytest.mark.parametrize("hits", [0.8, 0.72, 0.64])
def test_what_is_made_ready_serves_drafters_that_guess_worse_too(hits: float) -> None:
    """In a rollout's tail are the odd answers: what is best then was captured beforehand, or nearly so."""
    here, policy = capturing(hits), young()
    policy.load_prior(LEARNED, record(0.8))
    ready = policy.precapture([4, 8, 16, 32])
    assert len(ready) == len(set(ready)) < 12, "few serve for all"
    for size in (4, 8, 16, 32):
        mine = [here.rate(shape, size) for shape, at in ready if at == size]
        assert max(mine) > 0.93 * max(here.rate(shape, size) for shape in SHAPES)


def test_one_more_shape_is_named_where_those_named_lose_more_than_a_little() -> None:
    shapes = (OFF, learned(1, 1, 2), learned(2, 1, 3), learned(4, 1, 5))
    seconds = {8: (1.0, 1.0, 1.0, 1.0), 16: (1.0, 1.0, 2.0, 4.0), 64: (1.0, 4.0, 4.0, 4.0)}
    known, worse, worst = (1.0, 1.8, 2.4, 3.0), (1.0, 1.7, 2.0, 2.05), (1.0, 1.5, 1.4, 1.3)
    expected = [(shapes[3], 8), (shapes[1], 16), (shapes[1], 8)]
    assert precapture_plan(shapes, [0, 1, 2, 3], seconds, [known, worse, worst]) == expected
    assert precapture_plan(shapes, [0, 2], seconds, [known, worse, worst]) == [(shapes[2], 8), (shapes[2], 16)]
    assert precapture_plan(shapes, [0], seconds, [known]) == []


def test_supposing_that_fewer_guesses_are_right_leaves_what_is_known_alone() -> None:
    found = Acceptance(SHAPES, 1000.0)
    found.load_prior(LEARNED, record(0.8), 128.0)
    before = found.lengths()
    fewer = found.supposing(0.5).lengths()
    assert found.lengths() == before
    alone = SHAPES.index(learned(1, 1, 2))
    assert fewer[alone] - 1.0 == pytest.approx(0.5 * (before[alone] - 1.0), rel=0.05)
    assert all(less <= more for less, more in zip(fewer, before, strict=True))


def test_whoever_always_does_the_same_has_it_made_ready() -> None:
    assert Fixed(learned(2, 1, 3)).precapture([8, 4]) == [(learned(2, 1, 3), 8), (learned(2, 1, 3), 4)]
    assert not Fixed(OFF).precapture([8, 4])


# ---- newcomers


def test_a_drafter_that_takes_in_more_than_it_saves_stays_off() -> None:
    """Short answers to long prompts: what is to be taken in of each is no one-off work."""
    used = {}
    for arrived in (0, 16):  # a position for each token
        here, policy = capturing(0.5), young(Measured(CATCH_UP, 16, 0.004))
        policy.load_prior(LEARNED, record(0.5))
        here.run(policy, 16, 1500, arrived)
        used[arrived] = 1.0 - here.ticks[OFF] / 1500
    assert used[0] > 0.7
    assert used[16] < 0.1


def test_kernels_that_compile_are_no_reason_to_stay_off() -> None:
    """Three seconds once, in the first run of a drafter that doubles the speed."""
    here, policy = world(0.9, noise=0.0), young()
    policy.load_prior(LEARNED, record(0.9))
    compiled = 3.0
    for _ in range(3000):
        shape = policy.choose(16)
        kept = here.kept_cached(shape)
        results = [] if shape.off else [here.walk(shape, kept) for _ in range(16)]
        one_off_s, compiled = (compiled, 0.0) if not shape.off else (0.0, compiled)
        policy.observe(outcome(shape, 16, results, here.true_s(shape, 16), one_off_s=one_off_s))
        here.ticks[shape] += 1
    assert here.ticks[OFF] < 600
    assert policy.budget.spent[CostKind.CAPTURES] < 1.5


def test_a_try_that_compiles_does_not_end_all_tries() -> None:
    """What is booked of a surprise is as much as all graphs of a shape take."""
    policy = young()
    while (shape := policy.choose(16)).off:
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16)))
    before = policy.report().explored_s
    results = [AcceptResult(0, (RankHits((), shape.width),) * len(shape.drafters))] * 16
    policy.observe(outcome(shape, 16, results, tick_s(shape, 16), one_off_s=30.0))
    assert before + CAPTURED_S / 2 < policy.report().explored_s < before + 2.5 * CAPTURED_S


def test_what_is_to_come_is_asked_for_once_a_choice() -> None:
    """Whoever answers looks at every request, and many shapes may promise more than catching up lets them keep."""
    policy, asked = young(Measured(CATCH_UP, 16, 1.0)), list[int]()
    policy.load_prior(LEARNED, record(0.8))

    def remaining_ticks() -> float:
        asked.append(1)
        return 500.0

    for _ in range(100):
        before = len(asked)
        assert policy.choose(16, lag=400).off
        assert len(asked) - before <= 1
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), remaining_ticks=remaining_ticks))
    assert asked


@pytest.mark.parametrize("host_extend_s", [0.0, 5.0])
def test_whoever_has_much_to_index_first_is_not_tried_for_it(host_extend_s: float) -> None:
    """Thousands of tokens that were written meanwhile, while all requests wait: a try would lose far more than it may.
    How much it would be is not asked every tick."""
    policy, asked = tuner(), list[int]()

    def due() -> float:
        asked.append(1)
        return host_extend_s

    tried = 0
    for _ in range(600):
        shape = policy.choose(16)
        tried += "suffix" in shape.drafters
        results = (
            [AcceptResult(0, tuple(RankHits((), shape.width) for _ in shape.drafters))] * 16 if not shape.off else []
        )
        policy.observe(outcome(shape, 16, results, tick_s(shape, 16), host_extend_s=due))
    assert (tried > 0) == (host_extend_s == 0.0)
    assert 0 < len(asked) < 200


def test_whoever_has_nothing_to_index_is_tried_all_the_same() -> None:
    """Nothing is known of either: the pair would be tried first, and would have to wait for ever."""
    here, policy, due = capturing(0.8), tuner(), 0.2
    policy.load_costs([Measured(CAPTURE, 1, 0.01)])
    for _ in range(1500):
        shape = policy.choose(16)
        kept = here.kept_cached(shape)
        results = [] if shape.off else [here.walk(shape, kept) for _ in range(16)]
        due += 16 * 4e-6
        told = outcome(shape, 16, results, here.true_s(shape, 16), host_extend_s=lambda due=due: due)  # type: ignore[misc]
        policy.observe(told)
    assert policy.report().ticks_by_shape.get((16, OFF), 0) < 750, "the learned one is in use"


def test_a_drafter_that_was_left_out_meanwhile_is_weighed_again() -> None:
    """With few requests it was best, and nothing was due. Then many ran without it, and few are left."""
    for host_extend_s in (0.0, 60.0):
        policy = tuner()
        policy.load_prior("suffix", record(0.9))
        have_graphs(policy, 16, 64)
        for _ in range(200):
            shape = policy.choose(16)
            results = (
                []
                if shape.off
                else [AcceptResult(shape.depth, (RankHits((1,) * shape.depth),) * len(shape.drafters))] * 16
            )
            policy.observe(outcome(shape, 16, results, tick_s(shape, 16)))
        assert "suffix" in shape.drafters
        for _ in range(30):
            policy.observe(
                outcome(
                    OFF,
                    64,
                    (),
                    tick_s(OFF, 64),
                    remaining_ticks=lambda: 50.0,
                    host_extend_s=lambda due=host_extend_s: due,
                )
            )  # type: ignore[misc]
        assert ("suffix" in policy.choose(16).drafters) == (host_extend_s == 0.0)


def test_what_is_due_is_asked_for_once_a_tick() -> None:
    """Whoever answers looks at every request, and many shapes look up."""
    policy, asked = tuner(), list[int]()
    policy.load_prior("suffix", record(0.9))

    def due() -> float:
        asked.append(1)
        return 60.0

    policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), host_extend_s=due))
    for _ in range(100):
        before = len(asked)
        assert "suffix" not in policy.choose(16).drafters
        assert len(asked) - before <= 1
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), remaining_ticks=lambda: 500.0, host_extend_s=due))
    assert asked


def test_only_whoever_looks_up_is_asked_what_is_due() -> None:
    policy = young()
    policy.load_prior(LEARNED, record(0.8))
    policy._places = {("eagle",): policy._places["eagle",]}  # the others are not tried

    def due() -> float:
        raise AssertionError("nobody on the host takes part")

    for _ in range(300):
        shape = policy.choose(16, lag=4)
        assert "suffix" not in shape.drafters
        results = [] if shape.off else [AcceptResult(0, (RankHits((), shape.width),))] * 16
        policy.observe(outcome(shape, 16, results, tick_s(shape, 16), host_extend_s=due))


def test_what_the_host_indexed_is_not_charged_to_a_learned_drafter() -> None:
    found = {}
    for indexed_s in (0.0, 0.3):
        policy = young(Measured(CATCH_UP, 16, 1e-4))
        pair = next(shape for shape in SHAPES if len(shape.drafters) == 2)
        for _ in range(4):
            policy.observe(outcome(pair, 16, (), 0.01, ingest_s=0.01, index_s=indexed_s, lag=100))
        found[indexed_s] = policy._costs.catching_up(learned(2, 1, 3), OFF, 16, 100)
    assert found[0.3] == pytest.approx(found[0.0])


def test_a_shape_that_needs_much_indexed_first_is_taken_if_enough_is_to_come() -> None:
    used = {}
    for host_extend_s in (0.001, 60.0):
        policy = tuner()
        policy.load_prior("suffix", record(0.9))
        have_graphs(policy, 16)
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), host_extend_s=lambda due=host_extend_s: due))  # type: ignore[misc]
        for _ in range(300):
            shape = policy.choose(16)
            if "suffix" in shape.drafters:
                break
            told = outcome(
                OFF,
                16,
                (),
                tick_s(OFF, 16),
                remaining_ticks=lambda: 1000.0,
                host_extend_s=lambda due=host_extend_s: due,
            )  # type: ignore[misc]
            policy.observe(told)
        used[host_extend_s] = "suffix" in shape.drafters
    assert used == {0.001: True, 60.0: False}


class Arriving:
    """A world of one batch size in which somebody comes now and then, and has to be taken in by a learned drafter."""

    def __init__(self, every: int, taken_in: float, costs_s: float) -> None:
        self.every, self.taken_in, self.costs_s = every, taken_in, costs_s
        self.here, self.spent, self.tokens, self.used = world(0.6), 0.0, 0.0, list[bool]()

    def run(self, policy: Tuner, ticks: int, stall_s: float = 0.0) -> None:
        """The first time somebody is taken in, the machine stands still for so long."""
        for number in range(ticks):
            shape, comes = policy.choose(64), number % self.every == 0
            takes = comes and LEARNED in shape.drafters
            results = [] if shape.off else [self.here.walk(shape, self.here.kept_cached(shape)) for _ in range(64)]
            stall_s, stalled_s = (0.0, stall_s) if takes else (stall_s, 0.0)
            ingest_s = takes * self.costs_s + stalled_s
            arrived = int(64 * self.taken_in) if comes else 0
            known = outcome(shape, 64, results, tick_s(shape, 64), ingest_s=ingest_s, arrived=arrived)
            policy.observe(replace(known, ingested=self.taken_in if takes else 0.0))
            self.spent += tick_s(shape, 64) + ingest_s
            self.tokens += self.here.length(shape)
            self.used.append(LEARNED in shape.drafters)


def test_a_drafter_whose_newcomers_cost_more_than_it_saves_is_left_again() -> None:
    """Every eighth tick somebody comes; taking that in takes as long as five ticks, many times what was measured of
    catching up. Whoever believed that would lose a tenth."""
    policy, plain_s = tuner(), tick_s(OFF, 64)
    policy.load_costs([Measured(CATCH_UP, 64, 0.0001)])
    arriving = Arriving(every=8, taken_in=10.0, costs_s=5 * plain_s)
    arriving.run(policy, 1500)
    assert arriving.spent <= 1.02 * arriving.tokens * plain_s
    assert sum(arriving.used[200:]) <= 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "entering", lambda *_: 0.0)
        patch.setattr(Budget, "affords", lambda *_: True)
        deceived, believing = Arriving(every=8, taken_in=10.0, costs_s=5 * plain_s), tuner()
        believing.load_costs([Measured(CATCH_UP, 64, 0.0001)])
        deceived.run(believing, 1500)
    assert deceived.spent > 1.05 * deceived.tokens * plain_s


@pytest.mark.parametrize("stall_s", [0.0, 0.02, 0.1])
def test_a_moment_in_which_the_machine_stood_still_keeps_no_drafter_out(stall_s: float) -> None:
    policy = tuner()
    policy.load_costs([Measured(CATCH_UP, 64, 0.00005)])
    arriving = Arriving(every=16, taken_in=10.0, costs_s=0.0005)
    arriving.run(policy, 1500, stall_s)
    assert sum(arriving.used) > 0.5 * 1500
