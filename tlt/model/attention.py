"""Layouts: where the tokens of one forward stand and what each may look at.

A layout travels as an argument, so that trainer, engine and drafter share one model in one process:
- PackedLayout: several sequences in one row, block-diagonal causal attention, positions from 0 in each (training).
- PagedLayout: keys and values live in pages of a cache; queries are the newest tokens of each request (decoding,
  chunked prefill), or with `tree_mask_TW` the nodes of a draft tree, each seeing its own ancestors (verification).
Layouts know heads and positions, not weights; the head norms they apply are handed to them.
"""
# T tokens, R requests, P pages of a request, H heads, d head width, N width of a fused qkv row, W mask words

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tlt.kernels.attention import reference as kernels
from tlt.kernels.dispatch import dispatch
from tlt.kernels.training import reference as training_kernels
from tlt.model.config import ModelConfig
from tlt.model.device import upload
from tlt.model.kv import KVCache
from tlt.model.linear import in_gpu_rollout, in_gpu_training, rms_norm
from tlt.model.rope import rotate


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layout must know of one layer's attention."""

    layer: int
    query: int
    kv: int
    dim: int
    rotary: bool
    window: int  # 0 = all keys
    norm_eps: float

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.dim)


@dataclass(frozen=True, slots=True)
class Rotary:
    """The tables of `rope.rotary_tables`, on the model's device."""

    cos_PR: Tensor
    sin_PR: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the per-head norms of queries and keys; both None where a family has none."""

    query_d: Tensor | None = None
    key_d: Tensor | None = None


class Layout(Protocol):
    @property
    def exact(self) -> bool:
        """Whether a token's bits must not depend on the other tokens of the forward but for those it sees."""
        ...

    def attend(self, qkv_TN: Tensor, heads: Heads, rotary: Rotary, norms: HeadNorms) -> Tensor:
        """Attention over a row of fused projections: [T, N] → [T, query heads × width]."""
        ...


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Sequences of similar length, padded to one length: how to cut them out of the row and put them back."""

    take_BL: Tensor  # row index of every cell; padding repeats the last token, whose output is dropped
    keep_K: Tensor  # cells that are real, flat


class _Rectangles:
    """The sequences of a row cut into rectangles. Made when they are first asked for: flash attention needs none."""

    def __init__(self, sizes_S: Tensor, device: torch.device | str) -> None:
        self._sizes_S = sizes_S
        self._device = device

    @cached_property
    def cut(self) -> tuple[list[_Rectangle], Tensor]:
        """The rectangles, and how to get from their order back to the row's."""
        rectangles, order_T = _rectangles(self._sizes_S.cumsum(0) - self._sizes_S, self._sizes_S)
        sent = [_Rectangle(upload(r.take_BL, self._device), upload(r.keep_K, self._device)) for r in rectangles]
        return sent, upload(torch.argsort(order_T), self._device)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    positions_T: Tensor
    starts_S1: Tensor  # int32, where each sequence starts, and the end
    longest: int
    rectangles: _Rectangles

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedLayout":
        # by numpy: torch would wake up all its threads for a few thousand numbers, in every step
        sizes_S = np.array(lengths, dtype=np.int64)
        starts_S1 = np.concatenate(([0], sizes_S.cumsum()))
        positions_T = np.arange(starts_S1[-1]) - np.repeat(starts_S1[:-1], sizes_S)
        return cls(
            positions_T=upload(torch.from_numpy(positions_T), device),
            starts_S1=upload(torch.from_numpy(starts_S1.astype(np.int32)), device),
            longest=int(sizes_S.max()),
            rectangles=_Rectangles(torch.from_numpy(sizes_S), device),
        )

    @property
    def exact(self) -> bool:
        return False

    def attend(self, qkv_TN: Tensor, heads: Heads, rotary: Rotary, norms: HeadNorms) -> Tensor:
        q, k, v = self._queries_keys_values(qkv_TN, heads, rotary, norms)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return self._attend_flash(q, k, v, heads).flatten(1)
        return self._attend_rectangles(q, k, v, heads).flatten(1)

    def _queries_keys_values(
        self, qkv_TN: Tensor, heads: Heads, rotary: Rotary, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        tables = (rotary.cos_PR, rotary.sin_PR, self.positions_T)
        fused = heads.rotary and (in_gpu_training(qkv_TN) or in_gpu_rollout(qkv_TN))
        if fused and norms.query_d is None:
            return dispatch(training_kernels.split_and_rotate, True)(qkv_TN, *tables, heads.query, heads.kv, heads.dim)
        q, k, v = _split(qkv_TN, heads)
        q, k = _head_norm(q, norms.query_d, heads.norm_eps), _head_norm(k, norms.key_d, heads.norm_eps)
        if fused:
            return dispatch(training_kernels.rotate_heads, True)(q, k, v, *tables)
        if heads.rotary:
            cos_TR, sin_TR = rotary.cos_PR[self.positions_T], rotary.sin_PR[self.positions_T]
            q, k = rotate(q, cos_TR, sin_TR), rotate(k, cos_TR, sin_TR)
        return q, k, v

    def _attend_flash(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, heads: Heads) -> Tensor:
        window = heads.window - 1 if heads.window else None
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *(q_THd, k_TKd, v_TKd, self.starts_S1, self.starts_S1, self.longest, self.longest),
            *(0.0, True, False),  # no dropout, causal, no debug mask
            scale=heads.scale,
            window_size_left=window,
            window_size_right=0 if heads.window else None,
        )[0]
        return out

    def _attend_rectangles(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, heads: Heads) -> Tensor:
        outs = []
        rectangles, restore_T = self.rectangles.cut
        for r in rectangles:
            length = r.take_BL.shape[1]
            q, k, v = (x[r.take_BL].transpose(1, 2) for x in (q_THd, k_TKd, v_TKd))
            mask = _window_mask(length, heads.window, q.device) if 0 < heads.window < length else None
            out_BHLd = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=heads.scale, enable_gqa=heads.query != heads.kv
            )
            outs.append(out_BHLd.transpose(1, 2).flatten(0, 1)[r.keep_K])
        return torch.cat(outs)[restore_T]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Request r owns queries query_start_R1[r] … query_start_R1[r + 1]; they are the newest tokens of its context."""

    cache: KVCache
    positions_T: Tensor
    slots_T: Tensor  # int32, where each token's key and value go; −1 writes nothing (padding)
    query_start_R1: Tensor  # int32
    context_R: Tensor  # int32, tokens in the cache once these are written; 0 = padding
    pages_RP: Tensor  # int32, page table
    max_query: int  # most queries of one request: sizes the launch
    tree_mask_TW: Tensor | None = None  # int32 bits: which queries of its own request a node sees; None = causal
    exact: bool = False  # on a GPU in bfloat16; has no tree mask
    kv_splits_S: Tensor | None = None  # which program reads which part of which context, on a GPU (`kv_splits_of`)

    def attend(self, qkv_TN: Tensor, heads: Heads, rotary: Rotary, norms: HeadNorms) -> Tensor:
        in_triton = qkv_TN.is_cuda
        k_cache, v_cache = self.cache.k[heads.layer], self.cache.v[heads.layer]
        q_THd = dispatch(kernels.rope_and_write, in_triton)(
            *(qkv_TN, self.positions_T, self.slots_T, rotary.cos_PR, rotary.sin_PR, k_cache, v_cache),
            *(heads.query, heads.kv, heads.dim),
            rotary=heads.rotary,
            q_norm=norms.query_d,
            k_norm=norms.key_d,
            norm_eps=heads.norm_eps,
            pdl=True,
        )
        where = (q_THd, k_cache, v_cache, self.query_start_R1, self.context_R, self.pages_RP)
        how: dict[str, Any] = {"max_query": self.max_query, "scale": heads.scale, "sliding_window": heads.window}
        if self.exact and q_THd.is_cuda:
            from tlt.kernels.attention.exact_triton import paged_attention

            return paged_attention(*where, **how, pdl=True).flatten(1)
        how |= {"tree_mask_TW": self.tree_mask_TW, "kv_splits_S": self.kv_splits_S}
        return dispatch(kernels.paged_attention, in_triton)(*where, **how, pdl=True).flatten(1)


def kv_splits_of(context_R: Tensor, config: ModelConfig, max_query: int) -> Tensor | None:
    """How contexts are divided among programs, once for all layers; None where they are not divided."""
    group = config.heads // config.kv_heads
    return dispatch(kernels.kv_splits_of, context_R.is_cuda)(context_R, config.kv_heads, group, max_query)


def _rectangles(starts_S: Tensor, sizes_S: Tensor) -> tuple[list[_Rectangle], Tensor]:
    """Groups sequences whose lengths share a power of two: at most half of a rectangle is padding."""
    buckets: dict[int, list[int]] = {}
    for index, size in enumerate(sizes_S.tolist()):
        buckets.setdefault((size - 1).bit_length(), []).append(index)
    rectangles, order = [], []
    for members in buckets.values():
        start, size = starts_S[members], sizes_S[members]
        column = torch.arange(int(size.max()))
        take_BL = start[:, None] + torch.minimum(column[None, :], size[:, None] - 1)
        real_BL = column[None, :] < size[:, None]
        rectangles.append(_Rectangle(take_BL, real_BL.flatten().nonzero().squeeze(1)))
        order.append(take_BL[real_BL])
    return rectangles, torch.cat(order)


def _split(qkv_TN: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.split(qkv_TN.view(len(qkv_TN), -1, heads.dim), [heads.query, heads.kv, heads.kv], dim=1)
    return q, k, v


def _head_norm(x_THd: Tensor, weight_d: Tensor | None, eps: float) -> Tensor:
    if weight_d is None:
        return x_THd
    return rms_norm(x_THd.contiguous(), weight_d, eps)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (back >= 0) & (back < window)
