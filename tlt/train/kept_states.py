"""Keeps the policy's hidden states of sequences that a drafter trains on in several passes.

A policy is many times larger than its drafter: recomputing its states in every pass takes as long as the training
itself. Always holds: a batch read from here equals the one that `stream_states` computes, up to rounding. The policy
must not change in the meantime. Does not know drafters or training.
"""
# T packed positions, K kept positions

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tlt.model.device import free_bytes, upload
from tlt.model.transformer import Transformer
from tlt.spec.align import align
from tlt.train.drafter import DrafterBatch, policy_states, stream_states
from tlt.train.pacing import Clock
from tlt.train.packing import Example, PackedRow, pack
from tlt.train.supervised import batches

_CPU_ROOM = 2**30  # bytes of host memory
_GPU_SHARE = 0.5  # of a GPU's free memory


States = Callable[[Iterable[PackedRow]], Iterator[DrafterBatch]]  # a batch for each row


def states_for(
    model: Transformer, examples: Sequence[Example], taps: Sequence[int], *, passes: float, room: int | None = None
) -> States:
    """A function that makes batches of rows of these examples.

    States are kept if there are at least two passes and all states fit into `room` bytes (by default a part of the free
    memory). Otherwise they are computed row by row.
    """
    positions = sum(len(example.tokens) for example in examples)
    room = free_room(model.embed.device) if room is None else room
    if passes < 2 or positions * _position_bytes(model, taps) > room:
        return lambda rows: stream_states(model, rows, taps)
    return KeptStates(model, examples, taps).stream


def filling_s(
    model: Transformer, examples: Sequence[Example], taps: Sequence[int], tokens_per_batch: int, clock: Clock
) -> float:
    """Estimated seconds to compute the states of all examples, from the time of one batch."""
    batch = next(batches(examples, tokens_per_batch))
    everything, some = (sum(len(example.tokens) for example in these) for these in (examples, batch))
    (row,) = pack(batch, some)
    started = clock()
    float(policy_states(model, row, taps).hidden_TD[-1, -1])  # waits for the device
    return (clock() - started) * everything / some


def free_room(device: torch.device) -> int:
    """Bytes available for kept states."""
    if device.type != "cuda":
        return _CPU_ROOM
    return int(_GPU_SHARE * free_bytes(device))


def _position_bytes(model: Transformer, taps: Sequence[int]) -> int:
    return (len(taps) + 1) * model.config.hidden * model.embed.element_size()


class KeptStates:
    def __init__(self, model: Transformer, examples: Sequence[Example], taps: Sequence[int]) -> None:
        self._device = model.embed.device
        lengths = [len(example.tokens) for example in examples]
        starts = np.cumsum([0, *lengths])
        self._start = {example.tokens: int(at) for example, at in zip(examples, starts, strict=False)}
        hidden_KD = model.embed.new_empty(int(starts[-1]), model.config.hidden)
        self._hidden_KD = hidden_KD
        self._features_KF = hidden_KD.new_empty(len(hidden_KD), len(taps) * model.config.hidden)
        self._fill(model, examples, taps)

    def _fill(self, model: Transformer, examples: Sequence[Example], taps: Sequence[int]) -> None:
        rows = pack(examples, max(len(example.tokens) for example in examples))
        for row, batch in zip(rows, stream_states(model, rows, taps), strict=True):
            at_T = self._places(row)
            self._features_KF.index_copy_(0, at_T, batch.features_TF)
            self._hidden_KD.index_copy_(0, at_T, batch.hidden_TD)

    def stream(self, rows: Iterable[PackedRow]) -> Iterator[DrafterBatch]:
        for row in rows:
            at_T = self._places(row)
            aligned = align(row.tokens_T, row.mask_T, row.lengths)
            yield DrafterBatch(aligned, self._features_KF.index_select(0, at_T), self._hidden_KD.index_select(0, at_T))

    def _places(self, row: PackedRow) -> Tensor:
        tokens = row.tokens_T.tolist()
        spans = zip(row.starts, row.starts[1:], strict=False)
        begins = [self._start[tuple(tokens[first:last])] for first, last in spans]
        places = [np.arange(at, at + length) for at, length in zip(begins, row.lengths, strict=True)]
        return upload(torch.from_numpy(np.concatenate(places)), self._device)
