"""Who reads which part of which context: contexts divided into shares of equal length, listed where they lie.

One launch per forward serves the attention of all layers. Always holds: the list depends on the contexts alone, never
on the host; every request has a share, whatever its length; shares of one request stand side by side, in order.
"""
# R requests, S shares

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.plan import MOST_EXTRA, Launch

_FILLED = 512  # shares at a time that nobody needs


@triton.jit(do_not_specialize=["requests", "shares", "min_tiles"])
def _list_kernel(
    context_ptr, list_ptr, requests, shares, min_tiles, BLOCK_N: tl.constexpr, R: tl.constexpr, FILLED: tl.constexpr
):
    """One program. Shares are as short as can be without becoming too many. Prompts come in any number and length: they
    must not need another kernel each time."""
    request_R = tl.arange(0, R)
    there_R = request_R < requests
    tiles_R = tl.cdiv(tl.load(context_ptr + request_R, mask=there_R, other=0), BLOCK_N)
    length = tl.maximum(tl.cdiv(tl.sum(tiles_R), shares), min_tiles)
    count_R = tl.where(there_R, tl.maximum(tl.cdiv(tiles_R, length), 1), 0)
    total = tl.sum(count_R)
    while total > shares:
        length += tl.maximum(length // 8, 1)
        count_R = tl.where(there_R, tl.maximum(tl.cdiv(tiles_R, length), 1), 0)
        total = tl.sum(count_R)
    tl.store(list_ptr, length)
    for start in tl.range(0, shares, FILLED):
        share_S = start + tl.arange(0, FILLED)
        tl.store(list_ptr + 1 + share_S, -1, mask=(share_S >= total) & (share_S < shares))
    first_R = tl.cumsum(count_R) - count_R
    for number in tl.range(0, tl.max(count_R)):
        tl.store(list_ptr + 1 + first_R + number, request_R * 256 + number, mask=number < count_R)


def list_kv_splits(context_len_R: Tensor, launch: Launch) -> Tensor:
    """int32 [1 + S]: tiles of a share; then, share by share, 256 · its request + its number there, −1 if not needed."""
    requests = len(context_len_R)
    if not 0 <= launch.extra <= MOST_EXTRA:
        raise ValueError(f"{launch.extra} shares beyond one per request; expected 0 to {MOST_EXTRA}")
    shares = launch.shares(requests)
    listed = torch.empty(1 + shares, dtype=torch.int32, device=context_len_R.device)
    _list_kernel[(1,)](
        context_len_R, listed, requests, shares, max(1, launch.min_split // launch.block_n),
        BLOCK_N=launch.block_n, R=triton.next_power_of_2(requests), FILLED=_FILLED, num_warps=4,
    )  # fmt: skip
    return listed
