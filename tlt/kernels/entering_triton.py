"""`entering.enter_rows` in Triton: one launch for all newcomers, whose states are found by their address."""
# W slots of a ring, F states of one position, E newcomers

import triton
import triton.language as tl

from tlt.kernels.entering import UNUSED, Memory, NewRows

_POSITIONS, _COLUMNS = 4, 1024  # of one program


@triton.jit(do_not_specialize=["newcomers"], do_not_specialize_on_alignment=["token_ptr"])  # behind the columns
def _enter_kernel(
    states_ptr, tokens_ptr, held_ptr, taken_ptr, ready_ptr, slots_ptr, columns_ptr, token_ptr,
    newcomers, W, width, stride_row, stride_place, stride_tokens, stride_slots, slots,
    UNUSED: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program: a block of one newcomer's positions and of their columns; the first one sees to the row itself."""
    one = tl.program_id(0)
    row, first = tl.load(columns_ptr + one), tl.load(columns_ptr + newcomers + one)
    count = tl.load(columns_ptr + 2 * newcomers + one)
    at = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known = at < count
    place = (first + at) % W
    address = tl.load(columns_ptr + 6 * newcomers + one)
    states = tl.multiple_of(address.to(tl.pointer_type(states_ptr.dtype.element_ty)), 16)  # bytes
    ok = known[:, None] & (column < width)[None, :]
    x = tl.load(states + at[:, None].to(tl.int64) * width + column[None, :], mask=ok)
    tl.store(states_ptr + row * stride_row + place[:, None] * stride_place + column[None, :], x, mask=ok)
    if tl.program_id(2) == 0:
        start, last = tl.load(columns_ptr + 3 * newcomers + one), tl.load(columns_ptr + 4 * newcomers + one)
        token = tl.load(token_ptr + start + at, mask=known, other=0)
        token = tl.where(at == count - 1, last, token)
        tl.store(tokens_ptr + row * stride_tokens + place, token, mask=known)
        if tl.program_id(1) == 0:
            tl.store(held_ptr + row, first)
            tl.store(taken_ptr + row, first)
            tl.store(ready_ptr + row, 0)
            slot = tl.arange(0, SLOTS)
            tl.store(slots_ptr + row * stride_slots + slot, tl.full((SLOTS,), UNUSED, tl.int64), mask=slot < slots)


def enter_rows(memory: Memory, new: NewRows) -> None:
    """As `entering.enter_rows`."""
    width, slots = memory.states_RWF.shape[2], memory.position_RW.shape[1]
    newcomers, columns = new.columns_7E.shape[1], min(_COLUMNS, triton.next_power_of_2(width))
    grid = (newcomers, max(1, triton.cdiv(new.most, _POSITIONS)), triton.cdiv(width, columns))
    _enter_kernel[grid](
        memory.states_RWF, memory.tokens_RW, memory.held_R, memory.taken_R, memory.ready_R, memory.position_RW,
        new.columns_7E, new.token_N, newcomers, memory.tokens_RW.shape[1], width,
        memory.states_RWF.stride(0), memory.states_RWF.stride(1), memory.tokens_RW.stride(0),
        memory.position_RW.stride(0), slots,
        UNUSED=UNUSED, POSITIONS=_POSITIONS, COLUMNS=columns,
        SLOTS=triton.next_power_of_2(slots), num_warps=4,
    )  # fmt: skip
