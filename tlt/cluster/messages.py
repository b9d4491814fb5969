"""Messages between the driver of a fleet and its workers, besides those of `tlt.drafting.idle`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlt.cluster.drafter_state import DrafterWords
from tlt.cluster.timeline import TimelineSpan
from tlt.drafting.idle import HandOut, Report
from tlt.drafting.session import DraftingResult
from tlt.engine.engine import SleepReport
from tlt.engine.request import Request
from tlt.loop import RolloutReport
from tlt.spec.acceptance import Alarm
from tlt.types import Completion
from tlt.writing_ahead import WrittenText


@dataclass(frozen=True, slots=True)
class AssignedRequests:
    """Driver to worker: requests to decode."""

    hand_out: HandOut
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class UpcomingRequests:
    """Driver to a worker without requests: some of the next step, to write ahead until this rollout is over."""

    epoch: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class SharedCompletions:
    """Driver to a worker that trains the drafter: completions of other workers, as training data."""

    completions: tuple[Completion, ...]
    prompt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrafterOffer:
    """A better drafter: from the leader to the driver, and from there to the workers that still decode."""

    version: int
    weights: Any  # of the leader, in a list of one reference to Ray's object store; as they arrive, themselves


@dataclass(frozen=True, slots=True)
class NewestDrafter:
    """Driver to all workers: one sends its drafter to those that hold another. The tensors are broadcast."""

    drafter: DrafterWords
    root: int  # rank of the worker that sends it
    behind: frozenset[int]  # ids of those that take it over


@dataclass(frozen=True, slots=True, order=True)
class DrafterProgress:
    """How long a worker's drafter was trained. The larger of two was trained longer."""

    micro_steps: int
    version: int
    fingerprint: int  # of the drafter given out


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """Worker to driver: what has happened since the last update."""

    report: Report
    completions: tuple[Completion, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    offer: DrafterOffer | None = None
    texts: tuple[WrittenText, ...] = ()  # written ahead, to their end


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Worker to driver, about once a second: a worker whose progress counter stands still counts as hung."""

    progress: int
    updates: tuple[StatusUpdate, ...]


@dataclass(frozen=True, slots=True)
class WorkerRolloutReport:
    """Worker to driver, at the end of a rollout."""

    spans: tuple[TimelineSpan, ...]
    rollout: RolloutReport  # of this worker
    drafted: tuple[DraftingResult, ...]  # the sessions that this worker led
    joins: int  # sessions that this worker joined
    join_s: float  # seconds from the request to the first micro-step, summed over all joins
    waited_s: float  # seconds spent waiting for other members of a session
    averaging_s: float  # seconds spent averaging gradients
    swaps: int  # drafters that its engine swapped in while it decoded
    texts: tuple[WrittenText, ...] = ()  # written ahead, and cut when the rollout was over
    account: Mapping[str, float] | None = None  # what speculation cost and saved so far; None: nothing counts it


@dataclass(frozen=True, slots=True)
class Published:
    """Worker to driver, when it holds a new version. The fingerprints of all workers must be equal."""

    fingerprint: int  # of the policy
    drafter: int | None  # fingerprint of the drafter, where there is one
    swapped: int | None  # version of the drafter, if a new one was swapped in
    slept: SleepReport | None  # if the engine slept during the update
    gathered: int  # bytes of the policy that came from shards
    gather_s: float


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The complete state of a worker, in host memory, from which another worker can continue."""

    policy: Mapping[str, Tensor]
    trainer: Mapping[str, Any]
    drafter: Mapping[str, Any] | None
    version: int  # of the policy
    account: Mapping[str, float] | None = None  # what speculation cost and saved; None: nothing counts it
