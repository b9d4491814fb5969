"""Where workers run: what makes a fleet impossible is said at once, and what to change."""

import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

import ray
from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR

from tests.processes import Child, descendants, listening
from tlt.cluster import placement
from tlt.cluster.placement import (
    Environment,
    WorkerResources,
    WorkerSlot,
    check_room,
    check_versions,
    connect,
    cores_of,
    resources_per_worker,
)
from tlt.config import ClusterSettings
from tlt.errors import ClusterError

DRIVER = Environment("head", 1, "n", "10.0.0.1", "3.11.4", "2.13.0", "0.1")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    monkeypatch.setattr(placement, "_nodes", lambda: [{"Resources": resources} for resources in found])
    return found


def test_too_few_cores(nodes: list[dict[str, float]]) -> None:
    nodes += [{"CPU": 4.0}, {"CPU": 3.0}]
    check_room(3, WorkerResources(2, 0))
    with pytest.raises(ClusterError, match=r"4 with 2 CPUs each.* have 7 CPUs, room for 3; lower cluster.workers"):
        check_room(4, WorkerResources(2, 0))  # three and a half would fit, were it one machine


def test_too_few_gpus(nodes: list[dict[str, float]]) -> None:
    nodes += [{"CPU": 64.0, "GPU": 1.0}, {"CPU": 64.0}]
    check_room(2, WorkerResources(1, 0.5))
    with pytest.raises(ClusterError, match=r"2 with 1 GPUs each.* have 1 GPUs, room for 1.*gpus_per_worker"):
        check_room(2, WorkerResources(1, 1))


def test_an_engine_of_several_workers_needs_one_machine(nodes: list[dict[str, float]]) -> None:
    nodes += [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 6.0}]
    check_room(12, WorkerResources(1, 1), together=4)
    with pytest.raises(ClusterError, match=r"16 with 1 GPUs each.* have 14 GPUs, room for 12"):
        check_room(16, WorkerResources(1, 1), together=4)
    with pytest.raises(ClusterError, match="room for 12"):
        check_room(14, WorkerResources(1, 1), together=4)  # there are 14, but two of them are not on one machine


def test_gpus_are_taken_where_there_are_some(nodes: list[dict[str, float]]) -> None:
    settings = ClusterSettings(workers=2)
    nodes += [{"CPU": 2.0}]
    assert resources_per_worker(settings, "auto") == WorkerResources(1.0, 0.0)
    nodes += [{"CPU": 2.0, "GPU": 2.0}]
    assert resources_per_worker(settings, "auto") == WorkerResources(1.0, 1.0)
    assert resources_per_worker(settings, "cpu") == WorkerResources(1.0, 0.0)


@pytest.mark.parametrize(("name", "other"), [("torch", "2.12.0"), ("python", "3.12.1"), ("tlt", "0.2")])
def test_other_versions_on_a_node(name: str, other: str) -> None:
    from dataclasses import replace

    check_versions(DRIVER, [DRIVER, replace(DRIVER, python="3.11.9")])
    with pytest.raises(ClusterError, match=f"node far has {name} {other}, the driver has"):
        check_versions(DRIVER, [DRIVER, replace(DRIVER, host="far", **{name: other})])


def test_a_ray_of_our_own_listens_on_loopback_alone() -> None:
    everyone = lambda: listening([os.getpid(), *descendants(os.getpid())])
    before, variables = everyone(), dict(os.environ)
    assert connect(ClusterSettings())
    try:
        found = {key: address for key, address in everyone().items() if key not in before}
        assert len({pid for pid, _ in found}) >= 3  # this driver, the head, the raylet
        assert all(address.is_loopback for address in found.values()), found
        assert Environment.here().address == "127.0.0.1"
    finally:
        ray.shutdown()
    assert os.environ.get(ENABLE_RAY_CLUSTERS_ENV_VAR) == variables.get(ENABLE_RAY_CLUSTERS_ENV_VAR)


@pytest.mark.slow
def test_a_fleet_on_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Workers, too, their ring, and torch's own group for shards."""
    child = Child.start(tmp_path, "--cluster.workers=2", "--cluster.cpus_per_worker=0.5", "--cluster.shard=true")
    child.reached("update")
    family = descendants(child.process.pid)
    found = listening([child.process.pid, *family])
    child.process.terminate()
    child.ended()
    assert sum("ray::Host" in family.get(pid, "") for pid, _ in found) >= 5
    assert all(address.is_loopback for address in found.values()), found


def test_nobody_at_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"nobody answers at cluster.address 127.0.0.1:{port}"):
        connect(ClusterSettings(address=f"127.0.0.1:{port}"))


@pytest.mark.parametrize("address", ["somewhere", "host:", "host:port"])
def test_no_address(address: str) -> None:
    with pytest.raises(ClusterError, match="expected auto or HOST:PORT"):
        connect(ClusterSettings(address=address))


def test_workers_keep_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 5, 6, 7})
    assert [cores_of(WorkerSlot(n, 2), 2) for n in range(2)] == [(3, 4), (5, 6)]
    assert cores_of(WorkerSlot(0, 3), 2) == ()  # not enough for all
    assert cores_of(WorkerSlot(0, 2), 0.5) == ()
