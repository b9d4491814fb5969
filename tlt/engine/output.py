"""Transfer of a tick's output to the host: tokens and log-probabilities, one asynchronous copy per tick.

Always holds: only `PendingOutput.drawn` waits for the device. Knows no requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.engine.scheduler import Plan
from tlt.engine.timer import TickMarks
from tlt.spec.shape import MOST_NODES, OFF, Shape

_PLACES = 3  # host buffers in rotation: two ticks may be in flight, and a third buffer keeps them apart


@dataclass(frozen=True, slots=True)
class TickOutput:
    """The output of a tick: a list of tokens per row, of length 1 in plain decoding."""

    tokens: list[list[int]]  # −1 where the logits are NaN or infinite
    logprobs: list[list[float]]
    policy_logprobs: list[list[float]]


class PendingOutput:
    """The output of a launched tick. `drawn()` waits for the device."""

    def __init__(self, packed: Tensor, ready: torch.cuda.Event | None) -> None:
        """`packed`: int32 [R, 3·S], token, bits of logprob and policy logprob of each step. A walk adds its length."""
        self._packed = packed
        self.ready = ready  # None on a CPU, where the output is complete

    def drawn(self) -> TickOutput:
        if self.ready is not None:
            self.ready.synchronize()
        steps = self._packed.shape[1] // 3
        tokens, logprobs, policy_logprobs = torch.split(self._packed[:, : 3 * steps], steps, dim=1)
        drawn = TickOutput(
            tokens.tolist(), logprobs.view(torch.float32).tolist(), policy_logprobs.view(torch.float32).tolist()
        )
        if self._packed.shape[1] % 3:  # a walk: the last column is each row's number of steps
            for row, count in enumerate(self._packed[:, -1].tolist()):
                del drawn.tokens[row][count:]
        return drawn


@dataclass(frozen=True, slots=True)
class InFlightTick:
    """A launched tick whose output is not read yet."""

    plan: Plan
    pending: PendingOutput
    marks: TickMarks
    shape: Shape = OFF
    steps: int = 1  # most tokens that it may emit per request


class OutputBuffer:
    """Pinned host buffers for the outputs of ticks with up to `rows` rows. Unused on a CPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        numbers = rows * (3 * MOST_NODES + 1) if device.type == "cuda" else 0
        self._places = [torch.empty(numbers, dtype=torch.int32, pin_memory=True) for _ in range(_PLACES) if numbers]
        self._turn = 0

    def fetch(self, packed: Tensor) -> PendingOutput:
        if not self._places:
            return PendingOutput(packed, None)
        self._turn = (self._turn + 1) % len(self._places)
        landed = self._places[self._turn][: packed.numel()].view(packed.shape)
        landed.copy_(packed, non_blocking=True)
        ready = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return PendingOutput(landed, ready)
