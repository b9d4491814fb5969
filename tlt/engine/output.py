"""How what a tick drew comes to the host: tokens and their log-probabilities, one copy per tick, waited for only when
asked for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.engine.scheduler import Plan
from tlt.engine.timer import TickMarks
from tlt.spec.shape import MOST_NODES, OFF, Shape

_PLACES = 3  # two ticks may be under way, a third place keeps them apart


@dataclass(frozen=True, slots=True)
class TickOutput:
    """What a tick drew, row by row: a list of tokens each, one in plain decoding."""

    tokens: list[list[int]]  # −1 where the logits were no distribution
    logprobs: list[list[float]]
    policy_logprobs: list[list[float]]


class PendingOutput:
    """A launched tick. `drawn()` waits for the device, once."""

    def __init__(self, packed: Tensor, ready: torch.cuda.Event | None) -> None:
        """int32 [R, 3·S]: token, bits of logprob and policy logprob of each step; then, of a walk, its steps."""
        self._packed = packed
        self.ready = ready  # None on a CPU: it is ready already

    def drawn(self) -> TickOutput:
        if self.ready is not None:
            self.ready.synchronize()
        steps = self._packed.shape[1] // 3
        tokens, logprobs, policy_logprobs = torch.split(self._packed[:, : 3 * steps], steps, dim=1)
        drawn = TickOutput(
            tokens.tolist(), logprobs.view(torch.float32).tolist(), policy_logprobs.view(torch.float32).tolist()
        )
        if self._packed.shape[1] % 3:  # a walk: each row has its own number of steps
            for row, count in enumerate(self._packed[:, -1].tolist()):
                del drawn.tokens[row][count:]
        return drawn


@dataclass(frozen=True, slots=True)
class InFlightTick:
    """A tick that was launched and not read."""

    plan: Plan
    pending: PendingOutput
    marks: TickMarks
    shape: Shape = OFF
    steps: int = 1  # tokens of each request that may come out of it, at most


class OutputBuffer:
    """Host memory that ticks of so many rows land in; on a CPU they are there already."""

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
