"""Attention over a paged KV cache, in torch: what a CPU runs, and the reference of `triton` and `cache_triton`.

Owns reading and writing the cache of one layer. Always holds: nothing outside a request's context reaches its output,
not even a NaN. A key that is NaN affects only the queries that see it, so a draft with undefined states does not fail
its request. Requests of context 0 give zeros. Knows pages and slots as numbers only; the page allocator owns them.

Legend: T query tokens of all requests, one after the other; R requests; P pages a request may have; Q queries per
request; L context; H query heads, K key heads; d head width, h half of it; W words of 32 bits; N = (H + 2K)·d;
M positions in a table; m query rows, (query, head of the group) pairs.
Cache: `[pages, page_size, K, d]`, page_size a power of two. Slot = page · page_size + offset. Index tensors are int32.
"""

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tlt.kernels.linear.elementwise import rms_norm

WASTE_ALLOWED = 2  # pad a ragged batch up to this many times its tokens; beyond, attend in groups of like query lengths
_kept = threading.local()  # scratch memory of each thread


def rope_and_write(
    qkv_TN: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_Mh: Tensor,
    sin_Mh: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    n_q: int,
    n_kv: int,
    d_h: int,
    *,
    rotary: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Norm (Qwen3) and rotate q and k, write k and v to their slots (-1: nowhere), return q as `[T, n_q, d_h]`.

    Rotation is the half-split one of Hugging Face's Llama; the float32 tables hold any scaling already.
    `pdl` is a launch hint for the GPU and changes nothing here.
    """
    heads_THd = qkv_TN.view(qkv_TN.shape[0], n_q + 2 * n_kv, d_h)
    rotated_THd, v_TKd = heads_THd[:, : n_q + n_kv], heads_THd[:, n_q + n_kv :]
    if q_norm is not None and k_norm is not None:
        rotated_THd = _norm_heads(rotated_THd, n_q, q_norm, k_norm, norm_eps)
    if rotary:
        rotated_THd = _rotate(rotated_THd, cos_Mh[positions_T], sin_Mh[positions_T])
    _write(k_cache, v_cache, slots_T, rotated_THd[:, n_q:], v_TKd)
    q_THd = rotated_THd[:, :n_q]
    return q_THd.contiguous() if out is None else out.copy_(q_THd)


def _norm_heads(heads_THd: Tensor, n_q: int, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    q_THd, k_TKd = heads_THd[:, :n_q], heads_THd[:, n_q:]
    return torch.cat((rms_norm(q_THd, q_norm, eps), rms_norm(k_TKd, k_norm, eps)), dim=1)


def _rotate(heads_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """In the tables' precision or the heads', whichever is finer, then back to the heads' type."""
    cos_T1h, sin_T1h = cos_Th.unsqueeze(1), sin_Th.unsqueeze(1)
    first, second = heads_THd.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h), dim=-1)
    return rotated.to(heads_THd.dtype)


def _write(k_cache: Tensor, v_cache: Tensor, slots_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
    """Padding (-1) is dropped first: index_copy_ has no 'nowhere'."""
    kept_T = slots_T >= 0
    if not bool(kept_T.all()):
        slots_T, k_TKd, v_TKd = slots_T[kept_T], k_TKd[kept_T], v_TKd[kept_T]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots_T.long(), k_TKd)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots_T.long(), v_TKd)


def paged_attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    page_table_RP: Tensor,
    *,
    max_query: int,
    scale: float,
    tree_mask_TW: Tensor | None = None,
    out: Tensor | None = None,
    sliding_window: int = 0,
    pdl: bool = False,
    kv_splits_S: Tensor | None = None,
) -> Tensor:
    """Attention of each request's queries over its own context, the queries being the context's last tokens, in order.

    Request r owns the tokens query_start[r] to query_start[r+1]; context_len[r] counts them, and their keys are in the
    cache already. Without a tree mask they see each other causally. With one, bit j of token t's words says that t sees
    the j-th query of its request: set it for t itself and its ancestors. A window lets a query at position p see
    the keys of positions above p - window; in a tree a node's position counts its ancestors, and the window must be
    wider than the tree is deep. Tokens no request owns, and those of requests of context 0, give zeros.
    `pdl` and `kv_splits_S` say how a GPU launches this, and change nothing here.
    """
    result_THd = torch.empty_like(q_THd) if out is None else out
    n_requests, n_tokens = context_len_R.shape[0], q_THd.shape[0]
    if n_tokens == n_requests * max_query and int(query_start_R1[-1]) == n_tokens:  # so each request has max_query
        q_RQHd = q_THd.view(n_requests, max_query, *q_THd.shape[1:])
        tree_RQW = None if tree_mask_TW is None else tree_mask_TW.view(n_requests, max_query, -1)
        query_len_R: Tensor | int = max_query
        attended = _attend(
            q_RQHd, k_cache, v_cache, query_len_R, context_len_R, page_table_RP, scale, tree_RQW, sliding_window
        )
        return result_THd.copy_(attended.reshape(q_THd.shape))
    result_THd.zero_()
    lengths_R = query_start_R1[1:] - query_start_R1[:-1]
    for chosen_r in _alike(lengths_R, max_query, n_tokens):
        lengths_r = lengths_R[chosen_r]
        steps_Q = torch.arange(int(lengths_r.max()), device=q_THd.device)
        owned_rQ = steps_Q < lengths_r[:, None]
        token_rQ = torch.where(owned_rQ, query_start_R1[chosen_r, None] + steps_Q, 0)
        attended = _attend(
            q_THd[token_rQ],
            k_cache,
            v_cache,
            lengths_r,
            context_len_R[chosen_r],
            page_table_RP[chosen_r],
            scale,
            None if tree_mask_TW is None else tree_mask_TW[token_rQ],
            sliding_window,
        )
        result_THd[token_rQ[owned_rQ]] = attended[owned_rQ]
    return result_THd


def kv_splits_of(context_len_R: Tensor, n_kv: int, group: int, max_query: int) -> Tensor | None:
    """How contexts are divided among programs, for all layers of one forward: in torch they are not."""
    return None


def _alike(lengths_R: Tensor, max_query: int, n_tokens: int) -> Iterator[Tensor]:
    """Indices of requests whose query lengths are close enough to share a padded batch. No query: in none."""
    some_r = (lengths_R > 0).nonzero()[:, 0]
    if max_query * some_r.numel() <= WASTE_ALLOWED * n_tokens:
        groups = [some_r] if some_r.numel() else []
    else:
        magnitude_r = torch.log2(lengths_R[some_r].double()).floor()
        groups = [some_r[magnitude_r == size] for size in torch.unique(magnitude_r)]
    yield from groups


def _attend(
    q_RQHd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_len_R: Tensor | int,
    context_len_R: Tensor,
    page_table_RP: Tensor,
    scale: float,
    tree_RQW: Tensor | None,
    window: int,
) -> Tensor:
    """A padded batch: gather each request's keys and values, mask, one fused attention, rows grouped by key head."""
    n_requests, n_queries, n_heads, d_head = q_RQHd.shape
    n_kv = k_cache.shape[2]
    longest = max(int(context_len_R.max()), 1)
    in_context_RL = torch.arange(longest, device=q_RQHd.device, dtype=torch.int32) < context_len_R[:, None]
    slots_RL = _slots(in_context_RL, page_table_RP, k_cache.shape[1])
    k_RKLd = _gather(k_cache, slots_RL, "k")
    v_RKLd = _gather(v_cache, slots_RL, "v")
    visible_RQL = _visible(in_context_RL, query_len_R, context_len_R, n_queries, tree_RQW, window)
    lost_RKL = _without_number(k_RKLd, context_len_R, n_queries) if n_queries > 1 else None
    if lost_RKL is not None:  # a mask is added, and a weight of zero multiplied: neither silences a NaN
        k_RKLd.masked_fill_(lost_RKL.unsqueeze(3), 0)
        v_RKLd.masked_fill_(lost_RKL.unsqueeze(3), 0)
    bias_RQL = torch.where(visible_RQL, q_RQHd.new_zeros(()), -math.inf)
    # rows are (query, head of the group): every key head is read once for all of them
    group = n_heads // n_kv
    rows_RKmd = (
        q_RQHd.view(n_requests, n_queries, n_kv, group, d_head)
        .transpose(1, 2)
        .reshape(n_requests, n_kv, n_queries * group, d_head)
    )
    bias_R1mL = bias_RQL.unsqueeze(2).expand(-1, -1, group, -1).reshape(n_requests, 1, n_queries * group, longest)
    rows_RKmd = scaled_dot_product_attention(rows_RKmd, k_RKLd, v_RKLd, attn_mask=bias_R1mL, scale=scale)
    if lost_RKL is not None:
        sees_RKQ = (visible_RQL.unsqueeze(1) & lost_RKL.unsqueeze(2)).any(3)
        rows_RKmd = rows_RKmd.masked_fill(sees_RKQ.repeat_interleave(group, dim=2).unsqueeze(3), math.nan)
    rows_RQHd = rows_RKmd.view(n_requests, n_kv, n_queries, group, d_head).transpose(1, 2).reshape(q_RQHd.shape)
    return rows_RQHd.masked_fill(context_len_R.eq(0).view(-1, 1, 1, 1), 0)


def _without_number(k_RKLd: Tensor, context_len_R: Tensor, n_queries: int) -> Tensor | None:
    """`[R, K, L]`: which of the queries' own keys are NaN; None if none is. All queries see the earlier keys."""
    from_end_RQ = context_len_R[:, None] - 1 - torch.arange(n_queries, device=k_RKLd.device)
    index_RKQ = from_end_RQ.clamp(min=0)[:, None].expand(-1, k_RKLd.shape[1], -1)
    own_RKQd = k_RKLd.gather(2, index_RKQ.unsqueeze(3).expand(-1, -1, -1, k_RKLd.shape[3]).long())
    lost_RKQ = own_RKQd.isnan().any(3)
    if not bool(lost_RKQ.any()):
        return None
    lost_RKL = torch.zeros(k_RKLd.shape[:3], dtype=torch.bool, device=k_RKLd.device)
    return lost_RKL.scatter_(2, index_RKQ.long(), lost_RKQ)


def _slots(in_context_RL: Tensor, page_table_RP: Tensor, page_size: int) -> Tensor:
    """The slot of each position. Positions past the context get the first one's: masked, and of the same request."""
    n_requests, longest = in_context_RL.shape
    pages_RP = page_table_RP[:, : (longest + page_size - 1) // page_size]
    offsets = torch.arange(page_size, device=pages_RP.device, dtype=pages_RP.dtype)
    slots_RL = (pages_RP.unsqueeze(2) * page_size + offsets).view(n_requests, -1)[:, :longest]
    first_R1 = torch.where(in_context_RL[:, :1], slots_RL[:, :1], 0)
    return torch.where(in_context_RL, slots_RL, first_R1)


def _gather(cache: Tensor, slots_RL: Tensor, name: str) -> Tensor:
    n_kv, d_head = cache.shape[2:]
    rows = _scratch(name, cache, slots_RL.numel() * n_kv * d_head).view(-1, n_kv * d_head)
    torch.index_select(cache.view(-1, n_kv * d_head), 0, slots_RL.reshape(-1), out=rows)
    return rows.view(*slots_RL.shape, n_kv, d_head).transpose(1, 2)


def _scratch(name: str, like: Tensor, size: int) -> Tensor:
    """Memory kept from call to call: fresh pages from the system cost more than the attention (2.1 ms; kept, 0.8)."""
    kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = _kept.__dict__.setdefault("buffers", {})
    key = (name, like.dtype, like.device)
    if key not in kept or kept[key].numel() < size:
        kept[key] = like.new_empty(size + size // 2)
    return kept[key][:size]


def _visible(
    in_context_RL: Tensor,
    query_len_R: Tensor | int,
    context_len_R: Tensor,
    n_queries: int,
    tree_RQW: Tensor | None,
    window: int,
) -> Tensor:
    """Which position each query sees, `[R, Q, L]`."""
    if n_queries == 1 and window == 0 and tree_RQW is None:
        return in_context_RL.unsqueeze(1)
    device = in_context_RL.device
    position_L = torch.arange(in_context_RL.shape[1], device=device, dtype=torch.int32)
    first_R = context_len_R - query_len_R  # position of the first query
    query_Q = torch.arange(n_queries, device=device, dtype=torch.int32)
    if tree_RQW is None:
        depth_RQ = query_Q.expand(len(first_R), -1)
        visible_RQL = position_L <= (first_R[:, None] + depth_RQ).unsqueeze(2)
        visible_RQL = visible_RQL & in_context_RL.unsqueeze(1)
    else:
        index_RL = position_L - first_R[:, None]  # among the queries; negative before them
        word_RQL = tree_RQW.gather(
            2, (index_RL.clamp(0, 32 * tree_RQW.shape[2] - 1) >> 5).long().unsqueeze(1).expand(-1, n_queries, -1)
        )
        ancestor_RQL = ((word_RQL >> (index_RL & 31).unsqueeze(1)) & 1).bool() & (index_RL >= 0).unsqueeze(1)
        ancestor_RQL = ancestor_RQL & in_context_RL.unsqueeze(1)
        depth_RQ = ancestor_RQL.sum(2, dtype=torch.int32) - 1
        visible_RQL = ancestor_RQL | (index_RL < 0).unsqueeze(1)
    if window > 0:
        seen_from_RQ = first_R[:, None] + depth_RQ - window
        visible_RQL = visible_RQL & (position_L > seen_from_RQ.unsqueeze(2))
    return visible_RQL


def copy_kv(
    k_cache_all: Tensor, v_cache_all: Tensor, src_slots: Tensor, dst_slots: Tensor, *, pdl: bool = False
) -> None:
    """Copy keys and values from slot to slot in all layers; a pair with a -1 on either side is skipped.

    Caches: `[layers, pages, page_size, K, d]`. Slots: `[R, moves]`, a row per request, or `[moves]`, one row. Within a
    row all reads come before all writes, so a slot may be both source and destination; no row may write what another
    reads or writes, and no slot is written twice. `pdl` is a launch hint for the GPU and changes nothing here.
    """
    kept = (src_slots >= 0) & (dst_slots >= 0)
    src, dst = src_slots[kept].long(), dst_slots[kept].long()
    for cache in (k_cache_all, v_cache_all):
        by_slot = cache.view(cache.shape[0], -1, *cache.shape[3:])
        by_slot.index_copy_(1, dst, by_slot.index_select(1, src))
