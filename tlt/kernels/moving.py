"""Rows of a batch that change places, in torch: the reference of `moving_triton`."""
# R rows, E rows that move

from collections.abc import Sequence

from torch import Tensor


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """x[target] = x[source] of every tensor [R, …]. No row is both; whoever calls sees to that."""
    for x in tensors:
        x[target_E] = x[source_E]
