"""The shape of a draft, and a draft as a tree of tokens. No tensors.

Node 0 of a tree is the root: the request's newest token, whose successor is not known yet. Parents precede children.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

AHEAD = "ahead"  # the drafter of written-ahead text, in shapes


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The form of speculation in one tick."""

    drafters: tuple[str, ...] = ()  # drafters that contribute branches, sorted; (): plain decoding
    depth: int = 0  # tokens of the longest branch
    width: int = 0  # candidates per node
    verify: int = 1  # nodes verified per request, the root included; with a shared verify budget, their limit
    share: float = 0.0  # shared verify budget, in nodes per request; 0: every request verifies `verify` nodes

    @property
    def off(self) -> bool:
        return self.verify == 1

    @property
    def ahead(self) -> bool:
        """Whether it verifies a chunk of written-ahead text."""
        return self.drafters == (AHEAD,)

    def tokens(self, requests: int) -> int:
        """Nodes that the policy verifies in a tick of `requests` requests."""
        return ceil(requests * self.share) if self.share else requests * self.verify

    @property
    def most_tokens(self) -> float:
        """Tokens emitted per request, on average, if every node is accepted."""
        return min(self.depth + 1.0, self.share) if self.share else self.depth + 1.0

    def __str__(self) -> str:
        """`suffix 4x2/9`: drafters, depth × width, nodes verified; `eagle 3x1/4~1.5`: 1.5 on average, at most 4."""
        if self.off:
            return "off"
        shared = f"~{self.share:g}" if self.share else ""
        return f"{'+'.join(self.drafters)} {self.depth}x{self.width}/{self.verify}{shared}"


OFF = Shape()


def shown(shape: Shape) -> Shape:
    """The shape as reports name it: chunks of one size are one shape, however many requests had text."""
    return replace(shape, share=0.0) if shape.ahead else shape


# When no request waits for a row, the batch lasts as long as its longest request. So a shared verify budget prefers
# requests with many tokens left: one with a sixteenth less left must be e times as predictable to get a node first, but
# never more than e² times, as drafts do not help an unpredictable request. In simulations 8 to 32 were as good as 16,
# and 0 was 4 % slower.
FAVOUR, MAX_REMAINING_BIAS = 16.0, 2.0
MOST_NODES = 128  # of a tree, the root included: limited by masks, KV cache and positions


TicksByBatch = tuple[tuple[int, str, int], ...]  # number of requests (a power of two at least as large), shape, ticks


def by_batch(ticks: Iterable[tuple[tuple[int, "Shape | str"], int]]) -> TicksByBatch:
    """Sums ticks by shape and number of requests, rounded up to powers of two."""
    found: dict[tuple[int, str], int] = {}
    for (requests, shape), count in ticks:
        key = 1 << max(0, requests - 1).bit_length(), str(shape)
        found[key] = found.get(key, 0) + count
    return tuple((requests, shape, count) for (requests, shape), count in sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate tokens for one request, without the root: node i here is node i + 1 of the tree."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # index in `tokens`, or −1 for the root
    scores: tuple[float, ...] = ()  # estimated probability that the policy walks through this node

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY = Draft()


def merge(drafts: Sequence[Draft], budget: int) -> Draft:
    """Merges drafts into one tree of the `budget` likeliest nodes. Equal branches become one.

    A node's score is the largest that any drafter gave it; a node is kept only if its parent is.
    """
    children: dict[tuple[int, int], int] = {}  # (parent node, token) → node
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for draft in drafts:
        place: list[int] = []
        for token, parent, score in zip(draft.tokens, draft.parents, draft.scores, strict=True):
            under = -1 if parent < 0 else place[parent]
            node = children.setdefault((under, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(under)
                scores.append(score)
            else:
                scores[node] = max(scores[node], score)
            place.append(node)
    return _best(Draft(tuple(tokens), tuple(parents), tuple(scores)), budget)


def share_out(drafts: Sequence[Draft], budget: int) -> list[Draft]:
    """Prunes the trees to the `budget` likeliest nodes of all of them; of equal nodes the first stays."""
    scores = [_limited(draft) for draft in drafts]
    order = sorted((-score, node, row) for row, found in enumerate(scores) for node, score in enumerate(found))
    left = [0] * len(drafts)
    for _, _, row in order[:budget]:
        left[row] += 1
    return [_best(draft, nodes) for draft, nodes in zip(drafts, left, strict=True)]


def _limited(draft: Draft) -> list[float]:
    """Scores, limited to the parent's score: a child is accepted only if its parent is."""
    limited: list[float] = []
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        limited.append(score if parent < 0 else min(score, limited[parent]))
    return limited


def _best(draft: Draft, budget: int) -> Draft:
    """The `budget` likeliest nodes."""
    limited = _limited(draft)
    order = sorted(range(len(draft)), key=lambda node: (-limited[node], node))
    kept = sorted(order[:budget])
    new = {node: index for index, node in enumerate(kept)}
    return Draft(
        tuple(draft.tokens[node] for node in kept),
        tuple(-1 if draft.parents[node] < 0 else new[draft.parents[node]] for node in kept),
        tuple(limited[node] for node in kept),
    )
