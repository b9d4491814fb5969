"""The policy trainer: one step of GRPO from rollouts and their advantages, written into the weights the engine reads.

Always holds:
- Completions in a packed row do not attend to each other: a step equals the same completions one by one.
- Logits of a whole row never exist at once, and neither does a full attention mask.
- An update has finite loss and gradient norm, or it is not made: an error leaves weights and optimizer unchanged.
- Weights change in place. On a CPU the same state and experiences give the same weights bit for bit.
- Completions that cannot change the gradient (advantage 0 and no KL term) count in every mean and are not computed.

The ratio r uses the sampling distribution softmax(logits / temperature) without the top-k and top-p filters. Old
log-probabilities are the engine's, of the policy version that sampled the completion. Every result reports how far the
trainer's own differ from them. With `grpo.importance_cap` the ratio is relative to the trainer's log-probabilities at
the start of the step, and the ratio of trainer to engine becomes an importance weight, at most the cap.

The engine's log-probabilities depend in their last bits on the batch of the tick, hence on speculation and timing. In
float32 and float64 a difference of that size is ignored, so training curves are bit-identical if the tokens are. In
half precision engine and trainer differ by more, and the engine's values are used.

Several workers: each gets its part of the completions and `sum_over_workers`, which sums tensors over all workers in
place. Means use the totals of all workers (one call per minibatch). Gradients of N workers are therefore added, not
averaged (one call per update), and N workers compute the numbers of one. A library that averages gradients must be
compensated for. All workers make the same calls in the same order, also those without completions.

Does not know groups, rewards, engines, runs or files.
"""
# T tokens of a row, N answer tokens in it, C of them in a chunk, D hidden, V vocabulary

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt.config import GrpoSettings, TrainSettings
from tlt.errors import ConfigError, TltError
from tlt.model.attention import PackedLayout
from tlt.model.device import upload
from tlt.model.transformer import Output, Transformer
from tlt.model.weights import hf_tensors, weights_count
from tlt.train import grpo
from tlt.train.logprobs import token_logprobs, token_loss
from tlt.train.lora import Lora
from tlt.train.offload import OffloadedAdamW
from tlt.train.optimizer import MasterAdamW, Schedule, learning_rate
from tlt.train.packing import Example, PackedRow, pack
from tlt.train.rates import usual_rate
from tlt.train.restore import expect_keys, restore_policy
from tlt.train.sums import Sums, UpdateReport
from tlt.types import Completion, Experience, Key, SamplingParams

_ROUND_OFF = {
    torch.float32: 1e-3,
    torch.float64: 1e-6,
}  # nats, far above observed; the engine reports float32

SumOverWorkers = Callable[[Sequence[Tensor]], None]


class RowObserver(Protocol):
    """Receives the hidden states that an update computes anyway, row by row. It must not change the policy."""

    taps: tuple[int, ...]  # layers whose residual stream it receives

    def begin(self, rows: Sequence[PackedRow]) -> None:
        """The rows that will come, in this order, before the first of them."""

    def see(self, row: PackedRow, states: Output) -> None:
        """States of one row, after its backward pass and before the weights change."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of one step: means over its updates and over the trained tokens."""

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # computed, prompts included, once per epoch
    answer_tokens: int  # learned from, once per epoch
    updates: int  # of the weights; 0 if no completion had a gradient
    clipped: float  # fraction of tokens whose gradient was removed by clipping
    kl: float  # nats per token to the reference; 0 without one
    entropy: float  # nats per token
    mismatch_mean: float  # |trainer's − engine's| log-probability, over the first update, before the weights moved
    mismatch_max: float  # likewise, of this worker
    weight_mean: float  # of the truncated importance weights; 1 without them
    drafting_s: float = 0.0  # of the step's seconds, those of drafter training inside it
    checkpoint_s: float = 0.0  # likewise, those in which a snapshot of the weights was still copied
    entropies: tuple[tuple[Key, tuple[float, ...]], ...] = ()  # per token, of sampled completions


class PolicyTrainer:
    """Takes steps. Reads the device's results once per update, before the weights change.

    `reference`: the frozen policy of the `grpo.kl` term; None: the policy without its adapters. `sampling`: settings of
    the rollouts. `passes`: maps this worker's number of passes to the number that all workers make.
    """

    def __init__(
        self,
        model: Transformer,
        train: TrainSettings,
        grpo: GrpoSettings,
        *,
        reference: Transformer | None = None,
        sampling: SamplingParams | None = None,
        sum_over_workers: SumOverWorkers | None = None,
        passes: Callable[[int], int] | None = None,
    ) -> None:
        sampling = sampling or SamplingParams()
        _check(model, grpo, reference, sampling, adapters=train.lora_rank > 0)
        self._model = model
        self._train = train
        self._grpo = grpo
        self._reference = reference if grpo.kl else None
        self._temperature, self._limit = sampling.temperature, sampling.max_tokens
        self._round_off = _ROUND_OFF.get(model.embed.dtype, 0.0)
        self._sum_over_workers = sum_over_workers or (lambda tensors: None)
        self._passes = passes or (lambda own: own)
        peak = train.learning_rate or usual_rate(weights_count(model.config), train.lora_rank).rate
        self._schedule = Schedule(peak, train.warmup_steps, train.decay_steps)
        model.checkpoint_activations = train.checkpoint_activations == "always"
        self._lora = Lora(model, train.lora_rank, train.lora_alpha) if train.lora_rank else None
        adamw = OffloadedAdamW if train.offload else MasterAdamW
        self._optimizer = adamw(self._lora or model, weight_decay=train.weight_decay)
        self.steps_taken = 0
        self.passes = 0  # forward passes so far, a sign of progress for hang detection

    @property
    def adapters(self) -> Lora | None:
        """What is learned instead of the weights themselves, if `train.lora_rank` asks for it."""
        return self._lora

    def update(
        self,
        experiences: Sequence[Experience],
        observer: RowObserver | None = None,
        *,
        before_change: Callable[[], object] = lambda: None,
    ) -> UpdateResult:
        """One step: `train.minibatches` × `train.epochs` updates of the weights, in place.

        `observer` sees the rows of the first update. `before_change` is called before weights or optimizer change."""
        rate = learning_rate(self.steps_taken, self._schedule)
        parts = [self._prepare(experiences[i :: self._train.minibatches]) for i in range(self._train.minibatches)]
        if self._grpo.kl and self._reference is None and self._lora is not None:
            before_change()
            with self._lora.off():
                for part in parts:
                    part.rows = [self._referred(row, self._model) for row in self._rows(part)]
        if self._grpo.importance_cap or self._round_off:
            # the first update computes the log-probabilities at the start of the step itself
            for part in parts if self._train.epochs > 1 else parts[1:]:
                part.rows = [self._anchored(row) for row in self._rows(part)]
        reports: list[UpdateReport] = []
        entropies: dict[Key, Tensor] = {}
        for part in parts * self._train.epochs:
            if part.something_to_learn:
                seen = None if reports else observer
                reports.append(self._learn(part, rate, entropies, before_change, first=not reports, observer=seen))
        self.steps_taken += 1
        told = tuple((key, tuple(entropy_N.tolist())) for key, entropy_N in entropies.items())
        return replace(_result(reports, parts, rate), entropies=told)

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights as they are saved. Live tensors."""
        return hf_tensors(self._model)

    def state(self) -> dict[str, Any]:
        """The state that an exact continuation needs besides the weights. Live tensors: copy them to keep them."""
        lora = {} if self._lora is None else {"lora": self._lora.state()}
        return {"steps_taken": self.steps_taken, "optimizer": self._optimizer.state(), **lora}

    def restore_weights(self, policy: Transformer, directory: Path) -> None:
        """Copies the policy of a checkpoint into the weights; `policy`: what the engine computes with."""
        restore_policy(policy, directory)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`. The policy must have the weights saved with it."""
        expect_keys(state, ("steps_taken", "optimizer"), "the trainer's state")
        if ("lora" in state) != (self._lora is not None):
            raise ConfigError(
                f"the state was saved {'with' if 'lora' in state else 'without'} adapters but train.lora_rank is "
                f"{self._train.lora_rank}; resume with train.lora_rank as it was"
            )
        if self._lora is not None:
            self._lora.restore(state["lora"])
        self._optimizer.restore(state["optimizer"])
        if self._lora is not None:
            self._lora.merge()
        self.steps_taken = int(state["steps_taken"])

    # ---- one update

    def _learn(
        self,
        part: "_Minibatch",
        rate: float,
        entropies: dict[Key, Tensor],
        before_change: Callable[[], object],
        *,
        first: bool,
        observer: RowObserver | None = None,
    ) -> UpdateReport:
        sums = Sums(self._model.embed.device)
        if observer is not None:
            observer.begin(part.packed)
        for index, row in enumerate(self._rows(part)):
            states = self._states(self._model, row, observer.taps if observer else ())
            hidden_ND = states.hidden_TD.index_select(0, row.before_N)
            loss_of = _RowLoss(self._with_ratios(row, hidden_ND), self._grpo, sums, self._round_off)
            loss, _, entropy_N = token_loss(
                hidden_ND, self._model.head_weight, row.token_N, loss_of, temperature=self._temperature
            )
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.gather()
            sums.add(loss=loss.detach(), entropy=entropy_N.sum())
            if index < len(part.packed):
                _keep_sampled(part, index, entropy_N, entropies)
            if observer is not None and index < len(part.packed):
                observer.see(part.packed[index], states.detached())
        try:
            totals = sums.totals()
            self._sum_over_workers([*self._optimizer.gradients(), totals])
            norm = self._optimizer.norm()
            report = sums.read(totals, norm)
            self._refuse(report, first)
        except TltError:
            self._optimizer.forget()
            raise
        before_change()
        self._optimizer.step(rate, self._train.clip, norm)
        if self._lora is not None:
            self._lora.merge()
        return report

    def _refuse(self, report: UpdateReport, first: bool) -> None:
        """Raises, before the weights change, on numbers that are not finite or come from another policy."""
        if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            raise TltError(
                f"step {self.steps_taken + 1}: loss {report.loss}, gradient norm {report.grad_norm}; the weights were "
                "not touched: go on from the last checkpoint with a lower train.learning_rate, and check the rewards"
            )
        limit = self._grpo.mismatch_limit
        if first and limit and report.mismatch_mean > limit:
            raise TltError(
                f"step {self.steps_taken + 1}: trainer and engine differ by {report.mismatch_mean:.3f} nats per token "
                f"on average, more than grpo.mismatch_limit ({limit}); the weights were not touched: the answers are "
                "not this policy's. Check that the engine holds the trainer's weights, or raise the limit"
            )

    # ---- rows

    def _prepare(self, experiences: Sequence[Experience]) -> "_Minibatch":
        counted = [e for e in experiences if grpo.counts(e.rollout.completion, self._grpo)]
        for experience in counted:
            _check_experience(experience)
        learned = [e for e in counted if e.advantage != 0 or self._grpo.kl]
        tokens = sum(e.rollout.completion.drawn_tokens for e in counted)
        counts = torch.tensor([len(counted), tokens, len(learned)], device=self._model.embed.device)
        self._sum_over_workers([counts])
        all_answers, all_tokens, all_learned = counts.tolist()
        totals = grpo.Totals(answers=all_answers, tokens=all_tokens, limit=self._limit)
        # a completion longer than a row gets a longer row, rather than an error in the middle of a run
        longest = max((_length(e.rollout.completion) for e in learned), default=1)
        rows = pack([_example(e) for e in learned], max(self._train.row_tokens, longest))
        return _Minibatch(rows, self._passes(len(rows)), learned, totals, something_to_learn=all_learned > 0)

    def _rows(self, part: "_Minibatch") -> Iterator["_Row"]:
        """Makes rows on demand: the host lays out the next row while the device computes the current one."""
        for index in range(part.passes):
            if index == len(part.rows):
                idle = index >= len(part.packed)
                row = self._idle_row() if idle else self._row(part.packed[index], part.learned, part.totals)
                part.rows.append(row)
            yield part.rows[index]

    def _idle_row(self) -> "_Row":
        """A row without completions. Every worker takes part in every pass, and other workers have more rows."""
        device = self._model.embed.device
        empty_N = torch.zeros(0, dtype=torch.int64, device=device)
        numbers_N = torch.zeros(0, dtype=torch.promote_types(self._model.embed.dtype, torch.float32), device=device)
        layout = PackedLayout.from_lengths((2,), device)
        return _Row(empty_N.new_zeros(2), layout, empty_N, empty_N, numbers_N, numbers_N, numbers_N)

    @np.errstate(over="ignore")  # an infinite loss is refused later
    def _row(self, packed: PackedRow, experiences: Sequence[Experience], totals: grpo.Totals) -> "_Row":
        device = self._model.embed.device
        wide = np.float64 if self._model.embed.dtype == torch.float64 else np.float32
        members = [experiences[index] for index in packed.members]
        sizes_S = np.array([e.rollout.completion.drawn_tokens for e in members])
        weights = [grpo.token_weight(size, totals, self._grpo) for size in sizes_S.tolist()]
        # numpy: torch would wake all its threads for a few thousand numbers
        old = array("d", chain.from_iterable(self._old(e.rollout.completion) for e in members))

        def per_token(values: Sequence[float]) -> Tensor:
            return upload(torch.from_numpy(np.repeat(np.array(values, dtype=wide), sizes_S)), device)

        answers_N = np.flatnonzero(packed.mask_T.numpy())
        row = _Row(
            tokens_T=upload(packed.tokens_T, device),
            layout=PackedLayout.from_lengths(packed.lengths, device),
            before_N=upload(torch.from_numpy(answers_N - 1), device),
            token_N=upload(torch.from_numpy(packed.tokens_T.numpy()[answers_N]), device),
            advantage_N=per_token([e.advantage for e in members]),
            weight_N=per_token(weights),
            old_N=upload(torch.from_numpy(np.frombuffer(old).astype(wide)), device),
            sizes_S=upload(torch.from_numpy(sizes_S), device) if self._grpo.objective == "gspo" else None,
        )
        return row if self._reference is None else self._referred(row, self._reference)

    @torch.no_grad()
    def _referred(self, row: "_Row", reference: Transformer) -> "_Row":
        return replace(row, reference_N=self._logprobs(reference, row))

    def _with_ratios(self, row: "_Row", hidden_ND: Tensor) -> "_Row":
        """For GSPO, whose ratios are of whole completions, while losses are computed chunk by chunk."""
        if row.sizes_S is None:
            return row
        now_N = token_logprobs(hidden_ND.detach(), self._model.head_weight, row.token_N, temperature=self._temperature)
        _, anchor_N = _anchors(now_N, row.old_N, row.anchor_N, self._grpo, self._round_off)
        return replace(row, sequence_N=grpo.sequence_old(now_N, anchor_N, row.sizes_S))

    def _old(self, completion: Completion) -> Iterable[float]:
        """The engine's log-probabilities of the drawn tokens under the distribution the ratio is of."""
        logprobs = completion.policy_logprobs if self._temperature == 1 else completion.logprobs
        return compress(logprobs, completion.loss_mask) if completion.loss_mask else logprobs

    def _anchored(self, row: "_Row") -> "_Row":
        # gradients are enabled, so that the operations are those of the training pass
        with torch.enable_grad():
            return replace(row, anchor_N=self._logprobs(self._model, row))

    def _logprobs(self, model: Transformer, row: "_Row") -> Tensor:
        hidden_ND = self._hidden(model, row).detach()
        return token_logprobs(hidden_ND, model.head_weight, row.token_N, temperature=self._temperature)

    def _hidden(self, model: Transformer, row: "_Row") -> Tensor:
        return self._states(model, row).hidden_TD.index_select(0, row.before_N)

    def _states(self, model: Transformer, row: "_Row", taps: Sequence[int] = ()) -> Output:
        states: Output = model(row.tokens_T, row.layout, taps)
        self.passes += 1
        return states


@dataclass(frozen=True, slots=True)
class _Row:
    """A packed row and the values of its completion tokens, on the device."""

    tokens_T: Tensor
    layout: PackedLayout
    before_N: Tensor  # where the token before each answer token stands
    token_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor  # in the loss
    old_N: Tensor  # the engine's log-probabilities
    reference_N: Tensor | None = None  # the reference's
    anchor_N: Tensor | None = None  # the trainer's own at the start of the step
    sizes_S: Tensor | None = None  # tokens of each answer, where they are needed
    sequence_N: Tensor | None = None  # old ones with which a token's ratio is its answer's


@dataclass(slots=True)
class _Minibatch:
    """The data of one update."""

    packed: list[PackedRow]
    passes: int  # at least the number of rows
    learned: list[Experience]  # indexed by the rows' members
    totals: grpo.Totals
    something_to_learn: bool  # here or on another worker
    rows: list[_Row] = field(default_factory=list)  # on the device, made on demand


class _RowLoss:
    """The loss of a row's tokens, chunk by chunk. Adds the metrics to `sums`."""

    def __init__(self, row: _Row, settings: GrpoSettings, sums: Sums, round_off: float) -> None:
        self._row = row
        self._settings = settings
        self._sums = sums
        self._round_off = round_off

    def __call__(self, logprob_C: Tensor, chunk: slice) -> Tensor:
        row = self._row
        settings = self._settings
        now_C, old_C = logprob_C.detach(), row.old_N[chunk]
        start_C = None if row.anchor_N is None else row.anchor_N[chunk]
        off_C = ((now_C if start_C is None else start_C) - old_C).abs()
        old_C, anchor_C = _anchors(now_C, old_C, start_C, settings, self._round_off)
        ratio_C = anchor_C if row.sequence_N is None else row.sequence_N[chunk]
        loss_C, clipped_C = grpo.token_losses(logprob_C, ratio_C, row.advantage_N[chunk], settings)
        if settings.importance_cap:
            trust_C = grpo.importance(anchor_C, old_C, settings.importance_cap)
            loss_C = loss_C * trust_C
            self._sums.add(trust=trust_C.sum())
        else:
            self._sums.add(trust=len(old_C))
        if row.reference_N is not None:
            kl_C = grpo.divergence(logprob_C, row.reference_N[chunk])
            loss_C = loss_C + settings.kl * kl_C
            self._sums.add(kl=kl_C.detach().sum())
        self._sums.add(tokens=len(now_C), clipped=clipped_C.sum(), mismatch=off_C.sum())
        self._sums.see_mismatch(off_C.max())
        return loss_C * row.weight_N[chunk]


def _anchors(
    now_N: Tensor, old_N: Tensor, start_N: Tensor | None, settings: GrpoSettings, round_off: float
) -> tuple[Tensor, Tensor]:
    """The engine's log-probabilities as they count, and those that ratios are relative to.

    `start_N`: the trainer's at the start of the step; None: they are those of now.
    """
    start_N = now_N if start_N is None else start_N
    if round_off:
        old_N = grpo.settled(old_N, start_N, round_off)
    return old_N, start_N if settings.importance_cap else old_N


def _result(reports: Sequence[UpdateReport], parts: Sequence[_Minibatch], rate: float) -> UpdateResult:
    def mean(name: str) -> float:
        return math.fsum(getattr(report, name) for report in reports) / max(1, len(reports))

    return UpdateResult(
        loss=mean("loss"),
        grad_norm=mean("grad_norm"),
        learning_rate=rate,
        tokens=sum(len(row.tokens_T) for part in parts for row in part.packed),
        answer_tokens=sum(int(np.count_nonzero(row.mask_T.numpy())) for part in parts for row in part.packed),
        updates=len(reports),
        clipped=mean("clipped"),
        kl=mean("kl"),
        entropy=mean("entropy"),
        mismatch_mean=reports[0].mismatch_mean if reports else 0.0,
        mismatch_max=reports[0].mismatch_max if reports else 0.0,
        weight_mean=mean("weight_mean") if reports else 1.0,
    )


def _keep_sampled(part: _Minibatch, index: int, entropy_N: Tensor, kept: dict[Key, Tensor]) -> None:
    """The entropies of sampled completions in a row, unless an earlier epoch computed them."""
    start = 0
    for member in part.packed[index].members:
        experience = part.learned[member]
        completion = experience.rollout.completion
        end = start + completion.drawn_tokens
        if experience.sampled and completion.key not in kept:
            kept[completion.key] = _spread(entropy_N[start:end], completion.loss_mask)
        start = end


def _spread(drawn_N: Tensor, loss_mask: bytes) -> Tensor:
    """The values of a completion's drawn tokens as values of all its tokens: 0 for replies."""
    if not loss_mask:
        return drawn_N
    places_N = upload(torch.from_numpy(np.flatnonzero(np.frombuffer(loss_mask, dtype=bool))), drawn_N.device)
    return drawn_N.new_zeros(len(loss_mask)).index_copy_(0, places_N, drawn_N)


def _example(experience: Experience) -> Example:
    completion = experience.rollout.completion
    prompt = completion.prompt_tokens
    return Example(prompt + completion.tokens, answer_start=len(prompt), loss_mask=completion.loss_mask)


def _length(completion: Completion) -> int:
    return len(completion.prompt_tokens) + len(completion.tokens)


def _check(
    model: Transformer, grpo: GrpoSettings, reference: Transformer | None, sampling: SamplingParams, *, adapters: bool
) -> None:
    if model.embed.dtype == torch.float16:
        raise ConfigError("model.dtype is float16, whose gradients vanish; train in bfloat16 or float32")
    if grpo.kl and reference is None and not adapters:
        raise ConfigError(f"grpo.kl is {grpo.kl} but there is no reference policy; give one, or set grpo.kl to 0")
    if sampling.temperature == 0:
        raise ConfigError("sampling.temperature is 0: all answers of a group are the same; set it to 1")
    if sampling.temperature != 1 and sampling.filtered:
        raise ConfigError(
            f"sampling.temperature is {sampling.temperature} with top_k {sampling.top_k}, top_p {sampling.top_p} and "
            f"min_p {sampling.min_p}: the engine has no unfiltered log-probabilities at that temperature; set "
            "temperature to 1, or top_k and min_p to 0 and top_p to 1"
        )


def _check_experience(experience: Experience) -> None:
    completion = experience.rollout.completion
    counts = (len(completion.logprobs), len(completion.policy_logprobs))
    name = f"the answer to {experience.rollout.prompt.id!r} with key {completion.key}"
    if not completion.tokens or counts != (len(completion.tokens),) * 2:
        raise TltError(
            f"{name} has {len(completion.tokens)} tokens and {counts[0]} and {counts[1]} log-probabilities; "
            "expected as many, and at least one"
        )
    # one value that is not finite makes the sum not finite
    if not math.isfinite(experience.advantage + sum(completion.logprobs) + sum(completion.policy_logprobs)):
        raise TltError(f"{name} has an advantage or a log-probability that is not finite; check rewards and engine")
