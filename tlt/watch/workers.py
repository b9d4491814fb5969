"""Events of a fleet of several workers: activity of each worker, idle time, lost and replaced workers."""

from dataclasses import dataclass

from tlt.watch.event import Event


@dataclass(frozen=True, slots=True)
class WorkerSpans(Event):
    """Activity of one worker in a step."""

    step: int
    worker: int  # its rank
    host: str
    spans: tuple[tuple[str, float, float], ...]  # what, as in rolling or idle; from when; seconds. Of many the longest


@dataclass(frozen=True, slots=True)
class FleetRolledOut(Event):
    """How the workers shared a rollout. Seconds are summed over workers."""

    step: int
    workers: int
    seconds: float  # the rollout, from the first request to the last completion
    rolling_s: float
    idle_s: float  # without requests and without anything else to do
    drafting_s: float  # without requests, training the drafter
    straggler_share: float  # of the workers' time that was over before the last one was done
    joins: int  # times that a worker joined others in training the drafter
    join_s: float  # what joining took, all together
    waited_s: float  # for each other, in training the drafter together
    swaps: int  # times that a worker took a better drafter while it wrote
    stop_s: float  # from the last completion until everyone had stopped
    averaging_s: float = 0.0  # to average gradients of the drafter
    ahead_s: float = 0.0  # without requests, writing completions of the next step ahead


@dataclass(frozen=True, slots=True)
class FleetPublished(Event):
    """All workers hold the same version of policy and drafter: their fingerprints are equal."""

    step: int
    version: int  # of the policy
    fingerprint: int
    seconds: float
    gathered_gb: float = 0.0  # of the policy, from shards into every engine; 0: engines read the trainers' own tensors
    gather_s: float = 0.0  # that took, on the slowest worker


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker died or hung. The run goes on."""

    step: int
    worker: int
    phase: str  # what it was at
    reason: str
    requests: int  # that others generate in its place, from the start
    seconds: float  # since what it was at began: so much of it, at most, is done again


@dataclass(frozen=True, slots=True)
class WorkerReturned(Event):
    """A worker replaced a lost one and has the fleet's state."""

    step: int
    worker: int
    host: str
    seconds: float  # from the decision to the first thing it can do


@dataclass(frozen=True, slots=True)
class FleetWaits(Event):
    """A phase takes unusually long: which workers are waited for."""

    step: int
    phase: str
    workers: tuple[int, ...]
    seconds: float


KINDS = (WorkerSpans, FleetRolledOut, FleetPublished, WorkerLost, WorkerReturned, FleetWaits)
