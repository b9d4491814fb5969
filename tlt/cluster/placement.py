"""Where workers run: on a local Ray that this process starts, or on an existing cluster.

What always holds: what makes a fleet impossible (no cluster at the address, too few processors, other versions on a
node) raises before any policy is loaded, with what was found and what to change. A local Ray listens on the loopback
interface only. Does not know what workers do.
"""

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
import torch
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tlt import __version__
from tlt.config import ClusterSettings
from tlt.errors import ClusterError
from tlt.signals import keeping_sigterm

_REACH_S = 5.0  # seconds to wait for a connection to `cluster.address`; Ray itself would wait for minutes


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """CPUs and GPUs of one worker."""

    cpus: float
    gpus: float  # 0 for a worker on a CPU


class WorkerPlaces:
    """Room that Ray keeps for the workers of every rank: a placement group per engine, on one machine.

    The room of a lost worker stays its rank's; that of a lost machine moves to another one as soon as that has room.
    `together`: consecutive ranks that form one engine.
    """

    def __init__(self, resources: WorkerResources, together: int = 1) -> None:
        self._together = together
        self._bundle = {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.gpus else {})
        self._groups: dict[int, PlacementGroup] = {}  # by number of the engine

    def of(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where Ray is to start the worker of this rank. Does not wait for room."""
        engine, number = divmod(rank, self._together)
        if engine not in self._groups:
            self._groups[engine] = placement_group([self._bundle] * self._together, strategy="STRICT_PACK")
        return PlacementGroupSchedulingStrategy(self._groups[engine], placement_group_bundle_index=number)

    def close(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            remove_placement_group(group)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The number of a worker among the workers of its machine."""

    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Host and versions of a process. Workers need the driver's versions: other versions compute other numbers."""

    host: str
    pid: int
    node: str  # Ray's node id
    address: str  # of the machine, as other machines reach it
    python: str
    torch: str
    tlt: str

    @classmethod
    def here(cls) -> "Environment":
        context = ray.get_runtime_context()
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            node=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            python=platform.python_version(),
            torch=torch.__version__.partition("+")[0],  # without the build: a driver without a GPU may have a CPU build
            tlt=__version__,
        )


def connect(settings: ClusterSettings) -> bool:
    """Starts a local Ray, or joins the one at `cluster.address`. True if it was started here and must be shut down."""
    if ray.is_initialized():
        return False
    with keeping_sigterm():  # Ray installs a handler that ends the process with a traceback
        return _connect(settings)


def _connect(settings: ClusterSettings) -> bool:
    if not settings.address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local Ray sends no usage statistics
        with _on_loopback():
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
        return True
    if settings.address != "auto":
        _reach(settings.address)
    try:
        ray.init(address=settings.address, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise ClusterError(
            f"cluster.address is {settings.address!r} but no Ray answers there; start one with `ray start --head`, "
            "or leave cluster.address out to start a local Ray"
        ) from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise ClusterError(
            f"the cluster at {settings.address} runs other versions than this driver: {error}"
        ) from error
    return False


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started within listens on the loopback interface only.

    Ray uses 127.0.0.1 if multi-node clusters are disabled; an address passed to `ray.init` would be replaced by a
    public one. Ray's child processes read the variable; this one read it at import, so the constant is changed too.
    """
    name, constants = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants
    before, variable = constants.ENABLE_RAY_CLUSTER, os.environ.get(name)
    constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if variable is not None:
            os.environ[name] = variable


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"cluster.address is {address!r}; expected auto or HOST:PORT, as `ray start --head` prints it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"nobody answers at cluster.address {address} ({error}); check that the head node runs, and that its port "
            "can be reached from here"
        ) from error


def resources_per_worker(settings: ClusterSettings, device: str) -> WorkerResources:
    """`device` is what the policy was configured for; auto takes GPUs if the cluster has any."""
    has_gpus = any(node["Resources"].get("GPU", 0) for node in _nodes())
    on_gpu = device.startswith("cuda") or (device == "auto" and has_gpus)
    return WorkerResources(settings.cpus_per_worker, settings.gpus_per_worker if on_gpu else 0.0)


def check_room(workers: int, resources: WorkerResources, together: int = 1) -> None:
    """Raises ClusterError if the workers do not fit on the nodes. `together`: workers that need one node."""
    nodes = [(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)) for node in _nodes()]
    by_cpu = [_fits(cpus, resources.cpus, workers, together) for cpus, _ in nodes]
    by_gpu = [_fits(gpus, resources.gpus, workers, together) for _, gpus in nodes]
    room = sum(map(min, by_cpu, by_gpu))
    if room >= workers:
        return
    scarce_gpus = sum(by_gpu) < workers
    kind, each, knob = ("GPUs", resources.gpus, "gpus") if scarce_gpus else ("CPUs", resources.cpus, "cpus")
    found = sum(gpus if scarce_gpus else cpus for cpus, gpus in nodes)
    raise ClusterError(
        f"cluster.workers is {workers} with {each:g} {kind} each, but the {len(nodes)} node(s) of the cluster have "
        f"{found:g} {kind}, room for {room}; lower cluster.workers or cluster.{knob}_per_worker, or add nodes"
    )


def _fits(there: float, each: float, at_most: int, together: int) -> int:
    return at_most if not each else int(there / each + 1e-9) // together * together


def _nodes() -> list[dict[str, dict[str, float]]]:
    return [node for node in ray.nodes() if node["Alive"]]


def check_versions(driver: Environment, workers: Sequence[Environment]) -> None:
    """Raises ClusterError if a worker's Python, torch or tlt differs from the driver's."""
    for worker in workers:
        for name in ("python", "torch", "tlt"):
            ours, theirs = getattr(driver, name), getattr(worker, name)
            same = ours.split(".")[:2] == theirs.split(".")[:2] if name == "python" else ours == theirs
            if not same:
                raise ClusterError(
                    f"node {worker.host} has {name} {theirs}, the driver has {ours}; install the same version on every "
                    "node: other versions compute other numbers"
                )


def cores_of(slot: WorkerSlot, cpus: float) -> tuple[int, ...]:
    """The cores to which a worker is pinned; empty if there are too few for all workers of the machine."""
    each = int(cpus)
    cores = sorted(os.sched_getaffinity(0))
    if each < 1 or each != cpus or each * slot.of > len(cores):
        return ()
    return tuple(cores[slot.number * each : (slot.number + 1) * each])


def pin(cores: Sequence[int]) -> None:
    """Pins every thread of this process to these cores."""
    if cores:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)
