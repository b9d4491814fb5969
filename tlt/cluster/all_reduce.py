"""All-reduce over the workers of a fleet: every worker gets the sum of all workers' tensors.

What always holds: the sum is the same on every worker, bit by bit; when a member dies or hangs, the others raise
AllReduceBroken within the timeout. A broken group is discarded and a new one formed: no state of it is global.
Workers on whole GPUs use NCCL; others use gloo, through host memory. Does not know what the tensors are.
"""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tlt.errors import ClusterError, RankLost
from tlt.model.parallel import Ranks

dist: Any = torch.distributed  # its process groups have no types that all versions of torch know
LOOPBACK = "127.0.0.1"
_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is made
_DISK = timedelta(days=7)  # the driver decides when a write hangs; a member that dies is an error at once
_AT_ONCE = 2**24  # elements of one bucket: bounds the memory of the flat copy


class AllReduceBroken(ClusterError):
    """A member is gone. The tensors of the interrupted all-reduce are invalid."""


@contextmanager
def all_reduce_errors() -> Iterator[None]:
    """Turns torch's error about a lost member into AllReduceBroken."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise AllReduceBroken(f"a worker was lost during the all-reduce: {error}") from error
        raise


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a group find each other."""

    host: str
    port: int
    name: str  # unique per group


class RendezvousStore:
    """A TCP store at which one group after the other forms. Lives as long as this object."""

    def __init__(self, host: str) -> None:
        self._host = host
        listening = socket.create_server((host, 0)) if host == LOOPBACK else None  # TCPStore's own socket binds to all
        port, file = (listening.getsockname()[1], listening.detach()) if listening else (0, None)
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)

    def rendezvous(self, name: str) -> Rendezvous:
        return Rendezvous(self._host, self._store.port, name)


class AllReduceGroup:
    """A worker's membership. Before `join`, `all_reduce` leaves tensors as they are."""

    def __init__(self, timeout_s: float, *, nccl: bool = False) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._nccl = nccl
        self._group: Any = None
        self.sums = 0  # calls of `all_reduce` that succeeded since it joined

    def join(self, rendezvous: Rendezvous, rank: int, size: int, address: str) -> None:
        """`address`: of this machine, as the other members reach it."""
        self.leave()
        self.sums = 0
        if size == 1:
            return
        try:
            _stay_where(address)
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=self._timeout)
            named = dist.PrefixStore(rendezvous.name, store)
            self._group = (
                _nccl(named, rank, size, self._timeout)
                if self._nccl
                else _gloo(named, rank, size, self._timeout, address)
            )
            self._add([torch.zeros(1, device="cuda" if self._nccl else "cpu")])  # connects, or fails here
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise AllReduceBroken(
                f"group {rendezvous.name}: member {rank} of {size} found no other member: {error}"
            ) from error

    def mesh(self, rendezvous: Rendezvous, rank: int, size: int, address: str, device: str) -> Any:
        """The same members as a torch device mesh. Its process group is global: call it once per process."""
        _stay_where(address)
        store = dist.PrefixStore(
            f"{rendezvous.name}/mesh", dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
        )
        backend = "cpu:gloo,cuda:nccl" if self._nccl else "gloo"  # shards on GPUs are copied to shards on CPUs
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=self._timeout)
        return init_device_mesh(device, (size,))

    def checkpoint_group(self) -> Any:
        """The members of `mesh`, for what they agree on while a checkpoint is written beside training."""
        return dist.new_group(backend="gloo", timeout=_DISK)

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._nccl:
            group.abort()

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes, in place, its sum over all members."""
        if self._group is not None:
            try:
                for bucket in _buckets(tensors):
                    self._add(bucket)
            except RuntimeError as error:
                self.leave()
                raise AllReduceBroken(f"a worker was lost while gradients were added up: {error}") from error
        self.sums += 1

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        """Every tensor becomes, in place, that of the member of rank `root`."""
        if self._group is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        try:
            for tensor in tensors:
                held = tensor.detach().contiguous().view(-1).view(torch.uint8)
                sent = held if self._nccl else held.cpu()
                self._group.broadcast([sent], options).wait()
                tensor.copy_(sent.to(tensor.device).view(tensor.dtype).view(tensor.shape))
        except RuntimeError as error:
            self.leave()
            raise AllReduceBroken(f"a worker was lost while it was sent a drafter: {error}") from error

    def _add(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sums = flat if self._nccl else flat.cpu()
        self._group.allreduce([sums]).wait()
        offset = 0
        for tensor in tensors:
            part = sums[offset : offset + tensor.numel()]
            tensor.copy_(part.view(tensor.shape))
            offset += tensor.numel()


def engine_ranks(rendezvous: Rendezvous, rank: int, size: int, address: str, timeout_s: float, *, nccl: bool) -> Ranks:
    """The workers that form one engine. Their tensors travel by NCCL between whole GPUs, else by gloo; what the leader
    announces travels between hosts, and is waited for as long as the leader lives."""
    _stay_where(address)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
        commands = _gloo(dist.PrefixStore(f"{rendezvous.name}/commands", store), rank, size, _DISK, address)
        named = dist.PrefixStore(f"{rendezvous.name}/tensors", store)
        make = (
            partial(_recorded_nccl, named, rank, size, timeout)
            if nccl
            else partial(_gloo, named, rank, size, timeout, address)
        )
        return Ranks(rank, size, make(), commands)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"engine {rendezvous.name}: rank {rank} of {size} found no other rank: {error}") from error


def _recorded_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Its collectives are recorded in CUDA graphs, so that none of them may wait on the host."""
    before = os.environ.get(_BLOCKS)
    os.environ[_BLOCKS] = "0"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(_BLOCKS)
        if before is not None:
            os.environ[_BLOCKS] = before


def _stay_where(address: str) -> None:
    """Makes NCCL and gloo listen on the loopback interface if all members are on one machine."""
    if address == LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Splits tensors into buckets of one dtype and device, identically on every member."""
    for _, same in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.numel() > _AT_ONCE:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    os.environ.setdefault(_BLOCKS, "1")  # a lost peer raises an exception; the process lives on
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
