"""Tokenizer and chat template: the only place that converts between text and tokens.

Always holds: every exception of transformers or panic of tokenizers, caused by a tokenizer's files or a template,
becomes a one-line error. The files and libraries are external, so every exception is caught here.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from os.path import isfile
from pathlib import Path
from typing import Any

from tlt.errors import ModelError, TaskError, shown
from tlt.strict_json import read_object
from tlt.types import Message

_PENDING = "\ufffd"  # the decoding of an incomplete multi-byte character
_MOST_BYTES = 8  # tokens that one character may need

_SAMPLE = "1 + 2 = 3\n"  # every tokenizer must encode and decode this
_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # not caused by the tokenizer


class Tokenizer:
    """A policy's own tokenizer, loaded from its directory."""

    def __init__(self, inner: Any, eos_ids: frozenset[int], vocab: int | None = None) -> None:
        self._inner = inner
        self._vocab = vocab  # size of the policy's vocabulary; None: unchecked
        self._most: int | None = None  # tokens of a prompt, which loses its beginning; None: any
        self.eos_ids = eos_ids  # any of these ends a completion
        self.eos_id: int = inner.eos_token_id  # the last token of a supervised answer
        self._pieces: dict[int, str] = {}  # texts of single tokens

    @classmethod
    def load(cls, path: Path | str, *, vocab: int | None = None) -> "Tokenizer":
        from transformers import AutoTokenizer  # slow to import

        directory = Path(path)
        if not any(isfile(directory / name) for name in _FILES[:2]):
            raise ModelError(f"no tokenizer in {directory}: expected tokenizer.json and tokenizer_config.json")
        declared = _declared_eos(directory)
        try:
            inner = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            inner.decode(inner.encode(_SAMPLE, add_special_tokens=True))
        except _OURS:
            raise
        except BaseException as error:
            raise _unloadable(directory, error) from error
        if type(inner.eos_token_id) is not int:
            raise ModelError(f"the tokenizer in {directory} names no eos_token; answers could never end: add one")
        if vocab is not None and inner.eos_token_id >= vocab:
            raise ModelError(
                f"the tokenizer in {directory} ends an answer with token {inner.eos_token_id}, but the policy's "
                f"vocabulary has {vocab}; expected the policy's own tokenizer"
            )
        return cls(inner, frozenset({inner.eos_token_id, *declared}), vocab)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def cutting(self, limit: int) -> "Tokenizer":
        """The same tokenizer, that leaves of a prompt its last `limit` tokens at most."""
        cutting = copy(self)
        cutting._most = limit
        return cutting

    def encode_prompt(self, content: str | tuple[Message, ...]) -> list[int]:
        """Plain text with the tokenizer's special tokens, or a chat in the template with a generation prompt."""
        tokens = self._encode_whole(content)
        return tokens if self._most is None else tokens[-self._most :]

    def _encode_whole(self, content: str | tuple[Message, ...]) -> list[int]:
        if isinstance(content, str):
            return self._encode(content, special=True)
        return self.encode_chat([{"role": message.role, "content": message.content} for message in content])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        going_on: bool = False,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A chat in the template, with a generation prompt unless it is left out; `going_on`: its last message is to be
        continued instead.

        `tools` and `variables` are what the template knows under these names.
        """
        if not self.has_chat_template:
            raise TaskError(
                "the prompt is a chat, but the policy's tokenizer has no chat template: use a plain text prompt"
            )
        prompted = generation_prompt and not going_on
        options = {**(variables or {}), "add_generation_prompt": prompted, "continue_final_message": going_on}
        try:
            text = self._inner.apply_chat_template(list(messages), tools=list(tools) or None, tokenize=False, **options)
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TaskError(
                f"the policy's chat template refuses a chat of {roles or 'nobody'}: {_why(error)}"
            ) from error
        return self._encode(text, special=False)

    def encode_text(self, text: str, *, special: bool = False) -> list[int]:
        """The text, without special tokens unless they are asked for."""
        return self._encode(text, special=special)

    def piece(self, token: int) -> str:
        """The text of one token alone, special or not. Part of a character reads as a replacement character."""
        if token not in self._pieces:
            self._pieces[token] = self._inner.decode([token], clean_up_tokenization_spaces=False)
        return self._pieces[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        try:
            text: str = self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except _OURS:
            raise
        except BaseException as error:
            raise ModelError(f"the policy's tokenizer cannot decode {shown(list(tokens))}: {_why(error)}") from error
        return text

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            tokens = list(self._inner.encode(text, add_special_tokens=special))
        except _OURS:
            raise
        except BaseException as error:
            raise TaskError(f"the policy's tokenizer cannot encode {shown(text)}: {_why(error)}") from error
        if self._vocab is not None and tokens and max(tokens) >= self._vocab:
            raise TaskError(
                f"{shown(text)} has the token {max(tokens)}, but the policy's vocabulary has {self._vocab}; leave out "
                "what makes this token, or give the policy its own tokenizer"
            )
        return tokens


class TextStream:
    """Decodes tokens incrementally. Text of incomplete characters is withheld until they are complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # tokens before this index no longer change the decoding
        self._shown = 0  # number of tokens whose text was returned

    def feed(self, tokens: Sequence[int]) -> str:
        """The text added by these tokens."""
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        after = self._tokenizer.decode(self._tokens[self._context :])
        if len(after) <= len(before) or after.endswith(_PENDING):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def rest(self) -> str:
        """The text withheld so far: no more tokens will complete it."""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        after = self._tokenizer.decode(self._tokens[self._context :])
        self._context, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]


class TokenTexts:
    """The text of each single token. Together they are the decoded text: a character of several tokens belongs to the
    last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode_text("a")[-1:]  # in front: some tokenizers drop a leading space
        self._before = len(tokenizer.decode(self._anchor))
        self._known: dict[int, str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        texts: list[str] = []
        waiting: list[int] = []
        for token in tokens:
            text = self._of_one(token)
            if waiting or _PENDING in text:
                waiting.append(token)
                text = self._decode(waiting)
                if text.endswith(_PENDING) and len(waiting) < _MOST_BYTES:
                    texts.append("")
                    continue
                waiting = []
            texts.append(text)
        if waiting:
            texts[-1] = self._decode(waiting)
        return texts

    def _of_one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *tokens])[self._before :]


class StopWatch:
    """Decodes a completion token by token and reports when one of the stop strings is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._overlap = max(len(stop) for stop in stops) - 1  # characters in which a stop string may have begun
        self._tail = ""

    def feed(self, token: int) -> bool:
        text = self._tail + self._stream.feed([token])
        self._tail = text[max(0, len(text) - self._overlap) :]
        return any(stop in text for stop in self._stops)


def _declared_eos(directory: Path) -> set[int]:
    """EOS tokens of generation_config.json and config.json. Some policies have several."""
    found: set[int] = set()
    for file in (directory / "generation_config.json", directory / "config.json"):
        declared = read_object(file, ModelError, "copy it again").get("eos_token_id") if isfile(file) else None
        ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if any(type(token) is not int or token < 0 for token in ids):
            raise ModelError(f"{file}: eos_token_id is {shown(declared)}; expected a token's number, or a list of them")
        found.update(ids)
    return found


def _unloadable(directory: Path, error: BaseException) -> ModelError:
    """An error that names the damaged file, if it can be identified."""
    for file in (directory / name for name in _FILES if isfile(directory / name)):
        if "auto_map" in read_object(file, ModelError, "copy it again"):
            return ModelError(
                f"{file} asks for code of its own (auto_map), which tlt never runs; save a tokenizer.json"
            )
    return ModelError(f"the tokenizer in {directory} cannot be loaded: {_why(error)}; copy its files again")


def _why(error: BaseException) -> str:
    kind = type(error).__name__
    says = " ".join(str(error).split())[:300]
    return says if kind in ("Exception", "TemplateError") else f"{kind}: {says}"  # these two names add nothing
