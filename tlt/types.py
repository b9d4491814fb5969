"""The records that cross borders between modules: frozen, documented field by field, no tensors.

Whatever a policy wrote names the policy version it came from. Records that hold text or tokens have a repr of one short
line. The words are those of CONTRIBUTING.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tlt.errors import RequestError, shown

FinishReason = Literal["eos", "stop", "length", "abort"]
_SHOWN = 60  # characters of a text in a repr


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a task asks of the policy."""

    id: str  # stable across steps and restarts: history (lengths, earlier answers) is kept under it
    content: str | tuple[Message, ...]  # plain text, or a chat that the policy's template renders
    reference: Any = None  # what the reward compares the answer with
    extra: Mapping[str, Any] = field(default_factory=dict)  # columns handed through to the user's reward

    def __repr__(self) -> str:
        return f"Prompt({self.id!r}, {shown(self.content, _SHOWN)})"


class Key(NamedTuple):
    """Names one completion for the sampler: with the position it determines the noise, hence the token."""

    seed: int  # of the run, any 64-bit integer
    request: int  # unique within the seed, any 64-bit integer


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn. Settings may differ between the requests of one batch."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    max_tokens: int = 256  # tokens generated at most, the end token included
    stop: tuple[str, ...] = ()  # texts that end the answer; the answer contains the stop text
    ignore_eos: bool = False  # go on past the end token (benchmarks of a fixed length)
    min_p: float = 0.0  # keep tokens with at least this fraction of the likeliest token's probability; 0 keeps all
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the answer, as its last token

    @property
    def filtered(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def stops(self) -> bool:
        """Whether other tokens than the end token may end the answer."""
        return bool(self.stop or self.stop_token_ids)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature!r}; expected a finite number ≥ 0")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k!r}; expected 0 (off) or a positive integer")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p!r}; expected a number in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p is {self.min_p!r}; expected a number in [0, 1]")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens!r}; expected at least 1")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop is {self.stop!r}; expected a tuple of non-empty strings")
        tokens = self.stop_token_ids
        if not isinstance(tokens, tuple) or not all(type(token) is int and token >= 0 for token in tokens):
            raise RequestError(f"stop_token_ids is {tokens!r}; expected a tuple of integers ≥ 0")


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a completion's time went, in seconds since it was submitted."""

    first_token_s: float
    finished_s: float
    preemptions: int = 0  # times its pages were taken away and its prefix computed again


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's answer to one request."""

    key: Key
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # generated tokens, the end token included if there was one
    text: str  # the tokens as text, without special tokens
    logprobs: tuple[float, ...]  # of each token under the distribution it was drawn from (temperature, filters)
    policy_logprobs: tuple[float, ...]  # of each token under the policy at temperature 1, unfiltered
    finish_reason: FinishReason
    policy_version: int  # of the weights that wrote the last token
    timing: Timing
    drafted: bytes = b""  # of each token: 1 if it was an accepted draft, 2 if it was written ahead, 0 if neither
    loss_mask: bytes = b""  # of each token: 1 if the policy drew it, 0 if the task replied it; empty: all are drawn

    @property
    def drawn_tokens(self) -> int:
        """Tokens that the policy drew, and that it learns from."""
        return self.loss_mask.count(1) if self.loss_mask else len(self.tokens)

    def __repr__(self) -> str:
        text = shown(self.text, _SHOWN)
        return f"Completion({text}, {len(self.tokens)} tokens, {self.finish_reason}, request {self.key.request})"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion and what it earned."""

    prompt: Prompt
    completion: Completion
    reward: float

    def __repr__(self) -> str:
        return f"Rollout({self.prompt.id!r}, {self.completion!r}, reward {self.reward:g})"


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def __repr__(self) -> str:
        rewards = ", ".join(f"{rollout.reward:g}" for rollout in self.rollouts)
        return f"Group({self.prompt!r}, {len(self.rollouts)} rollouts, rewards {rewards[:_SHOWN]})"


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout as the policy learns from it."""

    rollout: Rollout
    advantage: float  # how much better than its group it did, as GRPO counts it
    sampled: bool = False  # its step file holds this completion: the update reports the entropy of its tokens
