"""What all endpoints share: the engine, the names of the served weights, and the limits of the server."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tlt.serve.async_engine import AsyncEngine
from tlt.serve.lora import Adapters
from tlt.serve.options import ServeOptions
from tlt.serve.protocol import ApiError, Fields, is_tokens, refused
from tlt.text import Tokenizer

T = TypeVar("T")
_SMALL_BODY = 2**16  # bytes whose tokenization takes the event loop a few milliseconds


@dataclass(slots=True)
class ServerState:
    engine: AsyncEngine
    options: ServeOptions
    model: str  # the policy's name
    path: str  # of its weights, as it was opened
    adapters: Adapters = field(default_factory=Adapters)
    # one thread with a tokenizer of its own: fast tokenizers do not support concurrent calls
    _tokenizer_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"))
    _tokenizer_copy: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.served.tokenizer

    async def with_tokenizer(self, fields: Fields, work: Callable[[Tokenizer], T]) -> T:
        """Tokenizes or detokenizes. Large bodies do so in a thread, while the event loop serves other calls."""
        if fields.size <= _SMALL_BODY:
            return work(self.tokenizer)
        if self._tokenizer_copy is None:
            self._tokenizer_copy = deepcopy(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work, self._tokenizer_copy)

    def close(self) -> None:
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    @property
    def processed(self) -> bool:
        return self.options.logprobs == "processed"

    @property
    def body_limit(self) -> int:
        return self.options.body_mib * 2**20

    @property
    def names(self) -> list[str]:
        """Of the weights that are served now."""
        adapter = self.adapters.name
        return [adapter] if adapter else [self.model]

    def check_model(self, fields: Fields) -> str:
        """The model name of the call: the served name, the path, or the last part of the path."""
        name = fields.text("model") or self.names[0]
        known = {*self.names} if self.adapters.name else {self.model, self.path, Path(self.path).name}
        if name not in known:
            merged = ", an adapter that is merged into the policy" if self.adapters.name else ""
            why = f"this server serves {self.names[0]!r}{merged}"
            raise ApiError(404, f"the model {name!r} is not served: {why}", param="model", code="model_not_found")
        return name

    async def prompts(self, fields: Fields) -> list[tuple[int, ...]]:
        """`prompt`: a text, token ids, or a list of either."""
        value = fields.raw("prompt")
        items = [value] if isinstance(value, str) or (is_tokens(value) and value) else value
        if not isinstance(items, list) or not items:
            raise refused(fields.name("prompt"), "expected a text, token ids, or a list of either")
        if not all(isinstance(item, str) or (is_tokens(item) and item) for item in items):
            raise refused(fields.name("prompt"), "expected a text, token ids, or a list of either")
        special = fields.flag("add_special_tokens", True)

        def encoded(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
            texts = (tokenizer.encode_text(item, special=special) if isinstance(item, str) else item for item in items)
            return [tuple(tokens) for tokens in texts]

        return await self.with_tokenizer(fields, encoded)

    def room(self, prompt: tuple[int, ...]) -> int:
        """Tokens of context behind a prompt, at least one: the engine refuses prompts that are too long."""
        return max(1, self.engine.served.context - len(prompt))
