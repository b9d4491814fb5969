"""Drafter training: the drafter learns the policy's next-token distributions from the policy's hidden states.

The loss compares distributions (soft cross-entropy and total variation) at completion tokens, in every unrolled draft
step. The policy's distribution is computed from its last hidden states and its head. Sequences in a packed row do not
attend to each other, so a micro-step equals the same sequences one by one. Logits of a whole row never exist at once.
The policy's tensors are never written. A micro-step is a complete optimizer step, so training may stop after any of
them. Does not know the source of the states, runs or idle workers.
"""
# T packed positions, N tokens to name, S draft steps, D hidden, F = 3·D states, v draft vocabulary, C tokens of a chunk

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt.config import DraftSettings
from tlt.errors import TltError
from tlt.kernels.dispatch import dispatch
from tlt.kernels.training import reference as kernels
from tlt.model.attention import PackedLayout
from tlt.model.device import Reading, upload
from tlt.model.transformer import Transformer
from tlt.spec.align import Aligned, Targets, align
from tlt.spec.eagle import Eagle, gather_taps
from tlt.train.logprobs import most_logits
from tlt.train.optimizer import MasterAdamW, Schedule, learning_rate
from tlt.train.packing import PackedRow
from tlt.train.restore import expect_keys
from tlt.train.supervised import StepResult

CLIP = 1.0  # largest norm of the gradient
RATED_AT = 1024  # hidden size at which `draft.learning_rate` applies unscaled
TOKENS_AT_ONCE = 32768  # tokens of short rows that a GPU computes in one forward


@dataclass(frozen=True, slots=True)
class DrafterBatch:
    """Packed sequences and the policy's hidden states at each position."""

    aligned: Aligned  # on the host
    features_TF: Tensor  # residual stream after each tapped layer
    hidden_TD: Tensor  # after the policy's final norm: the input of its head


def policy_states(model: Transformer, row: PackedRow, taps: Sequence[int]) -> DrafterBatch:
    """One forward of the policy over a packed row of prompts and answers."""
    (batch,) = _states_of(model, [row], taps)
    return batch


def stream_states(
    model: Transformer, rows: Iterable[PackedRow], taps: Sequence[int], at_once: int | None = None
) -> Iterator[DrafterBatch]:
    """A batch per row, as `policy_states` makes them. Short rows with up to `at_once` tokens share a forward.

    On a GPU, launches of the policy's many layers would otherwise take longer than the computation of a short row.
    """
    if at_once is None:
        at_once = TOKENS_AT_ONCE if model.embed.is_cuda else 0
    group: list[PackedRow] = []
    tokens = 0
    for row in rows:
        if group and tokens + len(row.tokens_T) > at_once:
            yield from _states_of(model, group, taps)
            group, tokens = [], 0
        group.append(row)
        tokens += len(row.tokens_T)
    if group:
        yield from _states_of(model, group, taps)


@torch.no_grad()
def _states_of(model: Transformer, rows: Sequence[PackedRow], taps: Sequence[int]) -> list[DrafterBatch]:
    device, sizes = model.embed.device, [len(row.tokens_T) for row in rows]
    tokens_T = torch.from_numpy(np.concatenate([row.tokens_T.numpy() for row in rows]))
    lengths = [length for row in rows for length in row.lengths]
    out = model(upload(tokens_T, device), PackedLayout.from_lengths(lengths, device), taps)
    aligned = [align(row.tokens_T, row.mask_T, row.lengths) for row in rows]  # while the device computes
    states = zip(aligned, torch.split(gather_taps(out.taps), sizes), torch.split(out.hidden_TD, sizes), strict=True)
    return [DrafterBatch(*parts) for parts in states]


class DrafterDiverged(TltError):
    """A micro-step gave numbers that are not finite: the drafter's weights are lost."""


class Averaging(Protocol):
    """Averages over the workers of a training session, which all make the same calls. Tensors change in place."""

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its mean."""

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        """As `mean`, of a micro-step's gradients; or nothing, where weights are averaged every few micro-steps."""

    def weights(self, tensors: Sequence[Tensor]) -> bool:
        """After the micro-step: whether it averaged its weights."""


class DrafterTrainer:
    """Takes micro-steps on packed batches. Reads the device's results once per micro-step, at its end.

    `head_VD`, `embed_VD`: the policy's tensors.
    `endless`: the learning rate does not decay (online training). Otherwise it decays until `settings.steps`.
    `progress`: elapsed fraction of a time limit. The schedule follows steps or time, whichever is further.
    `average`: averages over the workers of a training session; a micro-step is then one step on all their batches.
    """

    def __init__(
        self,
        model: Eagle,
        head_VD: Tensor,
        embed_VD: Tensor,
        settings: DraftSettings,
        *,
        endless: bool = False,
        average: Averaging | None = None,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._model = model
        self._head_VD = head_VD.detach()
        self._embed_VD = embed_VD.detach()
        self._settings = settings
        self._average = average
        self._progress = progress
        self._schedule = Schedule(
            settings.learning_rate * RATED_AT / model.config.layer.hidden,
            settings.warmup_steps,
            decay_steps=0 if endless else settings.steps,
        )
        self._optimizer = MasterAdamW(model, weight_decay=0.0)
        self.steps_taken = 0
        self.unrolled_steps = 0  # micro-steps of this object that unrolled more than one draft step
        self._warm_from = 0  # micro-step at which the optimizer's moments were reset

    def start_over(self, steps_taken: int) -> None:
        """After the drafter's weights were replaced: resets the optimizer and the learning rate's warm-up."""
        self._model.zero_grad(set_to_none=True)  # an interrupted pass may have left gradients
        self._optimizer = MasterAdamW(self._model, weight_decay=0.0)
        self.steps_taken = self._warm_from = steps_taken

    def micro_step(self, batch: DrafterBatch) -> StepResult:
        """One update from the batch."""
        return self.launch(batch)()

    def micro_steps(self, batches: Iterable[DrafterBatch]) -> Iterator[StepResult]:
        """One update per batch. Launches each update before it reads the result of the previous one."""
        last: Callable[[], StepResult] | None = None
        for batch in batches:
            result = self.launch(batch)
            if last:
                yield last()
            last = result
        if last:
            yield last()

    def launch(self, batch: DrafterBatch) -> Callable[[], StepResult]:
        """Starts a micro-step without waiting for the device. The returned function waits for the result."""
        place = self._place
        unrolled = self._unrolled_at(place)
        weighed = weigh(batch.aligned, self._settings, unrolled)
        loss = weighed_loss(self._model, batch, self._head_VD, self._embed_VD, self._settings, weighed)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gather()
        if self._average:
            self._share(self._average, weighed.total)
        # warm-up counts steps only, as the optimizer's moments do
        rate = min(learning_rate(at, self._schedule) for at in (place, self.steps_taken - self._warm_from))
        grad_norm = self._optimizer.update(rate, CLIP)
        if self._average:
            self._optimizer.change(self._average.weights)
        self.steps_taken += 1
        self.unrolled_steps += unrolled > 1
        numbers = Reading(torch.stack((loss.detach().float(), grad_norm.float())))
        return partial(self._read, numbers, self.steps_taken, batch.aligned, weighed.named, rate)

    @property
    def unrolled(self) -> int:
        """Draft steps that the next micro-step unrolls."""
        return self._unrolled_at(self._place)

    def _unrolled_at(self, place: float) -> int:
        return 1 if place < self._settings.single_steps else self._settings.unroll

    @property
    def _place(self) -> float:
        """Position in the schedule, in steps."""
        return max(self.steps_taken, self._progress() * self._settings.steps)

    @torch.no_grad()
    def _share(self, average: Averaging, weight: float) -> None:
        """Averages gradients weighted by batch: the result is the gradient of all batches as one."""
        gradients = self._optimizer.gradients()
        weight_1 = gradients[0].new_full((1,), weight)
        torch._foreach_mul_(gradients, weight_1[0])
        average.gradients([*gradients, weight_1])
        torch._foreach_div_(gradients, weight_1[0])

    def _read(self, numbers: Reading, step: int, aligned: Aligned, named: int, rate: float) -> StepResult:
        loss, grad_norm = numbers.values()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DrafterDiverged(
                f"micro-step {step} of the drafter: loss {loss}, gradient norm {grad_norm}; expected finite numbers: "
                "the training diverged; start again with a lower draft.learning_rate, a run from its last checkpoint"
            )
        return StepResult(loss, len(aligned.next_T), named, grad_norm, rate)

    def state(self) -> dict[str, Any]:
        """The state that an exact continuation needs besides the weights. Live tensors: copy them to keep them."""
        steps = (self.steps_taken, self._warm_from)
        return {"steps": steps, "optimizer": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        expect_keys(state, ("steps", "optimizer"), "the drafter's trainer")
        self._optimizer.restore(state["optimizer"])
        self.steps_taken, self._warm_from = state["steps"]


# ---- the loss


@dataclass(frozen=True, slots=True)
class WeightedTargets:
    """The target tokens of a batch and their weights in the loss."""

    targets: Targets
    share_S: "np.ndarray[Any, Any]"  # float64: weight of each reached token of a draft step; the weights sum to 1
    total: float  # sum of the weights before normalization

    @property
    def steps(self) -> int:
        return len(self.share_S)

    @property
    def named(self) -> int:
        """Number of target tokens."""
        return len(self.targets.state_N)


def weigh(aligned: Aligned, settings: DraftSettings, steps: int) -> WeightedTargets:
    """The targets of `steps` draft steps. The weight decays by `settings.decay` per step."""
    targets = aligned.targets(steps)
    if not len(targets.state_N):
        raise TltError("a batch holds no answer of two tokens or more: nothing for a drafter to learn; leave it out")
    weight_S = settings.decay ** np.arange(steps, dtype=np.float64)
    total = float((np.count_nonzero(targets.reached_SN.numpy(), axis=1) * weight_S).sum())
    return WeightedTargets(targets, weight_S / total, total)


def drafter_loss(
    model: Eagle, batch: DrafterBatch, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, steps: int
) -> tuple[Tensor, int]:
    """The weighted mean of the loss over the targets of `steps` draft steps, and the number of target tokens."""
    weighed = weigh(batch.aligned, settings, steps)
    return weighed_loss(model, batch, head_VD, embed_VD, settings, weighed), weighed.named


def weighed_loss(
    model: Eagle,
    batch: DrafterBatch,
    head_VD: Tensor,
    embed_VD: Tensor,
    settings: DraftSettings,
    weighed: WeightedTargets,
) -> Tensor:
    device, positions, targets = batch.features_TF.device, len(batch.aligned.next_T), weighed.targets
    # uploaded before any launch, as later uploads queue behind the launched work
    rows_SN = targets.entry_SN.numpy() + np.arange(weighed.steps)[:, None] * positions
    flat_SN, state_N = upload(torch.from_numpy(rows_SN), device), upload(targets.state_N, device)
    wide = torch.promote_types(batch.features_TF.dtype, torch.float32)
    share_S1 = upload(torch.from_numpy(weighed.share_S).to(wide)[:, None], device)
    weight_SN = upload(targets.reached_SN, device) * share_S1
    policy_head_vD = model.policy_rows(head_VD)
    states = model.unroll(batch.aligned, batch.features_TF, embed_VD, weighed.steps)
    return distribution_loss(
        model.for_head(torch.cat(states)),
        batch.hidden_TD.index_select(0, state_N),
        policy_head_vD,
        policy_head_vD if model.own_head_vD is None else model.own_head_vD,
        flat_SN,
        weight_SN,
        settings.total_variation,
    )


def distribution_loss(
    normed_XD: Tensor,
    hidden_ND: Tensor,
    policy_head_vD: Tensor,
    head_vD: Tensor,
    row_SN: Tensor,
    weight_SN: Tensor,
    variation: float,
    logits_at_once: int | None = None,
) -> Tensor:
    """Σ weight · [(1 − variation) · −Σ p log q + variation · ½ Σ |p − q|], p the policy's distribution of token n.

    q of draft step s is computed from row `row_SN[s, n]` of `normed` and the drafter's head, p from row n of `hidden`
    and the policy's head, both over the draft vocabulary. About `logits_at_once` logits at most are in memory. Only
    `normed` receives a gradient.
    """
    tokens = max(1, (logits_at_once or most_logits(head_vD.device)) // (len(head_vD) * (len(row_SN) + 1)))
    loss: Tensor = _DistributionLoss.apply(  # type: ignore[no-untyped-call]
        normed_XD, hidden_ND, policy_head_vD, head_vD, row_SN, weight_SN, variation, tokens
    )
    return loss


class _DistributionLoss(torch.autograd.Function):
    """The forward pass computes the gradient too, so that no chunk's logits are stored or recomputed.

    A token's p is computed once for all draft steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed_XD: Tensor,
        hidden_ND: Tensor,
        policy_head_vD: Tensor,
        head_vD: Tensor,
        row_SN: Tensor,
        weight_SN: Tensor,
        variation: float,
        tokens: int,
    ) -> Tensor:
        loss = torch.zeros((), dtype=weight_SN.dtype, device=normed_XD.device)
        grad_XD = torch.zeros_like(normed_XD)
        compare = _comparison(normed_XD)
        for start in range(0, row_SN.shape[1], tokens):
            chunk = slice(start, start + tokens)
            rows, weight_SC = row_SN[:, chunk].flatten(), weight_SN[:, chunk]
            draft_SCv = (normed_XD[rows] @ head_vD.T).view(*weight_SC.shape, -1)
            part, grad_SCv = compare(hidden_ND[chunk] @ policy_head_vD.T, draft_SCv, weight_SC, variation)
            loss += part
            # each row has at most one target; entries without a target point at row 0 with a gradient of 0
            grad_XD.index_add_(0, rows, grad_SCv.flatten(0, 1) @ head_vD)
        ctx.save_for_backward(grad_XD)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_XD,) = ctx.saved_tensors
        return (grad_XD * grads[0].to(grad_XD.dtype), *(None,) * 7)


def _comparison(x: Tensor) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    return dispatch(kernels.compare_distributions, x.is_cuda and x.dtype != torch.float64)
