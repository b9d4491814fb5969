"""Drafter training: the drafter learns the policy's next-token distributions from the policy's own states.

The loss compares distributions (soft cross-entropy, total variation), in every draft step that training unrolls, for
answers only; the policy's side is computed afresh from its last hidden states and its head. Sequences share packed rows
and cannot see each other, so a micro-step equals the same sequences one by one. Logits of a whole row never exist at
once. The policy's tensors are read, never written. A micro-step is a whole optimizer step: whoever trains may stop
between any two. Knows nothing of where the states come from, of runs or of idle workers.
"""
# T packed positions, N tokens to name, S draft steps, D hidden, F = 3·D states, v draft vocabulary, C tokens of a chunk

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
RATED_AT = 1024  # hidden size that `draft.learning_rate` speaks of
TOKENS_AT_ONCE = 32768  # whose states a GPU computes in one forward, where rows are shorter


@dataclass(frozen=True, slots=True)
class DrafterBatch:
    """Packed sequences as the policy saw them."""

    aligned: Aligned  # on the host
    features_TF: Tensor  # residual stream after each tapped layer
    hidden_TD: Tensor  # after the policy's final norm: what its head reads


def policy_states(model: Transformer, row: PackedRow, taps: Sequence[int]) -> DrafterBatch:
    """One forward of the policy over a packed row of prompts and answers."""
    (batch,) = _states_of(model, [row], taps)
    return batch


def stream_states(
    model: Transformer, rows: Iterable[PackedRow], taps: Sequence[int], at_once: int | None = None
) -> Iterator[DrafterBatch]:
    """A batch per row, as `policy_states` makes them; one forward serves short rows of `at_once` tokens together.

    That is what a GPU wants: the policy has many layers to launch, and a small one computes faster than they are.
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


class DrafterSpoilt(TltError):
    """A micro-step gave numbers that are none: the drafter it was taken on is worth nothing any more."""


Average = Callable[[Sequence[Tensor]], None]  # gives every tensor, in place, its mean over all who train together


class DrafterTrainer:
    """Takes micro-steps on packed batches. Reads the device's results once per micro-step, at its end.

    `head` and `embed` are the policy's. The learning rate falls until `settings.steps`; an online trainer, which has no
    end, passes `endless`. Where time may end first, `progress` says which share of it is over: the schedule then stands
    where steps or time have brought it, whichever is further. Those who train one drafter together, each on a batch of
    its own, pass `average`: the step is then that of all their batches as one. Whoever goes on from a trained drafter
    restores its trainer's state.
    """

    def __init__(
        self,
        model: Eagle,
        head_VD: Tensor,
        embed_VD: Tensor,
        settings: DraftSettings,
        *,
        endless: bool = False,
        average: Average | None = None,
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
        self.unrolled_steps = 0  # of those taken by this object
        self._warm_from = 0  # micro-step at which the optimizer remembered nothing

    def start_over(self, steps_taken: int) -> None:
        """The drafter's weights were replaced: the optimizer's memory goes, and the learning rate warms up again."""
        self._model.zero_grad(set_to_none=True)  # a pass that was cut short may have left some
        self._optimizer = MasterAdamW(self._model, weight_decay=0.0)
        self.steps_taken = self._warm_from = steps_taken

    def micro_step(self, batch: DrafterBatch) -> StepResult:
        """One update from the batch."""
        return self.launch(batch)()

    def micro_steps(self, batches: Iterable[DrafterBatch]) -> Iterator[StepResult]:
        """One update per batch. Each is launched before the result of the one before it is read: no device waits."""
        last: Callable[[], StepResult] | None = None
        for batch in batches:
            result = self.launch(batch)
            if last:
                yield last()
            last = result
        if last:
            yield last()

    def launch(self, batch: DrafterBatch) -> Callable[[], StepResult]:
        """Starts a micro-step. On a GPU the host is free until it asks for the result, which waits for the device."""
        place = self._place
        unrolled = self._unrolled_at(place)
        weighed = weigh(batch.aligned, self._settings, unrolled)
        loss = weighed_loss(self._model, batch, self._head_VD, self._embed_VD, self._settings, weighed)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gather()
        if self._average:
            self._share(self._average, weighed.total)
        # it warms up by steps alone, as the optimizer's memory does
        rate = min(learning_rate(at, self._schedule) for at in (place, self.steps_taken - self._warm_from))
        grad_norm = self._optimizer.update(rate, CLIP)
        self.steps_taken += 1
        self.unrolled_steps += unrolled > 1
        numbers = Reading(torch.stack((loss.detach().float(), grad_norm.float())))
        return partial(self._read, numbers, self.steps_taken, batch.aligned, weighed.named, rate)

    @property
    def unrolled(self) -> int:
        """Draft steps that a micro-step unrolls now."""
        return self._unrolled_at(self._place)

    def _unrolled_at(self, place: float) -> int:
        return 1 if place < self._settings.single_steps else self._settings.unroll

    @property
    def _place(self) -> float:
        """Where the schedule stands, in steps."""
        return max(self.steps_taken, self._progress() * self._settings.steps)

    @torch.no_grad()
    def _share(self, average: Average, weight: float) -> None:
        """Every batch's gradient counts as much as the batch: then the mean over all is the gradient of all as one."""
        gradients = self._optimizer.gradients()
        weight_1 = gradients[0].new_full((1,), weight)
        torch._foreach_mul_(gradients, weight_1[0])
        average([*gradients, weight_1])
        torch._foreach_div_(gradients, weight_1[0])

    def _read(self, numbers: Reading, step: int, aligned: Aligned, named: int, rate: float) -> StepResult:
        loss, grad_norm = numbers.values()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DrafterSpoilt(
                f"micro-step {step} of the drafter: loss {loss}, gradient norm {grad_norm}; expected finite numbers: "
                "the training diverged; start again with a lower draft.learning_rate, a run from its last checkpoint"
            )
        return StepResult(loss, len(aligned.next_T), named, grad_norm, rate)

    def state(self) -> dict[str, Any]:
        """What an exact continuation needs besides the drafter's weights. Live tensors: copy them to keep them."""
        steps = (self.steps_taken, self._warm_from)
        return {"steps": steps, "optimizer": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        expect_keys(state, ("steps", "optimizer"), "the drafter's trainer")
        self._optimizer.restore(state["optimizer"])
        self.steps_taken, self._warm_from = state["steps"]


# ---- the loss


@dataclass(frozen=True, slots=True)
class PreNormed:
    """What a batch can teach, and how much each part of it counts."""

    targets: Targets
    share_S: "np.ndarray[Any, Any]"  # float64: weight of a token that is reached; over all that are it sums to 1
    total: float  # what it summed to before

    @property
    def steps(self) -> int:
        return len(self.share_S)

    @property
    def named(self) -> int:
        """Tokens to name."""
        return len(self.targets.state_N)


def weigh(aligned: Aligned, settings: DraftSettings, steps: int) -> PreNormed:
    """All that can be named within `steps` draft steps; each step counts less than the one before."""
    targets = aligned.targets(steps)
    if not len(targets.state_N):
        raise TltError("a batch holds no answer of two tokens or more: nothing for a drafter to learn; leave it out")
    weight_S = settings.decay ** np.arange(steps, dtype=np.float64)
    total = float((np.count_nonzero(targets.reached_SN.numpy(), axis=1) * weight_S).sum())
    return PreNormed(targets, weight_S / total, total)


def drafter_loss(
    model: Eagle, batch: DrafterBatch, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, steps: int
) -> tuple[Tensor, int]:
    """The weighted mean of the loss over all that can be named within `steps` draft steps, and how many tokens."""
    weighed = weigh(batch.aligned, settings, steps)
    return weighed_loss(model, batch, head_VD, embed_VD, settings, weighed), weighed.named


def weighed_loss(
    model: Eagle, batch: DrafterBatch, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, weighed: PreNormed
) -> Tensor:
    device, positions, targets = batch.features_TF.device, len(batch.aligned.next_T), weighed.targets
    # sent before anything is launched: what is sent later has to queue behind it
    rows_SN = targets.entry_SN.numpy() + np.arange(weighed.steps)[:, None] * positions
    flat_SN, state_N = upload(torch.from_numpy(rows_SN), device), upload(targets.state_N, device)
    wide = torch.promote_types(batch.features_TF.dtype, torch.float32)
    share_S1 = upload(torch.from_numpy(weighed.share_S).to(wide)[:, None], device)
    weight_SN = upload(targets.reached_SN, device) * share_S1
    policy_head_vD = model.policy_rows(head_VD)
    states = model.unroll(batch.aligned, batch.features_TF, embed_VD, weighed.steps)
    return distribution_loss(
        model.final_norm(torch.cat(states)),
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

    q of draft step s is named by row `row_SN[s, n]` of `normed` and the drafter's head, p by row n of `hidden` and the
    policy's, both over the draft vocabulary. At most about `logits_at_once` logits are in memory. Only `normed`
    receives a gradient.
    """
    tokens = max(1, (logits_at_once or most_logits(head_vD.device)) // (len(head_vD) * (len(row_SN) + 1)))
    loss: Tensor = _DistributionLoss.apply(  # type: ignore[no-untyped-call]
        normed_XD, hidden_ND, policy_head_vD, head_vD, row_SN, weight_SN, variation, tokens
    )
    return loss


class _DistributionLoss(torch.autograd.Function):
    """The forward pass leaves the gradient behind, so that no chunk's logits are kept or computed twice.

    A token's p serves all draft steps that name it: it is computed once.
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
            # a row names one token; those that name nothing all point at row 0, with a gradient of 0
            grad_XD.index_add_(0, rows, grad_SCv.flatten(0, 1) @ head_vD)
        ctx.save_for_backward(grad_XD)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_XD,) = ctx.saved_tensors
        return (grad_XD * grads[0].to(grad_XD.dtype), *(None,) * 7)


def _comparison(x: Tensor) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    return dispatch(kernels.compare_distributions, x.is_cuda and x.dtype != torch.float64)
