"""The two small kernels around a decode tick on a GPU: row state → inputs, drawn tokens → row state.

They do what `tlt.kernels.rows` does with torch operations, in one launch each instead of a dozen.
"""
# R rows, P pages of a row

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit(do_not_specialize=["rows", "pages_stride"])
def _prepare_kernel(
    ints_ptr, floats_ptr, pages_ptr, count_ptr, int64s_ptr, int32s_ptr, float32s_ptr,
    rows, pages_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside & (row < tl.load(count_ptr))
    position = tl.load(ints_ptr + row * 5 + 1, mask=inside, other=0)
    page = tl.load(pages_ptr + row * pages_stride + position // PAGE, mask=live, other=0)
    slot = page * PAGE + (position % PAGE).to(tl.int32)
    tl.store(int64s_ptr + row, tl.load(ints_ptr + row * 5, mask=inside), mask=inside)
    tl.store(int64s_ptr + rows + row, position, mask=inside)
    tl.store(int64s_ptr + 2 * rows + row, position + 1, mask=inside)
    for column in tl.static_range(2, 5):  # seed, request, top-k
        tl.store(int64s_ptr + (column + 1) * rows + row, tl.load(ints_ptr + row * 5 + column, mask=inside), mask=inside)
    tl.store(int32s_ptr + row, tl.where(live, slot, -1), mask=inside)
    tl.store(int32s_ptr + rows + row, tl.where(live, position.to(tl.int32) + 1, 0), mask=inside)
    for column in tl.static_range(2):  # temperature, top-p
        tl.store(float32s_ptr + column * rows + row, tl.load(floats_ptr + row * 2 + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    ints_ptr, count_ptr, token_ptr, logprob_ptr, policy_logprob_ptr, packed_ptr, rows, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside & (row < tl.load(count_ptr))
    token = tl.load(token_ptr + row, mask=inside, other=0)
    position = tl.load(ints_ptr + row * 5 + 1, mask=live, other=0)
    tl.store(ints_ptr + row * 5, tl.maximum(token, 0), mask=live)
    tl.store(ints_ptr + row * 5 + 1, position + 1, mask=live)
    logprob = tl.load(logprob_ptr + row, mask=inside, other=0.0)
    policy_logprob = tl.load(policy_logprob_ptr + row, mask=inside, other=0.0)
    tl.store(packed_ptr + row * 3, token.to(tl.int32), mask=inside)
    tl.store(packed_ptr + row * 3 + 1, logprob.to(tl.int32, bitcast=True), mask=inside)
    tl.store(packed_ptr + row * 3 + 2, policy_logprob.to(tl.int32, bitcast=True), mask=inside)


def prepare(
    ints_R5: Tensor, floats_R2: Tensor, pages_RP: Tensor, count: Tensor, rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [6, R]: token, position, position of the next, seed, request, top-k; int32 [2, R]: slot, context;
    float32 [2, R]: temperature, top-p."""
    device = ints_R5.device
    int64s = torch.empty((6, rows), dtype=torch.int64, device=device)
    int32s = torch.empty((2, rows), dtype=torch.int32, device=device)
    float32s = torch.empty((2, rows), dtype=torch.float32, device=device)
    _prepare_kernel[(triton.cdiv(rows, _BLOCK),)](
        ints_R5, floats_R2, pages_RP, count, int64s, int32s, float32s, rows, pages_RP.stride(0),
        PAGE=page_size, BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip
    return int64s, int32s, float32s


def finish(
    ints_R5: Tensor, count: Tensor, token_R: Tensor, logprob_R: Tensor, policy_logprob_R: Tensor, rows: int
) -> Tensor:
    """Advances the rows that are live; returns int32 [R, 3]: token and the bits of both log-probabilities."""
    packed_R3 = torch.empty((rows, 3), dtype=torch.int32, device=ints_R5.device)
    _finish_kernel[(triton.cdiv(rows, _BLOCK),)](
        ints_R5, count, token_R, logprob_R, policy_logprob_R, packed_R3, rows, BLOCK=_BLOCK, num_warps=2
    )
    return packed_R3
