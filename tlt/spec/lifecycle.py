"""Who is being answered, as those who draft are told.

Hundreds come at once when a rollout begins, and go at once when answers are short. The device must not wait until
everybody has heard of that: what always holds is that all have whenever `flush` returns, in the order it happened.
Knows keys, prompts and answers, and decides nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from tlt.spec.drafter import Drafter
from tlt.types import Key, SamplingParams

_MAX_DEFERRED = 4096  # that wait: answers of one token end before anybody asks


class LifecycleQueue:
    def __init__(self, drafters: Sequence[Drafter], set_max_len: Callable[[int], None]) -> None:
        """`set_max_len` is told how many ticks an answer may take."""
        self._drafters = drafters
        self._expect = set_max_len
        self._deferred: deque[Callable[[], None]] = deque()
        self._completions: dict[Key, int] = {}  # under way, numbered: a key may come again, for another answer
        self._begun = 0  # answers so far

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._deferred.append(partial(self._begin, key, prompt_id, prompt, params))

    def end(self, key: Key, completion: Sequence[int]) -> None:
        """The answer stays as it is from now on."""
        self._deferred.append(partial(self._end, key, completion))
        if len(self._deferred) > _MAX_DEFERRED:
            self.flush()

    def flush(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def number(self, key: Key) -> int | None:
        """Of the answer under way; None: nobody said that it began."""
        return self._completions.get(key)

    def _begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._completions[key] = self._begun
        self._begun += 1
        self._expect(params.max_tokens)
        for drafter in self._drafters:
            drafter.begin(key, prompt_id, prompt, params)

    def _end(self, key: Key, completion: Sequence[int]) -> None:
        self._completions.pop(key, None)
        for drafter in self._drafters:
            drafter.end(key, completion)
