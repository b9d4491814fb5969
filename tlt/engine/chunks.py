"""Pieces of prompts, one behind the other, as a forward takes them, and pages to copy: plain lists, on the host.

What always holds: token i stands at position i and in slot i of the cache; a piece's page table is as wide as the
widest. Knows no tensors and no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tlt.engine.scheduler import Chunk, Copy


@dataclass(frozen=True, slots=True)
class Packed:
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]  # of each piece among the tokens, and the end
    contexts: list[int]  # positions that each piece's last token sees
    pages: list[list[int]]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_size: int) -> "Packed":
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for chunk in chunks:
            span = range(chunk.start, chunk.start + len(chunk.tokens))
            tokens += chunk.tokens
            positions += span
            slots += [chunk.pages[position // page_size] * page_size + position % page_size for position in span]
            starts.append(len(tokens))
        width = max(len(chunk.pages) for chunk in chunks)
        pages = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks]
        contexts = [chunk.start + len(chunk.tokens) for chunk in chunks]
        return cls(tokens, positions, slots, starts, contexts, pages)


# prompts and their tokens: kernels differ by how many there are of each
_IDLE = ((1, 20), (1, 70), (1, 100), (1, 180), (1, 1500), (8, 100), (20, 20), (40, 20))


def idle_chunks(page_size: int, longest: int) -> list[list[Chunk]]:
    """Prompts of nobody, before there are others, to see what reading prompts takes. All in one page."""
    asked = [(count, min(tokens, longest)) for count, tokens in _IDLE]
    return [[Chunk((0,) * n, 0, (0,) * -(-n // page_size), ())] * count for count, n in asked]


def copied_slots(copies: Sequence[Copy], page_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of each page what is copied, and to where; −1 behind it."""

    def slots(page: int, count: int) -> list[int]:
        return [page * page_size + i if i < count else -1 for i in range(page_size)]

    return [slots(copy.source, copy.count) for copy in copies], [slots(copy.target, copy.count) for copy in copies]
