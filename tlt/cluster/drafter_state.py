"""A drafter's state on its way to the other members of a process group: described in words first, then broadcast.

Always holds: what was sent and what is restored are equal, bit by bit. Words hold no tensors, so they can travel in a
call. Does not know why the state is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt.drafting.trainer import OnlineDrafter
from tlt.train.checkpoint import with_tensors, without_tensors


class BroadcastGroup(Protocol):
    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None: ...


@dataclass(frozen=True, slots=True)
class DrafterWords:
    """A state without the values of its tensors."""

    words: Any
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each


def describe(drafter: OnlineDrafter) -> DrafterWords:
    tensors: dict[str, Tensor] = {}
    words = without_tensors(drafter.state(buffer=False), tensors)
    return DrafterWords(words, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values()))


def send(drafter: OnlineDrafter, group: BroadcastGroup, root: int) -> None:
    """Of the member of rank `root`, which has described its state and not changed it since."""
    tensors: dict[str, Tensor] = {}
    without_tensors(drafter.state(buffer=False), tensors)
    group.broadcast(list(tensors.values()), root)


def receive(drafter: OnlineDrafter, sent: DrafterWords, group: BroadcastGroup, root: int) -> None:
    """Of all others that take it over."""
    places = list(_received(sent, group, root, drafter.drafter.fc.device))
    drafter.restore(with_tensors(sent.words, lambda key: places[int(key)]))


def pass_over(sent: DrafterWords, group: BroadcastGroup, root: int, device: torch.device) -> None:
    """Of all others that have no use for it: a broadcast needs every member."""
    for _ in _received(sent, group, root, device):
        pass


def _received(sent: DrafterWords, group: BroadcastGroup, root: int, device: torch.device) -> Iterator[Tensor]:
    for shape, dtype in sent.kinds:
        place = torch.empty(shape, dtype=dtype, device=device)
        group.broadcast([place], root)
        yield place
