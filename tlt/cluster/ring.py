"""The ring: all workers of a fleet add up their tensors, and each has the sum.

What always holds: everyone's sum is the same, bit by bit; a member that dies or hangs makes the others raise RingBroken
within the timeout, never wait for ever. A ring that broke is thrown away and a new one made: nothing of it is global.
On whole GPUs the tensors stay there (NCCL); elsewhere they meet in host memory (gloo). Knows nothing of what is added.
"""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tlt.errors import ClusterError

dist: Any = torch.distributed  # its process groups have no types that all versions of torch know
LOOPBACK = "127.0.0.1"
_AT_ONCE = 2**24  # elements added up in one go: bounds the memory for the copy


class RingBroken(ClusterError):
    """A member is gone. Nothing that was being added is worth anything."""


@contextmanager
def breaking() -> Iterator[None]:
    """What torch says when a member is gone, in our words."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise RingBroken(f"a worker was lost on the way: {error}") from error
        raise


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a ring find each other."""

    host: str
    port: int
    name: str  # different for each ring that meets here


class MeetingPlace:
    """A store that the members of many rings, one after the other, can meet at. Lives as long as this object."""

    def __init__(self, host: str) -> None:
        self._host = host
        listening = socket.create_server((host, 0)) if host == LOOPBACK else None  # by itself it listens everywhere
        port, file = (listening.getsockname()[1], listening.detach()) if listening else (0, None)
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)

    def meeting(self, name: str) -> Meeting:
        return Meeting(self._host, self._store.port, name)


class WorkerRing:
    """Alone until it joins. `add_up` is what a trainer is given."""

    def __init__(self, timeout_s: float, *, nccl: bool = False) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._nccl = nccl
        self._group: Any = None
        self.sums = 0  # calls of `add_up` that ended well since it joined

    def join(self, meeting: Meeting, rank: int, size: int, address: str) -> None:
        """`address`: of this machine, as the others reach it."""
        self.leave()
        self.sums = 0
        if size == 1:
            return
        try:
            _stay_where(address)
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=self._timeout)
            named = dist.PrefixStore(meeting.name, store)
            self._group = (
                _nccl(named, rank, size, self._timeout)
                if self._nccl
                else _gloo(named, rank, size, self._timeout, address)
            )
            self._add([torch.zeros(1, device="cuda" if self._nccl else "cpu")])  # connects, or says so now
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise RingBroken(f"ring {meeting.name}: member {rank} of {size} found no others: {error}") from error

    def mesh(self, meeting: Meeting, rank: int, size: int, address: str) -> Any:
        """The same members as torch's own sharding wants them. That is global: once in the life of a process."""
        _stay_where(address)
        store = dist.PrefixStore(f"{meeting.name}/mesh", dist.TCPStore(meeting.host, meeting.port, is_master=False))
        dist.init_process_group(
            "nccl" if self._nccl else "gloo", store=store, rank=rank, world_size=size, timeout=self._timeout
        )
        return init_device_mesh("cuda" if self._nccl else "cpu", (size,))

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._nccl:
            group.abort()

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes, in place, its sum over all members."""
        if self._group is not None:
            try:
                for bucket in _buckets(tensors):
                    self._add(bucket)
            except RuntimeError as error:
                self.leave()
                raise RingBroken(f"a worker was lost while gradients were added up: {error}") from error
        self.sums += 1

    def _add(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sums = flat if self._nccl else flat.cpu()
        self._group.allreduce([sums]).wait()
        offset = 0
        for tensor in tensors:
            part = sums[offset : offset + tensor.numel()]
            tensor.copy_(part.view(tensor.shape))
            offset += tensor.numel()


def _stay_where(address: str) -> None:
    """Where all members are on one machine, what NCCL and torch's own groups listen on is its loopback, too."""
    if address == LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind that are added up together, in the same way on every member."""
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
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost peer is an exception here, not the process's end
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
