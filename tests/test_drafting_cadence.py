"""When the drafter is trained: with need, in simulation. A drafter chases a policy; only numbers meet."""

from dataclasses import dataclass, replace

import pytest

from tlt.config import DraftingSettings
from tlt.drafting.cadence import Cadence, Pace

SETTINGS = DraftingSettings(check=4, behind=0.03, gain=0.01, probe=10)


@dataclass
class World:
    """A drafter reaches `ceiling` less what it is behind the policy; every micro-step takes a share of the gap."""

    ceiling: float = 4.0
    gap: float = 0.0
    rate: float = 0.05

    def reached(self, noise: float = 0.0) -> float:
        return 1 + (self.ceiling - 1) * (1 - self.gap) + noise

    def train(self, micro_steps: int) -> None:
        self.gap *= (1 - self.rate) ** micro_steps


@dataclass
class Seen:
    steps: int = 0
    trained: int = 0  # steps with training
    micro_steps: int = 0


def step(cadence: Cadence, world: World, seen: Seen, *, budget: int, per_check: int, noise: float = 0.0) -> str:
    """One step of a run: what training there is stops when the cadence says so, or the step's time is over."""
    reason = cadence.begin(world.reached(noise))
    seen.steps += 1
    going = reason != "rested"
    seen.trained += going
    used = 0
    while going and used < budget:
        count = min(per_check, budget - used)
        world.train(count)
        used += count
        going = cadence.goes_on(world.reached(noise), count)
    seen.micro_steps += used
    return reason


def test_a_drafter_that_holds_is_left_alone_but_for_a_probe_now_and_then() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=False), World(), Seen()
    for number in range(200):
        step(cadence, world, seen, budget=100, per_check=4, noise=0.02 * (-1) ** number)
    assert seen.trained == 200 // SETTINGS.probe
    assert seen.micro_steps <= seen.trained * 2 * SETTINGS.check  # a probe that gains nothing is over soon


def test_a_drafter_whose_policy_moves_is_kept_within_reach_of_the_best() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=False), World(), Seen()
    worst = 1.0
    for _ in range(200):
        world.gap = 1 - (1 - world.gap) * 0.985  # the policy's step loses it one and a half in a hundred
        step(cadence, world, seen, budget=60, per_check=4)
        worst = min(worst, (world.reached() - 1) / (world.ceiling - 1))
    assert worst > 0.9  # left alone it would have lost everything
    assert seen.trained < 150  # and there was rest between


def test_training_over_many_short_steps_is_not_given_up_for_small_gains_in_each() -> None:
    """A step's share is one micro-step: gains are added up before they are judged."""
    cadence, world, seen = Cadence(replace(SETTINGS, check=16), cold=False), World(gap=0.5), Seen()
    cadence.begin(World().reached())
    for _ in range(60):
        step(cadence, world, seen, budget=1, per_check=1)
    assert world.gap < 0.06


def test_a_cold_drafter_is_trained_at_once_and_with_patience() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=True), World(gap=1.0, rate=0.0), Seen()
    assert step(cadence, world, seen, budget=12, per_check=4) == "cold"
    assert step(cadence, world, seen, budget=12, per_check=4) == "improving"  # nothing gained yet
    world.rate = 0.05
    for _ in range(40):
        step(cadence, world, seen, budget=12, per_check=4)
    assert world.gap < 0.1
    assert not cadence.training


def test_a_drafter_at_rest_is_measured_only_with_a_reason() -> None:
    """What the last rollout accepted of its drafts costs nothing to know."""
    cadence, world, seen = Cadence(SETTINGS, cold=False), World(), Seen()
    assert cadence.due(), "nothing is known of it yet"
    step(cadence, world, seen, budget=40, per_check=4)
    assert [cadence.due(0.8) for _ in range(3)] == [False] * 3
    assert cadence.due(0.7), "the rollout accepted less"
    assert not cadence.due(0.7), "once"
    assert [cadence.due(0.7) for _ in range(5)] == [False] * 4 + [True], (
        "after so many steps a new policy may be easier"
    )
    assert Cadence(SETTINGS, cold=True).due()


def test_a_hopeless_cold_drafter_is_given_up_until_a_probe() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=True), World(gap=1.0, rate=0.0), Seen()
    for _ in range(100):
        step(cadence, world, seen, budget=40, per_check=4)
    assert seen.trained < 15


def test_a_policy_that_became_harder_sets_a_new_level() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=False), World(), Seen()
    step(cadence, world, seen, budget=40, per_check=4)
    world.ceiling = 2.0
    reasons = [step(cadence, world, seen, budget=40, per_check=4) for _ in range(8)]
    assert reasons == ["behind"] + ["rested"] * 7


def test_a_policy_that_became_easier_is_found_out() -> None:
    cadence, world, seen = Cadence(SETTINGS, cold=False), World(), Seen()
    step(cadence, world, seen, budget=40, per_check=4)
    world.ceiling, world.gap = 6.0, 0.4  # as good as before, but it could be better
    assert world.reached() == pytest.approx(4.0)
    for _ in range(SETTINGS.probe):
        step(cadence, world, seen, budget=200, per_check=4)
    assert world.reached() > 5.5


def test_a_diverged_drafter_is_tried_again_in_the_next_step() -> None:
    cadence = Cadence(SETTINGS, cold=False)
    assert cadence.begin(4.0) == "rested"
    assert cadence.begin(2.0) == "behind"
    cadence.diverged()
    assert not cadence.training
    assert cadence.begin(4.0) == "probe"


def test_a_restored_cadence_decides_as_the_saved_one() -> None:
    cadence, other, world = Cadence(SETTINGS, cold=True), Cadence(SETTINGS, cold=False), World(gap=0.9)
    for number in range(30):
        other.restore(cadence.state())
        copied = replace(world)
        assert step(other, copied, Seen(), budget=6, per_check=4) == step(cadence, world, Seen(), budget=6, per_check=4)
        assert other.state() == cadence.state()
        world.gap = min(1.0, world.gap + (0.1 if number % 7 == 0 else 0.0))


def test_micro_steps_become_as_large_as_their_time_allows() -> None:
    pace = Pace(replace(SETTINGS, tokens=8192, micro_s=0.1))
    first = pace.tokens
    for _ in range(10):
        pace.took(pace.tokens, 0.005 + pace.tokens * 20e-6)
    assert first < pace.tokens == pytest.approx((0.1 / 0.1) * 4750, rel=0.1)
    pace.took(pace.tokens, 5.0)  # something was compiled
    assert pace.tokens < 200
    for _ in range(10):
        pace.took(pace.tokens, 1e-3)
    assert pace.tokens == 8192


def test_without_a_limit_in_seconds_micro_steps_stay_as_they_are() -> None:
    pace = Pace(replace(SETTINGS, tokens=1000, micro_s=0.0))
    pace.took(1000, 60.0)
    assert pace.tokens == 1000


def test_a_micro_step_that_was_too_large_is_never_as_large_again() -> None:
    pace = Pace(replace(SETTINGS, tokens=1000, micro_s=1.0))
    for _ in range(5):
        pace.took(pace.tokens, 1e-3)
    pace.too_large()
    assert pace.tokens == 500
    for _ in range(5):
        pace.took(pace.tokens, 1e-3)
    assert pace.tokens == 500
