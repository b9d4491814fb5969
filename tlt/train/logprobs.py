"""Log-probabilities of a policy's tokens, and losses that depend on them, without a whole row's logits in memory.

If a loss is a sum over tokens, each a function of the token's own log-probability, its gradient is known once the
token's logits are computed. The forward pass therefore computes both gradients, and no chunk's logits are stored or
recomputed. Works on hidden states and heads; does not know packing, completions or the meaning of the loss.
"""
# N tokens, C tokens of a chunk, D hidden, V vocabulary

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.training import reference as kernels
from tlt.model.linear import wide_linear

_LOGITS_AT_ONCE = 2**27  # elements; in float32 half a gibibyte
_SHARE_OF_MEMORY = 64  # logits may take 1/64 of a GPU's memory

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probabilities of a chunk's tokens, its slice of the N tokens) → each token's loss. Differentiable."""


@cache
def most_logits(device: torch.device) -> int:
    """Upper limit of logits in memory. Larger chunks need fewer launches, which otherwise limit the speed."""
    if device.type != "cuda":
        return _LOGITS_AT_ONCE
    return torch.cuda.get_device_properties(device).total_memory // (_SHARE_OF_MEMORY * 4)


def token_loss(
    hidden_ND: Tensor,
    head_VD: Tensor,
    token_N: Tensor,
    loss_of: TokenLoss,
    *,
    temperature: float = 1.0,
    logits_at_once: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, which has a gradient, and each token's log-probability and entropy, which have none.

    The distribution is softmax(hidden · headᵀ / temperature). At most about `logits_at_once` logits are in memory.
    """
    rows = max(1, (logits_at_once or most_logits(head_VD.device)) // len(head_VD))
    loss, logprob_N, entropy_N = _TokenLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, token_N, loss_of, 1.0 / temperature, rows
    )
    return loss, logprob_N, entropy_N


@torch.no_grad()
def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    token_N: Tensor,
    *,
    temperature: float = 1.0,
    logits_at_once: int | None = None,
) -> Tensor:
    """The log-probabilities of `token_loss`, without gradients."""
    rows = max(1, (logits_at_once or most_logits(head_VD.device)) // len(head_VD))
    read_logprobs = dispatch(kernels.read_logprobs, _in_triton(hidden_ND))
    parts = [
        read_logprobs(wide_linear(hidden_ND[chunk], head_VD), token_N[chunk], 1.0 / temperature)[0]
        for chunk in _chunks(len(hidden_ND), rows)
    ]
    return torch.cat(parts) if parts else hidden_ND.new_empty(0)


def cross_entropy(hidden_ND: Tensor, head_VD: Tensor, token_N: Tensor, logits_at_once: int | None = None) -> Tensor:
    """−Σ log softmax(hidden · headᵀ)[token]."""
    return token_loss(hidden_ND, head_VD, token_N, lambda logprob_C, _: -logprob_C, logits_at_once=logits_at_once)[0]


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        token_N: Tensor,
        loss_of: TokenLoss,
        inverse_temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        logprob_N, entropy_N = (torch.empty(len(hidden_ND), dtype=wide, device=hidden_ND.device) for _ in range(2))
        hidden_grad_ND = torch.empty_like(hidden_ND)
        # a policy that learns through adapters has a frozen head
        head_grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        in_triton = _in_triton(hidden_ND)
        read_logprobs = dispatch(kernels.read_logprobs, in_triton)
        logprobs_gradient = dispatch(kernels.logprobs_gradient, in_triton)
        for chunk in _chunks(len(hidden_ND), rows):
            logits_CV = wide_linear(hidden_ND[chunk], head_VD)
            logprob_N[chunk], entropy_N[chunk], logsum_C = read_logprobs(logits_CV, token_N[chunk], inverse_temperature)
            part, slope_C = _value_and_slope(loss_of, logprob_N[chunk], chunk)
            loss += part
            grad_CV = logprobs_gradient(
                logits_CV, token_N[chunk], logsum_C, slope_C, inverse_temperature, hidden_ND.dtype
            )
            torch.mm(grad_CV, head_VD, out=hidden_grad_ND[chunk])
            if head_grad_VD is not None:
                head_grad_VD += grad_CV.T @ hidden_ND[chunk]
        ctx.save_for_backward(hidden_grad_ND, head_grad_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(logprob_N, entropy_N)
        return loss, logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_grad_ND, head_grad_VD = ctx.saved_tensors
        scale = grads[0]
        head_grad = None if head_grad_VD is None else (head_grad_VD * scale).to(ctx.head_dtype)
        return hidden_grad_ND * scale.to(hidden_grad_ND.dtype), head_grad, None, None, None, None


def _value_and_slope(loss_of: TokenLoss, logprob_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf_C = logprob_C.detach().requires_grad_()
        loss = loss_of(leaf_C, chunk).sum()
    (slope_C,) = torch.autograd.grad(loss, leaf_C)
    return loss.detach(), slope_C


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, count, rows))


def _in_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64
