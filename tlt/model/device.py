"""Between host and device: tensors sent and numbers fetched without making either wait for the other.

What always holds: sending queues behind nothing but what was launched before it, and the host goes on at once; fetching
waits for what computed the numbers, not for what was launched after. Knows tensors; knows nothing of what they mean.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

_SMALL = 2**23  # bytes that one thread copies as soon as many would


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Sends a host tensor to a device without waiting for what the device is still doing."""
    device = torch.device(device)
    return _pinned(x).to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU's memory that are free, or that torch caches without using."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def most_reserved(device: torch.device) -> int:
    """The most bytes of a GPU's memory that torch has reserved so far; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def upload_columns(columns: "Sequence[np.ndarray[Any, Any]]", device: torch.device) -> list[Tensor]:
    """Host numbers as int64 on a device, in one copy."""
    together = torch.from_numpy(np.concatenate(columns).astype(np.int64, copy=False))
    return list(torch.split(upload(together, device), [len(column) for column in columns]))


def _pinned(x: Tensor) -> Tensor:
    """A copy in memory that a GPU reads by itself."""
    return x.pin_memory() if x.nbytes > _SMALL else copied(x, torch.empty(x.shape, dtype=x.dtype, pin_memory=True))


def copied(x: Tensor, target: Tensor) -> Tensor:
    """`target`, on the host like x and as large, now with x in it. By numpy: torch would wake up all its threads."""
    np.copyto(_bytes_of(target), _bytes_of(x.contiguous()))
    return target


def _bytes_of(x: Tensor) -> "np.ndarray[Any, Any]":
    return x.view(-1).view(torch.uint8).numpy()


class Reading:
    """Numbers on their way from the device. Asking for them waits for what computed them, not for what came after."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @property
    def arrived(self) -> bool:
        """Whether asking for them waits no longer."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def values(self) -> list[float]:
        return self.on_host().tolist()

    def on_host(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._host


class DeviceTimer:
    """Seconds that a piece of work takes on the device, or on the host where that computes. Entering and leaving it
    never waits; asking for the seconds does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def __enter__(self) -> Self:
        self._mark()
        return self

    def __exit__(self, *exc: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    @property
    def seconds(self) -> float:
        begun, ended = self._marks
        if isinstance(ended, float):
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3
