"""Two machines, as two Ray nodes: one recipe runs across them and survives the loss of one."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

import ray
from ray.cluster_utils import Cluster

from tests.fleets import Letters, TinyHost, is_stopped, open_tiny, wait_for_everyone, with_workers
from tests.tiny import letters
from tlt.cluster.actors import Member
from tlt.cluster.placement import WorkerPlaces, WorkerResources, check_room, connect
from tlt.cluster.ray_fleet import RayFleet
from tlt.config import ClusterSettings, RunConfig
from tlt.errors import ClusterError
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet, Loop
from tlt.tasks.judge import DirectJudge
from tlt.watch.events import Event, PhaseStarted
from tlt.watch.workers import FleetPublished, WorkerLost, WorkerReturned


@pytest.fixture
def two_nodes() -> Iterator[tuple[Cluster, Any]]:
    quiet = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    second = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 * 2**20)  # a GPU in name alone
    cluster.wait_for_nodes()
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=0.5, max_calls=1)
def node_and_gpus() -> tuple[str, list[Any]]:
    return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


def test_an_engine_keeps_to_one_machine_and_two_may_share_a_gpu(two_nodes: tuple[Cluster, Any]) -> None:
    cluster, second = two_nodes
    assert not connect(ClusterSettings(address=cluster.address))

    def placed(places: WorkerPlaces, ranks: Sequence[int], gpus: float) -> list[tuple[str, list[Any]]]:
        at = [node_and_gpus.options(num_gpus=gpus, scheduling_strategy=places.of(rank)).remote() for rank in ranks]
        found: list[tuple[str, list[Any]]] = ray.get(at)
        places.close()
        return found

    engines = placed(WorkerPlaces(WorkerResources(0.5, 0.0), together=2), (2, 0, 3, 1), 0.0)
    nodes = [node for node, _ in engines]
    assert nodes[0] == nodes[2] != nodes[1] == nodes[3]
    halves = WorkerResources(0.5, 0.5)
    assert placed(WorkerPlaces(halves), (0, 1), 0.5) == [(second.node_id, [0])] * 2
    check_room(2, halves)
    with pytest.raises(ClusterError, match="room for 2"):
        check_room(3, halves)


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
