"""What the driver of a fleet and its workers say to each other, besides the words of `tlt.drafting.idle`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlt.cluster.timeline import TimelineSpan
from tlt.drafting.idle import HandOut, Report
from tlt.drafting.trainer import DraftingResult
from tlt.engine.request import Request
from tlt.loop import RolloutReport
from tlt.spec.alarm import Alarm
from tlt.types import Completion


@dataclass(frozen=True, slots=True)
class Handed:
    """To a worker: requests to answer."""

    hand_out: HandOut
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class SharedCompletions:
    """To a worker that drafts: what others have written, to learn from."""

    completions: tuple[Completion, ...]
    prompt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A better drafter, for those who still write: from the leader to the driver, and on to them."""

    version: int
    weights: Mapping[str, Tensor]  # on the host


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """How far a worker's drafter is. Of two, the larger has learned more."""

    micro_steps: int
    version: int


@dataclass(frozen=True, slots=True)
class News:
    """From a worker: what has happened since the last."""

    report: Report
    completions: tuple[Completion, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    offer: Offer | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """From a worker, now and then, whether or not there is news: a worker whose progress stands still hangs."""

    progress: int
    news: tuple[News, ...]


@dataclass(frozen=True, slots=True)
class RollReport:
    """From a worker, when a rollout is over."""

    spans: tuple[TimelineSpan, ...]
    rollout: RolloutReport  # its own
    drafted: tuple[DraftingResult, ...]  # the sessions that this worker led
    joins: int  # sessions that this worker joined
    join_s: float  # seconds from asking to the first micro-step, all joins together
    waited_s: float  # seconds for the gradients of others
    swaps: int  # better drafters that its engine took while it wrote


@dataclass(frozen=True, slots=True)
class Published:
    """From a worker, when it holds a new version: all workers' must be equal."""

    fingerprint: int  # of policy and drafter
    swapped: int | None  # the drafter's version, if it was another
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's memory, on the host: what another goes on from."""

    policy: Mapping[str, Tensor]
    trainer: Mapping[str, Any]
    drafter: Mapping[str, Any] | None
    version: int  # of the policy
