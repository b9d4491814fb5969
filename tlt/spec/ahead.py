"""Written-ahead text as drafts: how much of it the policy still writes, and how many tokens of it a tick verifies.

Text that an earlier version of the policy wrote with a request's own key differs from the request's completion only
where an update moved a token past its margin, so that it agrees up to a first difference. What always holds: a text is
used as long as the request's tokens agree with it, from any drafter, and is dropped at the first difference; a chunk is
verified only if it promises more tokens per second than what runs otherwise, and if the budget affords that nothing of
it is accepted. Knows tokens and seconds: no engine and no tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from tlt.spec.shape import AHEAD, EMPTY, MOST_NODES, Draft, Shape
from tlt.types import Key

CHUNKS = (16, 32, 64, MOST_NODES)  # nodes of a chunk, the newest token included
MOST_CHUNK_TOKENS = 8192  # most nodes of a tick that verifies chunks; the engine's memory may allow fewer
_MARGIN = 0.02  # expected gain over the other tick from which a chunk is used
_TURNED, _KEPT = 1.0, 99.0  # prior counts of the estimate: one token of a hundred differs
_FADE = 0.5  # weight of earlier counts after a policy update


class TurnRate:
    """Estimates the fraction of written-ahead tokens that differ, among those whose predecessors all agree."""

    def __init__(self) -> None:
        self._turned = self._kept = 0.0
        self.tokens = self.turns = 0  # compared so far, up to first differences; first differences

    def see(self, kept: int, turned: bool) -> None:
        """Counts `kept` agreeing tokens. `turned`: the next one differed."""
        self._kept += kept
        self._turned += turned
        self.tokens += kept + turned
        self.turns += turned

    def policy_changed(self) -> None:
        """Fades the counts: the next texts were written by another version of the policy."""
        self._kept *= _FADE
        self._turned *= _FADE

    @property
    def rate(self) -> float:
        turned = self._turned + _TURNED
        return turned / (turned + self._kept + _KEPT)


def emitted(rate: float, nodes: float) -> float:
    """Expected tokens emitted by a chain of `nodes` nodes, the root included. `rate`: of differences per draft."""
    return (1.0 - (1.0 - rate) ** nodes) / rate if rate > 0.0 else nodes


@dataclass(slots=True)
class _Text:
    tokens: Sequence[int]
    agreed: int = 0  # tokens that the request has written too


class AheadTexts:
    """The texts of requests in flight. A draft is a chain of the next tokens of a request's own text."""

    def __init__(self, turns: TurnRate) -> None:
        self._turns = turns
        self._texts: dict[Key, _Text] = {}

    def give(self, key: Key, text: Sequence[int], max_tokens: int) -> None:
        """Adds the text of a request, at most `max_tokens` − 1 tokens: a draft needs a token after it."""
        if useful := text[: max_tokens - 1]:
            self._texts[key] = _Text(useful)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        self._follow(key, completion)
        self._texts.pop(key, None)

    def left(self, running: Callable[[], Iterable[tuple[Key, Sequence[int]]]]) -> list[int]:
        """Remaining tokens of the texts of running requests, without those that have none."""
        if not self._texts:
            return []
        found = (self._follow(key, completion) for key, completion in running())
        return [len(text.tokens) - text.agreed for text in found if text is not None]

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [self._draft(key, completion, shape) for key, completion in zip(keys, completions, strict=True)]

    def _draft(self, key: Key, completion: Sequence[int], shape: Shape) -> Draft:
        text = self._follow(key, completion)
        if text is None:
            return EMPTY
        tokens = tuple(text.tokens[text.agreed : text.agreed + shape.verify - 1])
        kept = 1.0 - self._turns.rate
        scores = tuple(kept**depth for depth in range(1, len(tokens) + 1))
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), scores)

    def _follow(self, key: Key, completion: Sequence[int]) -> _Text | None:
        """Compares a request's newest tokens with its text. None: it has none left."""
        text = self._texts.get(key)
        if text is None:
            return None
        new, expected = completion[text.agreed :], text.tokens[text.agreed : len(completion)]
        same = next((place for place, pair in enumerate(zip(new, expected, strict=False)) if pair[0] != pair[1]), None)
        self._turns.see(len(expected) if same is None else same, same is not None)
        text.agreed = len(completion)
        if same is None and text.agreed < len(text.tokens):
            return text
        del self._texts[key]
        return None


@dataclass(frozen=True, slots=True)
class Prices:
    """The shape policy's estimates for a batch."""

    seconds: Callable[[Shape], float]  # of a tick
    rate: float  # tokens per second and request of the tick without written-ahead text
    # whether the budget affords a tick whose drafts may all fail; arguments: shape, expected saving
    affords: Callable[[Shape, float], bool]


class ChunkPolicy:
    """Chooses the chunk that a tick verifies."""

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens`: most nodes of a tick that fit in the engine's memory."""
        self._most_tokens = most_tokens
        self.turns = TurnRate()

    def choose(self, batch: int, left: Sequence[int], prices: Prices | None) -> Shape | None:
        """The chunk for a batch. `left`: written-ahead tokens left, of the requests that have any. None: none pays.

        `prices`: None if costs are unknown; then the smallest chunk is used.
        """
        if not left or batch > self._most_tokens:
            return None
        shapes = [self._shape(batch, left, nodes) for nodes in CHUNKS if nodes == CHUNKS[0] or nodes < 2 * max(left)]
        if prices is None:
            return shapes[0]
        promised = [(self._tokens(batch, left, shape) / prices.seconds(shape), shape) for shape in shapes]
        best, shape = max(promised, key=lambda pair: pair[0])
        otherwise = batch * prices.rate
        if best <= otherwise * (1.0 + _MARGIN) or not prices.affords(shape, 1.0 - otherwise / best):
            return None
        return shape

    def _shape(self, batch: int, left: Sequence[int], nodes: int) -> Shape:
        """A chain for each request with text, one node for each of the others.

        The total is rounded up, so that few sizes occur.
        """
        tokens = _padded(batch + sum(min(tokens, nodes - 1) for tokens in left))
        return Shape((AHEAD,), nodes - 1, 1, nodes, min(tokens, batch * nodes, self._most_tokens) / batch)

    def _tokens(self, batch: int, left: Sequence[int], shape: Shape) -> float:
        """Expected tokens of the tick. If the chains do not fit, all of them are shortened alike."""
        rate, drafts = self.turns.rate, [min(tokens, shape.depth) for tokens in left]
        room = min(1.0, (shape.tokens(batch) - batch) / sum(drafts))
        return batch - len(left) + sum(emitted(rate, 1.0 + room * count) for count in drafts)


def _padded(tokens: int) -> int:
    """The next of four sizes per power of two."""
    step = max(1, 1 << max(0, tokens.bit_length() - 3))
    return step * ceil(tokens / step)
