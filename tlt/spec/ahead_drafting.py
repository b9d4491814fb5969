"""The drafter of written-ahead text: drafts for a request are the next tokens of the text submitted with it.

Always holds: a text is used as long as the request's tokens agree with it, from any drafter; it is dropped
at the first difference. Computes no tensors; `ahead` decides when its drafts are verified.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt.spec.ahead import AHEAD, TurnRate
from tlt.spec.drafter import Drafter
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.types import Key


@dataclass(slots=True)
class _Text:
    tokens: Sequence[int]
    agreed: int = 0  # tokens that the request has written too


class AheadDrafting(Drafter):
    """Chains of a request's own text."""

    name = AHEAD

    def __init__(self, turns: TurnRate) -> None:
        self._turns = turns
        self._texts: dict[Key, _Text] = {}

    @property
    def empty(self) -> bool:
        """True if no request has text left."""
        return not self._texts

    def give(self, key: Key, text: Sequence[int], max_tokens: int) -> None:
        """Adds the written-ahead text of a request, at most `max_tokens` − 1 tokens: a draft needs a token after it."""
        if useful := text[: max_tokens - 1]:
            self._texts[key] = _Text(useful)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        if key in self._texts:
            self._follow(key, completion)
            self._texts.pop(key, None)

    def left(self, running: Iterable[tuple[Key, Sequence[int]]]) -> list[int]:
        """Remaining tokens of the texts of running requests, without those that have none."""
        found = (self._follow(key, completion) for key, completion in running if key in self._texts)
        return [len(text.tokens) - text.agreed for text in found if text is not None]

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [self._draft(key, completion, shape) for key, completion in zip(keys, completions, strict=True)]

    def _draft(self, key: Key, completion: Sequence[int], shape: Shape) -> Draft:
        text = self._follow(key, completion) if key in self._texts else None
        if text is None:
            return EMPTY
        tokens = tuple(text.tokens[text.agreed : text.agreed + shape.verify - 1])
        kept = 1.0 - self._turns.rate
        return Draft(
            tokens, tuple(range(-1, len(tokens) - 1)), tuple(kept**depth for depth in range(1, len(tokens) + 1))
        )

    def _follow(self, key: Key, completion: Sequence[int]) -> _Text | None:
        """Compares the request's newest tokens with its text; None: they differ, and the text is dropped."""
        text = self._texts[key]
        new, expected = completion[text.agreed :], text.tokens[text.agreed : len(completion)]
        same = next((place for place, pair in enumerate(zip(new, expected, strict=False)) if pair[0] != pair[1]), None)
        self._turns.see(len(expected) if same is None else same, same is not None)
        text.agreed = len(completion)
        if same is None and text.agreed < len(text.tokens):
            return text
        del self._texts[key]
        return None
