"""Which program reads which part of which context: contexts divided into splits of equal length, listed in memory.

One launch per forward serves the attention of all layers. Always holds: the list depends on the contexts alone, never
on the host; every request has a split, whatever its length; the splits of one request are adjacent and in order.
"""
# R requests, S splits

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.plan import MAX_EXTRA, AttentionLaunch

_FILLED = 512  # unused entries written at a time


@triton.jit(do_not_specialize=["requests", "splits", "min_tiles"])
def _list_kernel(
    context_ptr, list_ptr, requests, splits, min_tiles, BLOCK_N: tl.constexpr, R: tl.constexpr, FILLED: tl.constexpr
):
    """One program. Splits are as short as possible without exceeding their number. Their numbers are
    not specialized: prompts come in any number and length, and must not compile another kernel each time."""
    request_R = tl.arange(0, R)
    there_R = request_R < requests
    tiles_R = tl.cdiv(tl.load(context_ptr + request_R, mask=there_R, other=0), BLOCK_N)
    length = tl.maximum(tl.cdiv(tl.sum(tiles_R), splits), min_tiles)
    count_R = tl.where(there_R, tl.maximum(tl.cdiv(tiles_R, length), 1), 0)
    total = tl.sum(count_R)
    while total > splits:
        length += tl.maximum(length // 8, 1)
        count_R = tl.where(there_R, tl.maximum(tl.cdiv(tiles_R, length), 1), 0)
        total = tl.sum(count_R)
    tl.store(list_ptr, length)
    for start in tl.range(0, splits, FILLED):
        split_S = start + tl.arange(0, FILLED)
        tl.store(list_ptr + 1 + split_S, -1, mask=(split_S >= total) & (split_S < splits))
    first_R = tl.cumsum(count_R) - count_R
    for number in tl.range(0, tl.max(count_R)):
        tl.store(list_ptr + 1 + first_R + number, request_R * 256 + number, mask=number < count_R)


def list_kv_splits(context_len_R: Tensor, launch: AttentionLaunch) -> Tensor:
    """int32 [1 + S]: tiles of a split; then for each split 256 · request + its number in that request, −1 if unused."""
    requests = len(context_len_R)
    if not 0 <= launch.extra <= MAX_EXTRA:
        raise ValueError(f"{launch.extra} splits beyond one per request; expected 0 to {MAX_EXTRA}")
    splits = launch.kv_splits(requests)
    listed = torch.empty(1 + splits, dtype=torch.int32, device=context_len_R.device)
    _list_kernel[(1,)](
        context_len_R, listed, requests, splits, max(1, launch.min_split // launch.block_n),
        BLOCK_N=launch.block_n, R=triton.next_power_of_2(requests), FILLED=_FILLED, num_warps=4,
    )  # fmt: skip
    return listed
