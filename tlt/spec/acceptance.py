"""What the policy will accept: survival per depth and rank of each drafter, and a shape's accept length from it.

What always holds: the estimates come from what policies really walked, newer verifies counting more; a verify speaks
for all shorter depths and narrower widths too, one of requests that shared for depth 1 alone. What was measured before
the first walk counts like a few of them. Knows nothing of costs, tensors or the choice of a shape.

The rule of the tree. With p_d(r) the probability that the policy's token at depth d is the drafter's r-th candidate, a
node is reached with the product of its path's p; a tree of `verify` nodes holds the likeliest ones within depth and
width, and its accept length is 1 + the sum of their probabilities. Real trees follow each context's own scores and do
better (or worse): what a shape really gave, over what the rule foresaw, corrects it.
Where requests share what is verified, the drafter knows better than chance for whom it is worth it, and less than for
sure: the rule takes the middle between choosing blindly and knowing what will be accepted.
Several drafters in one tree count as one whose rank is the best of theirs, each rank costing one node per drafter; at
least what the best of them would give alone.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tlt.spec.shape import Draft, Shape

Drafters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankHits:
    """How far one drafter's own branches, alone, go along with the policy, as far as the policy's tokens are known."""

    ranks: tuple[int, ...] = ()  # at depth 1, 2, …: rank of the policy's token among the drafter's candidates, from 1
    missed_among: int = 0  # then the policy's token was none of this many candidates; 0: nobody looked further


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What one request did with its draft."""

    accepted: int  # draft tokens the policy walked through; the verify emitted one more
    rank_hits: tuple[RankHits, ...]  # one per drafter, in the order of shape.drafters; none: nobody looked
    request: Hashable = None  # which one it was, if somebody looked; None: nobody says, it counts as one of its own


def rank_hits_of(draft: Draft, emitted: Sequence[int], shape: Shape) -> RankHits:
    """Of a drafter's own draft, before anything was pruned, against the tokens a verify emitted.

    A drafter that named fewer candidates than it was asked for has missed among all it could have named.
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
    """Of several drafters in one tree: the best rank at each depth, until all that are still in the race miss."""
    ranks: list[int] = []
    while hits := [found.ranks[len(ranks)] for found in rank_hits if len(found.ranks) > len(ranks)]:
        ranks.append(min(hits))
    return RankHits(tuple(ranks), min(found.missed_among for found in rank_hits if len(found.ranks) == len(ranks)))


_COLD = 0.15  # chance of the first candidate before anything is known …
_NEXT_RANK = 0.5  # … and of a rank nobody tried, given that those before missed, against the rank before it
_PRIOR = 4.0  # verifies the prior is worth


class Survival:
    """Of one drafter, or of one set of drafters together."""

    def __init__(self, depth: int, width: int, horizon: float) -> None:
        self._width, self._depth = width, depth
        self._hits = [[0.0] * width for _ in range(depth)]  # policy's token had this rank
        self._misses = [[0.0] * width for _ in range(depth)]  # it was none of so many candidates
        self._weight = 1.0  # of the newest verify: growing it forgets the older ones
        self._growth = 1.0 + 1.0 / horizon
        self._guess = [[0.0] * width for _ in range(depth)]  # chances believed before the last `fade`, or recalled
        self.fresh = 0.0  # verifies since the last `fade` or since somebody set it to 0

    @property
    def evidence(self) -> float:
        """Verifies it rests on; those of long ago count for little."""
        return (sum(self._hits[0]) + sum(self._misses[0])) / self._weight

    def see(self, rank_hits: Iterable[RankHits], shallow: bool = False) -> None:
        """`shallow`: they speak of depth 1 alone, and what is known of the others keeps its worth."""
        before = self._weight
        for seen in rank_hits:
            self._weight *= self._growth
            self.fresh += 1
            self._add(_first_only(seen) if shallow else seen)
        if shallow:
            for row in (*self._hits[1:], *self._misses[1:]):
                row[:] = [value * self._weight / before for value in row]
        if self._weight > 1e12:
            self._scale(1.0 / self._weight)
            self._weight = 1.0

    def load_prior(self, ranks: Sequence[Sequence[float]], worth: float) -> None:
        """As if `worth` verifies had gone as a table of p_d(r) says, below its last row as in that row. Where few of
        them would have got, the table is leaned on all the same."""
        reaching = worth * self._weight
        for depth, (hits, misses) in enumerate(zip(self._hits, self._misses, strict=True)):
            row, missed = ranks[min(depth, len(ranks) - 1)][: self._width], 1.0
            for rank, probability in enumerate(row):
                self._guess[depth][rank] = min(1.0, probability / missed) if missed > 0.0 else 0.0
                hits[rank] += reaching * probability
                missed -= probability
            misses[len(row) - 1] += reaching * max(0.0, missed)
            reaching *= min(1.0, sum(row))
        self.fresh += worth

    def fade(self, most: float) -> None:
        """Keeps the estimates, unless they are worse than a stranger's, as worth at most so many verifies."""
        self._guess = self._all_chances()
        if self.evidence > most:
            self._scale(most / self.evidence)
        self.fresh += 1

    def by_depth(self) -> tuple[float, ...]:
        """Share accepted at depth 1, 2, … of what got there, at any rank; as deep as something got. What was recalled
        counts too."""
        looked = [(sum(hits), sum(misses)) for hits, misses in zip(self._hits, self._misses, strict=True)]
        return tuple(hits / (hits + misses) for hits, misses in looked if hits + misses > 0.0)

    def ranks(self) -> list[list[float]]:
        """p_d(r)."""
        table: list[list[float]] = []
        for chances in self._all_chances():
            left, row = 1.0, []
            for chance in chances:
                row.append(left * chance)
                left *= 1.0 - chance
            table.append(row)
        return table

    def _all_chances(self) -> list[list[float]]:
        """Of each rank given that those before missed, among the verifies that looked so far. Where little is known it
        leans on the depth before, at depth 1 on the rank before; or on what was recalled, or believed before a `fade`,
        if that is better."""
        found: list[list[float]] = []
        for depth, (hits, misses) in enumerate(zip(self._hits, self._misses, strict=True)):
            looked, at_risk = 0.0, [0.0] * self._width
            for rank in reversed(range(self._width)):
                looked += hits[rank] + misses[rank]
                at_risk[rank] = looked
            found.append(self._chances(hits, at_risk, found[-1] if found else [_COLD], self._guess[depth]))
        return found

    def _chances(
        self, hits: list[float], at_risk: list[float], shallower: list[float], before: list[float]
    ) -> list[float]:
        chances: list[float] = []
        strength = _PRIOR * self._weight
        for rank in range(self._width):
            guess = shallower[rank] if rank < len(shallower) else chances[-1] * _NEXT_RANK
            prior = max(guess, before[rank])
            chances.append((hits[rank] + strength * prior) / (at_risk[rank] + strength))
        return chances

    def _add(self, seen: RankHits) -> None:
        for depth, rank in enumerate(seen.ranks[: self._depth]):
            if rank > self._width:
                self._misses[depth][-1] += self._weight
                return
            self._hits[depth][rank - 1] += self._weight
        if seen.missed_among and len(seen.ranks) < self._depth:
            self._misses[len(seen.ranks)][min(seen.missed_among, self._width) - 1] += self._weight

    def _scale(self, factor: float) -> None:
        for row in (*self._hits, *self._misses):
            row[:] = [value * factor for value in row]


def _first_only(seen: RankHits) -> RankHits:
    """What happened at depth 1."""
    return seen if not seen.ranks else RankHits(seen.ranks[:1])


def likeliest_nodes(ranks: list[list[float]], count: int) -> list[tuple[float, int, int]]:
    """(probability of being walked through, depth, largest rank on its path) of the likeliest nodes, best first."""
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


@dataclass(slots=True)
class _Foreseen:
    """A drafter set's likeliest nodes as of its last review, and accept lengths cut from them."""

    nodes: list[tuple[float, int, int]] = field(default_factory=list)
    lengths: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # (depth, width) → by nodes kept


_SAMPLE = 32  # walks of one tick that are looked into; of more, every n-th
_MODEL_WORTH = 256.0  # verifies that the rule of the tree is worth against what a shape really gave
_SETTLED = 64.0  # verifies before the rule says enough to be compared with what a shape gives
_NEWS = 0.1  # share of new evidence that makes the accept lengths worth computing again


class Acceptance:
    """Survival of every drafter and set of drafters among the shapes, and what follows from it."""

    def __init__(self, shapes: Sequence[Shape], horizon: float) -> None:
        self._depth = max((shape.depth for shape in shapes), default=0)
        self._width = max((shape.width for shape in shapes), default=0)
        self._nodes = 2 * max((shape.verify for shape in shapes), default=1)
        self._horizon = horizon
        self._sets = {shape.drafters for shape in shapes if not shape.off}
        keys = self._sets | {(drafter,) for drafters in self._sets for drafter in drafters}
        self._survival = {key: self._new_survival() for key in keys}
        self._expected = {key: _Foreseen() for key in keys}
        self._shapes = tuple(shapes)
        self._index = {shape: place for place, shape in enumerate(self._shapes)}
        self._rules: dict[Shape, float] = {}  # accept lengths by the rule of the tree, as of the last review …
        self._unused: list[float] | None = None  # … and of every shape, if nothing corrects that
        self._real: dict[Shape, tuple[float, float]] = {}  # tokens emitted, tokens foreseen: both fading
        self._sampled = 0

    def evidence(self, drafters: Drafters) -> float:
        return self._survival[drafters].evidence

    def known(self, drafters: Drafters) -> float:
        """Evidence an estimate of this set rests on: that of the drafter least is known about."""
        return min(self.evidence((drafter,)) for drafter in drafters)

    def length(self, shape: Shape) -> float:
        """Expected accept length."""
        if shape.off:
            return 1.0
        return self._length(self._rule(shape), *self._real.get(shape, (0.0, 0.0)))

    def _length(self, rule: float, emitted: float, expected: float) -> float:
        return max(1.0, rule * (emitted + _MODEL_WORTH * rule) / (expected + _MODEL_WORTH * rule))

    def lengths(self) -> list[float]:
        """`length` of every shape, in the order they were given in, for less: few of them were ever in use."""
        if self._unused is None:
            self._unused = [
                1.0 if shape.off else self._length(self._by_rule(shape), 0.0, 0.0) for shape in self._shapes
            ]
        found = self._unused.copy()
        for shape in self._real:
            found[self._index[shape]] = self.length(shape)
        return found

    def see(self, shape: Shape, results: Sequence[AcceptResult]) -> None:
        looked = [walked for walked in results if walked.rank_hits]
        stride = max(1, -(-len(looked) // _SAMPLE))
        sample = looked[self._sampled % stride :: stride]
        self._sampled += 1
        shallow = shape.share > 0  # deeper, only those were verified of which much was expected
        for index, drafter in enumerate(shape.drafters):
            self._survival[(drafter,)].see((walked.rank_hits[index] for walked in sample), shallow)
        if len(shape.drafters) > 1:
            if not self.evidence(shape.drafters):
                self._forget_rules()  # from here on there is more to go by than what each gives alone
            self._survival[shape.drafters].see((together(walked.rank_hits) for walked in sample), shallow)
        if self.known(shape.drafters) > _SETTLED:
            self._compare(shape, len(results), len(results) + sum(walked.accepted for walked in results))

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]], worth: float) -> None:
        """This drafter alone was measured elsewhere: p_d(r), a row per depth. It counts like so many verifies."""
        if (drafter,) not in self._survival:
            known = sorted(key[0] for key in self._survival if len(key) == 1)
            raise ValueError(f"no shape uses drafter {drafter!r}; expected one of {known}")
        self._survival[(drafter,)].load_prior(ranks, worth)

    def supposing(self, share: float) -> "Acceptance":
        """As if so many times as many of each drafter's guesses were right, at any depth. By the rule of the tree only,
        and nothing is known of sets of drafters then: for tuners that have seen no tick."""
        other = Acceptance(self._shapes, self._horizon)
        for key, survival in self._survival.items():
            if len(key) == 1 and survival.evidence:
                table = [[share * probability for probability in row] for row in survival.ranks()]
                other.load_prior(key[0], table, survival.evidence)
        return other

    def refresh(self) -> None:
        """Takes new evidence into the accept lengths, where there is enough of it to matter."""
        for key, survival in self._survival.items():
            if survival.fresh > _NEWS * survival.evidence:
                self._expected[key] = _Foreseen()
                self._forget_rules()
                survival.fresh = 0.0

    def changed(self, drafter: str, worth: float) -> None:
        """Another version of the drafter: what is known of the old one is a guess worth this many verifies."""
        for key in self._of(drafter):
            self._survival[key].fade(worth)
        self._real = {shape: real for shape, real in self._real.items() if drafter not in shape.drafters}

    def forget(self, drafter: str) -> None:
        for key in self._of(drafter):
            self._survival[key], self._expected[key] = self._new_survival(), _Foreseen()
        self._forget_rules()
        self._real = {shape: real for shape, real in self._real.items() if drafter not in shape.drafters}

    def by_depth(self, drafter: str) -> tuple[float, ...]:
        return self._survival[(drafter,)].by_depth()

    def _of(self, drafter: str) -> list[Drafters]:
        return [key for key in self._survival if drafter in key]

    def _new_survival(self) -> Survival:
        return Survival(self._depth, self._width, self._horizon)

    def _compare(self, shape: Shape, verifies: int, tokens: int) -> None:
        kept = max(0.0, 1.0 - verifies / self._horizon)
        emitted, expected = self._real.get(shape, (0.0, 0.0))
        self._real[shape] = (emitted * kept + tokens, expected * kept + verifies * self._rule(shape))

    def _rule(self, shape: Shape) -> float:
        """Accept length by the rule of the tree alone."""
        rule = self._rules.get(shape)
        if rule is None:
            rule = self._rules[shape] = self._by_rule(shape)
        return rule

    def _forget_rules(self) -> None:
        self._rules.clear()
        self._unused = None

    def _by_rule(self, shape: Shape) -> float:
        alone = max(self._tree((drafter,), shape, 1) for drafter in shape.drafters)
        if len(shape.drafters) == 1 or not self.evidence(shape.drafters):
            return alone
        return max(alone, self._tree(shape.drafters, shape, len(shape.drafters)))

    def _tree(self, key: Drafters, shape: Shape, nodes_a_rank: int) -> float:
        lengths = self._cut(key, shape)
        held = (shape.verify - 1) // nodes_a_rank
        if not shape.share:
            return lengths[min(held, len(lengths) - 1)]
        whole = lengths[min(held, shape.width * shape.depth, len(lengths) - 1)]  # there is room for more than is grown
        nodes = (shape.share - 1.0) / nodes_a_rank
        below = min(int(nodes), len(lengths) - 1)
        above = min(below + 1, len(lengths) - 1)
        blindly = lengths[below] + (nodes - below) * (lengths[above] - lengths[below])
        return (min(blindly, whole) + min(1.0 + nodes, whole)) / 2

    def _cut(self, key: Drafters, shape: Shape) -> list[float]:
        """Accept lengths of trees of 0, 1, … nodes within the shape's depth and width."""
        expected = self._expected[key]
        lengths = expected.lengths.get((shape.depth, shape.width))
        if lengths is None:
            expected.nodes = expected.nodes or likeliest_nodes(self._survival[key].ranks(), self._nodes)
            lengths = [1.0]
            for probability, depth, rank in expected.nodes:
                if depth <= shape.depth and rank <= shape.width:
                    lengths.append(lengths[-1] + probability)
            expected.lengths[(shape.depth, shape.width)] = lengths
        return lengths
