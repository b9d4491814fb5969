"""A variant of a training run, taken step by step: the times of each step, and their totals.

Used by `tlt.bench.train`, one variant after the other, and by `tlt.bench.turns`, two variants in turns.
What always holds: the seconds of a step include everything it made the device compute. The time between two steps of a
variant is part of neither, and of no forecast or account of its drafter training. A ratio divides the seconds of plain
decoding by those of a variant, over the same steps.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from types import TracebackType

from tlt.bench.lab import widened
from tlt.bench.options import TrainOptions, TrainScale
from tlt.bench.report import Subject
from tlt.config import RunConfig
from tlt.event_builders import Lengths, lengths_of, mean_reward
from tlt.fleet import LocalFleet
from tlt.loop import Loop, Step
from tlt.machine import free_memory, wait_for
from tlt.model.weights import read_config, save_policy
from tlt.policy import open_policy, source_of
from tlt.replay import common_start
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.context import fit_task
from tlt.text import Tokenizer
from tlt.types import Key
from tlt.watch.events import DrafterSwapped, DrafterTrained, Event, StartupPhase, TrainingForecast

PLAIN = "plain"
RECENT = 10  # steps

Answers = Mapping[Key, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one variant. Fields of one of the two benchmarks are None in the other."""

    variant: str
    step: int
    mean_reward: float
    loss: float
    tokens: int
    longest: int  # answer, in tokens
    length_p50: int  # median of the answers' lengths
    length_p90: int
    truncated: float  # share of the answers that were cut off at the cap
    rollout_s: float
    reward_s: float
    drafting_s: float  # on the critical path
    swap_s: float  # handing a new drafter to the engine; part of update_s
    update_s: float
    step_s: float  # everything
    accept_length: float
    micro_steps: int  # of the drafter's training
    drafter_version: int | None  # that the next rollout drafts with
    forecast: TrainingForecast | None  # the last one so far: whether drafter training pays
    spent: Mapping[str, float] | None  # seconds that were charged for speculation so far, by kind
    balance_s: float | None  # of that account
    mismatch_mean: float  # of the engine's log-probabilities and the trainer's
    identical: float | None = None  # share of the answers that are plain decoding's, token for token
    common: float | None = None  # share of plain decoding's tokens before the first that differs
    moved: float | None = None  # nats per token from the first policy to the one that wrote these answers
    reach: float | None = None  # accept length to expect next, of chains as long as training unrolls
    left_alone: float | None = None  # the same of the drafter this run began with, for the same policy and answers


@dataclass(frozen=True, slots=True)
class Total:
    """All steps of one variant."""

    variant: str
    steps: int
    start_s: float  # before the first step: opening the policy, capturing and timing what is known to be needed
    snapshot_s: float | None  # that a run waits for its first checkpoint's snapshot; None: not taken
    copy_s: float | None  # until it was copied to the host, behind which the next update would wait
    seconds: float
    speedup: float | None  # over plain, everything included
    speedup_with_start: float | None  # start_s added to both
    lowest_speedup: float | None  # of the first n steps, the lowest over all n
    later_speedup: float | None  # without the first step, in which kernels are compiled and graphs captured
    token_speedup: float | None  # as later_speedup, but seconds per token: answers may have grown or shrunk
    recent_speedup: float | None  # of the last ten steps
    recent_token_speedup: float | None
    rollout_s: float
    rollout_speedup: float | None
    recent_rollout_speedup: float | None
    reward_s: float
    drafting_s: float  # on the critical path, with handing new drafters to the engine
    drafting_share: float  # of all time
    update_s: float
    accept_first: float  # accept length over the first third of the steps
    accept_last: float  # over the last third
    reward_first: float
    reward_last: float
    reach_last: float | None  # over the last third
    left_alone_last: float | None
    moved_last: float | None
    tokens: int
    answers: int
    length_p50: int  # of all answers
    length_p90: int
    length_p99: int
    length_max: int
    cap: int
    temperature: float


@dataclass(slots=True)
class VariantSteps:
    """The steps of a variant so far. Outlives its fleet."""

    variant: str
    config: RunConfig
    start_s: float = 0.0
    start_phases_s: dict[str, float] = field(default_factory=dict)  # seconds of each part of it
    snapshot_s: float | None = None
    copy_s: float | None = None
    records: list[StepRecord] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of all answers

    def add(self, record: StepRecord, step: Step) -> None:
        self.records.append(record)
        self.lengths += lengths_of(step.rollouts)


class VariantRun:
    """A variant's own policy, fleet, task and judge. Opening it is timed, and so is every step."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self.taken = VariantSteps(name, config)
        self._events: list[Event] = []
        self._version: int | None = None
        self._forecast: TrainingForecast | None = None
        self._phases: list[tuple[float, str]] = []  # when each began
        started = time.perf_counter()
        with ExitStack() as stack:
            task = task_of(config)
            judge = stack.enter_context(judge_of(task, config))
            self.fleet = LocalFleet(config, self._see)
            stack.callback(self.fleet.close)
            source = source_of(config.model)
            context = read_config(source).max_positions
            tokenizer = fit_task(task, Tokenizer.load(source), config, context).tokenizer
            self._loop = Loop(config, task, tokenizer, judge, self.fleet, self._see)
            self._device = self.fleet.worker.policy.model.embed.device
            wait_for(self._device)
            self._stack = stack.pop_all()
        self._ended = time.perf_counter()
        self.taken.start_s = self._ended - started
        self.taken.start_phases_s = self._phases_s(self._ended)

    def __enter__(self) -> "VariantRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _see(self, event: Event) -> None:
        if isinstance(event, StartupPhase):
            self._phases.append((time.perf_counter(), event.phase))
        self._events.append(event)

    def _phases_s(self, ended: float) -> dict[str, float]:
        ends = [begun for begun, _ in self._phases[1:]] + [ended]
        return {phase: end - begun for (begun, phase), end in zip(self._phases, ends, strict=True)}

    def step(self) -> tuple[Step, StepRecord]:
        """The next step. The record is not yet one of those that `taken` holds: whoever has more to say adds it."""
        self._events.clear()
        started = time.perf_counter()
        self.fleet.leave_out(started - self._ended)
        step = self._loop.step(len(self.taken.records))
        wait_for(self._device)  # the end of the update is this step's, too
        self._ended = time.perf_counter()
        return step, self._record(step, self._ended - started)

    def snapshot(self) -> None:
        """Times a checkpoint's snapshot and its copy. It is not written."""
        started = time.perf_counter()
        self.fleet.snapshot()
        self.taken.snapshot_s = time.perf_counter() - started
        self.fleet.worker.wait_for_copies()
        self.taken.copy_s = time.perf_counter() - started

    def _record(self, step: Step, seconds: float) -> StepRecord:
        rollouts, account = step.rollouts, self.fleet.account
        lengths, swap_s, micro_steps = Lengths.of(lengths_of(rollouts)), 0.0, 0
        for event in self._events:
            match event:
                case DrafterSwapped():
                    self._version, swap_s = event.version, event.seconds
                case DrafterTrained():
                    micro_steps += event.micro_steps
                case TrainingForecast():
                    self._forecast = event
                case _:
                    pass
        return StepRecord(
            variant=self.taken.variant,
            step=step.number,
            mean_reward=mean_reward(rollouts),
            loss=step.update.loss,
            tokens=lengths.total,
            longest=lengths.longest,
            length_p50=lengths.p50,
            length_p90=lengths.p90,
            truncated=fmean(rollout.completion.finish_reason == "length" for rollout in rollouts),
            rollout_s=step.times.rollout,
            reward_s=step.times.reward,
            drafting_s=step.times.drafting,
            swap_s=swap_s,
            update_s=step.times.update,
            step_s=seconds,
            accept_length=step.report.accept_length,
            micro_steps=micro_steps,
            drafter_version=self._version,
            forecast=self._forecast,
            spent={kind.value: spent_s for kind, spent_s in account.spent.items()} if account else None,
            balance_s=account.balance_s if account else None,
            mismatch_mean=step.update.mismatch_mean,
        )


def in_shape(config: RunConfig, shape: str | None, scratch: Path) -> RunConfig:
    """The configuration with the policy widened to a shape and saved, so that every variant can open it."""
    if shape is None:
        return config
    policy = open_policy(config.model)
    save_policy(widened(policy.model, shape), scratch / "policy", tokenizer_from=policy.source)
    del policy
    free_memory()
    return replace(config, model=replace(config.model, path=str(scratch / "policy")))


def subject_of(config: RunConfig, model: str, options: TrainOptions, scale: TrainScale) -> Subject:
    """The subject of the record. Raises for unreadable or too long prompts, before anything is opened."""
    source, task = source_of(config.model), task_of(config)
    tokenizer = fit_task(task, Tokenizer.load(source), config, read_config(source).max_positions).tokenizer
    lengths = [len(tokenizer.encode_prompt(prompt.content)) for prompt in task.sample(0, scale.prompts)]
    return Subject(
        model=model,
        shape=options.shape or "as it is",
        prompts=config.task.path or config.task.name,
        prompt_tokens_mean=round(fmean(lengths), 1),
        seed=config.run.seed,
        temperature=config.sampling.temperature,
    )


# ---- two variants compared


def answers_of(step: Step) -> Answers:
    return {rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts}


def agreement(found: Answers, plain: Answers) -> tuple[float, float]:
    """Fraction of equal completions, and of plain decoding's tokens before the first difference."""
    identical = fmean(found[key] == tokens for key, tokens in plain.items())
    common = sum(common_start(found[key], tokens) for key, tokens in plain.items())
    return identical, common / sum(map(len, plain.values()))


def total_of(own: VariantSteps, plain: VariantSteps | None) -> Total:
    """The totals of a variant. `plain`: at least the same steps by plain decoding; None: no comparison."""
    steps, base = own.records, plain.records[: len(own.records)] if plain else []
    third = -(-len(steps) // 3)
    lengths = Lengths.of(own.lengths)
    drafting_s = _sum(steps, "drafting_s") + _sum(steps, "swap_s")
    plain_start_s = plain.start_s if plain else 0.0
    return Total(
        variant=own.variant,
        steps=len(steps),
        start_s=own.start_s,
        snapshot_s=own.snapshot_s,
        copy_s=own.copy_s,
        seconds=_sum(steps, "step_s"),
        speedup=_speedup(base, steps),
        speedup_with_start=ratio(plain_start_s + _sum(base, "step_s"), own.start_s + _sum(steps, "step_s")),
        lowest_speedup=_lowest_speedup(base, steps),
        later_speedup=_speedup(base[1:], steps[1:]),
        token_speedup=_token_speedup(base[1:], steps[1:]),
        recent_speedup=_speedup(base[-RECENT:], steps[-RECENT:]),
        recent_token_speedup=_token_speedup(base[-RECENT:], steps[-RECENT:]),
        rollout_s=_sum(steps, "rollout_s"),
        rollout_speedup=_speedup(base, steps, "rollout_s"),
        recent_rollout_speedup=_speedup(base[-RECENT:], steps[-RECENT:], "rollout_s"),
        reward_s=_sum(steps, "reward_s"),
        drafting_s=drafting_s,
        drafting_share=drafting_s / max(1e-9, _sum(steps, "step_s")),
        update_s=_sum(steps, "update_s"),
        accept_first=fmean(step.accept_length for step in steps[:third]),
        accept_last=fmean(step.accept_length for step in steps[-third:]),
        reward_first=fmean(step.mean_reward for step in steps[:third]),
        reward_last=fmean(step.mean_reward for step in steps[-third:]),
        reach_last=_mean([step.reach for step in steps[-third:]]),
        left_alone_last=_mean([step.left_alone for step in steps[-third:]]),
        moved_last=steps[-1].moved,
        tokens=sum(step.tokens for step in steps),
        answers=len(own.lengths),
        length_p50=lengths.p50,
        length_p90=lengths.p90,
        length_p99=lengths.p99,
        length_max=lengths.longest,
        cap=own.config.sampling.max_tokens,
        temperature=own.config.sampling.temperature,
    )


def ratio(one: float, other: float) -> float | None:
    return one / other if one and other else None


def _speedup(plain: Sequence[StepRecord], own: Sequence[StepRecord], name: str = "step_s") -> float | None:
    return ratio(_sum(plain, name), _sum(own, name))


def _token_speedup(plain: Sequence[StepRecord], own: Sequence[StepRecord]) -> float | None:
    """Ratio of seconds per token."""
    return ratio(_sum(plain, "step_s") * _sum(own, "tokens"), _sum(own, "step_s") * _sum(plain, "tokens"))


def _lowest_speedup(plain: Sequence[StepRecord], own: Sequence[StepRecord]) -> float | None:
    sums = (accumulate(step.step_s for step in steps) for steps in (plain, own))
    found = [ratio(plain_s, own_s) for plain_s, own_s in zip(*sums, strict=False)]
    return min((one for one in found if one is not None), default=None)


def _sum(steps: Sequence[StepRecord], name: str) -> float:
    return float(sum(getattr(step, name) for step in steps))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
