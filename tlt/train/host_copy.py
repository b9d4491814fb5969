"""Copies of states in host memory, to be written to disk while the originals change.

Always holds: `begin` waits for nothing; tensors must not change until its future is done, and a change launched behind
it is in no copy. Direct copies from a GPU need pinned memory. Pinning takes seconds per gigabyte, and pinned memory
cannot be swapped out. So only a ring of a few slots is pinned; tensors pass through it into ordinary memory, which the
next copy reuses. Slots are small: a copy of a tick's tokens waits for at most one of them. Does not know the meaning of
the states.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

SLOTS, SLOT_BYTES = 4, 16 * 2**20
Begin = Callable[[Tensor, Tensor], Callable[[], None]]
"""Starts a copy of (bytes of a tensor) into (slot). The returned function waits until the copy is complete."""


def begin_on_gpu(source: Tensor, slot: Tensor) -> Callable[[], None]:
    slot.copy_(source, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return arrived.synchronize


class PinnedRing:
    """Staging slots: the device fills some slots while the host empties another."""

    def __init__(self, begin: Begin = begin_on_gpu, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._begin, self._count, self._slot_bytes = begin, slots, slot_bytes
        self._free: list[Tensor] = []
        self._filling: deque[tuple[Callable[[], None], Tensor, Tensor]] = deque()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Starts to copy a tensor into host memory. The source must not change until `finish` returns."""
        source_B, target_B = (tensor.reshape(-1).view(torch.uint8) for tensor in (source, target))
        for start in range(0, len(source_B), self._slot_bytes):
            piece_B = source_B[start : start + self._slot_bytes]
            slot_B = self._slot(source.is_cuda)
            arrived = self._begin(piece_B, slot_B[: len(piece_B)])
            self._filling.append((arrived, slot_B, target_B[start : start + self._slot_bytes]))

    def finish(self) -> None:
        while self._filling:
            self._empty_oldest()

    def _slot(self, pinned: bool) -> Tensor:
        if not self._free and len(self._filling) < self._count:
            self._free.append(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=pinned))
        if not self._free:
            self._empty_oldest()
        return self._free.pop()

    def _empty_oldest(self) -> None:
        arrived, slot_B, target_B = self._filling.popleft()
        arrived()
        target_B.copy_(slot_B[: len(target_B)])
        self._free.append(slot_B)


class HostCopy:
    """Copies of states, made by a thread in the order they were begun. A state of the same names as an earlier one
    takes its memory. Of a shard (DTensor), the local part is copied, and the copy is a shard on a mesh of the same
    workers' CPUs."""

    def __init__(
        self, ring: PinnedRing | None = None, passes_ring: Callable[[Tensor], bool] = lambda t: t.is_cuda
    ) -> None:
        self._ring, self._passes_ring = ring or PinnedRing(), passes_ring
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-copy")
        self._memory: dict[str, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the state that is begun: source and target
        self._side: Any = None  # the stream of all copies: what is launched meanwhile does not wait for them

    def begin(self, state: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """The state as it is now, with every tensor copied. Plain values are taken at once."""
        copied = {key: self._copied(part, key) for key, part in state.items()}
        pairs, self._pairs = self._pairs, []
        device = next((source.device for source, _ in pairs if source.is_cuda), None)
        launched = torch.cuda.current_stream(device).record_event() if device else None

        def copy() -> dict[str, Any]:
            if device is None:
                self._copy(pairs)
                return copied
            with torch.cuda.device(device):
                self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                with torch.cuda.stream(self._side):
                    self._side.wait_event(launched)
                    self._copy(pairs)
            return copied

        return self._thread.submit(copy)

    @torch.no_grad()
    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            if self._passes_ring(source):
                self._ring.copy(source, target)
            else:
                target.copy_(source)
        self._ring.finish()

    def _copied(self, value: Any, name: str) -> Any:
        if isinstance(value, DTensor):
            local, mesh = self._place(value.to_local().detach(), name), _on_host(value.device_mesh)
            size, stride = value.shape, value.stride()
            return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=size, stride=stride)
        if isinstance(value, Tensor):
            return self._place(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._copied(part, f"{name}.{key}") for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(part, f"{name}.{index}") for index, part in enumerate(value))
        return value

    def _place(self, tensor: Tensor, name: str) -> Tensor:
        """Where the tensor will be copied to."""
        place = self._memory.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = self._memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._pairs.append((tensor, place))
        return place


@cache
def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same workers, with tensors in host memory. All of them call it together the first time."""
    return mesh if mesh.device_type == "cpu" else DeviceMesh("cpu", mesh.mesh)
