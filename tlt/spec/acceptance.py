"""Acceptance: survival per depth and rank of each drafter, expected accept lengths, and the alarm of a collapse.

Always holds: estimates come from verified drafts, and newer ones count more. A verify is evidence for all smaller
depths and widths too; with a shared verify budget, for depth 1 alone. Knows nothing of costs or tensors.

The tree rule. With p_d(r) the probability that the policy's token at depth d is the drafter's r-th candidate, a node is
accepted with the product of its path's p; a tree of `verify` nodes holds the likeliest ones within depth and width, and
its accept length is 1 + the sum of their probabilities. Real trees follow each context's own scores, so the accept
length seen with a shape, relative to the rule, corrects it. With a shared verify budget the rule uses the mean of two
bounds: nodes chosen at random, and nodes chosen with knowledge of what is accepted. Several drafters in one tree count
as one drafter with the best of their ranks, at one node per drafter and rank; at least as good as the best one alone.

The alarm. A drafter whose tokens the policy suddenly refuses is reported; neither cause nor reaction is known here.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log

from tlt.spec.shape import Draft, Shape

Drafters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankHits:
    """Agreement of one drafter's own branches with the policy's tokens, as far as these are known."""

    ranks: tuple[int, ...] = ()  # at depth 1, 2, …: rank of the policy's token among the drafter's candidates, from 1
    missed_among: int = 0  # at the next depth: number of candidates, none of them right; 0: not compared


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The verification of one request's draft."""

    accepted: int  # draft tokens; the verify emitted one more
    rank_hits: tuple[RankHits, ...]  # one per drafter, in the order of shape.drafters; (): not compared
    request: Hashable = None  # identifies the completion; None: unknown, it counts as one of its own


def rank_hits_of(draft: Draft, emitted: Sequence[int], shape: Shape) -> RankHits:
    """Compares a drafter's own draft, before pruning, with the tokens a verify emitted.

    A drafter that named fewer candidates than the shape's width has missed among all it could have named.
    """
    children: dict[int, list[int]] = {}
    for child, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(child)
    node, ranks = -1, list[int]()
    for token in emitted[: shape.depth]:
        best = sorted(children.get(node, ()), key=draft.scores.__getitem__, reverse=True)[: shape.width]
        named = [draft.tokens[child] for child in best]
        if token not in named:
            return RankHits(tuple(ranks), shape.width)
        node = best[named.index(token)]
        ranks.append(named.index(token) + 1)
    return RankHits(tuple(ranks))


def together(rank_hits: Sequence[RankHits]) -> RankHits:
    """Merges several drafters in one tree: the best rank at each depth, until all remaining drafters miss."""
    ranks: list[int] = []
    while hits := [found.ranks[len(ranks)] for found in rank_hits if len(found.ranks) > len(ranks)]:
        ranks.append(min(hits))
    return RankHits(tuple(ranks), min(found.missed_among for found in rank_hits if len(found.ranks) == len(ranks)))


_UNTRIED, _NEXT = (
    0.15,
    0.5,
)  # chance of an untried drafter's first candidate; of the next rank, relative to the one before
PRIOR_VERIFIES = 4.0  # weight of the prior of an untried drafter, or of an earlier version's estimates
HORIZON = 1000.0  # verifies after which an observation counts 1/e
_RULE_VERIFIES = 256.0  # weight of the tree rule against accept lengths seen with a shape
_NEWS = 0.1  # fraction of new evidence that triggers a recomputation of accept lengths


class Survival:
    """Hit rates of one drafter's candidates, or of a set of drafters together: a prior, and decaying counts."""

    def __init__(self, depth: int, width: int, horizon: float = HORIZON) -> None:
        self._width, self._depth = width, depth
        self._hits = [[0.0] * width for _ in range(depth)]  # the policy's token had this rank
        self._misses = [[0.0] * width for _ in range(depth)]  # it was none of this many candidates
        self._weight = 1.0  # weight of the newest verify; it grows, which makes older ones decay
        self._growth = 1.0 + 1.0 / horizon
        self._prior: list[list[float]] | None = None  # chances; None: untried
        self._known = 0.0  # weight of the prior in `evidence`, times `_weight`
        self.fresh = 0.0  # verifies since the last refresh

    @property
    def evidence(self) -> float:
        """Number of verifies behind the estimates, with decay."""
        return (self._known + sum(self._hits[0]) + sum(self._misses[0])) / self._weight if self._depth else 0.0

    def see(self, rank_hits: Iterable[RankHits], shallow: bool = False) -> None:
        """Adds verifies. `shallow`: only depth 1 counts, and the estimates of deeper ones do not decay."""
        before = self._weight
        for seen in rank_hits:
            self._weight *= self._growth
            self.fresh += 1
            self._add(seen if not (shallow and seen.ranks) else RankHits(seen.ranks[:1]))
        if shallow:
            for row in (*self._hits[1:], *self._misses[1:]):
                row[:] = [value * self._weight / before for value in row]
        if self._weight > 1e12:
            for row in (*self._hits, *self._misses):
                row[:] = [value / self._weight for value in row]
            self._known, self._weight = self._known / self._weight, 1.0

    def _add(self, seen: RankHits) -> None:
        for depth, rank in enumerate(seen.ranks[: self._depth]):
            if rank > self._width:
                self._misses[depth][-1] += self._weight
                return
            self._hits[depth][rank - 1] += self._weight
        if seen.missed_among and len(seen.ranks) < self._depth:
            self._misses[len(seen.ranks)][min(seen.missed_among, self._width) - 1] += self._weight

    def load_prior(self, ranks: Sequence[Sequence[float]], verifies: float) -> None:
        """Loads a table of p_d(r) with the weight of `verifies` verifies. Missing depths are like its last row."""
        self._prior = []
        for depth in range(self._depth):
            row, left, chances = ranks[min(depth, len(ranks) - 1)], 1.0, list[float]()
            for rank in range(self._width):
                known = rank < len(row)
                chances.append((min(1.0, row[rank] / left) if left > 0.0 else 0.0) if known else chances[-1] * _NEXT)
                left -= row[rank] if known else 0.0
            self._prior.append(chances)
        self._known = verifies * self._weight
        self.fresh += verifies

    def fade(self, verifies: float) -> None:
        """Keeps the estimates as a prior of this many verifies, and at least those of an untried drafter."""
        known = min(self.evidence, verifies)
        if known:
            untried = [_UNTRIED * _NEXT**rank for rank in range(self._width)]
            self._prior = [list(map(max, chances, untried)) for chances in self._chances()]
        self._hits = [[0.0] * self._width for _ in range(self._depth)]
        self._misses = [[0.0] * self._width for _ in range(self._depth)]
        self._known = known * self._weight
        self.fresh += 1

    def by_depth(self) -> tuple[float, ...]:
        """At depth 1, 2, …: accepted / reached, at any rank; up to the largest depth reached."""
        looked = [(sum(hits), sum(misses)) for hits, misses in zip(self._hits, self._misses, strict=True)]
        return tuple(hits / (hits + misses) for hits, misses in looked if hits + misses > 0.0)

    def ranks(self) -> list[list[float]]:
        """The table p_d(r)."""
        table: list[list[float]] = []
        for chances in self._chances():
            left, row = 1.0, []
            for chance in chances:
                row.append(left * chance)
                left *= 1.0 - chance
            table.append(row)
        return table

    def _chances(self) -> list[list[float]]:
        """The hit rate of each rank, given that the ranks before missed.

        An untried depth is like the depth before; an untried rank of depth 1 is half as likely as the rank before.
        """
        found: list[list[float]] = []
        weight = max(PRIOR_VERIFIES * self._weight, self._known)
        for depth, (hits, misses) in enumerate(zip(self._hits, self._misses, strict=True)):
            looked, chances = sum(hits) + sum(misses), list[float]()
            for rank in range(self._width):
                if self._prior:
                    prior = self._prior[depth][rank]
                else:
                    prior = found[-1][rank] if found else chances[-1] * _NEXT if chances else _UNTRIED
                chances.append((hits[rank] + weight * prior) / (looked + weight))
                looked -= hits[rank] + misses[rank]
            found.append(chances)
        return found


def likeliest_nodes(ranks: list[list[float]], count: int) -> list[tuple[float, int, int]]:
    """(probability of being accepted, depth, largest rank on its path) of the likeliest nodes, best first."""
    found: list[tuple[float, int, int]] = []
    heap = [(-ranks[0][0], 1, 1, 1.0, 1)]  # −probability, depth, rank, the parent's probability and largest rank
    while heap and len(found) < count:
        negative, depth, rank, above, largest = heappop(heap)
        widest = max(rank, largest)
        found.append((-negative, depth, widest))
        if rank < len(ranks[0]):
            heappush(heap, (-above * ranks[depth - 1][rank], depth, rank + 1, above, largest))
        if depth < len(ranks):
            heappush(heap, (negative * ranks[depth][0], depth + 1, 1, -negative, widest))
    return found


# likeliest nodes, and accept lengths cut from them: by (depth, width), then by number of nodes
_Tree = tuple[list[tuple[float, int, int]], dict[tuple[int, int], list[float]]]


class Acceptance:
    """Survival of every drafter and set of drafters among the shapes, and the accept lengths that follow."""

    def __init__(self, shapes: Sequence[Shape], horizon: float = HORIZON) -> None:
        self._shapes, self._horizon = tuple(shapes), horizon
        self._index = {shape: place for place, shape in enumerate(self._shapes)}
        self._depth = max((shape.depth for shape in shapes), default=0)
        self._width = max((shape.width for shape in shapes), default=0)
        self._nodes = 2 * max((shape.verify for shape in shapes), default=1)
        sets = {shape.drafters for shape in shapes if not shape.off}
        keys = sets | {(drafter,) for drafters in sets for drafter in drafters}
        self._survival = {key: Survival(self._depth, self._width, horizon) for key in keys}
        self._trees: dict[Drafters, _Tree] = {}
        self._rule: list[float] | None = None  # accept length of each shape by the tree rule, at the last refresh
        self._seen: dict[int, tuple[float, float]] = {}  # shape → tokens emitted, tokens the rule expected; both fade

    def evidence(self, drafters: Drafters) -> float:
        return self._survival[drafters].evidence

    def known(self, drafters: Drafters) -> float:
        """Evidence of the least known of these drafters."""
        return min(self.evidence((drafter,)) for drafter in drafters)

    def length(self, shape: Shape) -> float:
        """Expected accept length of a shape."""
        return self.lengths()[self._index[shape]]

    def lengths(self) -> list[float]:
        """Expected accept length of every shape, in order."""
        if self._rule is None:
            self._rule = [1.0 if shape.off else self._by_rule(shape) for shape in self._shapes]
        found = self._rule.copy()
        for place, (emitted, expected) in self._seen.items():
            usual = _RULE_VERIFIES * found[place]
            found[place] = max(1.0, found[place] * (emitted + usual) / (expected + usual))
        return found

    def see(self, shape: Shape, results: Sequence[AcceptResult]) -> None:
        compared, alone = [result for result in results if result.rank_hits], not shape.share
        for index, drafter in enumerate(shape.drafters):
            self._survival[(drafter,)].see((result.rank_hits[index] for result in compared), not alone)
        if len(shape.drafters) > 1:
            if not self.evidence(shape.drafters):
                self._rule = None  # computed from each drafter alone so far
            self._survival[shape.drafters].see((together(result.rank_hits) for result in compared), not alone)
        if self._rule is not None and results:
            place, kept = self._index[shape], max(0.0, 1.0 - len(results) / self._horizon)
            emitted, expected = self._seen.get(place, (0.0, 0.0))
            tokens = len(results) + sum(result.accepted for result in results)
            self._seen[place] = (emitted * kept + tokens, expected * kept + len(results) * self._rule[place])

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]], verifies: float) -> None:
        """Loads p_d(r) of this drafter alone, a row per depth, as the prior of a number of verifies."""
        if (drafter,) not in self._survival:
            known = sorted(key[0] for key in self._survival if len(key) == 1)
            raise ValueError(f"no shape uses drafter {drafter!r}; expected one of {known}")
        self._survival[(drafter,)].load_prior(ranks, verifies)

    def refresh(self) -> None:
        """Recomputes the accept lengths from new evidence, if it exceeds `_NEWS`."""
        for key, survival in self._survival.items():
            if survival.fresh > _NEWS * survival.evidence:
                self._trees.pop(key, None)
                self._rule, survival.fresh = None, 0.0

    def changed(self, drafter: str, verifies: float) -> None:
        """Makes the estimates a prior of this many verifies, for another version of the drafter."""
        for key, survival in self._survival.items():
            if drafter in key:
                survival.fade(verifies)
        self._forget_seen(drafter)

    def forget(self, drafter: str) -> None:
        for key in self._survival:
            if drafter in key:
                self._survival[key] = Survival(self._depth, self._width, self._horizon)
                self._trees.pop(key, None)
        self._forget_seen(drafter)

    def _forget_seen(self, drafter: str) -> None:
        self._rule = None
        self._seen = {place: seen for place, seen in self._seen.items() if drafter not in self._shapes[place].drafters}

    def by_depth(self, drafter: str) -> tuple[float, ...]:
        return self._survival[(drafter,)].by_depth()

    def _by_rule(self, shape: Shape) -> float:
        alone = max(self._tree((drafter,), shape, 1) for drafter in shape.drafters)
        if len(shape.drafters) == 1 or not self.evidence(shape.drafters):
            return alone
        return max(alone, self._tree(shape.drafters, shape, len(shape.drafters)))

    def _tree(self, key: Drafters, shape: Shape, nodes_per_rank: int) -> float:
        lengths = self._by_nodes(key, shape)
        nodes = (shape.verify - 1) // nodes_per_rank
        if not shape.share:
            return lengths[min(nodes, len(lengths) - 1)]
        most = lengths[min(nodes, shape.width * shape.depth, len(lengths) - 1)]  # the verify size may exceed the nodes
        shared = (shape.share - 1.0) / nodes_per_rank
        below = min(int(shared), len(lengths) - 1)
        above = min(below + 1, len(lengths) - 1)
        blindly = lengths[below] + (shared - below) * (lengths[above] - lengths[below])
        return (min(blindly, most) + min(1.0 + shared, most)) / 2

    def _by_nodes(self, key: Drafters, shape: Shape) -> list[float]:
        """Accept lengths of trees of 0, 1, … nodes within the shape's depth and width."""
        if key not in self._trees:
            self._trees[key] = likeliest_nodes(self._survival[key].ranks(), self._nodes), {}
        nodes, known = self._trees[key]
        if (shape.depth, shape.width) not in known:
            lengths = [1.0]
            for probability, depth, rank in nodes:
                if depth <= shape.depth and rank <= shape.width:
                    lengths.append(lengths[-1] + probability)
            known[shape.depth, shape.width] = lengths
        return known[shape.depth, shape.width]


# ---- the alarm


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drafter's acceptance collapsed; it is not used until a try shows that it is useful again."""

    drafter: str
    shape: Shape  # in use when the collapse showed
    recent: float  # accept length of a chain of the drafter's first candidates, since acceptance fell
    baseline: float  # the same before
    verifies: int  # that `recent` rests on


_FALL = 4.0  # factor by which the odds of a first candidate fall in a collapse
_VERIFIES_COUNTED = 2  # most verifies counted per completion
_COMPLETIONS_REMEMBERED = 4096  # completions whose counts are kept
_BASELINE_VERIFIES = (64, 4096)  # from which the usual odds are known; over which they are a mean
_THRESHOLD = 48.0  # of the sum; completions that differ as much as any seen reach 40 without a collapse


class CollapseWatch:
    """Watches one drafter.

    A CUSUM of log-likelihood ratios: "the odds of the drafter's first candidates fell to a quarter" against "they are
    as usual". Only first candidates count, so a change of shape is no collapse; a completion counts a few times only,
    for its verifies resemble each other.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._right, self._wrong = 0.0, 1.0  # baseline: first candidates per verify, means that start from one miss
        self._verifies = 1  # that the baseline rests on
        self._counted: OrderedDict[Hashable, int] = OrderedDict()  # completion → verifies counted
        self._sum, self._since = 0.0, (0, 0, 0)  # CUSUM; verifies, right and wrong candidates since it was 0

    def see(self, shape: Shape, results: Sequence[AcceptResult]) -> Alarm | None:
        """The alarm, at the moment the collapse shows. It would repeat: the caller starts a new watch."""
        index = shape.drafters.index(self._drafter)
        for result in results:
            if result.rank_hits and self._counts(result.request):
                ranks = result.rank_hits[index].ranks
                right = next((depth for depth, rank in enumerate(ranks) if rank > 1), len(ranks))
                told = right < len(ranks) or result.rank_hits[index].missed_among > 0
                self._add(right, int(told and right < shape.depth))
        if self._sum < _THRESHOLD:
            return None
        verifies, right, wrong = self._since
        return Alarm(self._drafter, shape, 1.0 + right / wrong, 1.0 + self._right / self._wrong, verifies)

    def _counts(self, completion: Hashable) -> bool:
        """Whether a verify of this completion counts. None, an unknown completion, always counts."""
        if completion is None:
            return True
        counted = self._counted.pop(completion, 0)
        self._counted[completion] = counted + 1
        if len(self._counted) > _COMPLETIONS_REMEMBERED:
            self._counted.popitem(last=False)
        return counted < _VERIFIES_COUNTED

    def _add(self, right: int, wrong: int) -> None:
        """Adds a verify with `right` correct first candidates in a row. `wrong`: the next one was wrong."""
        if self._verifies >= _BASELINE_VERIFIES[0] and self._right:
            usual = self._right / (self._right + self._wrong)
            fallen = self._right / (self._right + _FALL * self._wrong)
            self._sum += right * log(fallen / usual) + wrong * log((1.0 - fallen) / (1.0 - usual))
            before, all_right, all_wrong = self._since
            self._since = (before + 1, all_right + right, all_wrong + wrong)
            if self._sum <= 0.0:
                self._sum, self._since = 0.0, (0, 0, 0)
        self._verifies = min(self._verifies + 1, _BASELINE_VERIFIES[1])
        self._right += (right - self._right) / self._verifies
        self._wrong += (wrong - self._wrong) / self._verifies
