"""`states.keep_states` in Triton: one launch for all taps and the tokens."""
# R rows, S steps of a row, W slots of a ring, F = 3·D: three taps side by side

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.cache_triton import start
from tlt.kernels.states import StatePlaces

_BLOCK = 1024  # columns per program


@triton.jit(do_not_specialize=["stride_token", "stride_at", "W"])
def _keep_kernel(
    states_ptr, tokens_ptr, low_ptr, middle_ptr, high_ptr, position_ptr, slot_ptr, token_ptr, at_ptr, steps_ptr,
    width, stride_row, stride_place, stride_tokens, stride_low, stride_middle, stride_high,
    stride_token, stride_at, W, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one step of a row, one block of columns of all three taps. All is read before anything is written, so
    that no read waits for another; what is not kept is read all the same."""
    start(PDL)
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = row
    if at_ptr is not None:
        source = tl.load(at_ptr + row * stride_at + step)
    low = tl.load(low_ptr + source * stride_low + column, mask=inside)
    middle = tl.load(middle_ptr + source * stride_middle + column, mask=inside)
    high = tl.load(high_ptr + source * stride_high + column, mask=inside)
    token = tl.load(token_ptr + row * stride_token + step).to(tl.int64)
    live = tl.load(slot_ptr + source) >= 0
    if steps_ptr is None:
        steps = tl.num_programs(1)
    else:
        steps = tl.load(steps_ptr + row)
    place = tl.load(position_ptr + source).to(tl.int64) % W
    stays = live & (step < steps) & (step + W >= steps)
    out = states_ptr + row * stride_row + place * stride_place + column
    tl.store(out, low, mask=inside & stays)
    tl.store(out + width, middle, mask=inside & stays)
    tl.store(out + 2 * width, high, mask=inside & stays)
    if tl.program_id(2) == 0:
        tl.store(tokens_ptr + row * stride_tokens + place, tl.maximum(token, 0), mask=stays)


def keep_states(
    states_RWF: Tensor, tokens_RW: Tensor, taps: Sequence[Tensor], kept: StatePlaces, *, pdl: bool = False
) -> None:
    """As `states.keep_states`, for three taps of one width."""
    low, middle, high = taps
    (rows, steps), width = kept.token_RS.shape, low.shape[1]
    token_RS, at_RS = _rows(kept.token_RS), None if kept.at_RS is None else _rows(kept.at_RS)
    steps_R = None if kept.steps_R is None else kept.steps_R.contiguous()
    stride_at = 0 if at_RS is None else at_RS.stride(0)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _keep_kernel[(rows, steps, triton.cdiv(width, block))](
        states_RWF, tokens_RW, low, middle, high, kept.position_T, kept.slot_T, token_RS, at_RS, steps_R,
        width, states_RWF.stride(0), states_RWF.stride(1), tokens_RW.stride(0),
        low.stride(0), middle.stride(0), high.stride(0),
        token_RS.stride(0), stride_at, tokens_RW.shape[1], BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _rows(x_RS: Tensor) -> Tensor:
    """With steps side by side, as the engine's are: nothing is copied."""
    return x_RS if x_RS.stride(1) == 1 else x_RS.contiguous()
