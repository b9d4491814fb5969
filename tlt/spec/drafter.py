"""What a drafter is: someone who guesses the policy's next tokens. Wrong, stale or absent, only speed changes."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.spec.suffix import SuffixDrafter
from tlt.types import Key, SamplingParams


class Drafter(Protocol):
    """Told when requests begin and end; asked for a tree per running request."""

    name: str

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def end(self, key: Key, answer: Sequence[int]) -> None:
        """The answer is complete."""

    def catch_up(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> None:
        """Called before `propose`: takes in what is more than the last tick can have added.

        That is work done once, after a start or a pause, and not what drafting in this shape costs.
        """

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        """A draft of at most `shape.verify − 1` nodes for each request; `answers` is what they have written so far."""
        ...


class NoDrafter:
    """Proposes nothing."""

    name = "none"

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        pass

    def end(self, key: Key, answer: Sequence[int]) -> None:
        pass

    def catch_up(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> None:
        pass

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [EMPTY] * len(keys)


_ANSWERS_KEPT = 16  # finished answers per prompt that wait to be indexed
_PAST = Key(0, 1 << 64)  # no request has this key: finished answers are indexed under it, one after the other

_Finished = tuple[Sequence[int], Sequence[int]]  # prompt and answer


class SuffixDrafting:
    """The model-free drafter behind the protocol. Texts are indexed when somebody first asks about their prompt.

    While nobody speculates (a full batch decodes plainly) it costs a list append per answer and nothing per token.
    """

    name = "suffix"

    def __init__(self, memory_tokens: int) -> None:
        self._suffix = SuffixDrafter(memory_tokens)
        self._memory_tokens = memory_tokens
        self._waiting: dict[Key, tuple[str, Sequence[int]]] = {}  # begun, not indexed yet
        self._indexed: dict[Key, int] = {}  # tokens of the answer that the index has
        self._finished: OrderedDict[str, deque[_Finished]] = OrderedDict()  # never indexed; by prompt, latest last
        self._kept_tokens = 0  # in them

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._waiting[key] = (prompt_id, prompt)

    def end(self, key: Key, answer: Sequence[int]) -> None:
        if key in self._indexed:
            self._suffix.extend(key, answer[self._indexed.pop(key) :])
            self._suffix.end(key)
            return
        prompt_id, prompt = self._waiting.pop(key)
        self._keep(prompt_id, (prompt, tuple(answer)))

    def catch_up(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> None:
        for key, answer in zip(keys, answers, strict=True):
            if key in self._waiting:
                self._index(key)
            if len(answer) - self._indexed[key] > shape.depth + 1:
                self._extend(key, answer)

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        drafts = []
        for key, answer in zip(keys, answers, strict=True):
            self._extend(key, answer)
            drafts.append(self._suffix.propose(key, shape.depth, shape.width, shape.verify - 1))
        return drafts

    def _extend(self, key: Key, answer: Sequence[int]) -> None:
        self._suffix.extend(key, answer[self._indexed[key] :])
        self._indexed[key] = len(answer)

    def _keep(self, prompt_id: str, finished: _Finished) -> None:
        """Until somebody asks about the prompt. No more than the index could hold: the oldest prompts go."""
        kept = self._finished.setdefault(prompt_id, deque())
        self._finished.move_to_end(prompt_id)
        kept.append(finished)
        self._kept_tokens += _size(finished)
        if len(kept) > _ANSWERS_KEPT:
            self._kept_tokens -= _size(kept.popleft())
        while self._kept_tokens > self._memory_tokens:
            self._give_up(next(iter(self._finished)))

    def _give_up(self, prompt_id: str) -> Sequence[_Finished]:
        gone = self._finished.pop(prompt_id, ())
        self._kept_tokens -= sum(map(_size, gone))
        return gone

    def _index(self, key: Key) -> None:
        """The request, and whatever its group has finished."""
        prompt_id, prompt = self._waiting.pop(key)
        for earlier_prompt, answer in self._give_up(prompt_id):
            self._suffix.begin(_PAST, prompt_id, earlier_prompt)
            self._suffix.extend(_PAST, answer)
            self._suffix.end(_PAST)
        self._suffix.begin(key, prompt_id, prompt)
        self._indexed[key] = 0


def _size(finished: _Finished) -> int:
    prompt, answer = finished
    return len(prompt) + len(answer)
