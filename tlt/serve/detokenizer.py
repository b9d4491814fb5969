"""Incremental detokenization of a completion: text without the stop string, and none that a later token changes."""

from collections.abc import Sequence

from tlt.text import TextStream, Tokenizer
from tlt.types import FinishReason, SamplingParams


class Detokenizer:
    """Withholds incomplete characters, and the characters that may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams | None, *, with_stop: bool = False) -> None:
        """`with_stop`: the stop string or stop token is part of the text."""
        self._stream = TextStream(tokenizer)
        self._stops = params.stop if params else ()
        self._stop_tokens = frozenset(params.stop_token_ids if params else ())
        self._with_stop = with_stop
        self._withheld = 0 if with_stop else max(map(len, self._stops), default=1) - 1  # may begin a stop string
        self._text, self._sent = "", 0
        self.stop: str | int | None = None  # the string or token that ended the completion

    def feed(self, tokens: Sequence[int], reason: FinishReason | None) -> str:
        """The text added by these tokens. With a `reason` they are the last."""
        if reason == "stop" and tokens and tokens[-1] in self._stop_tokens:
            self.stop, tokens = tokens[-1], tokens if self._with_stop else tokens[:-1]
        self._text += self._stream.feed(tokens)
        if reason is None:
            end = max(self._sent, len(self._text) - self._withheld)
        else:
            self._text += self._stream.rest()
            end = self._end(reason)
        added, self._sent = self._text[self._sent : end], end
        return added

    def _end(self, reason: FinishReason) -> int:
        found = [(self._text.find(stop), stop) for stop in self._stops if stop in self._text]
        if reason != "stop" or self.stop is not None or not found:
            return len(self._text)
        at, self.stop = min(found)
        return len(self._text) if self._with_stop else at
