"""The text of a completion as clients see it: without the stop text, and nothing that a later token takes back."""

from collections.abc import Sequence

from tlt.text import TextStream, Tokenizer
from tlt.types import FinishReason, SamplingParams


class ShownText:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams | None, *, with_stop: bool = False) -> None:
        """`with_stop`: the stop text is shown."""
        self._stream = TextStream(tokenizer)
        self._stops = params.stop if params and not with_stop else ()
        self._stop_tokens = frozenset(params.stop_token_ids) if params and not with_stop else frozenset()
        self._held = max(map(len, self._stops), default=1) - 1  # characters that may belong to a stop text
        self._text, self._shown = "", 0
        self.stop: str | int | None = None  # what ended the completion

    def feed(self, tokens: Sequence[int], reason: FinishReason | None) -> str:
        """The text added by these tokens; `reason`: they are the last."""
        if reason == "stop" and tokens and tokens[-1] in self._stop_tokens:
            self.stop, tokens = tokens[-1], tokens[:-1]
        self._text += self._stream.feed(tokens)
        if reason is None:
            end = max(self._shown, len(self._text) - self._held)
        else:
            self._text += self._stream.rest()
            end = self._end(reason)
        shown, self._shown = self._text[self._shown : end], end
        return shown

    def _end(self, reason: FinishReason) -> int:
        found = [(self._text.find(stop), stop) for stop in self._stops if stop in self._text]
        if reason != "stop" or self.stop is not None or not found:
            return len(self._text)
        at, self.stop = min(found)
        return at
