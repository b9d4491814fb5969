"""Words of speculation: the shape of a draft, and a draft itself as a tree of tokens. No tensors.

A tree's node 0 is the root: the request's newest token, whose successor nobody knows yet. Parents come before children.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How to speculate in one tick."""

    drafters: tuple[str, ...] = ()  # who contributes branches, sorted; none = plain decoding
    depth: int = 0  # tokens a branch may run ahead
    width: int = 0  # candidates considered after each node
    verify: int = 1  # nodes the policy checks per request, the root included; where requests share, room for so many
    share: float = 0.0  # nodes per request on average: the likeliest of all requests' trees; 0: `verify` of each

    @property
    def off(self) -> bool:
        return self.verify == 1

    def tokens(self, requests: int) -> int:
        """Nodes that the policy checks in a tick of so many requests."""
        return ceil(requests * self.share) if self.share else requests * self.verify

    @property
    def most_tokens(self) -> float:
        """That a request is given in a tick, on average over all of them, if everything is accepted."""
        return min(self.depth + 1.0, self.share) if self.share else self.depth + 1.0

    def __str__(self) -> str:
        """`suffix 4x2/9`: who, depth × width, nodes verified; `eagle 3x1/4~1.5`: on average 1.5, and room for 4."""
        if self.off:
            return "off"
        shared = f"~{self.share:g}" if self.share else ""
        return f"{'+'.join(self.drafters)} {self.depth}x{self.width}/{self.verify}{shared}"


OFF = Shape()

# A batch that nobody waits to enter lasts as long as its last request. Where requests share, one that has a sixteenth
# less left to write than another has to be e times as predictable to be given a node before it, but never more than e²
# times: whoever cannot be guessed is not helped by drafts. In simulations 8 to 32 were as good, 0 four percent slower.
FAVOUR, MAX_REMAINING_BIAS = 16.0, 2.0
MOST_NODES = 128  # of a tree, the root included: what masks, cache and positions leave room for


TicksByBatch = tuple[tuple[int, str, int], ...]  # requests, up to that power of two; shape; ticks


def by_batch(ticks: Iterable[tuple[tuple[int, "Shape | str"], int]]) -> TicksByBatch:
    """Ticks by number of requests and shape, few numbers of requests."""
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


def depths(draft: Draft) -> list[int]:
    """Of each node; children of the root have depth 1."""
    found: list[int] = []
    for parent in draft.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def merge(drafts: Sequence[Draft], budget: int) -> Draft:
    """One tree of at most `budget` nodes: equal branches become one, the likeliest nodes stay.

    A node's score is the largest any drafter gave it; a node is kept only if its parent is.
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
    """The same trees with the `budget` likeliest nodes of all of them left; of equals the first."""
    scores = [_limited(draft) for draft in drafts]
    order = sorted((-score, node, row) for row, found in enumerate(scores) for node, score in enumerate(found))
    left = [0] * len(drafts)
    for _, _, row in order[:budget]:
        left[row] += 1
    return [_best(draft, nodes) for draft, nodes in zip(drafts, left, strict=True)]


def _limited(draft: Draft) -> list[float]:
    """Scores. A child can never outlive its parent: it counts at most as much."""
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
