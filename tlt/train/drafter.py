"""Drafter training: the drafter learns the policy's next-token distributions from the policy's own states.

The loss compares distributions (soft cross-entropy, total variation), in every draft step that training unrolls, for
answers only; the policy's side is computed afresh from its last hidden states and its head. Sequences share packed rows
and cannot see each other, so a micro-step equals the same sequences one by one. Logits of a whole row never exist at
once. The policy's tensors are read, never written. A micro-step is a whole optimizer step: whoever trains may stop
between any two. Knows nothing of where the states come from, of runs or of idle workers.
"""
# T packed positions, N tokens to name, S draft steps, D hidden, F = 3·D states, v draft vocabulary, C tokens of a chunk

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt.config import DraftSettings, WarmupSettings
from tlt.errors import TltError
from tlt.kernels import distribution
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.spec.align import Aligned, align
from tlt.spec.eagle import Eagle, gather_taps
from tlt.train.packing import PackedRow
from tlt.train.supervised import LOGITS_AT_ONCE, MasterAdamW, StepResult, learning_rate

CLIP = 1.0  # largest norm of the gradient
RATED_AT = 1024  # hidden size that `draft.learning_rate` speaks of


@dataclass(frozen=True, slots=True)
class DrafterBatch:
    """Packed sequences as the policy saw them."""

    aligned: Aligned  # on the host
    features_TF: Tensor  # residual stream after each tapped layer
    hidden_TD: Tensor  # after the policy's final norm: what its head reads


@torch.no_grad()
def policy_states(model: Transformer, row: PackedRow, taps: Sequence[int]) -> DrafterBatch:
    """One forward of the policy over a packed row of prompts and answers."""
    device = model.embed.device
    out = model(row.tokens_T.to(device), PackedLayout.from_lengths(row.lengths, device), taps)
    return DrafterBatch(align(row.tokens_T, row.mask_T, row.lengths), gather_taps(out.taps), out.hidden_TD)


class DrafterTrainer:
    """Takes micro-steps on packed batches. Reads the device's results once per micro-step, at its end.

    `head` and `embed` are the policy's. The learning rate falls until `settings.steps`; an online trainer, which has no
    end, passes `endless`. One that goes on from a trained drafter starts with `steps_taken` where that one stood.
    """

    def __init__(
        self, model: Eagle, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, *, endless: bool = False
    ) -> None:
        self._model = model
        self._head_VD = head_VD.detach()
        self._embed_VD = embed_VD.detach()
        self._settings = settings
        self._schedule = WarmupSettings(
            steps=2**62 if endless else settings.steps,
            learning_rate=settings.learning_rate * RATED_AT / model.config.layer.hidden,
            warmup_steps=settings.warmup_steps,
        )
        self._optimizer = MasterAdamW(model, weight_decay=0.0)
        self.steps_taken = 0

    def micro_step(self, batch: DrafterBatch) -> StepResult:
        """One update from the batch."""
        steps = 1 if self.steps_taken < self._settings.single_steps else self._settings.unroll
        loss, named = drafter_loss(self._model, batch, self._head_VD, self._embed_VD, self._settings, steps)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gather()
        rate = learning_rate(self.steps_taken, self._schedule)
        grad_norm = self._optimizer.update(rate, CLIP)
        self.steps_taken += 1
        loss_value, norm_value = torch.stack((loss.detach().float(), grad_norm.float())).tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise TltError(
                f"micro-step {self.steps_taken}: loss {loss_value}, gradient norm {norm_value}; the drafter is spoilt: "
                "start again from its last checkpoint with a lower draft.learning_rate"
            )
        return StepResult(loss_value, len(batch.aligned.next_T), named, norm_value, rate)


def drafter_loss(
    model: Eagle, batch: DrafterBatch, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, steps: int
) -> tuple[Tensor, int]:
    """The weighted mean of the loss over all that can be named within `steps` draft steps, and how many tokens."""
    targets = batch.aligned.targets(steps)
    if not len(targets.state_N):
        raise TltError("a batch holds no answer of two tokens or more: nothing for a drafter to learn; leave it out")
    device = batch.features_TF.device
    decay_S1 = settings.decay ** torch.arange(steps, dtype=torch.float64)[:, None]
    weight_SN = targets.reached_SN * decay_S1
    weight_SN = weight_SN / weight_SN.sum()
    states = model.unroll(batch.aligned, batch.features_TF, embed_VD, steps)
    normed_STD = model.final_norm(torch.stack(states))
    flat_SN = targets.entry_SN + torch.arange(steps)[:, None] * len(batch.aligned.next_T)
    loss = distribution_loss(
        normed_STD.flatten(0, 1),
        batch.hidden_TD.index_select(0, targets.state_N.to(device)),
        model.head_rows(head_VD),
        flat_SN.to(device),
        weight_SN.to(device, torch.promote_types(normed_STD.dtype, torch.float32)),
        settings.total_variation,
    )
    return loss, len(targets.state_N)


def distribution_loss(
    normed_XD: Tensor,
    hidden_ND: Tensor,
    head_vD: Tensor,
    row_SN: Tensor,
    weight_SN: Tensor,
    variation: float,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """Σ weight · [(1 − variation) · −Σ p log q + variation · ½ Σ |p − q|], p the policy's distribution of token n.

    q of draft step s is named by row `row_SN[s, n]` of `normed`, p by row n of `hidden`, both over the draft
    vocabulary. At most about `logits_at_once` logits are in memory. Only `normed` receives a gradient.
    """
    tokens = max(1, logits_at_once // (len(head_vD) * (len(row_SN) + 1)))
    loss: Tensor = _DistributionLoss.apply(  # type: ignore[no-untyped-call]
        normed_XD, hidden_ND, head_vD, row_SN, weight_SN, variation, tokens
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
            part, grad_SCv = compare(hidden_ND[chunk] @ head_vD.T, draft_SCv, weight_SC, variation)
            loss += part
            # a row names one token; those that name nothing all point at row 0, with a gradient of 0
            grad_XD.index_add_(0, rows, grad_SCv.flatten(0, 1) @ head_vD)
        ctx.save_for_backward(grad_XD)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        (grad_XD,) = ctx.saved_tensors
        return grad_XD * grads[0].to(grad_XD.dtype), None, None, None, None, None, None


def _comparison(x: Tensor) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    if not x.is_cuda or x.dtype == torch.float64:
        return distribution.compare
    from tlt.kernels import distribution_triton  # Triton is installed only where there is a GPU

    return distribution_triton.compare
