"""Rows of a batch that change places, in torch: the reference of `moving_triton`."""
# R rows, E rows that move

from collections.abc import Sequence

from torch import Tensor


def origins(moves: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Row → where what it ends up with came from. Moves (from, to) happen one after another: it may have come by way of
    others."""
    origin: dict[int, int] = {}
    for source, target in moves:
        origin[target] = origin.get(source, source)
    return origin


def move_rows(tensors: Sequence[Tensor], source_E: Tensor, target_E: Tensor) -> None:
    """x[target] = x[source] of every tensor [R, …], all at once: a row that is written over may be read as well."""
    for x in tensors:
        x[target_E] = x[source_E]
