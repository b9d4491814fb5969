"""A drafter of your own: the token that followed most often is proposed next, and so on along a chain.

    python examples/custom_drafter.py

A drafter is one class and one entry in `DRAFTERS`. Speculation changes the time and never the tokens, so that this
drafter may guess as badly as it likes: the policy checks every token of its drafts.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod

import tlt
from tlt.config import DRAFTERS
from tlt.spec.shape import Draft, Shape
from tlt.types import Key, SamplingParams


class MostFrequent(tlt.Drafter):
    """Counts over all requests which token follows which."""

    name = "frequent"

    def __init__(self) -> None:
        self._after: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._counted: dict[Key, int] = {}  # running request → tokens of its completion that are counted

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._counted[key] = 0

    def end(self, key: Key, completion: Sequence[int]) -> None:
        del self._counted[key]

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [self._chain(key, completion, shape.depth) for key, completion in zip(keys, completions, strict=True)]

    def _chain(self, key: Key, completion: Sequence[int], depth: int) -> Draft:
        for at in range(max(1, self._counted[key]), len(completion)):
            self._after[completion[at - 1]][completion[at]] += 1
        self._counted[key] = len(completion)
        tokens, shares = list(completion[-1:]), list[float]()
        while tokens and len(tokens) <= depth and (after := self._after[tokens[-1]]):
            ((token, times),) = after.most_common(1)
            tokens.append(token)
            shares.append(times / after.total())
        scores = [prod(shares[: node + 1]) for node in range(len(shares))]
        return Draft(tuple(tokens[1:]), tuple(range(-1, len(shares) - 1)), tuple(scores))


DRAFTERS["frequent"] = MostFrequent

if __name__ == "__main__":
    prompts = [f"{number}+{number + 1}*2=" for number in range(8)]
    chains = {"shape_policy": "fixed", "depths": [3], "widths": [1], "verifies": [4]}
    tokens = []
    for spec in ({}, {"drafter": "frequent", **chains}):
        with tlt.Engine.open("tiny", spec=spec) as engine:
            tokens.append([completion.tokens for completion in engine.generate(prompts, seed=1)])
    print("the tokens of plain decoding" if tokens[0] == tokens[1] else "other tokens than plain decoding")
