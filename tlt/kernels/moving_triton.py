"""`moving.move_rows` in Triton: one launch for all tensors, which are found by their address. Rows are copied as words,
whatever they hold.

Rows move whenever a request ends, whether or not anybody drafts, and a launch of their own for each of nine tensors
would hold the host up longer than the copying holds the device. What always holds: a plan of blocks says where tensors
lie and how long their rows are, nothing else, so that it may be kept for others that lie in the same places.
"""
# R rows, E rows that move, B blocks of a row, of all tensors

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words of one program
_WORD = 8  # bytes; rows that do not consist of whole ones are copied byte by byte
_PLANS = 64  # that are kept


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
        blocks += [(address, words, first, size) for first in range(0, words, _BLOCK)]
    plan_B4 = torch.tensor(blocks, dtype=torch.int64)
    return plan_B4.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan_B4


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """As `moving.move_rows`."""
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"rows of a tensor with strides {x.stride()} cannot be moved as words; make it contiguous")
    places = tuple((x.data_ptr(), x.nbytes // len(x)) for x in tensors)
    plan_B4 = _plan(places, source_E.device)
    _move_kernel[(len(source_E), len(plan_B4))](plan_B4, source_E, target_E, BLOCK=_BLOCK, num_warps=8)
