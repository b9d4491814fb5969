"""The environment of a simulated worker: how long a tick takes, and how many draft tokens the policy accepts.

What always holds: a tick's time depends on the cost book and the batch alone; random numbers are drawn in the order of
the calls, so equal calls give equal results. Draft tokens are accepted as often as the book's table says, independently
of each other. Real requests differ from one another, and a tree built for each context does better than this.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from tlt.sim.book import CostBook
from tlt.spec.acceptance import Acceptance, AcceptResult, RankHits
from tlt.spec.costs import DECODE, VERIFY, CostModel, TickTimes
from tlt.spec.shape import OFF, Shape

_CERTAIN = 1e9  # weight of the book's table, in verifies: no observation changes it

Paths = frozenset[tuple[int, ...]]  # of a tree's nodes: ranks from the root


class World:
    def __init__(self, book: CostBook, shapes: Sequence[Shape], pad: Callable[[int], int], seed: int) -> None:
        self.book = book
        drafters = {drafter for shape in shapes for drafter in shape.drafters}  # of the book
        self._costs = CostModel(pad, learned=drafters, context_read_once=book.gpu)
        for measured in book.measured:
            self._costs.load_costs(measured)
        self._luck = random.Random(seed)
        self._acceptance = Acceptance(shapes, horizon=_CERTAIN)
        for drafter in drafters if book.ranks else ():
            self._acceptance.load_prior(drafter, book.ranks, _CERTAIN)
        self._hits = [list(accumulate(row)) for row in book.ranks]
        self._trees: dict[Shape, Paths] = {}

    # ---- time

    def tick_s(self, shape: Shape, looked_back: Sequence[int], *, may_draft: bool) -> float:
        """Of requests that look back on so many tokens each; of an engine that drafts at times, or never."""
        seconds = self.times(shape, looked_back, may_draft=may_draft).seconds
        assert seconds is not None
        return seconds

    def times(self, shape: Shape, looked_back: Sequence[int], *, may_draft: bool) -> TickTimes:
        """The same, part by part."""
        book, batch = self.book, len(looked_back)
        tokens = batch * max(looked_back) if book.padded else sum(looked_back)
        times = 1.0 if book.gpu else shape.tokens(batch) / batch
        plain_s = book.off_tick_s if may_draft else book.plain_tick_s
        parts = self._costs.parts(shape, batch)
        parts[DECODE if shape.off else VERIFY] += book.context_s * tokens * times
        return TickTimes(parts, sum(parts.values()) + (plain_s if shape.off else book.verify_tick_s))

    def prefill_s(self, tokens: int) -> float:
        return self.book.prefill_s * tokens

    def catch_up_s(self, shape: Shape, batch: int, lag: int) -> float:
        return self._costs.catching_up(shape, OFF, batch, lag)

    def entering_s(self, shape: Shape, batch: int, positions: float) -> float:
        return self._costs.entering(shape, batch, positions)

    # ---- luck

    def results(self, shape: Shape, requests: Iterable[int]) -> list[AcceptResult]:
        """What each request does with its draft."""
        if shape.share:
            return [self._shared(shape, request) for request in requests]
        tree = self._trees.get(shape)
        if tree is None:
            tree = self._trees[shape] = grown(self._ranks(shape.depth), shape)
        return [self._walk(shape, tree, request) for request in requests]

    def _walk(self, shape: Shape, tree: Paths, request: int) -> AcceptResult:
        path: tuple[int, ...] = ()
        accepted = 0
        while len(path) < shape.depth:
            rank = self._rank(len(path), shape.width)
            if rank is None:
                return AcceptResult(accepted, (RankHits(path, shape.width),), request)
            path = (*path, rank)
            if path not in tree:  # the drafter knew, but there was no room for it
                return AcceptResult(accepted, (RankHits(path),), request)
            accepted += 1
        return AcceptResult(accepted, (RankHits(path),), request)

    def _rank(self, depth: int, width: int) -> int | None:
        """Of the policy's token among the drafter's first candidates; None: it is none of them."""
        hits = self._hits[min(depth, len(self._hits) - 1)]
        rank = bisect_right(hits, self._luck.random()) + 1
        return rank if rank <= min(width, len(hits)) else None

    def _shared(self, shape: Shape, request: int) -> AcceptResult:
        """Where requests share, only the length on average is known."""
        length = self._acceptance.length(shape)
        accepted = min(shape.depth, int(length - 1.0 + self._luck.random()))
        return AcceptResult(accepted, (RankHits((1,)) if accepted else RankHits((), shape.width),), request)

    def _ranks(self, depth: int) -> list[tuple[float, ...]]:
        ranks = self.book.ranks
        return [ranks[min(level, len(ranks) - 1)] for level in range(depth)]


def grown(ranks: Sequence[Sequence[float]], shape: Shape) -> Paths:
    """The likeliest nodes within depth and width, `shape.verify` of them with the root."""
    found: set[tuple[int, ...]] = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while heap and len(found) < shape.verify:
        negative, path = heappop(heap)
        found.add(path)
        if len(path) < shape.depth:
            for rank, chance in enumerate(ranks[len(path)][: shape.width], start=1):
                heappush(heap, (negative * chance, (*path, rank)))
    return frozenset(found)
