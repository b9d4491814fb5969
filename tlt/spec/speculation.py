"""Speculation as the engine sees it: which shape now, which trees, and how it went.

Owns the drafters and the policy that chooses between them; knows tokens and seconds, no tensors. Whatever happens here,
the tokens that come out are the same.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tlt.spec.acceptance import Walked, track
from tlt.spec.alarm import Alarm
from tlt.spec.drafter import Drafter
from tlt.spec.shape import OFF, Draft, Shape, merge
from tlt.spec.tuner import Outcome, TunerPolicy
from tlt.types import Key, SamplingParams


class Speculation(Protocol):
    """What the engine asks and tells."""

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def end(self, key: Key, answer: Sequence[int]) -> None: ...

    def choose(self, running: int) -> Shape: ...

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]: ...

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float) -> None:
        """A tick with these trees emitted these tokens, row by row, and took this long."""

    def decoded(self, running: int, seconds: float) -> None:
        """A plain tick took this long."""


class NoSpeculation:
    """Plain decoding."""

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        pass

    def end(self, key: Key, answer: Sequence[int]) -> None:
        pass

    def choose(self, running: int) -> Shape:
        return OFF

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        raise AssertionError("plain decoding drafts nothing")

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float) -> None:
        pass

    def decoded(self, running: int, seconds: float) -> None:
        pass


class Speculating:
    """Drafters whose branches are merged into one tree per request, in the shape that a tuner chooses."""

    def __init__(self, drafters: Sequence[Drafter], tuner: TunerPolicy) -> None:
        self._drafters: Mapping[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self._tuner = tuner
        self._proposed: list[tuple[Draft, ...]] = []  # of the tick under way: per request, a draft per drafter
        self.alarms: list[Alarm] = []

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        for drafter in self._drafters.values():
            drafter.begin(key, prompt_id, prompt, params)

    def end(self, key: Key, answer: Sequence[int]) -> None:
        for drafter in self._drafters.values():
            drafter.end(key, answer)

    def choose(self, running: int) -> Shape:
        return self._tuner.choose(running) if running else OFF

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        columns = [self._drafters[name].propose(keys, answers, shape) for name in shape.drafters]
        self._proposed = list(zip(*columns, strict=True))
        return [merge(parts, shape.verify - 1) for parts in self._proposed]

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float) -> None:
        walks = [
            Walked(len(tokens) - 1, tuple(track(draft, tokens, shape) for draft in parts))
            for tokens, parts in zip(emitted, self._proposed, strict=True)
        ]
        self.alarms += self._tuner.observe(Outcome(shape, len(walks), walks, seconds))

    def decoded(self, running: int, seconds: float) -> None:
        self._tuner.observe(Outcome(OFF, running, (), seconds))
