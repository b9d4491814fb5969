"""The record of a tick's hidden states that the engine passes to its callback. Knows nothing of the receiver."""
# R rows, S positions of each, D hidden

from dataclasses import dataclass

from torch import Tensor

from tlt.engine.scheduler import RunningRequest


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the positions a tick decoded, on the device; valid until the next tick starts."""

    reqs: tuple[RunningRequest, ...]
    first: tuple[int, ...]  # position of each row's first hidden state
    taps: tuple[Tensor, ...]  # [R, S, D] each: the residual stream after each tapped layer
    hidden: Tensor  # [R, S, D], after the final norm
    steps: Tensor | None  # [R], valid positions of the S; None: all
