"""Tokenizer and chat template: the only place where text becomes tokens, and tokens text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlt.errors import ModelError, TaskError
from tlt.types import Message

_PENDING = "\ufffd"  # what an unfinished multi-byte character decodes to


class Tokenizer:
    """A policy's own tokenizer, loaded from its directory."""

    def __init__(self, inner: Any, eos_ids: frozenset[int]) -> None:
        self._inner = inner
        self.eos_ids = eos_ids  # any of these ends an answer
        self.eos_id: int = inner.eos_token_id  # what a supervised answer is taught to end with

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        from transformers import AutoTokenizer  # slow to import: only those who need text pay

        directory = Path(path)
        if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
            raise ModelError(f"no tokenizer in {directory}: expected tokenizer.json and tokenizer_config.json")
        inner = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if inner.eos_token_id is None:
            raise ModelError(f"the tokenizer in {directory} names no eos_token; answers could never end: add one")
        return cls(inner, frozenset({inner.eos_token_id, *_declared_eos(directory)}))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode_prompt(self, content: str | tuple[Message, ...]) -> list[int]:
        """Plain text as the tokenizer opens a text; a chat through the policy's template, ready for the answer."""
        if isinstance(content, str):
            return list(self._inner.encode(content, add_special_tokens=True))
        if not self.has_chat_template:
            raise TaskError(
                "the prompt is a chat, but the policy's tokenizer has no chat template: use a plain text prompt"
            )
        from jinja2 import TemplateError  # as late as transformers imports it

        messages = [{"role": message.role, "content": message.content} for message in content]
        try:
            text = self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message.role for message in content)
            raise TaskError(f"the policy's chat template refuses a chat of {roles or 'nobody'}: {error}") from error
        return list(self._inner.encode(text, add_special_tokens=False))

    def encode_text(self, text: str) -> list[int]:
        """The text alone, no special tokens around it."""
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream:
    """Turns a growing list of tokens into text as it comes, holding back characters that are not complete yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # tokens before this are settled and only cost time
        self._shown = 0  # tokens whose text has been handed out

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        after = self._tokenizer.decode(self._tokens[self._context :])
        if len(after) <= len(before) or after.endswith(_PENDING):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]


class StopWatch:
    """Sees an answer token by token and says when one of the stop texts is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._reach = max(len(stop) for stop in stops) - 1  # a stop text may have begun this far back
        self._tail = ""

    def feed(self, token: int) -> bool:
        text = self._tail + self._stream.feed([token])
        self._tail = text[max(0, len(text) - self._reach) :]
        return any(stop in text for stop in self._stops)


def _declared_eos(directory: Path) -> set[int]:
    """End tokens named by generation_config.json and config.json (some policies end on several)."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            try:
                declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            except json.JSONDecodeError as error:
                raise ModelError(f"{file} is not valid JSON: {error}") from error
            found.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    return found
