"""What every endpoint works with: the client of the engine, the served names, and the server's limits."""

from dataclasses import dataclass, field
from pathlib import Path

from tlt.serve.client import Client
from tlt.serve.errors import ApiError, refused
from tlt.serve.fields import Fields, is_tokens
from tlt.serve.lora import Adapters
from tlt.serve.options import ServeOptions
from tlt.text import Tokenizer


@dataclass(slots=True)
class Service:
    client: Client
    options: ServeOptions
    model: str  # the policy's name
    path: str  # of its weights, as it was opened
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.client.served.tokenizer

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
        """The name the caller uses; every way to write the policy's is taken."""
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
        """Tokens that may be written behind a prompt; at least one: a prompt that is too long is refused later."""
        return max(1, self.client.served.context - len(prompt))
