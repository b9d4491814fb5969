"""The state of the batch's rows between forwards, in Triton. Same functions as in `reference`, which explains them.

Always holds: one launch each, whose shape depends on shapes alone. Rows that move, and prefixes of new requests, are
found by their address, so that one launch serves all tensors; rows are copied as words, whatever they hold.
A plan of blocks says where tensors lie and how long their rows are, nothing else, so that it can be reused for other
tensors in the same places.
"""
# As in `reference`; B blocks of a row, of all tensors that move; F = 3·D: three taps side by side

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.batch_state.reference import UNUSED, Memory, NewRows, StatePlaces

_ROWS_BLOCK = 64
_MOVE_BLOCK = 2048  # words of one program
_WORD = 8  # bytes; rows that do not consist of whole words are copied byte by byte
_PLANS = 64  # that are kept
_POSITIONS, _COLUMNS = 4, 1024  # of one program
_TAPS_BLOCK = 1024  # columns per program

# ---- around a decode tick


@triton.jit(do_not_specialize=["rows", "pages_stride"])
def _prepare_decode_kernel(
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
    for column in tl.static_range(3):  # temperature, top-p, ln min-p
        tl.store(float32s_ptr + column * rows + row, tl.load(floats_ptr + row * 3 + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _finish_decode_kernel(
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


def prepare_decode(
    ints_R5: Tensor, floats_R3: Tensor, pages_RP: Tensor, count: Tensor, rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [6, R]: token, position, position of the next, seed, request, top-k; int32 [2, R]: slot, context;
    float32 [3, R]: temperature, top-p, ln min-p."""
    device = ints_R5.device
    int64s = torch.empty((6, rows), dtype=torch.int64, device=device)
    int32s = torch.empty((2, rows), dtype=torch.int32, device=device)
    float32s = torch.empty((3, rows), dtype=torch.float32, device=device)
    _prepare_decode_kernel[(triton.cdiv(rows, _ROWS_BLOCK),)](
        ints_R5, floats_R3, pages_RP, count, int64s, int32s, float32s, rows, pages_RP.stride(0),
        PAGE=page_size, BLOCK=_ROWS_BLOCK, num_warps=2,
    )  # fmt: skip
    return int64s, int32s, float32s


def finish_decode(
    ints_R5: Tensor, count: Tensor, token_R: Tensor, logprob_R: Tensor, policy_logprob_R: Tensor, rows: int
) -> Tensor:
    """Advances the rows that are live; returns int32 [R, 3]: token and the bits of both log-probabilities."""
    packed_R3 = torch.empty((rows, 3), dtype=torch.int32, device=ints_R5.device)
    _finish_decode_kernel[(triton.cdiv(rows, _ROWS_BLOCK),)](
        ints_R5, count, token_R, logprob_R, policy_logprob_R, packed_R3, rows, BLOCK=_ROWS_BLOCK, num_warps=2
    )
    return packed_R3


# ---- rows that move


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "source_ptr", "target_ptr"])
def _move_kernel(blocks_ptr, source_ptr, target_ptr, BLOCK: tl.constexpr):
    """Program: a block of one row of one tensor."""
    block = blocks_ptr + 4 * tl.program_id(1)
    address, words, first, size = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    source, target = tl.load(source_ptr + tl.program_id(0)), tl.load(target_ptr + tl.program_id(0))
    column = first + tl.arange(0, BLOCK)
    inside = column < words
    if size == 1:
        x = address.to(tl.pointer_type(tl.int8))
        tl.store(x + target * words + column, tl.load(x + source * words + column, mask=inside), mask=inside)
    else:
        y = address.to(tl.pointer_type(tl.int64))
        tl.store(y + target * words + column, tl.load(y + source * words + column, mask=inside), mask=inside)


@lru_cache(_PLANS)
def _plan(places: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """int64 [B, 4]: address of a tensor, words of its rows, the first of a block, bytes of a word. `places`: address
    and bytes of a row of each."""
    blocks = []
    for address, bytes_a_row in places:
        size = _WORD if address % _WORD == bytes_a_row % _WORD == 0 else 1
        words = bytes_a_row // size
        blocks += [(address, words, first, size) for first in range(0, words, _MOVE_BLOCK)]
    plan_B4 = torch.tensor(blocks, dtype=torch.int64)
    return plan_B4.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan_B4


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """As `reference.move_rows`."""
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"rows of a tensor with strides {x.stride()} cannot be moved as words; make it contiguous")
    places = tuple((x.data_ptr(), x.nbytes // len(x)) for x in tensors)
    plan_B4 = _plan(places, source_E.device)
    _move_kernel[(len(source_E), len(plan_B4))](plan_B4, source_E, target_E, BLOCK=_MOVE_BLOCK, num_warps=8)


# ---- rows of new requests


@triton.jit(do_not_specialize=["requests"], do_not_specialize_on_alignment=["token_ptr"])  # behind the columns
def _enter_kernel(
    states_ptr, tokens_ptr, held_ptr, taken_ptr, ready_ptr, slots_ptr, columns_ptr, token_ptr,
    requests, W, width, stride_row, stride_place, stride_tokens, stride_slots, slots,
    UNUSED: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program: a block of one new request's positions and of their columns; the first program resets the row."""
    one = tl.program_id(0)
    row, first = tl.load(columns_ptr + one), tl.load(columns_ptr + requests + one)
    count = tl.load(columns_ptr + 2 * requests + one)
    at = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known = at < count
    place = (first + at) % W
    address = tl.load(columns_ptr + 6 * requests + one)
    states = tl.multiple_of(address.to(tl.pointer_type(states_ptr.dtype.element_ty)), 16)  # bytes
    ok = known[:, None] & (column < width)[None, :]
    x = tl.load(states + at[:, None].to(tl.int64) * width + column[None, :], mask=ok)
    tl.store(states_ptr + row * stride_row + place[:, None] * stride_place + column[None, :], x, mask=ok)
    if tl.program_id(2) == 0:
        start, last = tl.load(columns_ptr + 3 * requests + one), tl.load(columns_ptr + 4 * requests + one)
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
    """As `reference.enter_rows`."""
    width, slots = memory.states_RWF.shape[2], memory.position_RW.shape[1]
    requests, columns = new.columns_7E.shape[1], min(_COLUMNS, triton.next_power_of_2(width))
    grid = (requests, max(1, triton.cdiv(new.most, _POSITIONS)), triton.cdiv(width, columns))
    _enter_kernel[grid](
        memory.states_RWF, memory.tokens_RW, memory.held_R, memory.taken_R, memory.ready_R, memory.position_RW,
        new.columns_7E, new.token_N, requests, memory.tokens_RW.shape[1], width,
        memory.states_RWF.stride(0), memory.states_RWF.stride(1), memory.tokens_RW.stride(0),
        memory.position_RW.stride(0), slots,
        UNUSED=UNUSED, POSITIONS=_POSITIONS, COLUMNS=columns,
        SLOTS=triton.next_power_of_2(slots), num_warps=4,
    )  # fmt: skip


# ---- hidden states for a drafter


@triton.jit(do_not_specialize=["stride_token", "stride_at", "W"])
def _keep_kernel(
    states_ptr, tokens_ptr, low_ptr, middle_ptr, high_ptr, position_ptr, slot_ptr, token_ptr, at_ptr, steps_ptr,
    width, stride_row, stride_place, stride_tokens, stride_low, stride_middle, stride_high,
    stride_token, stride_at, W, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one step of a row, one block of columns of all three taps. All reads come before the first write, so
    that no read waits for another; states that are not kept are read too."""
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
    """As `reference.keep_states`, for three taps of one width."""
    low, middle, high = taps
    (rows, steps), width = kept.token_RS.shape, low.shape[1]
    token_RS, at_RS = _rows(kept.token_RS), None if kept.at_RS is None else _rows(kept.at_RS)
    steps_R = None if kept.steps_R is None else kept.steps_R.contiguous()
    stride_at = 0 if at_RS is None else at_RS.stride(0)
    block = min(_TAPS_BLOCK, triton.next_power_of_2(width))
    _keep_kernel[(rows, steps, triton.cdiv(width, block))](
        states_RWF, tokens_RW, low, middle, high, kept.position_T, kept.slot_T, token_RS, at_RS, steps_R,
        width, states_RWF.stride(0), states_RWF.stride(1), tokens_RW.stride(0),
        low.stride(0), middle.stride(0), high.stride(0),
        token_RS.stride(0), stride_at, tokens_RW.shape[1], BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _rows(x_RS: Tensor) -> Tensor:
    """With steps side by side, as the engine's are: nothing is copied."""
    return x_RS if x_RS.stride(1) == 1 else x_RS.contiguous()
