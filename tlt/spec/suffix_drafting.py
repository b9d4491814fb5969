"""The suffix drafter as a `Drafter`: decides which texts are indexed, and when.

What always holds: drafts for a request come only from texts of its own prompt; finished completions that wait to be
indexed have at most as many tokens as the index may hold.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import median
from typing import Self

from tlt.config import RunConfig
from tlt.policy import Policy
from tlt.spec.drafter import Drafter, Running
from tlt.spec.shape import Draft, Shape
from tlt.spec.suffix import SuffixDrafter
from tlt.types import Key, SamplingParams

_COMPLETIONS_KEPT = 16  # finished completions per prompt that wait to be indexed
_PAST = Key(0, 1 << 64)  # finished completions are indexed under this key, one at a time; no request has it

_TOKEN_S = 4e-6  # seconds to index a token, until it was timed
_TIMED, _TIMES = 256, 5  # fewest tokens of a timing; number of timings whose median is used

_Finished = tuple[Sequence[int], Sequence[int]]  # prompt and completion


class SuffixDrafting(Drafter):
    """`SuffixDrafter` as a drafter. A text is indexed when a draft for its prompt is first asked for.

    While all ticks are plain it costs a list append per completion and nothing per token.
    """

    name = "suffix"

    @classmethod
    def build(cls, policy: Policy, config: RunConfig) -> Self:
        return cls(config.spec.memory_tokens)

    def __init__(self, memory_tokens: int) -> None:
        self._suffix = SuffixDrafter(memory_tokens)
        self._memory_tokens = memory_tokens
        self._waiting: dict[Key, tuple[str, Sequence[int]]] = {}  # begun, not yet indexed
        self._indexed: dict[Key, int] = {}  # tokens of the completion that are indexed
        self._finished: OrderedDict[str, deque[_Finished]] = (
            OrderedDict()
        )  # finished, not indexed; by prompt, newest last
        self._kept_tokens = 0  # of `_finished`
        self._token_s: deque[float] = deque([_TOKEN_S], maxlen=_TIMES)

    def host_extend_s(self, running: Running) -> float:
        return median(self._token_s) * self._due(running)

    def _due(self, running: Running) -> int:
        """Tokens still to index: of indexed requests what they wrote since; of the others all of it, their prompts
        unless indexed already, and the finished completions of these prompts."""
        due, prompts = 0, dict[str, int]()
        for key, completion in running:
            due += len(completion) - self._indexed.get(key, 0)
            if key in self._waiting:
                prompt_id, prompt = self._waiting[key]
                prompts[prompt_id] = 0 if self._suffix.holds(prompt_id) else len(prompt)
        finished = (self._finished.get(prompt_id, ()) for prompt_id in prompts)
        return due + sum(prompts.values()) + sum(len(completion) for kept in finished for _, completion in kept)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._waiting[key] = (prompt_id, prompt)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        if key in self._indexed:
            self._suffix.extend(key, completion[self._indexed.pop(key) :])
            self._suffix.end(key)
            return
        prompt_id, prompt = self._waiting.pop(key)
        self._keep(prompt_id, (prompt, tuple(completion)))

    def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        lag = [
            (key, completion)
            for key, completion in zip(keys, completions, strict=True)
            if key in self._waiting or len(completion) - self._indexed[key] > shape.depth + 1
        ]
        if not lag:
            return
        due, started = self._due(lag), time.perf_counter()
        for key, completion in lag:
            if key in self._waiting:
                self._index(key)
            self._extend(key, completion)
        if due >= _TIMED:
            self._token_s.append((time.perf_counter() - started) / due)

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        drafts = []
        for key, completion in zip(keys, completions, strict=True):
            self._extend(key, completion)
            drafts.append(self._suffix.propose(key, shape.depth, shape.width, shape.verify - 1))
        return drafts

    def _extend(self, key: Key, completion: Sequence[int]) -> None:
        self._suffix.extend(key, completion[self._indexed[key] :])
        self._indexed[key] = len(completion)

    def _keep(self, prompt_id: str, finished: _Finished) -> None:
        """Keeps a finished completion for later. Beyond the memory limit the oldest prompts are dropped."""
        kept = self._finished.setdefault(prompt_id, deque())
        self._finished.move_to_end(prompt_id)
        kept.append(finished)
        self._kept_tokens += _size(finished)
        if len(kept) > _COMPLETIONS_KEPT:
            self._kept_tokens -= _size(kept.popleft())
        while self._kept_tokens > self._memory_tokens:
            self._give_up(next(iter(self._finished)))

    def _give_up(self, prompt_id: str) -> Sequence[_Finished]:
        gone = self._finished.pop(prompt_id, ())
        self._kept_tokens -= sum(map(_size, gone))
        return gone

    def _index(self, key: Key) -> None:
        """Indexes the request's prompt and the finished completions of its group."""
        prompt_id, prompt = self._waiting.pop(key)
        for earlier_prompt, completion in self._give_up(prompt_id):
            self._suffix.begin(_PAST, prompt_id, earlier_prompt)
            self._suffix.extend(_PAST, completion)
            self._suffix.end(_PAST)
        self._suffix.begin(key, prompt_id, prompt)
        self._indexed[key] = 0


def _size(finished: _Finished) -> int:
    prompt, completion = finished
    return len(prompt) + len(completion)
