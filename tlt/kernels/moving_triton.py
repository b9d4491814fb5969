"""`moving.move_rows` in Triton: a launch for each tensor, nothing in between. Rows are copied as words, whatever they
hold."""
# R rows, E rows that move, N words of a row

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = (1024, 8192)  # words per program, of short rows and of long ones: two kernels serve all lengths
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _move_kernel(x_ptr, source_ptr, target_ptr, words, BLOCK: tl.constexpr):
    """Program: a block of one row."""
    row = tl.program_id(0)
    source, target = tl.load(source_ptr + row), tl.load(target_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    tl.store(x_ptr + target * words + column, tl.load(x_ptr + source * words + column, mask=inside), mask=inside)


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """As `moving.move_rows`."""
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"rows of a tensor with strides {x.stride()} cannot be moved as words; make it contiguous")
        bytes_RN = x.view(len(x), -1).view(torch.uint8)
        size, word = next((size, word) for size, word in _WORDS if bytes_RN.shape[1] % size == 0)
        words = bytes_RN.shape[1] // size
        block = _BLOCKS[words > _BLOCKS[0]]
        _move_kernel[(len(source_E), triton.cdiv(words, block))](
            bytes_RN.view(word), source_E, target_E, words, BLOCK=block, num_warps=min(8, block // 256)
        )
