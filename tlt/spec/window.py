"""Sliding-window attention of the drafter: over at most `window` earlier positions of a sequence, then over its draft.

Owns two forms of the same attention. `Band` serves packed training: each block of queries attends to the keys just
before it, so memory is tokens × (window + block), not tokens². `attend_ring` serves rollouts: the last positions of
every row lie in a ring buffer, and the nodes of its draft tree in a second one. Always holds: both give equal results,
by test, and have static shapes. Knows heads and positions; knows nothing of weights or tokens.
"""
# T packed positions, n blocks of B queries, L keys a block sees, s keys of a draft chain
# R rows, Q queries of a row, W ring slots, N further keys of a row
# H query heads, K key heads, G = H / K queries that share a key head, d head width

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tlt.kernels.attention import window as window_attention
from tlt.kernels.batch_state.reference import UNUSED
from tlt.kernels.dispatch import dispatch
from tlt.model.device import upload
from tlt.model.linear import in_gpu_rollout

BLOCK = 64  # queries per block; they share their keys
_LEAST_BEFORE = 32  # fewest keys before a block; larger numbers are rounded up to powers of two
_MOST_SPANS = {"cpu": 6, "cuda": 2}  # more spans would mean many small launches
_CHEAP = 256  # keys, summed over blocks, whose cost equals that of another span
_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Band:
    """The attention mask of packed positions, as spans of blocks with equally many earlier keys.

    Rows packed longest first have few spans. Short sequences do not pay for the long ones in the same row.
    """

    spans: tuple["Span", ...]

    @classmethod
    def of(cls, index_T: Tensor, window: int, device: torch.device) -> "Band":
        """`index_T`, on the host: index of each position within its own sequence."""
        padded_nB = functional.pad(index_T, (0, -len(index_T) % BLOCK)).view(-1, BLOCK)
        need_n = (padded_nB.clamp(max=window - 1) - torch.arange(BLOCK)).amax(1)
        before = [_LEAST_BEFORE << max(0, (need - 1) // _LEAST_BEFORE).bit_length() for need in need_n.tolist()]
        on_device = upload(padded_nB, device)
        return cls(
            tuple(
                Span(on_device[first:last], window, far, first * BLOCK, min(last * BLOCK, len(index_T)))
                for first, last, far in _spans(before, _MOST_SPANS.get(device.type, 2))
            )
        )

    def windows(self, x_TKd: Tensor) -> list[Tensor]:
        """The keys (or values) that each block of each span attends to."""
        return [span.windows(x_TKd) for span in self.spans]

    def attend(
        self,
        q_THd: Tensor,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        step: int,
        chain: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """[T, H, d]: attention over the `windows` of keys and values and over the query's own chain, [T, K, d] each."""
        outs = [
            span.attend(q_THd[span.cut], k[at], v[at], step, [(key[span.cut], value[span.cut]) for key, value in chain])
            for at, span in enumerate(self.spans)
        ]
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def _spans(before: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Cuts blocks into at most `most` runs (first, last + 1, keys before a block). Each cut saves the most keys."""
    runs = [(0, len(before))]
    while len(runs) < most:
        gain, at, run = max((*_best_cut(before[first:last]), run) for run, (first, last) in enumerate(runs))
        if gain <= _CHEAP:
            break
        first, last = runs[run]
        runs[run : run + 1] = [(first, first + at), (first + at, last)]
    return [(first, last, max(before[first:last])) for first, last in runs]


def _best_cut(before: Sequence[int]) -> tuple[int, int]:
    """The best cut of a run into two: the number of keys that it saves, and the number of blocks before it."""
    left = list(accumulate(before, max))
    right = list(accumulate(reversed(before), max))[::-1]
    far, blocks = left[-1], len(before)
    cuts = ((far - left[at - 1]) * at + (far - right[at]) * (blocks - at) for at in range(1, blocks))
    return max(((gain, at) for at, gain in enumerate(cuts, start=1)), default=(0, 0))


@dataclass(frozen=True, slots=True)
class Span:
    index_nB: Tensor  # int64: index of each query within its own sequence; padding is 0
    window: int  # positions
    before: int  # keys before each block's own
    start: int  # packed positions, without padding
    stop: int

    @property
    def cut(self) -> slice:
        return slice(self.start, self.stop)

    def windows(self, x_TKd: Tensor) -> Tensor:
        """[n·K, d, L]: the keys of every block and those before it, padded with zeros before the first position."""
        missing = max(0, self.before - self.start)
        seen = x_TKd[self.start - self.before + missing : self.stop]
        rest = self.index_nB.numel() - (self.stop - self.start)
        padded = functional.pad(seen, (0, 0, 0, 0, missing, rest))
        return padded.unfold(0, self.before + BLOCK, BLOCK).reshape(-1, x_TKd.shape[2], self.before + BLOCK)

    def attend(self, q_THd: Tensor, k: Tensor, v: Tensor, step: int, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        (T, H, d), n, bias = q_THd.shape, len(self.index_nB), self._bias_nBL(step, q_THd.dtype)
        K = k.shape[0] // n
        q_TKGd = (q_THd * d**-0.5).view(T, K, H // K, d)
        own = self._to_blocks(_chain_scores(q_TKGd, chain))
        attended: tuple[Tensor, Tensor] = _BlockAttention.apply(  # type: ignore[no-untyped-call]
            self._to_blocks(q_TKGd).reshape(n * K, -1, d), k, v, own.reshape(n * K, H // K * BLOCK, -1), bias
        )
        out_TKGd = self._from_blocks(attended[0].view(*own.shape[:4], d))
        own_TKGs = self._from_blocks(attended[1].view(own.shape))
        if chain:
            values_TKsd = torch.stack([value_TKd for _, value_TKd in chain], dim=2)
            out_TKGd = out_TKGd + (own_TKGs[..., None] * values_TKsd[:, :, None]).sum(-2)
        return out_TKGd.reshape(T, H, d)

    def _bias_nBL(self, step: int, dtype: torch.dtype) -> Tensor:
        """−∞ where a query of draft step `step` does not attend. Its position and window are shifted by `step`."""
        device = self.index_nB.device
        query_B, key_L = torch.arange(BLOCK, device=device), torch.arange(self.before + BLOCK, device=device)
        back_BL = query_B[:, None] - (key_L[None, :] - self.before)
        most_nB = self.index_nB.clamp(max=self.window - 1 - step)
        hidden_nBL = (back_BL < 0) | (back_BL > most_nB[:, :, None])
        return torch.zeros((), dtype=dtype, device=device).masked_fill(hidden_nBL, _HIDDEN)

    def _to_blocks(self, x_TKGe: Tensor) -> Tensor:
        """[n, K, G, B, e]"""
        rest = self.index_nB.numel() - len(x_TKGe)
        padded = functional.pad(x_TKGe, (0, 0, 0, 0, 0, 0, 0, rest)) if rest else x_TKGe
        return padded.view(len(self.index_nB), BLOCK, *x_TKGe.shape[1:]).permute(0, 2, 3, 1, 4)

    def _from_blocks(self, x_nKGBe: Tensor) -> Tensor:
        """[T, K, G, e]"""
        return x_nKGBe.permute(0, 3, 1, 2, 4).flatten(0, 1)[: self.stop - self.start]


class _BlockAttention(torch.autograd.Function):
    """Softmax attention of each block over its window and over a few further keys, given by their scores.

    Returns the window's part of the output and the weights of the further keys. A custom function, because the scores
    dominate memory and time: they are updated in place, and only the weights are saved for the backward pass.
    """

    # x blocks × key heads, q queries of a block (all heads that share a key head), L window keys, s further keys

    @staticmethod
    def forward(
        ctx: Any, q_xqd: Tensor, k_xdL: Tensor, v_xdL: Tensor, own_xqs: Tensor, bias_nBL: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores_xqL = torch.bmm(q_xqd, k_xdL)
        n, block, keys = bias_nBL.shape
        scores_xqL.view(n, -1, block, keys).add_(bias_nBL[:, None])
        weights_xqL = scores_xqL.softmax(-1)
        out_xqd = torch.bmm(weights_xqL, v_xdL.transpose(1, 2))
        if own_xqs.shape[2]:
            wide = torch.promote_types(q_xqd.dtype, torch.float32)
            # log-sum-exp of the window, from its largest score and the weight of that score
            window_xq1 = scores_xqL.amax(-1, keepdim=True).to(wide) - weights_xqL.amax(-1, keepdim=True).to(wide).log()
            shares = torch.cat((window_xq1, own_xqs.to(wide)), dim=-1).softmax(-1).to(q_xqd.dtype)
        else:
            shares = out_xqd.new_ones((*out_xqd.shape[:2], 1))
        share_xq1, own_xqs = shares[..., :1], shares[..., 1:]
        out_xqd = out_xqd * share_xq1
        ctx.save_for_backward(q_xqd, k_xdL, v_xdL, weights_xqL, out_xqd, shares)
        return out_xqd, own_xqs.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q_xqd, k_xdL, v_xdL, weights_xqL, out_xqd, shares = ctx.saved_tensors
        out_grad, own_grad = grads
        share_xq1, own_xqs = shares[..., :1], shares[..., 1:]
        mean_xq1 = (out_grad * out_xqd).sum(-1, keepdim=True) + (own_grad * own_xqs).sum(-1, keepdim=True)
        shared_grad = out_grad * share_xq1
        v_grad = torch.bmm(shared_grad.transpose(1, 2), weights_xqL)
        scores_grad = torch.bmm(shared_grad, v_xdL).sub_(mean_xq1 * share_xq1).mul_(weights_xqL)
        q_grad = torch.bmm(scores_grad, k_xdL.transpose(1, 2))
        k_grad = torch.bmm(q_xqd.transpose(1, 2), scores_grad)
        return q_grad, k_grad, v_grad, own_xqs * (own_grad - mean_xq1), None


def _chain_scores(q_TKGd: Tensor, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[T, K, G, s]: each query against its own chain's keys."""
    if not chain:
        return q_TKGd[..., :0]
    keys_TKsd = torch.stack([key_TKd for key_TKd, _ in chain], dim=2)
    return (q_TKGd[..., None, :] * keys_TKsd[:, :, None]).sum(-1)


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys and values of the newest positions of every row. Position p lies in slot p modulo the window.

    One slot more than the window: padding may be written there and is never read. `kernels.drafter` writes.
    Graphs hold these pointers: never rebind.
    """

    k_RKWd: Tensor
    v_RKWd: Tensor
    position_RW: Tensor  # int64; UNUSED where a slot holds nothing

    @classmethod
    def empty(
        cls, rows: int, window: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "Ring":
        shape = (rows, kv_heads, window + 1, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            torch.full((rows, window + 1), UNUSED, dtype=torch.int64, device=device),
        )

    @property
    def window(self) -> int:
        return self.position_RW.shape[1] - 1

    def first(self, rows: int) -> "Ring":
        """Views of the first rows."""
        return Ring(self.k_RKWd[:rows], self.v_RKWd[:rows], self.position_RW[:rows])


@dataclass(frozen=True, slots=True)
class Nodes:
    """Keys and values of the nodes of every row's draft tree, each in the slot its caller gives it."""

    k_RKNd: Tensor
    v_RKNd: Tensor

    @classmethod
    def empty(
        cls, rows: int, nodes: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "Nodes":
        shape = (rows, kv_heads, nodes, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def first(self, rows: int) -> "Nodes":
        """Views of the first rows."""
        return Nodes(self.k_RKNd[:rows], self.v_RKNd[:rows])


def attend_ring(
    q_RQHd: Tensor, ring: Ring, position_RQ: Tensor, beside: Nodes | None = None, seen_RQN: Tensor | None = None
) -> Tensor:
    """[R, Q, H, d]: queries at these positions over the ring slots in their window and the keys beside that they see.

    No slot may hold a position newer than the queries'.
    """
    near = None if beside is None or seen_RQN is None else (beside.k_RKNd, beside.v_RKNd, seen_RQN)
    attend = dispatch(window_attention.attend, in_gpu_rollout(q_RQHd))
    return attend(q_RQHd, ring.k_RKWd, ring.v_RKWd, ring.position_RW, position_RQ, near, pdl=True)


class Flash(Protocol):
    """Attention over the keys before each query: forward and backward."""

    def forth(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output [T, H, d], log-sum-exp [H, T], and tensors for the backward pass."""

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum_HT: Tensor, rest: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v for the part of `out` from these keys, whose weights are exp(score − logsum)."""


@dataclass(frozen=True, slots=True)
class FlashBand:
    """The attention mask of packed positions, as in `Band`, for flash attention."""

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
        """[T, H, d]: attention over the window, shifted by `step`, and over the query's own chain."""
        back = self.window - 1 - step
        return chained_attention(q_THd, k, v, chain, _VendorFlash(self.starts_C1, self.longest, back))


@dataclass(frozen=True, slots=True)
class _VendorFlash:
    starts_C1: Tensor
    longest: int
    reach: int  # earlier positions that a query attends to

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
    """[T, H, d]: attention over the keys of `flash` and over each query's own chain, [T, K, d] each."""
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
    """Output and log-sum-exp over window and chain, and the weights of the chain's keys."""
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
