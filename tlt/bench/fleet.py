"""`tlt bench fleet`: the same steps on several workers: plain decoding, a frozen drafter, and training by idle workers.

For every seed N steps are taken from the same policy, in six ways: plain decoding on one worker and on all of them; a
learned drafter that was trained for the first policy and then frozen, and the same drafter trained by idle workers
(spot), both with the tuner; and these two once more with one fixed shape, so that accept lengths depend on the drafters
alone. Worker timelines are measured, and completions compared with those of one plain worker. At the end: how much
slower a worker's ticks are while the others train the drafter. Does not know the cluster: it gets a function that opens
a fleet.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Protocol

from tlt.bench.options import FleetOptions, TrainScale
from tlt.bench.report import BenchReport, Clock, Subject
from tlt.cluster.interference import Interference, InterferenceRuns, interference
from tlt.config import NEW, RunConfig, SpecSettings
from tlt.draft import draft_train
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet, Loop, Step, ask
from tlt.machine import describe
from tlt.policy import device_of, open_policy, source_of
from tlt.tasks.choose import judge_of, task_of
from tlt.text import Tokenizer
from tlt.types import Key
from tlt.watch.events import DrafterTrained, Event
from tlt.watch.workers import FleetPublished, FleetRolledOut

ALONE, PLAIN, FROZEN, SPOT = "one worker", "plain", "frozen", "spot"
FROZEN_FIXED, SPOT_FIXED = "frozen, one shape", "spot, one shape"

Answers = Mapping[Key, tuple[int, ...]]


class WorkerFleet(Fleet, Protocol):
    """A fleet whose workers can train while another one decodes, to measure the slowdown."""

    def slowdown(self, requests: Sequence[Request], repeats: int) -> InterferenceRuns: ...


OpenWorkers = Callable[[RunConfig, Emit], WorkerFleet]


@dataclass(frozen=True, slots=True)
class FleetStep:
    """One step of one variant. Worker seconds are sums over all workers."""

    seed: int
    variant: str
    step: int
    mean_reward: float
    tokens: int
    step_s: float
    rollout_s: float
    update_s: float
    publish_s: float
    accept_length: float
    idle_share: float  # fraction of the workers' time in the rollout
    idle_used: float | None  # fraction of the idle time in which the drafter was trained
    micro_steps: int  # of the drafter
    swaps: int  # drafters swapped in during the rollout
    joins: int
    join_s: float
    stop_s: float  # from the last completion until every worker had stopped
    identical: float  # fraction of completions equal to those of one worker, token for token


@dataclass(frozen=True, slots=True)
class FleetTotal:
    """All steps of one variant."""

    seed: int
    variant: str
    seconds: float
    speedup: float  # over plain decoding on as many workers
    rollout_s: float
    idle_share: float
    idle_used: float | None
    micro_steps: int
    reward_first: float  # mean over the first third of the steps
    reward_last: float  # mean over the last third
    same_rewards: bool  # equal to those of one worker


@dataclass(frozen=True, slots=True)
class Drafters:
    """Accept lengths of the two drafters in one step, on the same completions and with the same shape in every tick."""

    seed: int
    step: int
    frozen: float  # accept length: tokens per verify
    spot: float
    gain: float  # share


def bench_fleet(config: RunConfig, options: FleetOptions, open_fleet: OpenWorkers) -> None:
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
            temperature=config.sampling.temperature,
        )
        report = BenchReport(describe(device, options.commit), subject, policy.model.config, scale, options.json)
        del policy
        bench = _FleetBench(config, scale, options, open_fleet)
        clock = Clock()
        report.section("steps", bench.steps(), clock, line=_told)
        report.section("totals", bench.totals(), clock)
        report.section("drafters", bench.drafters(), clock)
        report.section("busy", bench.busy(), clock)
        report.close()


def _told(step: FleetStep) -> str:
    used = "" if step.idle_used is None else f", {step.idle_used:.0%} of it used"
    return (
        f"seed {step.seed}, {step.variant}, step {step.step}: {step.step_s:.1f} s, accept length "
        f"{step.accept_length:.2f}, idle {step.idle_share:.0%}{used}"
    )


def _prepared(config: RunConfig, scale: TrainScale, scratch: Path) -> RunConfig:
    """The configuration with a drafter that was trained for the first policy."""
    task = replace(config.task, prompts=scale.prompts, group=scale.group)
    config = replace(config, task=task, sampling=replace(config.sampling, max_tokens=scale.cap))
    if config.spec.path in ("", NEW):
        unseen = replace(config, run=replace(config.run, seed=-1 - config.run.seed))  # prompts no step asks
        draft_train(unseen, config.task.name, str(scratch / "drafter"))
        config = replace(config, spec=replace(config.spec, drafter="eagle", path=str(scratch / "drafter")))
    return config


def _variants(config: RunConfig) -> dict[str, RunConfig]:
    """The variants. Those with one shape use a chain as deep as `draft.unroll`."""
    deep = config.draft.unroll
    chain = replace(
        config.spec, shape_policy="fixed", drafter="eagle", depths=(deep,), widths=(1,), verifies=(deep + 1,)
    )
    plain, left_alone = replace(config, spec=SpecSettings()), replace(config.drafting, frozen=True)
    return {
        ALONE: plain,
        PLAIN: plain,
        FROZEN: replace(config, drafting=left_alone),
        SPOT: config,
        FROZEN_FIXED: replace(config, drafting=left_alone, spec=chain),
        SPOT_FIXED: replace(config, spec=chain),
    }


class _FleetBench:
    def __init__(self, config: RunConfig, scale: TrainScale, options: FleetOptions, open_fleet: OpenWorkers) -> None:
        self._config, self._scale, self._open = config, scale, open_fleet
        self._seeds, self._repeats = range(config.run.seed, config.run.seed + options.seeds), options.repeats
        self._tokenizer = Tokenizer.load(source_of(config.model))
        self._records: dict[tuple[int, str], list[FleetStep]] = {}
        self._rolled: dict[tuple[int, str], list[FleetRolledOut]] = {}
        self._completions: dict[int, list[Answers]] = {}  # of one worker, step by step
        self._beside: InterferenceRuns | None = None

    def steps(self) -> Iterator[FleetStep]:
        for seed in self._seeds:
            config = replace(self._config, run=replace(self._config.run, seed=seed))
            for name, variant in _variants(config).items():
                yield from self._variant(name, variant, LocalFleet if name == ALONE else self._open)

    def _variant(
        self, name: str, config: RunConfig, open_fleet: Callable[[RunConfig, Emit], Fleet]
    ) -> Iterator[FleetStep]:
        events: list[Event] = []
        task = task_of(config)
        fleet = open_fleet(config, events.append)
        try:
            with judge_of(task, config) as judge:
                loop = Loop(config, task, self._tokenizer, judge, fleet, events.append)
                for number in range(self._scale.steps):
                    events.clear()
                    started = time.perf_counter()
                    step = loop.step(number)
                    yield self._keep(config.run.seed, name, step, time.perf_counter() - started, events)
            if name == SPOT and config.run.seed == self._seeds[-1]:
                self._measure_slowdown(config, fleet)
        finally:
            fleet.close()

    def _keep(self, seed: int, name: str, step: Step, seconds: float, events: Sequence[Event]) -> FleetStep:
        completions = {rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts}
        if name == ALONE:
            self._completions.setdefault(seed, []).append(completions)
        expected = self._completions[seed][step.number - 1]
        rolled = [event for event in events if isinstance(event, FleetRolledOut)]
        self._rolled.setdefault((seed, name), []).extend(rolled)
        record = FleetStep(
            seed=seed,
            variant=name,
            step=step.number,
            mean_reward=fmean(rollout.reward for rollout in step.rollouts),
            tokens=sum(map(len, completions.values())),
            step_s=seconds,
            rollout_s=step.times.rollout,
            update_s=step.times.update,
            publish_s=sum(event.seconds for event in events if isinstance(event, FleetPublished)),
            accept_length=step.report.accept_length,
            idle_share=_idle_share(rolled),
            idle_used=_idle_used(rolled),
            micro_steps=sum(event.micro_steps for event in events if isinstance(event, DrafterTrained)),
            swaps=sum(event.swaps for event in rolled),
            joins=sum(event.joins for event in rolled),
            join_s=sum(event.join_s for event in rolled),
            stop_s=sum(event.stop_s for event in rolled),
            identical=fmean(completions[key] == tokens for key, tokens in expected.items()),
        )
        self._records.setdefault((seed, name), []).append(record)
        return record

    def totals(self) -> Iterator[FleetTotal]:
        third = -(-self._scale.steps // 3)
        for (seed, name), steps in self._records.items():
            seconds = sum(step.step_s for step in steps)
            plain = self._records.get((seed, PLAIN), [])
            rewards = [step.mean_reward for step in self._records[seed, ALONE]]
            yield FleetTotal(
                seed=seed,
                variant=name,
                seconds=seconds,
                speedup=sum(step.step_s for step in plain) / seconds,
                rollout_s=sum(step.rollout_s for step in steps),
                idle_share=_idle_share(self._rolled[seed, name]),
                idle_used=_idle_used(self._rolled[seed, name]),
                micro_steps=sum(step.micro_steps for step in steps),
                reward_first=fmean(step.mean_reward for step in steps[:third]),
                reward_last=fmean(step.mean_reward for step in steps[-third:]),
                same_rewards=[step.mean_reward for step in steps] == rewards,
            )

    def drafters(self) -> Iterator[Drafters]:
        for seed in self._seeds:
            pairs = (self._records.get((seed, name), []) for name in (FROZEN_FIXED, SPOT_FIXED))
            for frozen, spot in zip(*pairs, strict=False):
                gain = spot.accept_length / frozen.accept_length - 1
                yield Drafters(seed, spot.step, frozen.accept_length, spot.accept_length, gain)

    def _measure_slowdown(self, config: RunConfig, fleet: Fleet) -> None:
        workers: WorkerFleet = fleet  # type: ignore[assignment]  # the spot variant runs on several
        asked = ask(self._scale.steps, config, task_of(config), self._tokenizer)
        requests = [request for one in asked for request in one.requests][: config.engine.rows]
        self._beside = workers.slowdown(requests, self._repeats)

    def busy(self) -> Iterator[Interference]:
        if self._beside:
            yield interference(self._beside)


def _idle_share(rolled: Sequence[FleetRolledOut]) -> float:
    idle = sum(event.idle_s + event.drafting_s for event in rolled)
    return idle / max(1e-9, idle + sum(event.rolling_s for event in rolled))


def _idle_used(rolled: Sequence[FleetRolledOut]) -> float | None:
    drafting = sum(event.drafting_s for event in rolled)
    return drafting / (drafting + sum(event.idle_s for event in rolled)) if drafting else None
