"""Prefill inputs on the host: chunks of prompts packed into flat lists, and the slots of pages to copy.

Always holds: entry i of tokens, positions and slots describes the same token; all page tables are padded to one width.
Knows no tensors and no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tlt.engine.scheduler import Chunk, Copy


@dataclass(frozen=True, slots=True)
class Packed:
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]  # index of each chunk's first token; last: the number of tokens
    contexts: list[int]  # context length of each chunk's last token, itself included
    pages: list[list[int]]  # page table of each chunk, padded with 0

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


# (chunks, tokens per chunk) of the warm-up prefills: kernels are specialized by both
_IDLE = ((1, 20), (1, 70), (1, 100), (1, 180), (1, 1500), (8, 100), (20, 20), (40, 20))


def idle_chunks(page_size: int, longest: int) -> list[list[Chunk]]:
    """Dummy prompts that compile the prefill kernels before the first request. All of their tokens lie in page 0."""
    asked = [(count, min(tokens, longest)) for count, tokens in _IDLE]
    return [[Chunk((0,) * n, 0, (0,) * -(-n // page_size), ())] * count for count, n in asked]


def copied_slots(copies: Sequence[Copy], page_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Source and target slots of each page copy, padded with −1 to a full page."""

    def slots(page: int, count: int) -> list[int]:
        return [page * page_size + i if i < count else -1 for i in range(page_size)]

    return [slots(copy.source, copy.count) for copy in copies], [slots(copy.target, copy.count) for copy in copies]
