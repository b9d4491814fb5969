"""AdamW whose masters and moments lie in host memory: a GPU holds 12 bytes less per weight.

Always holds: on a CPU the steps equal those of `MasterAdamW` bit by bit. Gradients are summed on the weights' device
and sent to the host in buckets; while the host updates one bucket, the next arrives, and the last one's weights are
sent back. Saved states are those of `MasterAdamW`, so either continues the other's run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tlt.train.optimizer import MasterAdamW, wide_dtype

_BUCKET = 2**26  # numbers; a larger weight is a bucket of its own


class OffloadedAdamW(MasterAdamW):
    """As `MasterAdamW`. `step` waits until the host has updated all weights."""

    def __init__(self, model: nn.Module, *, weight_decay: float, bucket: int = _BUCKET) -> None:
        super().__init__(model, weight_decay=weight_decay)
        self._buckets = list(_buckets(self._weights, bucket))
        self._staging: list[_Staging] = []  # allocated at the first step

    def _master_of(self, weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", wide_dtype(weight), copy=True).requires_grad_()

    def _sum_of(self, weight: Tensor, master: Tensor) -> Tensor:
        """Holds the summed gradient of a weight in half precision; itself it takes no memory."""
        if master.dtype == weight.dtype:
            return weight
        return torch.empty(1, dtype=master.dtype, device=weight.device).expand(weight.shape).requires_grad_()

    @torch.no_grad()
    def _advance(self, unless: Tensor | None) -> None:
        if unless is not None and unless.item():
            return
        slots = self._slots()
        for position, bucket in enumerate(self._buckets):
            slot = slots[position % 2]
            if position == 0:
                slot.fetch(self._gradients_of(bucket))
            if position + 1 < len(self._buckets):
                slots[(position + 1) % 2].fetch(self._gradients_of(self._buckets[position + 1]))
            for index, gradient in zip(bucket, slot.arrived(), strict=True):
                self._masters[index].grad = gradient
            self._adam.step()
            for index in bucket:
                self._masters[index].grad = None
            slot.send([self._masters[index] for index in bucket], [self._weights[index] for index in bucket])
        for slot in slots:
            slot.wait_sent()

    def _gradients_of(self, bucket: Sequence[int]) -> list[Tensor]:
        held = [self._sums[index] for index in bucket]
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in held]

    def _slots(self) -> "list[_Staging]":
        if not self._staging:
            numbers = max(sum(self._weights[index].numel() for index in bucket) for bucket in self._buckets)
            self._staging = [_Staging.of(self._weights[0], numbers) for _ in range(2)]
        return self._staging

    @torch.no_grad()
    def _write_back(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)


@dataclass(slots=True)
class _Staging:
    """Host memory through which a bucket travels: gradients to the host, and its weights back."""

    gradients: Tensor  # pinned, if the weights are on a GPU
    weights: Tensor
    parts: list[Tensor]
    done: "torch.cuda.Event | None" = None  # of the last copy, on a GPU
    sent: "torch.cuda.Event | None" = None

    @classmethod
    def of(cls, like: Tensor, numbers: int) -> "_Staging":
        gradients, weights = (
            torch.empty(numbers, dtype=dtype, pin_memory=like.is_cuda) for dtype in (wide_dtype(like), like.dtype)
        )
        return cls(gradients, weights, [])

    def fetch(self, gradients: Sequence[Tensor]) -> None:
        """Begins to copy gradients to the host."""
        self.parts = list(_cut(self.gradients, gradients))
        for part, gradient in zip(self.parts, gradients, strict=True):
            part.copy_(gradient, non_blocking=True)
        self.done = _event(gradients[0])

    def arrived(self) -> list[Tensor]:
        if self.done is not None:
            self.done.synchronize()
        return self.parts

    def send(self, masters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Begins to copy updated weights to their device."""
        self.wait_sent()
        for part, master, weight in zip(_cut(self.weights, masters), masters, weights, strict=True):
            weight.copy_(part.copy_(master), non_blocking=True)
        self.sent = _event(weights[0])

    def wait_sent(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()


def _cut(memory: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in like:
        yield memory[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def _event(tensor: Tensor) -> "torch.cuda.Event | None":
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _buckets(weights: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Indices of weights that travel together."""
    bucket: list[int] = []
    numbers = 0
    for index, weight in enumerate(weights):
        if bucket and numbers + weight.numel() > most:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(index)
        numbers += weight.numel()
    yield bucket
