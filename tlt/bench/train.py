"""`tlt bench train`: the same steps of reinforcement learning plainly and with speculation, everything included.

Four variants take N steps from the same policy with the same seeds: plain decoding; a learned drafter that was trained
for the first policy and is trained on while the policy learns; the same drafter frozen; and the suffix drafter. Without
a given drafter, one is trained beforehand on the first policy's completions of other prompts. The parts of each step
are timed, and completions compared with plain decoding's, token for token. In half precision, policies that learned
from differently rounded numbers drift apart, so agreement and rewards are recorded step by step. The divergence of each
policy from the first, and the accept length of its drafter if it were frozen, are measured between the steps, outside
all times.

What always holds: every step is on disk when it is done, and the totals after every variant; totals compare the same
steps. With a budget, no step begins once it is spent, and plain decoding uses at most half of it.
"""
# T tokens of a row, N answer tokens in it

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tlt.bench.lab import check_shape
from tlt.bench.options import VARIANTS, TrainOptions, TrainScale
from tlt.bench.report import BenchReport, Clock
from tlt.bench.training import (
    PLAIN,
    Answers,
    StepRecord,
    Total,
    VariantRun,
    VariantSteps,
    agreement,
    answers_of,
    in_shape,
    subject_of,
    total_of,
)
from tlt.config import NEW, RunConfig, SpecSettings
from tlt.draft import draft_train
from tlt.drafting.buffer import Sample
from tlt.drafting.states import Recompute, SamplePiece
from tlt.fleet import Worker
from tlt.loop import Step
from tlt.machine import describe, free_memory
from tlt.model.attention import PackedLayout
from tlt.model.device import upload
from tlt.model.transformer import Transformer
from tlt.policy import device_of, open_policy
from tlt.train.drafter_measure import expected
from tlt.train.logprobs import token_logprobs
from tlt.train.packing import Example, pack
from tlt.types import Completion

_, ADAPTIVE, FROZEN, SUFFIX = VARIANTS
_PLAIN_SHARE = 0.5  # of the budget
_MOVED_TOKENS, _MOVED_ROW = 256, 16384  # of an answer, and of a pass, by which it is told how far a policy has moved


def bench_train(config: RunConfig, options: TrainOptions) -> None:
    check_shape(options.shape)
    device = device_of(config.model.device)
    scale = options.scale(on_gpu=device.type == "cuda")
    with TemporaryDirectory() as scratch:
        named = config.model.path
        config = _prepared(config, options.shape, scale, Path(scratch))
        policy = open_policy(config.model)
        subject = subject_of(config, named, options, scale)
        report = BenchReport(describe(device, options.commit), subject, policy.model.config, scale, options.json)
        bench = _TrainBench(config, scale, policy.model, options.budget_s)
        clock = Clock()
        for name in options.variants:
            if name in bench.variants:
                report.section(name, bench.steps(name), clock, line=_line, table=False)
                report.section("totals", bench.totals(), clock, upright=True)
        report.close()


def _prepared(config: RunConfig, shape: str | None, scale: TrainScale, scratch: Path) -> RunConfig:
    """The configuration with the policy in the given shape, and a drafter for it."""
    task = replace(config.task, prompts=scale.prompts, group=scale.group)
    config = replace(config, task=task, sampling=replace(config.sampling, max_tokens=scale.cap))
    config = in_shape(config, shape, scratch)
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
    """Takes the steps, variant by variant, and keeps their records."""

    def __init__(self, config: RunConfig, scale: TrainScale, first: Transformer, budget_s: float) -> None:
        self.variants = _variants(config)
        self._scale = scale
        self._first = first  # policy; it learns nothing
        self._ends_s = time.perf_counter() + budget_s if budget_s else float("inf")
        self._taken: dict[str, VariantSteps] = {}
        self._plain: list[Answers] = []  # step by step

    def steps(self, name: str) -> Iterator[StepRecord]:
        """Takes at most as many steps as plain decoding did: others could not be compared."""
        free_memory()
        now = time.perf_counter()
        until = self._ends_s if name != PLAIN else now + _PLAIN_SHARE * (self._ends_s - now)
        count = len(self._plain) if self._plain and name != PLAIN else self._scale.steps
        if now >= until:
            return
        with VariantRun(name, self.variants[name]) as run:
            self._taken[name] = run.taken
            reach = _Reach(run.fleet.worker)
            for _ in range(count):
                step, record = run.step()
                record = self._with_more(record, step, reach)
                run.taken.add(record, step)
                yield record
                if time.perf_counter() >= until:
                    break

    def _with_more(self, record: StepRecord, step: Step, reach: "_Reach") -> StepRecord:
        """Adds the measurements that are taken between the steps."""
        if record.variant == PLAIN:
            self._plain.append(answers_of(step))
        elif step.number <= len(self._plain):
            identical, common = agreement(answers_of(step), self._plain[step.number - 1])
            record = replace(record, identical=identical, common=common)
        one_each = [rollout.completion for rollout in step.rollouts[:: self._scale.group]]
        reached, left_alone = reach.on(one_each)
        return replace(record, moved=moved(self._first, one_each), reach=reached, left_alone=left_alone)

    def totals(self) -> Iterator[Total]:
        for taken in self._taken.values():
            if taken.records:
                yield total_of(taken, self._taken.get(PLAIN))


def _line(record: StepRecord) -> str:
    return (
        f"{record.variant} {record.step}: {record.step_s:.2f} s (rollout {record.rollout_s:.2f}, drafting "
        f"{record.drafting_s:.2f}, update {record.update_s:.2f}), {record.tokens:,} tokens, reward "
        f"{record.mean_reward:.3f}, accept {record.accept_length:.2f}, moved {record.moved:.4f}"
        + (f", reach {record.reach:.3f}, left alone {record.left_alone:.3f}" if record.reach is not None else "")
    )


class _Reach:
    """Accept lengths of a worker's drafter now, and of a copy of it as it was when this object was made."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._as_it_was = copy.deepcopy(worker.drafts_with)

    def on(self, completions: Sequence[Completion]) -> tuple[float | None, float | None]:
        policy, now = self._worker.policy.model, self._worker.drafts_with
        completions = [c for c in completions if len(c.tokens) > 1]
        if now is None or self._as_it_was is None or not completions:
            return None, None
        samples = [Sample.of(c.prompt_tokens, c.tokens[:_MOVED_TOKENS], "", c.policy_version) for c in completions]
        batch = Recompute(policy, now.config.taps).batch([SamplePiece.whole(sample) for sample in samples])
        settings = self._worker.config.draft
        found = [expected(one, [batch], policy.head_weight, policy.embed, settings) for one in (now, self._as_it_was)]
        return found[0].accept_length, found[1].accept_length


@torch.no_grad()
def moved(first: Transformer, completions: Sequence[Completion]) -> float:
    """KL divergence from the first policy in nats per token, estimated on the beginnings of these completions."""
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
