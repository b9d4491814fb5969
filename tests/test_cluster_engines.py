"""Workers that form engines of several ranks do what one worker does, whoever dies."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

from tests.fleets import CONFIG, open_tiny, with_workers
from tests.test_cluster_fleet import STEPS, Crowd, Story, cluster, run, same
from tlt.cluster.ray_fleet import RayFleet
from tlt.config import RunConfig
from tlt.errors import ConfigError, ModelError, StateLost
from tlt.fleet import LocalFleet
from tlt.watch.events import DrafterTrained, ReplayCompared
from tlt.watch.workers import FleetPublished, WorkerLost, WorkerReturned, WorkerSpans

__all__ = ["cluster"]  # a fixture


@pytest.fixture(scope="module")
def alone() -> Story:
    """The undisturbed run of one worker in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.fleet.open_policy", open_tiny)
        story = Story()
        return run(CONFIG, LocalFleet(CONFIG, story.events.append), story)


@pytest.fixture(scope="module")
def engines(cluster: None) -> Iterator[Crowd]:
    """Two engines of two ranks each."""
    crowd = Crowd(4, tensor_parallel=2)
    yield crowd
    crowd.fleet.close()


@pytest.fixture
def crowd(engines: Crowd) -> Crowd:
    engines.begin()
    return engines


def with_replays(config: RunConfig) -> RunConfig:
    return replace(config, run=replace(config.run, replay_every=1))


def test_two_engines_of_two_ranks_do_what_one_worker_does(crowd: Crowd, alone: Story) -> None:
    """Rollouts with drafts, drafter training by the engine that is dry, plain replays, updates by all workers."""
    story = run(with_replays(crowd.config), crowd.fleet, crowd.story)
    same(story, alone)
    assert not story.of(WorkerLost)
    assert [event.version for event in story.of(FleetPublished)] == [1, 2]
    assert all(replay.identical for replay in story.of(ReplayCompared))
    assert story.of(DrafterTrained)
    policies, drafters = zip(*crowd.prints(), strict=True)
    assert len({*policies}) == 1
    assert [drafter is None for drafter in drafters].count(True) == 2  # followers have none
    assert len({*drafters}) == 2
    rolled = {event.worker for event in story.of(WorkerSpans) for span in event.spans if span[0] == "rolling"}
    assert rolled == {0, 1, 2, 3}


def test_with_a_rank_its_engine_is_lost_and_replaced(crowd: Crowd, alone: Story) -> None:
    """The other engine answers what was open, and the lost one returns with both ranks."""
    crowd.hold(2)  # until somebody is lost
    crowd.arm(1, "rollout", 8)
    story = crowd.run(1)
    crowd.begin_again()
    run(crowd.config, crowd.fleet, story, STEPS, first=1)
    same(story, alone)
    lost = story.of(WorkerLost)
    assert {event.worker for event in lost} == {0, 1}
    assert {event.phase for event in lost} == {"rollout"}
    assert {event.worker for event in story.of(WorkerReturned)} == {0, 1}


def test_what_cannot_be_divided_is_refused(cluster: None) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 2; expected a divisor of workers, which is 3"):
        with_workers(3, tensor_parallel=2)
    with pytest.raises(ModelError, match="tensor_parallel is 4, and the policy's num_key_value_heads is 2"):
        RayFleet(with_workers(4, tensor_parallel=4), lambda event: None)


def test_with_a_rank_of_every_engine_the_state_is_lost(crowd: Crowd) -> None:
    """Each has only a slice of the policy left; the last test, as the fleet does not come back."""
    crowd.arm(1, "rollout", 8)
    crowd.arm(2, "rollout", 8)
    with pytest.raises(StateLost, match=r"every worker was lost, the last one .* go on with --resume"):
        crowd.run()
