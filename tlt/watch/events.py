"""The types of events, one line of `events.jsonl` each, and reading a run back.

Lines are never rewritten, so only the last line can be incomplete (after a crash); it is ignored. Any other broken line
is an error. A kind that a newer version wrote is kept as it is. Steps count from 1: step N is the N-th step of the run,
and 0 is before the first. Lines without a `format` are of earlier versions, count from 0 and are renumbered on reading.
Does not depend on the writer (`tlt.watch.log`) or on readers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.recipe import load_config
from tlt.strict_json import InvalidJson, parse
from tlt.watch import workers
from tlt.watch.event import Event as Event
from tlt.watch.event import WrongField, event_of, has_fields

EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.toml"
FORMAT = 2  # of a line; 1, which is not written down, counted steps from 0

Phase = Literal["rollout", "reward", "update", "drafting", "checkpoint", "replay", "evaluation"]


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The first event of a run."""

    verb: str  # what the command line was asked to do
    seed: int
    version: str  # of tlt


@dataclass(frozen=True, slots=True)
class MachineDescribed(Event):
    """Hardware and versions of the run."""

    device: str
    device_memory_gib: float  # 0 on a CPU
    cpu: str
    cores: int
    versions: dict[str, str]  # of python, torch and whatever else bears on the numbers
    commit: str
    command: str


@dataclass(frozen=True, slots=True)
class StartupPhase(Event):
    """A phase of the start-up begins."""

    phase: str  # in words, as in "opening the policy"


@dataclass(frozen=True, slots=True)
class StartupFinished(Event):
    """Everything is ready for the first step."""

    seconds: float  # since RunStarted


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """The run goes on from a checkpoint. The steps after `step` are computed again, with the same numbers."""

    step: int  # the last one in the checkpoint; 0: none
    path: str  # of the checkpoint
    changed: tuple[str, ...] = ()  # settings that are others than when it was written: `key old → new`


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(Event):
    """A checkpoint cannot be resumed from, and the run goes on from an older one."""

    path: str
    problem: str  # which files are missing or damaged


@dataclass(frozen=True, slots=True)
class CheckpointsPlanned(Event):
    """Expected disk usage of the run's checkpoints, before the first is written."""

    path: str  # where they are written
    weights_bytes: int  # of one checkpoint: the weights
    optimizer_bytes: int  # of one checkpoint: what only a resumed run needs
    keep: int  # checkpoints whose weights are kept
    keep_optimizer: int  # checkpoints that can be resumed from
    most_bytes: int  # of all there will be at a time, one being written included
    free_bytes: int  # on the disk, what the run's earlier checkpoints take included
    drafter_bytes: int = 0  # of one checkpoint, the learned drafter's part of weights and optimizer


@dataclass(frozen=True, slots=True)
class MemoryPlanned(Event):
    """Expected GPU memory of each worker, before the policy is loaded."""

    parts: tuple[tuple[str, int], ...]  # what for, and how many bytes; together what is needed
    device_bytes: int  # of the GPU, or of the worker's part of it; 0: the run is on a CPU


@dataclass(frozen=True, slots=True)
class NothingLeft(Event):
    """The resumed run has already taken all its steps."""

    step: int  # the last one
    steps: int  # run.steps


@dataclass(frozen=True, slots=True)
class PromptsPlanned(Event):
    """How often each prompt of a file is used, before the first step."""

    path: str
    prompts: int  # in the file
    per_step: int
    steps: int  # of the whole run
    turns: int = 1  # rollouts of a step at most: more than one with dynamic sampling, each with prompts of its own

    @property
    def times(self) -> float:
        """Mean number of uses of each prompt, without further turns."""
        return self.per_step * self.steps / self.prompts


@dataclass(frozen=True, slots=True)
class LearningRatePlanned(Event):
    """The peak learning rate, before the first step."""

    rate: float
    kind: str  # what is trained, in words
    usual: float  # the rate for that, which is taken where the recipe names none
    given: bool  # the recipe names it


@dataclass(frozen=True, slots=True)
class PromptsFitted(Event):
    """Some prompts exceed the limit; they are handled as configured."""

    name: str  # of the prompts: training, or as an evaluation of them is called
    long: int
    prompts: int  # in all
    limit: int  # tokens of a prompt
    choice: str  # task.long_prompts


@dataclass(frozen=True, slots=True)
class PhaseStarted(Event):
    """A phase of the step begins."""

    step: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class RolloutProgress(Event):
    """Progress of a rollout, at most once a second."""

    step: int
    finished: int  # completions
    n: int  # completions asked for
    running: int  # being written right now
    tokens: int  # generated so far


@dataclass(frozen=True, slots=True)
class RolloutFinished(Event):
    """All completions of one step are generated and judged."""

    step: int
    n: int  # rollouts
    mean_reward: float
    length_p50: int  # quantiles of the completions' lengths in tokens
    length_p90: int
    length_max: int
    tokens: int  # generated, all completions together
    seconds: float  # from the first submit to the last completion
    lengths: tuple[int, ...] = ()  # of the completions, in tokens; of at most MOST_LENGTHS of them, evenly chosen


@dataclass(frozen=True, slots=True)
class AnswerShown(Event):
    """One completion of a step, that of its first request."""

    step: int
    prompt: str  # id
    question: str  # beginning and end, where it is long; of a chat, the last message
    answer: str  # likewise
    reward: float
    tokens: int


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """The numbers of one step: rollout, rewards, update. Source of most curves."""

    step: int
    policy_version: int  # after the update
    mean_reward: float  # over all completions
    reward_std: float  # standard deviation over all completions
    length_mean: float  # of the completions, in tokens
    length_p50: int  # median
    length_p90: int  # nine completions in ten are shorter
    length_max: int  # the longest completion
    truncated: float  # share of the completions that ran into sampling.max_tokens
    tokens: int  # generated, all completions together
    accept_length: float  # tokens per verify, the policy's own included; 1 where nothing was drafted
    loss: float  # of the update
    grad_norm: float  # before clipping
    kl: float  # to the reference policy, nats per token; 0 without one
    clipped: float  # share of the completion tokens whose ratio was clipped
    mismatch_mean: float  # |log-probability of the engine − of the trainer|, mean over the completion tokens
    mismatch_max: float  # the largest of them
    learning_rate: float  # of the update
    rollout_s: float  # seconds of the step, by what it was waiting for: the parts do not overlap
    reward_s: float  # after the last completion
    update_s: float  # with handing the new policy to the engines
    drafting_s: float  # what training the drafter added to the step; what ran beside something else costs nothing
    checkpoint_s: float  # what the run waited for
    step_s: float  # the whole step, everything included but replays
    saved_s: float  # seconds of rollout saved, by the engine's measured cost of plain ticks; negative if lost
    verifies: int = 0  # drafts checked, each of one completion: what accept_length is the mean over
    entropy: float = 0.0  # of the policy over the completion tokens that the update computed, nats per token
    host_bytes: int = 0  # resident memory after the rollout, all workers' processes together
    device_bytes: int = 0  # most that torch has reserved on a GPU so far, of the worker that has most
    no_signal: float = 0.0  # share of the groups whose completions all earned the same: they teach nothing
    groups: int = 0  # prompts asked, those of dynamic sampling included
    groups_learned: int = 0  # of these the update learned from
    weight_mean: float = 1.0  # of the truncated importance weights; 1 without them
    staleness: float = 0.0  # updates of the policy between a completion and its use, mean over the completions
    drafted_share: float = 0.0  # of the tokens: accepted drafts
    ahead_share: float = 0.0  # of the tokens: written ahead in the step before, and accepted
    ahead_tokens: int = 0  # of the next step's completions, written ahead in the rollout


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Evaluation of the policy on held-out prompts after a step. Not part of any training step's numbers or times."""

    step: int  # 0: before the first
    name: str  # of the prompts: their file, without ending, or the task
    prompts: int
    answers: int  # to all prompts
    mean_reward: float  # over all completions
    reward_error: float  # its standard error, over prompts
    pass_at: tuple[tuple[int, float], ...]  # k; probability that one of k completions is correct
    length_mean: float  # of the completions, in tokens
    truncated: float  # share of the completions that ran into the limit
    seconds: float  # rewards included
    best: bool = False  # the best policy so far by eval.best, which says so of one set of prompts
    metrics: dict[str, float] = field(default_factory=dict)  # means of several rewards each, and of their metrics


@dataclass(frozen=True, slots=True)
class ShapesChosen(Event):
    """Draft shapes of a step's rollout, all workers together.

    `by_depth` is the tuner's estimate after the rollout, weighted towards recent verifies, of the drafters used in this
    step.
    """

    step: int
    ticks: tuple[tuple[int, str, int], ...]  # requests that ran, up to that power of two; shape, or off; ticks
    by_depth: tuple[tuple[str, tuple[float, ...]], ...] = ()  # drafter; of what got to depth 1, 2, … share accepted
    switches: int = 0  # ticks in another shape than the tick before
    one_off_s: float = (
        0.0  # seconds of what speculation did once (drafters catching up, captures), all workers' together
    )


@dataclass(frozen=True, slots=True)
class TrainingForecast(Event):
    """Whether drafter training is expected to pay. Emitted when a verdict is first reached."""

    step: int
    pays: bool
    gain: float  # expected, of the time of the steps left: what comes back in rollouts, less what training costs
    steps_left: int
    micro_steps: int = 0  # of the training that pays best; 0: none pays
    cost_s: float = 0.0  # of that training …
    returns_s: float = 0.0  # … and what is expected to come back before the run ends


@dataclass(frozen=True, slots=True)
class DrafterTrained(Event):
    """The drafter was trained on rollouts."""

    step: int
    version: int  # of the drafter, afterwards
    micro_steps: int
    tokens: int  # learned from
    loss_before: float
    loss_after: float
    seconds: float
    reason: str  # why it was trained, and why it stopped
    accept_before: float = (
        1.0  # expected accept length of the drafter alone, draft.unroll tokens ahead, on held-out text
    )
    accept_after: float = 1.0  # the same after the training


@dataclass(frozen=True, slots=True)
class DrafterSwapped(Event):
    """The engine drafts with this version from now on."""

    step: int  # at the end of which it is taken; it drafts in the next
    version: int
    seconds: float = 0.0  # that handing it over took, which the step waited for; 0: not measured


@dataclass(frozen=True, slots=True)
class EngineSlept(Event):
    """The KV cache's memory was given back during the update. In a fleet, of the slowest worker."""

    step: int
    gib: float
    sleep_s: float  # to give it back
    wake_s: float  # to take it again


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    step: int  # the last one in it: a run resumed from here goes on with the next
    path: str
    seconds: float  # from its beginning to its last byte; what the run waited for is in StepFinished.checkpoint_s


@dataclass(frozen=True, slots=True)
class ReplayCompared(Event):
    """A step's rollout was generated again without speculation, with the same seeds. Measured, not estimated."""

    step: int
    tokens: int
    tlt_s: float  # seconds of the rollout, as the run wrote it
    plain_s: float  # seconds of the same rollout without speculation
    identical: bool  # token for token
    plain_tokens: int = 0  # of the replay; events of earlier versions have 0 in this and the following fields
    compared: int = 0  # tokens of all completions, each up to and including its first difference
    differing: int = 0  # completions that differ: so many of those tokens
    exact: bool = False  # no token may differ: exact mode, or float64; elsewhere rounding depends on the batch size
    at_once: int = 0  # requests that ran at once at most, all workers together
    sample_at_once: int = 0  # where tokens differ: of these requests fewer at once, plainly, against the replay
    sample_compared: int = 0
    sample_differing: int = 0
    sample_s: float = 0.0  # seconds that the sample took; in no step's time, like the replay


@dataclass(frozen=True, slots=True)
class RewardsFailed(Event):
    """Completions of one step whose reward failed in the same way. The run goes on as configured."""

    step: int
    kind: str  # raised, timed out, died, or no number
    count: int  # completions
    prompt: str  # id of the first
    message: str  # what the first said


@dataclass(frozen=True, slots=True)
class RewardsJudged(Event):
    """Means of a step's rewards and reward metrics, where there are several or rewards return metrics."""

    step: int
    parts: dict[str, float]  # mean of each of several rewards, before it is weighted
    metrics: dict[str, float]  # mean of each metric, over the completions that have it


@dataclass(frozen=True, slots=True)
class HealthWarning(Event):
    """One of the run's five lights got worse. The run goes on."""

    step: int
    light: str  # learning, rewards, truncation, speculation or machine
    bad: bool  # otherwise something to look at
    message: str  # what was found
    remedy: str  # what to do, in one line


@dataclass(frozen=True, slots=True)
class AcceptanceCollapsed(Event):
    """The policy suddenly rejects a drafter's tokens. Tokens stay correct; the drafter is disabled until it helps
    again."""

    step: int
    drafter: str
    shape: str  # in use when it showed
    recent: float  # accept length of the drafter alone over the last verifies
    baseline: float  # what it was before, in the same shapes
    verifies: int  # that `recent` rests on


@dataclass(frozen=True, slots=True)
class AccountUpdated(Event):
    """The budget of speculation after a step: seconds of the whole run so far."""

    step: int
    plain_s: float  # without speculation; of several workers all numbers are means
    saved_s: float  # in rollouts, by measured costs
    spent_s: dict[str, float]  # that steps waited for: training, measuring, swapping
    balance_s: float  # may be spent
    rollouts_only: bool = False  # the rest of the steps is not counted: no worker trains a drafter while others wait


@dataclass(frozen=True, slots=True)
class WarmupStep(Event):
    """One optimizer step of supervised training."""

    step: int
    loss: float  # nats per completion token
    tokens: int  # completion tokens in the batch
    seconds: float


@dataclass(frozen=True, slots=True)
class ReaderFailed(Event):
    """A reader (console, TensorBoard, W&B, trackio) failed and was dropped. The run goes on."""

    reader: str
    message: str


@dataclass(frozen=True, slots=True)
class RunFailed(Event):
    """The last event of a run that an error or its user stopped."""

    kind: str  # of the error
    message: str  # its first line says what happened; the user's traceback, or ours, may follow


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    """The last event of a run that completed."""

    seconds: float  # since RunStarted


@dataclass(frozen=True, slots=True)
class UnknownEvent(Event):
    """An event of an unknown kind or with unknown fields, from a newer version."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event with the time at which it was written."""

    time: float  # seconds since 1970
    event: Event


@dataclass(frozen=True, slots=True)
class Run:
    """Configuration and events of a run directory."""

    config: RunConfig
    events: tuple[Recorded, ...]

    def __repr__(self) -> str:
        steps = [record.event.step for record in self.events if isinstance(record.event, StepFinished)]
        taken = f"{steps[-1] if steps else 0} of {self.config.run.steps} steps"
        return f"Run({self.config.run.name!r}, {taken}, {len(self.events)} events)"


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        MachineDescribed,
        StartupPhase,
        StartupFinished,
        RunResumed,
        CheckpointDamaged,
        CheckpointsPlanned,
        MemoryPlanned,
        NothingLeft,
        PromptsPlanned,
        LearningRatePlanned,
        PromptsFitted,
        PhaseStarted,
        RolloutProgress,
        RolloutFinished,
        AnswerShown,
        StepFinished,
        Evaluated,
        ShapesChosen,
        TrainingForecast,
        DrafterTrained,
        DrafterSwapped,
        EngineSlept,
        CheckpointSaved,
        ReplayCompared,
        RewardsFailed,
        HealthWarning,
        RewardsJudged,
        AcceptanceCollapsed,
        AccountUpdated,
        WarmupStep,
        ReaderFailed,
        RunFailed,
        RunFinished,
        *workers.KINDS,
    )
}
_RENAMED = {
    ("ShapesChosen", "once_s"): "one_off_s",
    ("AcceptanceCollapsed", "usual"): "baseline",
}  # by the last version
MOST_LENGTHS = 1024
_END_OF_TIME = 253_402_300_800  # the year 10000, which no date holds


def read_events(path: str | Path) -> tuple[Recorded, ...]:
    """All events of the file; an incomplete last line is ignored."""
    lines = Path(path).read_bytes().split(b"\n")
    return tuple(parse_event(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1))


def parse_event(line: bytes, where: str) -> Recorded:
    try:
        record = parse(line)
        when, kind, values, form = record["time"], record["kind"], record["fields"], record.get("format", 1)
        if isinstance(kind, str) and isinstance(values, dict) and 0 <= when < _END_OF_TIME:
            return Recorded(float(when), _event(kind, values, form))
        problem = ""
    except (InvalidJson, WrongField) as error:
        problem = f" ({error})"
    except (KeyError, TypeError, AttributeError):
        problem = ""
    raise TltError(f"{where}: is not an event{problem}; the file was edited or overwritten, restore or remove the line")


def _event(kind: str, values: dict[str, Any], form: int) -> Event:
    values = {_RENAMED.get((kind, name), name): value for name, value in values.items()}
    known = _KINDS.get(kind)
    if known is None or not has_fields(known, set(values)):
        return UnknownEvent(kind, values)
    event = event_of(known, values)
    if form == 1 and "step" in values and known not in (CheckpointSaved, RunResumed):
        return event_of(known, {**values, "step": values["step"] + 1})  # those two always named the last step taken
    return event


def read_run(directory: str | Path) -> Run:
    """A run's configuration and events, while it runs or afterwards."""
    directory = Path(directory)
    if not (directory / EVENTS_FILE).exists():
        raise TltError(f"{directory}: holds no {EVENTS_FILE}; expected a directory that a run wrote")
    return Run(load_config(directory / CONFIG_FILE), read_events(directory / EVENTS_FILE))
