"""What a tick hands to whoever wants the policy's states. Knows nothing of who that is."""
# R rows, S positions of each, D hidden

from dataclasses import dataclass

from torch import Tensor

from tlt.engine.scheduler import RunningRequest


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the positions a tick decoded, on the device; valid until the next tick starts."""

    reqs: tuple[RunningRequest, ...]
    first: tuple[int, ...]  # position of each row's first state
    taps: tuple[Tensor, ...]  # [R, S, D] each: the residual stream after each tapped layer
    hidden: Tensor  # [R, S, D], after the final norm
    steps: Tensor | None  # [R], how many of the S positions are real; None: all
