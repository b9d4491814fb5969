"""Rows of a batch that change places, in torch: the reference of `moving_triton`."""
# R rows, E rows that move

from collections.abc import Sequence

from torch import Tensor


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """x[target] = x[source] of every tensor [R, …], all at once: a row that is written over may be read as well."""
    for x in tensors:
        x[target_E] = x[source_E]
