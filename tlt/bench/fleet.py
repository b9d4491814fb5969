"""`tlt bench fleet`: the same steps on several workers: plainly, with a drafter left alone, and with spot training.

Three ways to take N steps from the same policy with the same seeds: plain decoding; a learned drafter that was trained
for the first policy and then left alone; and the same one trained further by whichever workers have run dry. What every
worker did when is measured, and answers are compared with those of one worker that decodes plainly. At the end: how
much slower a worker writes while the others train the drafter. Knows no cluster: it is handed a way to open a fleet.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Protocol

from tlt.bench.machine import describe
from tlt.bench.options import TrainOptions, TrainScale
from tlt.bench.report import Clock, Report, Subject
from tlt.config import RunConfig, SpecSettings
from tlt.draft import draft_train
from tlt.engine.build import NEW
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet, Loop, Step, ask
from tlt.policy import device_of, open_policy, source_of
from tlt.tasks.choose import judge_of, task_of
from tlt.text import Tokenizer
from tlt.types import Key
from tlt.watch.events import Event
from tlt.watch.workers import FleetPublished, FleetRolledOut

ALONE, PLAIN, FROZEN, SPOT = "one worker", "plain", "frozen", "spot"
_REPEATS = 5  # of each half of the last measurement

Answers = Mapping[Key, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Seconds that one worker took to write the same answers, plainly."""

    alone_s: float  # the others idle
    beside_s: float  # the others training the drafter
    alone_cpu_s: float  # seconds that its processor was busy with it: what else runs on the machine counts less
    beside_cpu_s: float
    micro_steps: int  # that they took meanwhile


class WorkerFleet(Fleet, Protocol):
    """What is measured here besides: every worker can be asked to train while another writes."""

    def slowdown(self, requests: Sequence[Request]) -> Slowdown: ...


OpenWorkers = Callable[[RunConfig, Emit], WorkerFleet]


@dataclass(frozen=True, slots=True)
class FleetStep:
    """One step of one variant. Seconds of workers are added up over all of them."""

    variant: str
    step: int
    mean_reward: float
    tokens: int
    step_s: float
    rollout_s: float
    update_s: float
    publish_s: float
    accept_length: float
    idle_share: float  # of the workers' time in the rollout
    idle_used: float | None  # share of that which trained the drafter
    joins: int
    join_s: float
    stop_s: float  # from the last answer until everyone had stopped
    identical: float  # share of the answers that are one worker's, token for token


@dataclass(frozen=True, slots=True)
class FleetTotal:
    """All steps of one variant."""

    variant: str
    seconds: float
    speedup: float  # over plain decoding on as many workers
    rollout_s: float
    idle_share: float
    idle_used: float | None
    accept_first: float  # accept length over the first third of the steps …
    accept_last: float  # … and over the last
    reward_first: float
    reward_last: float
    same_rewards: bool  # as one worker's


@dataclass(frozen=True, slots=True)
class Busy:
    """What the others' training costs a worker that writes."""

    alone_s: float
    beside_s: float
    slowdown: float  # share; the median over pairs of runs
    cpu_slowdown: float  # the same in processor time
    micro_steps: int


def bench_fleet(config: RunConfig, options: TrainOptions, open_fleet: OpenWorkers) -> None:
    if config.cluster.workers < 2:
        raise ConfigError(f"cluster.workers is {config.cluster.workers}; expected several, as in --cluster.workers 2")
    device = device_of(config.model.device)
    scale = options.scale(on_gpu=device.type == "cuda")
    with TemporaryDirectory() as scratch:
        config = _prepared(config, scale, Path(scratch))
        policy = open_policy(config.model)
        prompts = task_of(config).sample(0, scale.prompts)
        subject = Subject(
            model=config.model.path,
            shape=f"as it is, {config.cluster.workers} workers × {config.cluster.cpus_per_worker:g} cores",
            prompts=config.task.path or config.task.name,
            prompt_tokens_mean=round(fmean(len(policy.tokenizer.encode_prompt(p.content)) for p in prompts), 1),
            seed=config.run.seed,
        )
        report = Report(describe(device, options.commit), subject, policy.model.config, scale, options.json)
        del policy
        bench = _Bench(config, scale, open_fleet)
        clock = Clock()
        report.section("steps", bench.steps(), clock)
        report.section("totals", bench.totals(), clock)
        report.section("busy", bench.busy(), clock)
        report.close()


def _prepared(config: RunConfig, scale: TrainScale, scratch: Path) -> RunConfig:
    """With a drafter that was trained for the first policy."""
    task = replace(config.task, prompts=scale.prompts, group=scale.group)
    config = replace(config, task=task, sampling=replace(config.sampling, max_tokens=scale.cap))
    if config.spec.path in ("", NEW):
        unseen = replace(config, run=replace(config.run, seed=-1 - config.run.seed))  # prompts no step asks
        draft_train(unseen, config.task.name, str(scratch / "drafter"))
        config = replace(config, spec=replace(config.spec, drafter="eagle", path=str(scratch / "drafter")))
    return config


class _Bench:
    def __init__(self, config: RunConfig, scale: TrainScale, open_fleet: OpenWorkers) -> None:
        self._config, self._scale, self._open = config, scale, open_fleet
        self._tokenizer = Tokenizer.load(source_of(config.model))
        self._records: dict[str, list[FleetStep]] = {}
        self._rolled: dict[str, list[FleetRolledOut]] = {}
        self._answers: list[Answers] = []  # of one worker, step by step
        self._slowdowns: list[Slowdown] = []

    def steps(self) -> Iterator[FleetStep]:
        plain = replace(self._config, spec=SpecSettings())
        yield from self._variant(ALONE, plain, LocalFleet)
        yield from self._variant(PLAIN, plain, self._open)
        drafting = self._config.drafting
        yield from self._variant(FROZEN, replace(self._config, drafting=replace(drafting, frozen=True)), self._open)
        yield from self._variant(SPOT, self._config, self._open)

    def _variant(
        self, name: str, config: RunConfig, open_fleet: Callable[[RunConfig, Emit], Fleet]
    ) -> Iterator[FleetStep]:
        events: list[Event] = []
        task = task_of(config)
        fleet = open_fleet(config, events.append)
        try:
            with judge_of(task) as judge:
                loop = Loop(config, task, self._tokenizer, judge, fleet, events.append)
                for number in range(self._scale.steps):
                    events.clear()
                    started = time.perf_counter()
                    step = loop.step(number)
                    yield self._keep(name, step, time.perf_counter() - started, events)
            if name == SPOT:
                self._measure_slowdown(fleet)
        finally:
            fleet.close()

    def _keep(self, name: str, step: Step, seconds: float, events: Sequence[Event]) -> FleetStep:
        answers = {rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts}
        if name == ALONE:
            self._answers.append(answers)
        expected = self._answers[step.number]
        rolled = [event for event in events if isinstance(event, FleetRolledOut)]
        self._rolled.setdefault(name, []).extend(rolled)
        record = FleetStep(
            variant=name,
            step=step.number,
            mean_reward=fmean(rollout.reward for rollout in step.rollouts),
            tokens=sum(map(len, answers.values())),
            step_s=seconds,
            rollout_s=step.times.rollout,
            update_s=step.times.update,
            publish_s=sum(event.seconds for event in events if isinstance(event, FleetPublished)),
            accept_length=step.report.accept_length,
            idle_share=_idle_share(rolled),
            idle_used=_idle_used(rolled),
            joins=sum(event.joins for event in rolled),
            join_s=sum(event.join_s for event in rolled),
            stop_s=sum(event.stop_s for event in rolled),
            identical=fmean(answers[key] == tokens for key, tokens in expected.items()),
        )
        self._records.setdefault(name, []).append(record)
        return record

    def totals(self) -> Iterator[FleetTotal]:
        third = -(-self._scale.steps // 3)
        plain_s = sum(step.step_s for step in self._records[PLAIN])
        rewards = [step.mean_reward for step in self._records[ALONE]]
        for name, steps in self._records.items():
            seconds = sum(step.step_s for step in steps)
            yield FleetTotal(
                variant=name,
                seconds=seconds,
                speedup=plain_s / seconds,
                rollout_s=sum(step.rollout_s for step in steps),
                idle_share=_idle_share(self._rolled[name]),
                idle_used=_idle_used(self._rolled[name]),
                accept_first=fmean(step.accept_length for step in steps[:third]),
                accept_last=fmean(step.accept_length for step in steps[-third:]),
                reward_first=fmean(step.mean_reward for step in steps[:third]),
                reward_last=fmean(step.mean_reward for step in steps[-third:]),
                same_rewards=[step.mean_reward for step in steps] == rewards,
            )

    def _measure_slowdown(self, fleet: Fleet) -> None:
        workers: WorkerFleet = fleet  # type: ignore[assignment]  # the spot variant runs on several
        asked = ask(self._scale.steps, self._config, task_of(self._config), self._tokenizer)
        requests = [request for one in asked for request in one.requests][: self._config.engine.rows]
        self._slowdowns = [workers.slowdown(requests) for _ in range(_REPEATS)]

    def busy(self) -> Iterator[Busy]:
        if self._slowdowns:
            yield Busy(
                alone_s=median(pair.alone_s for pair in self._slowdowns),
                beside_s=median(pair.beside_s for pair in self._slowdowns),
                slowdown=median(pair.beside_s / pair.alone_s - 1 for pair in self._slowdowns),
                cpu_slowdown=median(pair.beside_cpu_s / pair.alone_cpu_s - 1 for pair in self._slowdowns),
                micro_steps=sum(pair.micro_steps for pair in self._slowdowns),
            )


def _idle_share(rolled: Sequence[FleetRolledOut]) -> float:
    idle = sum(event.idle_s + event.drafting_s for event in rolled)
    return idle / max(1e-9, idle + sum(event.rolling_s for event in rolled))


def _idle_used(rolled: Sequence[FleetRolledOut]) -> float | None:
    drafting = sum(event.drafting_s for event in rolled)
    return drafting / (drafting + sum(event.idle_s for event in rolled)) if drafting else None
