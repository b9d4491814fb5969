"""`tlt bench train`: the same steps of reinforcement learning plainly and with speculation, everything included.

Four ways to take N steps from the same policy with the same seeds: plain decoding; a learned drafter that was trained
for the first policy and is kept sharp while the policy learns; the same one left alone; and the model-free drafter.
Where no drafter is given, one is trained beforehand on the first policy's answers to other prompts. What each step
waited for is measured; answers are compared with plain decoding's, token for token. In half precision two policies that
learned from differently rounded numbers drift apart: how far the answers agree is told step by step, and so are the
rewards. How far each policy has moved from the first, and what its drafter would reach were it left as it was at the
beginning, is measured between the steps, at nobody's cost.

What always holds: every step is on disk when it is done, and the totals after every variant; totals compare the same
steps. With a budget no step is begun once it is spent, and plain decoding leaves half of it to the others.
"""
# T tokens of a row, N answer tokens in it

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from tlt.bench.lab import check_shape, widened
from tlt.bench.options import VARIANTS, TrainOptions, TrainScale
from tlt.bench.report import BenchReport, Clock, Subject
from tlt.config import NEW, RunConfig, SpecSettings
from tlt.draft import draft_train
from tlt.drafting.buffer import Sample
from tlt.drafting.states import Piece, Recompute
from tlt.fleet import LocalFleet, Worker
from tlt.loop import Loop, Step
from tlt.machine import describe, free_memory, wait_for
from tlt.model.attention import PackedLayout
from tlt.model.device import upload
from tlt.model.transformer import Transformer
from tlt.model.weights import save_policy
from tlt.policy import device_of, open_policy, source_of
from tlt.replay import common_start
from tlt.tasks.choose import judge_of, task_of
from tlt.text import Tokenizer
from tlt.train.drafter_measure import expected
from tlt.train.logprobs import token_logprobs
from tlt.train.packing import Example, pack
from tlt.types import Completion, Key
from tlt.watch.events import DrafterSwapped, DrafterTrained, Event

PLAIN, ADAPTIVE, FROZEN, SUFFIX = VARIANTS
_PLAIN_SHARE = 0.5  # of the budget
_MOVED_TOKENS, _MOVED_ROW = 256, 16384  # of an answer, and of a pass, by which it is told how far a policy has moved

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
    micro_steps: int  # of the drafter's training
    drafter_version: int | None  # that the next rollout drafts with
    moved: float  # nats per token from the first policy to the one that wrote these answers
    reach: float | None  # accept length to expect next, of chains as long as training unrolls, whatever the shape …
    left_alone: float | None  # … and of the drafter this run began with, for the same policy and answers
    identical: float | None  # share of the answers that are plain decoding's, token for token
    common: float | None  # share of plain decoding's tokens before the first that differs
    mismatch_mean: float  # of the engine's log-probabilities and the trainer's


@dataclass(frozen=True, slots=True)
class Total:
    """All steps of one variant."""

    variant: str
    steps: int
    start_s: float  # before the first step: opening the policy, capturing and timing what is known to be needed
    seconds: float
    speedup: float | None  # over plain, in the same steps, everything included
    later_speedup: float | None  # the same without the first step, in which kernels are compiled and graphs captured
    token_speedup: float | None  # as later_speedup, but seconds per token: answers may have grown or shrunk
    rollout_s: float
    rollout_speedup: float | None
    reward_s: float
    drafting_s: float  # on the critical path
    drafting_share: float  # of all time
    update_s: float
    accept_first: float  # accept length over the first third of the steps …
    accept_last: float  # … and over the last
    reward_first: float
    reward_last: float
    reach_last: float | None  # over the last third
    left_alone_last: float | None
    moved_last: float
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
            temperature=config.sampling.temperature,
        )
        report = BenchReport(describe(device, options.commit), subject, policy.model.config, scale, options.json)
        bench = _TrainBench(config, scale, policy.model, options.budget_s)
        clock = Clock()
        for name in options.variants:
            if name in bench.variants:
                report.section(name, bench.steps(name), clock, line=_line)
                report.section("totals", bench.totals(), clock)
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
        free_memory()
    if config.spec.drafter != "suffix" and config.spec.path in ("", NEW):
        unseen = replace(config, run=replace(config.run, seed=-1 - config.run.seed))  # prompts no step asks
        draft_train(unseen, config.task.name, str(scratch / "drafter"))
        config = replace(config, spec=replace(config.spec, drafter="both", path=str(scratch / "drafter")))
        free_memory()
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


class _TrainBench:
    """Takes the steps, variant by variant, and remembers them."""

    def __init__(self, config: RunConfig, scale: TrainScale, first: Transformer, budget_s: float) -> None:
        self.variants = _variants(config)
        self._scale = scale
        self._first = first  # policy; it learns nothing
        self._ends_s = time.perf_counter() + budget_s if budget_s else float("inf")
        self._start_s: dict[str, float] = {}
        self._records: dict[str, list[StepRecord]] = {}
        self._plain: list[Answers] = []  # step by step

    def steps(self, name: str) -> Iterator[StepRecord]:
        """No more of them than plain decoding took: there would be nothing to compare with."""
        free_memory()
        now = time.perf_counter()
        until = self._ends_s if name != PLAIN else now + _PLAIN_SHARE * (self._ends_s - now)
        records = self._records[name] = []
        count = len(self._plain) if self._plain and name != PLAIN else self._scale.steps
        if now < until:
            for record in self._taken(name, count):
                records.append(record)
                yield record
                if time.perf_counter() >= until:
                    break

    def _taken(self, name: str, count: int) -> Iterator[StepRecord]:
        config, events, started = self.variants[name], list[Event](), time.perf_counter()
        task = task_of(config)
        fleet = LocalFleet(config, events.append)
        with judge_of(task) as judge:
            loop = Loop(config, task, Tokenizer.load(source_of(config.model)), judge, fleet, events.append)
            self._start_s[name] = time.perf_counter() - started
            reach = _Reach(fleet.worker)
            for number in range(count):
                events.clear()
                started = time.perf_counter()
                step = loop.step(number)
                wait_for(self._first.embed.device)  # the end of the update is this step's, too
                record = self._record(name, step, time.perf_counter() - started, events, reach)
                if name == PLAIN:
                    self._plain.append(_completions(step))
                yield record
        fleet.close()

    def _record(self, name: str, step: Step, seconds: float, events: Sequence[Event], reach: "_Reach") -> StepRecord:
        found = _completions(step)
        same = common = None
        if name != PLAIN and step.number <= len(self._plain):
            expected = self._plain[step.number - 1]
            same = fmean(found[key] == tokens for key, tokens in expected.items())
            agreed = sum(common_start(found[key], tokens) for key, tokens in expected.items())
            common = agreed / sum(map(len, expected.values()))
        earlier = self._records.get(name)
        version = earlier[-1].drafter_version if earlier else None
        for event in events:
            version = event.version if isinstance(event, DrafterSwapped) else version
        one_each = [rollout.completion for rollout in step.rollouts[:: self._scale.group]]
        reached, left_alone = reach.on(one_each)
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
            micro_steps=sum(event.micro_steps for event in events if isinstance(event, DrafterTrained)),
            drafter_version=version,
            moved=moved(self._first, one_each),
            reach=reached,
            left_alone=left_alone,
            identical=same,
            common=common,
            mismatch_mean=step.update.mismatch_mean,
        )

    def totals(self) -> Iterator[Total]:
        for name, steps in self._records.items():
            if steps:
                yield _total(name, steps, self._records.get(PLAIN, [])[: len(steps)], self._start_s[name])


def _completions(step: Step) -> Answers:
    return {rollout.completion.key: rollout.completion.tokens for rollout in step.rollouts}


def _line(record: StepRecord) -> str:
    return (
        f"{record.variant} {record.step}: {record.step_s:.2f} s (rollout {record.rollout_s:.2f}, drafting "
        f"{record.drafting_s:.2f}, update {record.update_s:.2f}), {record.tokens:,} tokens, reward "
        f"{record.mean_reward:.3f}, accept {record.accept_length:.2f}, moved {record.moved:.4f}"
        + (f", reach {record.reach:.3f}, left alone {record.left_alone:.3f}" if record.reach is not None else "")
    )


class _Reach:
    """What a worker's drafter reaches now, and what it would have reached as it was when this was made."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._as_it_was = copy.deepcopy(worker.drafts_with)

    def on(self, completions: Sequence[Completion]) -> tuple[float | None, float | None]:
        policy, now = self._worker.policy.model, self._worker.drafts_with
        completions = [c for c in completions if len(c.tokens) > 1]
        if now is None or self._as_it_was is None or not completions:
            return None, None
        samples = [Sample.of(c.prompt_tokens, c.tokens[:_MOVED_TOKENS], "", c.policy_version) for c in completions]
        batch = Recompute(policy, now.config.taps).batch([Piece.whole(sample) for sample in samples])
        settings = self._worker.config.draft
        found = [expected(one, [batch], policy.head_weight, policy.embed, settings) for one in (now, self._as_it_was)]
        return found[0].accept_length, found[1].accept_length


@torch.no_grad()
def moved(first: Transformer, completions: Sequence[Completion]) -> float:
    """By how many nats per token the policy that wrote these has left the first one: KL, by the answers' beginnings."""
    cut = [(c.prompt_tokens, c.tokens[:_MOVED_TOKENS], c.policy_logprobs[:_MOVED_TOKENS]) for c in completions]
    examples = [Example((*prompt, *completion), len(prompt)) for prompt, completion, _ in cut]
    device, total = first.embed.device, 0.0
    for row in pack(examples, max(_MOVED_ROW, *(len(example.tokens) for example in examples))):
        layout = PackedLayout.from_lengths(row.lengths, device)
        answers_N = row.mask_T.nonzero().squeeze(1)
        hidden_TD = first(upload(row.tokens_T, device), layout).hidden_TD
        hidden_ND = hidden_TD.index_select(0, upload(answers_N - 1, device))
        first_N = token_logprobs(hidden_ND, first.head_weight, upload(row.tokens_T[answers_N], device))
        total += sum(sum(cut[member][2]) for member in row.members) - first_N.double().sum().item()
    return total / sum(len(completion) for _, completion, _ in cut)


def _total(name: str, steps: Sequence[StepRecord], plain: Sequence[StepRecord], start_s: float) -> Total:
    """`plain`: the same steps of plain decoding, or nothing."""
    third = -(-len(steps) // 3)
    drafting = _sum(steps, "drafting_s")
    return Total(
        variant=name,
        steps=len(steps),
        start_s=start_s,
        seconds=_sum(steps, "step_s"),
        speedup=_ratio(_sum(plain, "step_s"), _sum(steps, "step_s")),
        later_speedup=_ratio(_sum(plain[1:], "step_s"), _sum(steps[1:], "step_s")),
        token_speedup=_ratio(
            _sum(plain[1:], "step_s") * _sum(steps[1:], "tokens"), _sum(steps[1:], "step_s") * _sum(plain[1:], "tokens")
        ),
        rollout_s=_sum(steps, "rollout_s"),
        rollout_speedup=_ratio(_sum(plain, "rollout_s"), _sum(steps, "rollout_s")),
        reward_s=_sum(steps, "reward_s"),
        drafting_s=drafting,
        drafting_share=drafting / _sum(steps, "step_s"),
        update_s=_sum(steps, "update_s"),
        accept_first=fmean(step.accept_length for step in steps[:third]),
        accept_last=fmean(step.accept_length for step in steps[-third:]),
        reward_first=fmean(step.mean_reward for step in steps[:third]),
        reward_last=fmean(step.mean_reward for step in steps[-third:]),
        reach_last=_mean([step.reach for step in steps[-third:]]),
        left_alone_last=_mean([step.left_alone for step in steps[-third:]]),
        moved_last=steps[-1].moved,
        tokens=sum(step.tokens for step in steps),
    )


def _sum(steps: Sequence[StepRecord], name: str) -> float:
    return float(sum(getattr(step, name) for step in steps))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _ratio(one: float, other: float) -> float | None:
    return one / other if one and other else None
