"""Tensors whose memory is given back and taken again while they keep their address on a GPU, so that CUDA graphs which
hold it stay valid.

On a GPU the address is reserved once, and the driver maps memory to it (CUDA's virtual memory management); on a CPU,
which has no graphs, the storage is resized. What always holds: a tensor is zero whenever it gets memory. Without memory
it may be neither read nor written. Does not know what tensors are for.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt.errors import TltError

_DEVICE_MEMORY = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class Returnable(Protocol):
    tensor: Tensor

    def give_back(self) -> None:
        """Gives the memory back; nothing happens if it has none."""

    def take(self) -> None:
        """Takes zeroed memory; nothing happens if it has some."""


def returnable(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Returnable:
    """A tensor of zeros."""
    return _Mapped(shape, dtype, device, _driver()) if device.type == "cuda" else _Resized(shape, dtype, device)


class _Resized:
    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
        self._bytes = self.tensor.untyped_storage().nbytes()

    def give_back(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        if not self.tensor.untyped_storage().nbytes():
            self.tensor.untyped_storage().resize_(self._bytes)
            self.tensor.zero_()


class _Mapped:
    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, driver: Any) -> None:
        size = prod(shape) * dtype.itemsize
        self._range = AddressRange(size, device.index or 0, driver)
        self._range.map()
        flat = torch.as_tensor(self._range, device=device)  # no copy; it keeps the range alive
        self.tensor = flat[:size].view(dtype).view(tuple(shape))
        self.tensor.zero_()

    def give_back(self) -> None:
        self._range.unmap()

    def take(self) -> None:
        if not self._range.mapped:
            torch.cuda.empty_cache()  # torch keeps what it does not use, and the driver has to have it
            self._range.map()
            self.tensor.zero_()


class AddressRange:
    """A reserved range of a GPU's addresses, with memory or without."""

    def __init__(self, size: int, device: int, driver: Any) -> None:
        self._driver, self._device, self._memory = driver, device, ctypes.c_ulonglong()
        self._kind = _Kind(_DEVICE_MEMORY, 0, _Location(_DEVICE_MEMORY, device), None, _Flags())
        unit, start = ctypes.c_size_t(), ctypes.c_ulonglong()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._kind), _MINIMUM)
        self.size, self.address, self.mapped = -(-size // unit.value) * unit.value, 0, False
        self._call("cuMemAddressReserve", ctypes.byref(start), self._size, ctypes.c_size_t(0), _NOWHERE, _NO_FLAGS)
        self.address = start.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def map(self) -> None:
        if self.mapped:
            return
        self._call("cuMemCreate", ctypes.byref(self._memory), self._size, ctypes.byref(self._kind), _NO_FLAGS)
        self._call("cuMemMap", self._start, self._size, ctypes.c_size_t(0), self._memory, _NO_FLAGS)
        access = _Access(self._kind.location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", self._start, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.mapped = True

    def unmap(self) -> None:
        """Waits for what the GPU still does."""
        if self.mapped:
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", self._start, self._size)
            self._call("cuMemRelease", self._memory)
            self.mapped = False

    def __del__(self) -> None:
        with suppress(TltError):  # at the end of a process the driver may be gone
            if getattr(self, "address", 0):
                self.unmap()
                self._call("cuMemAddressFree", self._start, self._size)

    @property
    def _start(self) -> ctypes.c_ulonglong:
        return ctypes.c_ulonglong(self.address)

    @property
    def _size(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self.size)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise TltError(
                f"the CUDA driver's {name} failed with error {error} for {self.size:,} bytes on GPU {self._device}; "
                'see what else uses the GPU, or set engine.sleep to "never"'
            )


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


# ---- the driver's records, as cuda.h declares them


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_NOWHERE, _NO_FLAGS = ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)  # no address wished for
