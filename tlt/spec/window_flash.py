"""The drafter's attention in packed training by the vendor's flash attention: `Band`'s on a GPU in half precision.

A draft step's queries look back over a window of their own sequence, which flash attention does by itself, and along
their own draft, a few keys of each query's own, which it cannot. Both meet in the sum of exponentials: forth, the
window's output and its logarithm of that sum are merged with the chain; back, flash attention is handed the merged ones
and so gives the window's share of the gradient, exactly. Knows heads and positions; knows nothing of weights or tokens.
"""
# T packed positions, C sequences, H query heads, K key heads, G = H / K, d head width, s keys of a draft chain

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt.model.device import upload


class Flash(Protocol):
    """Attention over the keys before each query, and its way back."""

    def forth(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What is attended to, [T, H, d]; the log of the sum of exponentials, [H, T]; and what the way back needs."""

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum_HT: Tensor, rest: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by q, k and v of the part of `out` that came from these keys, weighed by exp(score − logsum)."""


@dataclass(frozen=True, slots=True)
class FlashBand:
    """As `window.Band`: who sees whom among packed positions."""

    starts_C1: Tensor  # int32
    longest: int
    window: int

    @classmethod
    def of(cls, lengths: Sequence[int], window: int, device: torch.device) -> "FlashBand":
        starts_C1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(upload(starts_C1, device), max(lengths), window)

    def windows(self, x_TKd: Tensor) -> Tensor:
        return x_TKd

    def attend(self, q_THd: Tensor, k: Tensor, v: Tensor, step: int, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """[T, H, d]: over the window, which stands `step` positions on, then over the query's own chain."""
        back = self.window - 1 - step
        return chained_attention(q_THd, k, v, chain, _VendorFlash(self.starts_C1, self.longest, back))


@dataclass(frozen=True, slots=True)
class _VendorFlash:
    starts_C1: Tensor
    longest: int
    reach: int  # positions a query looks back, not counting its own

    @property
    def _shape(self) -> tuple[Any, ...]:
        return self.starts_C1, self.starts_C1, self.longest, self.longest, 0.0, True  # no dropout, causal

    def forth(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        out, logsum_HT, random, unused, _ = torch.ops.aten._flash_attention_forward(
            *(q_THd, k_TKd, v_TKd, *self._shape, False), window_size_left=self.reach, window_size_right=0
        )
        return out, logsum_HT, (random, unused)

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum_HT: Tensor, rest: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, logsum_HT, *self._shape, *rest), window_size_left=self.reach, window_size_right=0
        )
        return grads


def chained_attention(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, chain: Sequence[tuple[Tensor, Tensor]], flash: Flash
) -> Tensor:
    """[T, H, d]: over what `flash` sees and the keys of each query's own chain, [T, K, d] each."""
    own = (torch.stack(kind, dim=2) for kind in zip(*chain, strict=True)) if chain else (None, None)
    attended: Tensor = _Chained.apply(q_THd, k_TKd, v_TKd, *own, flash)  # type: ignore[no-untyped-call]
    return attended


class _Chained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        k_TKsd: Tensor | None,
        v_TKsd: Tensor | None,
        flash: Flash,
    ) -> Tensor:
        out_THd, logsum_HT, rest = flash.forth(q_THd, k_TKd, v_TKd)
        share_TKGs = None
        if k_TKsd is not None and v_TKsd is not None:
            out_THd, logsum_HT, share_TKGs = _merge(out_THd, logsum_HT, q_THd, k_TKsd, v_TKsd)
        ctx.flash, ctx.rest = flash, rest
        ctx.save_for_backward(q_THd, k_TKd, v_TKd, k_TKsd, v_TKsd, share_TKGs, out_THd, logsum_HT)
        return out_THd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TKd, v_TKd, k_TKsd, v_TKsd, share_TKGs, out_THd, logsum_HT = ctx.saved_tensors
        grad_THd = grads[0].contiguous()
        q_grad, k_grad, v_grad = ctx.flash.back(grad_THd, q_THd, k_TKd, v_TKd, out_THd, logsum_HT, ctx.rest)
        if share_TKGs is None:
            return q_grad, k_grad, v_grad, None, None, None
        T, K, G, _ = share_TKGs.shape
        grad_TKGd = grad_THd.view(T, K, G, -1)
        mean_TKG1 = torch.linalg.vecdot(grad_THd, out_THd).view(T, K, G, 1)
        pull_TKGs = (grad_TKGd @ v_TKsd.mT).sub_(mean_TKG1).mul_(share_TKGs).mul_(q_THd.shape[2] ** -0.5)
        q_grad = q_grad + (pull_TKGs @ k_TKsd).view(q_grad.shape)
        own_k_grad = pull_TKGs.mT @ q_THd.reshape(T, K, G, -1)
        return q_grad, k_grad, v_grad, own_k_grad, share_TKGs.mT @ grad_TKGd, None


def _merge(
    out_THd: Tensor, logsum_HT: Tensor, q_THd: Tensor, k_TKsd: Tensor, v_TKsd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and log of the sum over window and chain, and the weights of the chain's keys."""
    T, K = k_TKsd.shape[:2]
    dtype, wide, scale = q_THd.dtype, logsum_HT.dtype, q_THd.shape[2] ** -0.5
    q_TKGd = q_THd.reshape(T, K, -1, q_THd.shape[2])
    scores_TKGs = (q_TKGd @ k_TKsd.mT).to(wide) * scale
    window_TKG1 = logsum_HT.t().reshape(T, K, -1, 1)
    all_TKGs = torch.cat((window_TKG1, scores_TKGs), dim=-1)
    logsum_TKG1 = all_TKGs.logsumexp(-1, keepdim=True)
    share = (all_TKGs - logsum_TKG1).exp_().to(dtype)
    window_share, own_share = share[..., :1], share[..., 1:]
    merged_TKGd = torch.addcmul(own_share @ v_TKsd, out_THd.view(q_TKGd.shape), window_share)
    return merged_TKGd.view(out_THd.shape), logsum_TKG1.view(T, -1).t().contiguous(), own_share
