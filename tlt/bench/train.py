"""`tlt bench train`: the same steps of reinforcement learning plainly and with speculation, everything included.

Four ways to take N steps from the same policy with the same seeds: plain decoding; the model-free drafter; a learned
drafter that was trained for the first policy and then left alone; and the same one kept sharp while the policy learns.
Where no drafter is given, one is trained beforehand on the first policy's answers to other prompts. What each step
waited for is measured; answers are compared with plain decoding's, token for token. In half precision two policies that
learned from differently rounded numbers drift apart: how far the answers agree is told step by step.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from tlt.bench.fidelity import common_start
from tlt.bench.lab import check_shape, widened
from tlt.bench.machine import describe
from tlt.bench.options import TrainOptions, TrainScale
from tlt.bench.report import Clock, Report, Subject
from tlt.config import RunConfig, SpecSettings
from tlt.draft import draft_train
from tlt.engine.build import NEW
from tlt.fleet import LocalFleet
from tlt.loop import Loop, Step
from tlt.model.weights import save_policy
from tlt.policy import device_of, open_policy, source_of
from tlt.tasks.choose import judge_of, task_of
from tlt.text import Tokenizer
from tlt.types import Key
from tlt.watch.events import DrafterSwapped, Event

PLAIN, SUFFIX, FROZEN, ADAPTIVE = "plain", "suffix", "frozen", "adaptive"  # the last two: the learned drafter

Answers = Mapping[Key, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one variant."""

    variant: str
    step: int
    mean_reward: float
    loss: float
    tokens: int
    longest: int  # answer, in tokens
    rollout_s: float
    reward_s: float
    drafting_s: float
    update_s: float
    step_s: float
    accept_length: float
    drafter_version: int | None  # that the next rollout drafts with
    identical: float | None  # share of the answers that are plain decoding's, token for token
    common: float | None  # share of plain decoding's tokens before the first that differs
    mismatch_mean: float  # of the engine's log-probabilities and the trainer's


@dataclass(frozen=True, slots=True)
class Total:
    """All steps of one variant."""

    variant: str
    steps: int
    seconds: float
    speedup: float  # over plain, everything included
    later_speedup: float | None  # the same without the first step, in which graphs are captured
    rollout_s: float
    rollout_speedup: float
    reward_s: float
    drafting_s: float  # on the critical path
    drafting_share: float  # of all time
    update_s: float
    accept_first: float  # accept length over the first third of the steps …
    accept_last: float  # … and over the last
    reward_first: float
    reward_last: float
    tokens: int


def bench_train(config: RunConfig, options: TrainOptions) -> None:
    check_shape(options.shape)
    device = device_of(config.model.device)
    scale = options.scale(on_gpu=device.type == "cuda")
    with TemporaryDirectory() as scratch:
        named = config.model.path
        config = _prepared(config, options.shape, scale, Path(scratch))
        policy = open_policy(config.model)
        lengths = [len(policy.tokenizer.encode_prompt(p.content)) for p in task_of(config).sample(0, scale.prompts)]
        subject = Subject(
            model=named,
            shape=options.shape or "as it is",
            prompts=config.task.path or config.task.name,
            prompt_tokens_mean=round(fmean(lengths), 1),
            seed=config.run.seed,
        )
        report = Report(describe(device, options.commit), subject, policy.model.config, scale, options.json)
        del policy
        records: list[StepRecord] = []
        clock = Clock()
        report.section("steps", _all_steps(config, scale, records), clock)
        report.section("totals", _totals(records), clock)
        report.close()


def _prepared(config: RunConfig, shape: str | None, scale: TrainScale, scratch: Path) -> RunConfig:
    """With the policy in the shape asked for, and a drafter for it."""
    task = replace(config.task, prompts=scale.prompts, group=scale.group)
    config = replace(config, task=task, sampling=replace(config.sampling, max_tokens=scale.cap))
    if shape:
        policy = open_policy(config.model)
        save_policy(widened(policy.model, shape), scratch / "policy", tokenizer_from=policy.source)
        config = replace(config, model=replace(config.model, path=str(scratch / "policy")))
        del policy
        _free_memory()
    if config.spec.drafter != "suffix" and config.spec.path in ("", NEW):
        unseen = replace(config, run=replace(config.run, seed=-1 - config.run.seed))  # prompts no step asks
        draft_train(unseen, config.task.name, str(scratch / "drafter"))
        config = replace(config, spec=replace(config.spec, drafter="both", path=str(scratch / "drafter")))
        _free_memory()
    return config


def _variants(config: RunConfig) -> dict[str, RunConfig]:
    every = {
        PLAIN: replace(config, spec=SpecSettings()),
        SUFFIX: replace(config, spec=replace(config.spec, drafter="suffix", path="")),
    }
    if config.spec.drafter == "suffix":
        return every
    return every | {
        FROZEN: replace(config, drafting=replace(config.drafting, frozen=True)),
        ADAPTIVE: replace(config, drafting=replace(config.drafting, frozen=False)),
    }


def _all_steps(config: RunConfig, scale: TrainScale, records: list[StepRecord]) -> Iterator[StepRecord]:
    """Every step of every variant, kept in `records` too."""
    plain: list[Answers] = []  # step by step
    for name, chosen in _variants(config).items():
        for step, record in _steps(name, chosen, scale.steps, plain):
            if name == PLAIN:
                plain.append(_answers(step))
            records.append(record)
            yield record
        _free_memory()


def _steps(name: str, config: RunConfig, steps: int, plain: Sequence[Answers]) -> Iterator[tuple[Step, StepRecord]]:
    events: list[Event] = []
    task = task_of(config)
    fleet = LocalFleet(config, events.append)
    with judge_of(task) as judge:
        loop = Loop(config, task, Tokenizer.load(source_of(config.model)), judge, fleet, events.append)
        for number in range(steps):
            started = time.perf_counter()
            step = loop.step(number)
            seconds = time.perf_counter() - started
            swapped = [event.version for event in events if isinstance(event, DrafterSwapped)]
            expected = plain[number] if number < len(plain) else None
            yield step, _record(name, step, seconds, swapped[-1] if swapped else None, expected)
    fleet.close()


def _answers(step: Step) -> Answers:
    return {rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts}


def _record(name: str, step: Step, seconds: float, version: int | None, expected: Answers | None) -> StepRecord:
    found = _answers(step)
    same = common = None
    if expected is not None:
        same = fmean(found[key] == tokens for key, tokens in expected.items())
        agreed = sum(common_start(found[key], tokens) for key, tokens in expected.items())
        common = agreed / sum(map(len, expected.values()))
    return StepRecord(
        variant=name,
        step=step.number,
        mean_reward=fmean(rollout.reward for rollout in step.rollouts),
        loss=step.update.loss,
        tokens=sum(map(len, found.values())),
        longest=max(map(len, found.values())),
        rollout_s=step.times.rollout,
        reward_s=step.times.reward,
        drafting_s=step.times.drafting,
        update_s=step.times.update,
        step_s=seconds,
        accept_length=step.report.accept_length,
        drafter_version=version,
        identical=same,
        common=common,
        mismatch_mean=step.update.mismatch_mean,
    )


def _totals(records: Sequence[StepRecord]) -> Iterator[Total]:
    """A line per variant that took all its steps."""
    by_variant: dict[str, list[StepRecord]] = {}
    for record in records:
        by_variant.setdefault(record.variant, []).append(record)
    plain = by_variant.get(PLAIN, [])
    for name, steps in by_variant.items():
        if len(steps) == len(plain):
            yield _total(name, steps, plain)


def _total(name: str, steps: Sequence[StepRecord], plain: Sequence[StepRecord]) -> Total:
    third = -(-len(steps) // 3)
    seconds = sum(step.step_s for step in steps)
    drafting = sum(step.drafting_s for step in steps)
    rollout = sum(step.rollout_s for step in steps)
    later = sum(step.step_s for step in steps[1:])
    return Total(
        variant=name,
        steps=len(steps),
        seconds=seconds,
        speedup=sum(step.step_s for step in plain) / seconds,
        later_speedup=sum(step.step_s for step in plain[1:]) / later if later else None,
        rollout_s=rollout,
        rollout_speedup=sum(step.rollout_s for step in plain) / rollout,
        reward_s=sum(step.reward_s for step in steps),
        drafting_s=drafting,
        drafting_share=drafting / seconds,
        update_s=sum(step.update_s for step in steps),
        accept_first=fmean(step.accept_length for step in steps[:third]),
        accept_last=fmean(step.accept_length for step in steps[-third:]),
        reward_first=fmean(step.mean_reward for step in steps[:third]),
        reward_last=fmean(step.mean_reward for step in steps[-third:]),
        tokens=sum(step.tokens for step in steps),
    )


def _free_memory() -> None:
    """What the last variant held goes before the next one asks for what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
