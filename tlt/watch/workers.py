"""Events of a fleet of several workers: what each did when, what was idle and what came of it, who was lost."""

from dataclasses import dataclass

from tlt.watch.event import Event


@dataclass(frozen=True, slots=True)
class WorkerSpans(Event):
    """What one worker did in a step."""

    step: int
    worker: int  # its rank
    host: str
    spans: tuple[tuple[str, float, float], ...]  # rolling, idle, drafting, updating, publishing; from when; seconds


@dataclass(frozen=True, slots=True)
class FleetRolledOut(Event):
    """How the workers shared a rollout. Seconds of all workers are added up."""

    step: int
    workers: int
    seconds: float  # the rollout, from the first request to the last answer
    rolling_s: float
    idle_s: float  # without requests and without anything else to do
    drafting_s: float  # without requests, training the drafter
    straggler_share: float  # of the workers' time that was over before the last one was done
    joins: int  # times that a worker joined others in training the drafter
    join_s: float  # what joining took, all together
    waited_s: float  # for each other, in training the drafter together
    swaps: int  # times that a worker took a better drafter while it wrote
    stop_s: float  # from the last answer until everyone had stopped
    averaging_s: float = 0.0  # to average gradients of the drafter


@dataclass(frozen=True, slots=True)
class FleetPublished(Event):
    """All workers hold one version of policy and drafter: their fingerprints are equal."""

    step: int
    version: int  # of the policy
    fingerprint: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker died or hung. The run goes on."""

    step: int
    worker: int
    phase: str  # what it was at
    reason: str
    requests: int  # that others answer in its place, from the start
    seconds: float  # since what it was at began: so much of it, at most, is done again


@dataclass(frozen=True, slots=True)
class WorkerReturned(Event):
    """Another worker has taken the place of a lost one, with the state of one that was not."""

    step: int
    worker: int
    host: str
    seconds: float  # from the decision to the first thing it can do


@dataclass(frozen=True, slots=True)
class FleetWaits(Event):
    """Something takes unusually long: who is waited for, and what for."""

    step: int
    phase: str
    workers: tuple[int, ...]
    seconds: float


KINDS = (WorkerSpans, FleetRolledOut, FleetPublished, WorkerLost, WorkerReturned, FleetWaits)
