"""Two machines, as two Ray nodes: one recipe runs across them and survives the loss of one."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

import ray
from ray.cluster_utils import Cluster

from tests.fleets import Letters, TinyHost, is_stopped, open_tiny, wait_for_everyone, with_workers
from tests.tiny import letters
from tlt.cluster.actors import Member
from tlt.cluster.ray_fleet import RayFleet
from tlt.config import RunConfig
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet, Loop
from tlt.tasks.judge import DirectJudge
from tlt.watch.events import Event, PhaseStarted
from tlt.watch.workers import FleetPublished, WorkerLost, WorkerReturned


@pytest.fixture
def two_nodes() -> Iterator[tuple[Cluster, Any]]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    quiet = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    second = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def tokens_of(fleet: Fleet, config: RunConfig, emit: Emit) -> list[dict[Any, Any]]:
    task = Letters()
    loop = Loop(config, task, letters(), DirectJudge(task), fleet, emit)
    steps = [loop.step(number) for number in range(3)]
    return [{rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts} for step in steps]


def test_a_run_across_two_nodes_survives_the_loss_of_one(
    two_nodes: tuple[Cluster, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, second = two_nodes
    config = with_workers(2, cpus_per_worker=1.0, address=cluster.address)
    with monkeypatch.context() as patch:
        patch.setattr("tlt.fleet.open_policy", open_tiny)
        expected = tokens_of(LocalFleet(config, lambda event: None), config, lambda event: None)
    events: list[Any] = []

    def lose(member: Member) -> None:
        """A machine takes its processes with it at once. This one has stopped itself in the middle of its answers."""
        while not is_stopped(member.environment.pid):
            time.sleep(0.01)
        cluster.remove_node(second, allow_graceful=False)
        os.kill(member.environment.pid, signal.SIGKILL)

    def emit(event: Event) -> None:
        events.append(event)
        if event == PhaseStarted(2, "rollout"):
            (gone,) = [m for m in fleet._actors.members.values() if m.environment.node == second.node_id]
            ray.get(gone.actor.arm.remote("rollout", 5, signal.SIGSTOP))
            threading.Thread(target=lose, args=(gone,)).start()
        if event == PhaseStarted(3, "rollout"):
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            wait_for_everyone(fleet, 2)

    fleet = RayFleet(config, emit, host=TinyHost)
    try:
        assert len({member.environment.node for member in fleet._actors.members.values()}) == 2  # a worker on each
        assert tokens_of(fleet, config, emit) == expected
    finally:
        fleet.close()
    (lost,) = [event for event in events if isinstance(event, WorkerLost)]
    (returned,) = [event for event in events if isinstance(event, WorkerReturned)]
    assert lost.step == 2
    assert lost.requests > 0
    assert events.index(returned) > events.index(PhaseStarted(3, "rollout"))  # there was no room before
    assert returned.worker == lost.worker
    assert [event.version for event in events if isinstance(event, FleetPublished)] == [1, 2, 3]
