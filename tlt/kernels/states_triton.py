"""`states.keep_states` in Triton: one launch for all taps and the tokens."""
# R rows, S positions of a row, W slots of a ring, F = 3·D: three taps side by side

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # columns per program


@triton.jit
def _keep_kernel(
    states_ptr, tokens_ptr, low_ptr, middle_ptr, high_ptr, source_ptr, slot_ptr, token_ptr,
    width, stride_row, stride_slot, stride_tokens, stride_low, stride_middle, stride_high, S, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: one position, one block of columns of all three taps."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = place // S
    slot = tl.load(slot_ptr + place).to(tl.int64)
    source = tl.load(source_ptr + place).to(tl.int64)
    out = states_ptr + row * stride_row + slot * stride_slot + column
    tl.store(out, tl.load(low_ptr + source * stride_low + column, mask=inside), mask=inside)
    tl.store(out + width, tl.load(middle_ptr + source * stride_middle + column, mask=inside), mask=inside)
    tl.store(out + 2 * width, tl.load(high_ptr + source * stride_high + column, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(tokens_ptr + row * stride_tokens + slot, tl.load(token_ptr + place).to(tl.int64))


def keep_states(
    states_RWF: Tensor, tokens_RW: Tensor, taps: Sequence[Tensor], source_RS: Tensor, slot_RS: Tensor, token_RS: Tensor
) -> None:
    """As `states.keep_states`, for three taps of one width."""
    low, middle, high = taps
    width, positions = low.shape[1], slot_RS.shape[1]
    _keep_kernel[(slot_RS.numel(), triton.cdiv(width, _BLOCK))](
        states_RWF, tokens_RW, low, middle, high,
        source_RS.contiguous(), slot_RS.contiguous(), token_RS.contiguous(),
        width, states_RWF.stride(0), states_RWF.stride(1), tokens_RW.stride(0),
        low.stride(0), middle.stride(0), high.stride(0), positions, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
