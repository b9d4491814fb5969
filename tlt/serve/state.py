"""What all endpoints share: the engine, the names of the served weights, and the limits of the server."""

from dataclasses import dataclass, field
from pathlib import Path

from tlt.serve.async_engine import AsyncEngine
from tlt.serve.lora import Adapters
from tlt.serve.options import ServeOptions
from tlt.serve.protocol import ApiError, Fields, is_tokens, refused
from tlt.text import Tokenizer


@dataclass(slots=True)
class ServerState:
    engine: AsyncEngine
    options: ServeOptions
    model: str  # the policy's name
    path: str  # of its weights, as it was opened
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.served.tokenizer

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

    def prompts(self, fields: Fields) -> list[tuple[int, ...]]:
        """`prompt`: a text, token ids, or a list of either."""
        value = fields.raw("prompt")
        items = [value] if isinstance(value, str) or (is_tokens(value) and value) else value
        if not isinstance(items, list) or not items:
            raise refused(fields.name("prompt"), "expected a text, token ids, or a list of either")
        special = fields.flag("add_special_tokens", True)
        found = []
        for item in items:
            if isinstance(item, str):
                found.append(tuple(self.tokenizer.encode_text(item, special=special)))
            elif is_tokens(item) and item:
                found.append(tuple(item))
            else:
                raise refused(fields.name("prompt"), "expected a text, token ids, or a list of either")
        return found

    def room(self, prompt: tuple[int, ...]) -> int:
        """Tokens of context behind a prompt, at least one: the engine refuses prompts that are too long."""
        return max(1, self.engine.served.context - len(prompt))
