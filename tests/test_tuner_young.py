"""A tuner that has seen little: what it is told beforehand, and what it may invest before anything was earned."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.test_tuner import SHAPES, learned, tuner, world
from tests.tuning import LEARNED, Curve, costs, outcome, pad, tick_s
from tlt.spec.acceptance import AcceptResult, RankHits
from tlt.spec.budget import Budget, CostKind
from tlt.spec.costs import CATCH_UP, CostModel, Measured
from tlt.spec.shape import OFF
from tlt.spec.shape_policy import Fixed
from tlt.spec.tuner import COMPILED_S, Tuner


def record(first: float) -> list[list[float]]:
    """p_d(r) of a curve, as somebody measured it: easy and hard contexts alike."""
    easy, hard = (Curve(first).ranks(hard) for hard in (False, True))
    return [[(e + h) / 2 for e, h in zip(a, b, strict=True)] for a, b in zip(easy[:8], hard[:8], strict=True)]


def young(*told: Measured) -> Tuner:
    policy = tuner()
    policy.load_costs(told)
    return policy


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


def test_catching_up_must_pay_before_the_last_answer_is_in() -> None:
    used = {}
    for remaining_ticks in (20.0, 2000.0):
        policy = Tuner(SHAPES, costs(False))
        policy.load_costs([Measured(CATCH_UP, 16, 0.001)])
        policy.load_prior(LEARNED, record(0.8))
        for _ in range(400):
            shape = policy.choose(16, lag=256)
            if not shape.off:
                break
            policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16), remaining_ticks=lambda left=remaining_ticks: left))  # type: ignore[misc]
        used[remaining_ticks] = not shape.off
    assert used == {20.0: False, 2000.0: True}


# ---- graphs


CAPTURED = (1, 2, 4, 8, 16, 32, 64, 256)


def test_every_shape_that_an_excellent_drafter_makes_worth_while_gets_a_graph() -> None:
    """Nothing has to be known of the drafter: graphs are captured at start-up, and no rollout waits for one."""
    policy, excellent = tuner(), world(0.9)
    pairs = policy.precapture(CAPTURED)
    assert len(pairs) == len(set(pairs))
    for size in CAPTURED:
        mine = [excellent.rate(shape, size) for shape, at in pairs if at == size]
        assert max([excellent.rate(OFF, size), *mine]) > 0.97 * max(excellent.rate(shape, size) for shape in SHAPES)
    largest = {size: max((shape.verify for shape, at in pairs if at == size), default=0) for size in CAPTURED}
    assert largest[1] == 32
    assert largest[256] < 16, "where many requests run, large trees never pay"
    assert not any(shape.off for shape, _ in pairs), "plain ticks have theirs"


@pytest.mark.parametrize("first", [0.05, 0.6, 0.9])
def test_shapes_without_a_graph_are_never_used(first: float) -> None:
    here, policy = world(first), tuner()
    pairs = set(policy.precapture([8, 16]))
    for batch in (3, 5, 8, 12, 16, 30, 200):
        for _ in range(400):
            before = Counter(here.ticks)
            here.tick(policy, batch)
            (shape,) = here.ticks - before
            serving = [at for one, at in pairs if one == shape and pad(batch) <= at <= 2 * pad(batch)]
            assert shape.off or serving, f"{shape} with {batch} requests"
    assert (sum(here.ticks.values()) > here.ticks[OFF]) == (first > 0.05) or first == 0.05


def test_a_fixed_shape_is_captured_at_all_sizes() -> None:
    assert Fixed(learned(2, 1, 3)).precapture([8, 4]) == [(learned(2, 1, 3), 8), (learned(2, 1, 3), 4)]
    assert not Fixed(OFF).precapture([8, 4])


# ---- newcomers


def test_a_drafter_that_takes_in_more_than_it_saves_stays_off() -> None:
    """Short completions of long prompts: what is to be ingested of each is no one-off work."""
    used = {}
    for arrived in (0, 16):  # a position for each token
        here, policy = world(0.5), young(Measured(CATCH_UP, 16, 0.004))
        policy.load_prior(LEARNED, record(0.5))
        for _ in range(1500):
            shape = policy.choose(16)
            results = [] if shape.off else [here.walk(shape, here.kept_cached(shape)) for _ in range(16)]
            here.ticks[shape] += 1
            policy.observe(outcome(shape, 16, results, here.true_s(shape, 16), arrived=arrived))
        used[arrived] = sum(ticks for shape, ticks in here.ticks.items() if LEARNED in shape.drafters) / 1500
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
    """Of thirty seconds of one-off work a tenth of a second is charged: the rest compiled kernels."""
    policy = young()
    while (shape := policy.choose(16)).off:
        policy.observe(outcome(OFF, 16, (), tick_s(OFF, 16)))
    before = policy.report().explored_s
    results = [AcceptResult(0, (RankHits((), shape.width),) * len(shape.drafters))] * 16
    policy.observe(outcome(shape, 16, results, tick_s(shape, 16), one_off_s=30.0))
    assert before + COMPILED_S < policy.report().explored_s < before + 1.5 * COMPILED_S


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
    here, policy, due = world(0.8), tuner(), 0.2
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
