"""Requests, their state in the engine, and their checks. A request is checked before it affects running ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tlt.errors import RequestError
from tlt.types import Key, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate. Requests with equal prompts share the KV cache of the prompt."""

    key: Key
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    prompt_id: str = ""  # identifies the prompt in length statistics; equal for all requests of a group
    noise: Key | None = None  # the sampling key, if it differs from `key`; requests in flight may share one
    keep: bool = False  # cache its full pages when it ends, for prompts that continue this completion
    draft_tokens: tuple[int, ...] = ()  # a guess at the completion, e.g. written ahead; changes only the speed

    @property
    def noise_key(self) -> Key:
        return self.key if self.noise is None else self.noise


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and its output so far. Survives preemption."""

    request: Request
    order: int  # number of the submission
    submitted_s: float  # reading of `time.perf_counter`
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    drafted: bytearray = field(default_factory=bytearray)  # per token: 1 accepted draft, 2 written ahead, 0 neither
    first_token_s: float = 0.0  # reading of `time.perf_counter`
    preemptions: int = 0

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens to prefill before the next one: prompt and completion so far, without the last token."""
        return (self.request.prompt + tuple(self.tokens))[:-1]

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """A part of an unfinished completion."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this engine and its policy."""

    vocab: int
    context: int  # positions that the policy supports
    cache_tokens: int  # tokens that the whole KV cache holds


def check(request: Request, limits: Limits) -> None:
    """Raises RequestError if the request can never be completed. The message says what to change."""
    name = f"request {request.key.request}"
    if not isinstance(request.params, SamplingParams):
        raise RequestError(f"{name}: params is a {type(request.params).__name__}; expected SamplingParams")
    _check_tokens(f"{name}: the prompt", request.prompt, limits)
    if request.draft_tokens:
        _check_tokens(f"{name}: draft_tokens", request.draft_tokens, limits)
    total = len(request.prompt) + request.params.max_tokens
    if total > limits.context:
        raise RequestError(
            f"{name}: a prompt of {len(request.prompt)} tokens and max_tokens {request.params.max_tokens} "
            f"make {total}, more than the policy's context of {limits.context}; shorten one of them"
        )
    if total > limits.cache_tokens:
        raise RequestError(
            f"{name}: needs {total} tokens of key-value cache, the whole cache holds {limits.cache_tokens}; "
            "raise engine.kv_gib or lower max_tokens"
        )


def check_text(text: Sequence[int], limits: Limits) -> None:
    """Raises RequestError if the text cannot be scored."""
    _check_tokens("the text", tuple(text), limits)
    if len(text) > limits.context:
        raise RequestError(f"the text has {len(text)} tokens, more than the policy's context of {limits.context}")


def _check_tokens(name: str, tokens: tuple[int, ...], limits: Limits) -> None:
    if not isinstance(tokens, tuple) or not all(isinstance(token, int) for token in tokens):
        raise RequestError(f"{name} is {_glimpse(tokens)}; expected a tuple of integers")
    if not tokens:
        raise RequestError(f"{name} has no tokens; expected at least one")
    strange = [token for token in tokens if not 0 <= token < limits.vocab]
    if strange:
        raise RequestError(f"{name}: token {strange[0]} is outside the policy's vocabulary of {limits.vocab}")


def _glimpse(prompt: object, shown: int = 40) -> str:
    text = repr(prompt)
    return f"a {type(prompt).__name__}, {text if len(text) <= shown else text[:shown] + '…'}"


def check_keys(requests: Iterable[Request], in_flight: Iterable[Key]) -> None:
    """Raises RequestError if a key is in flight already: equal keys draw equal completions."""
    seen = set(in_flight)
    for request in requests:
        if request.key in seen:
            raise RequestError(
                f"key (seed {request.key.seed}, request {request.key.request}) is already in flight; "
                "give each request its own number"
            )
        seen.add(request.key)
