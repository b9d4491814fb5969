"""Workers that form engines of several ranks do what one worker does, whoever dies."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

import ray

from tests.fleets import CONFIG, CountingHost, open_tiny, with_workers
from tests.test_cluster_fleet import STEPS, Crowd, Story, cluster, run, same
from tlt.cluster.ray_fleet import RayFleet
from tlt.config import GrpoSettings, RunConfig
from tlt.errors import ConfigError, ModelError, StateLost
from tlt.fleet import LocalFleet
from tlt.loop import Fleet, Loop
from tlt.model.weights import read_config, weights_count
from tlt.policy import TINY_POLICY
from tlt.tasks.choose import task_of
from tlt.tasks.judge import DirectJudge
from tlt.text import Tokenizer
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


def toy_run(config: RunConfig, fleet: Fleet, story: Story, steps: range) -> Story:
    task = task_of(config)
    tokenizer = Tokenizer.load(TINY_POLICY)
    loop = Loop(config, task, tokenizer, DirectJudge(task), fleet, story.events.append)
    for number in steps:
        step = loop.step(number)
        rollouts = [rollout for one in step.judged for rollout in one.group.rollouts]
        story.tokens.append({rollout.completion.key: rollout.completion.tokens for rollout in rollouts})
        story.rewards.append(sum(rollout.reward for rollout in rollouts))
        story.losses.append(step.update.loss)
        story.norms.append(step.update.grad_norm)
    return story


def test_no_worker_holds_a_sharded_policy_that_an_engine_divides(cluster: None, tmp_path: Path) -> None:
    """Shards in the trainers and slices in the engine, from the policy's files, in rollouts, and from a checkpoint. The
    first test, as the other fleet takes all CPUs."""
    shape = replace(CONFIG.task, prompts=3, group=2), replace(CONFIG.sampling, max_tokens=32)
    config = replace(CONFIG, task=shape[0], sampling=shape[1])
    alone, story = Story(), Story()
    toy_run(config, LocalFleet(config, alone.events.append), alone, range(2))
    divided = replace(config, cluster=replace(config.cluster, workers=2, tensor_parallel=2, shard=True))
    fleet = RayFleet(divided, story.events.append, host=CountingHost)
    toy_run(divided, fleet, story, range(1))
    write = fleet.snapshot()
    write(tmp_path)
    before = fleet._actors.ask_all("fingerprint").answers
    toy_run(divided, fleet, story, range(1, 2))
    same(story, alone)
    leader = fleet._actors.members[0].actor
    fleet.draft(2, lambda: ray.get(leader.micro_steps.remote()) > 0)
    assert story.of(DrafterTrained)  # from states that both ranks computed
    held = list(fleet._actors.ask_all("held").answers.values())
    fleet.restore(tmp_path, 1)
    assert {w: policy for w, (policy, _) in fleet._actors.ask_all("fingerprint").answers.items()} == {
        w: policy for w, (policy, _) in before.items()
    }
    fleet.close()
    whole = weights_count(read_config(TINY_POLICY))
    assert sum(trained for _, trained in held) == whole
    assert all(engine < 0.55 * whole for engine, _ in held)
    policies = {policy for policy, _ in before.values()}
    assert len(policies) == 2  # each has a slice of its own


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
    assert crowd.fleet._actors.losses == 1  # of an engine
    assert {event.phase for event in lost} == {"rollout"}
    assert {event.worker for event in story.of(WorkerReturned)} == {0, 1}


def test_what_cannot_be_divided_is_refused(cluster: None) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 2; expected a divisor of workers, which is 3"):
        with_workers(3, tensor_parallel=2)
    with pytest.raises(ModelError, match="tensor_parallel is 4, and the policy's num_key_value_heads is 2"):
        RayFleet(with_workers(4, tensor_parallel=4), lambda event: None)
    with_reference = replace(with_workers(2, tensor_parallel=2, shard=True), grpo=GrpoSettings(kl=0.1))
    with pytest.raises(ConfigError, match="the reference policy is whole on every worker"):
        RayFleet(with_reference, lambda event: None)


def test_with_a_rank_of_every_engine_the_state_is_lost(crowd: Crowd) -> None:
    """Each has only a slice of the policy left; the last test, as the fleet does not come back."""
    crowd.arm(1, "rollout", 8)
    crowd.arm(2, "rollout", 8)
    with pytest.raises(StateLost, match=r"every worker was lost, the last one .* go on with --resume"):
        crowd.run()
