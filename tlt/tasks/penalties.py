"""Built-in rewards that look at the length of a completion alone. Pure functions of a completion."""

from dataclasses import dataclass

from tlt.config import TaskSettings
from tlt.errors import ConfigError
from tlt.types import Completion, Prompt

_BUFFER = 0.2  # of the limit, where task.overlong_tokens is 0


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """Minus the completion's share of the limit: 0 to -1."""

    max_tokens: int

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return -len(completion.tokens) / self.max_tokens


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment: 0, then falling in a straight line over the last `buffer` tokens, -1 at the
    limit."""

    max_tokens: int
    buffer: int

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        over = len(completion.tokens) - (self.max_tokens - self.buffer)
        return -min(1.0, max(0.0, over / self.buffer))


def penalty(name: str, settings: TaskSettings, max_tokens: int) -> LengthPenalty | OverlongPenalty | None:
    """The penalty of that name; None if it is another reward's."""
    if name == "length":
        return LengthPenalty(max_tokens)
    if name != "overlong":
        return None
    buffer = settings.overlong_tokens or max(1, round(_BUFFER * max_tokens))
    if buffer > max_tokens:
        raise ConfigError(f"task.overlong_tokens is {buffer}; expected at most {max_tokens}, the limit of a completion")
    return OverlongPenalty(max_tokens, buffer)
