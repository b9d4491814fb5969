"""Replay: decodes a rollout once more without speculation, with the same keys, and counts the tokens that differ.

What always holds: a completion counts up to and including its first difference, for everything after a different token
follows from it. Where tokens differ, some of the requests are decoded plainly a third time, fewer at once: in half
precision rounding depends on the size of a pass, so this tells what the batch size alone changes for the same policy.
Knows nothing of engines or fleets.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.types import Completion, Key
from tlt.watch.events import ReplayCompared

Decode = Callable[[Sequence[Request]], tuple[list[Completion], float]]  # plainly; and the seconds that took
_SMALLER = 4  # times fewer requests at once than in the rollout …
_SAMPLED = 32  # … and so many at most, …
_SAMPLED_TOKENS = 512  # … each of at most so many tokens: this bounds what the sample costs


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two ways to decode the same requests."""

    tokens: int  # compared: of each completion up to and including its first difference
    differing: int  # completions with a difference, and so first differences among those tokens

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> "Difference":
        tokens = differing = 0
        for one, other in pairs:
            differs = tuple(one) != tuple(other)
            tokens += common_start(one, other) + differs
            differing += differs
        return cls(tokens, differing)


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def replayed(
    step: int,
    config: RunConfig,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    seconds: float,
    decode: Decode,
) -> ReplayCompared:
    """Decodes the rollout of a step again, and compares it with what the step wrote in so many seconds."""
    plain, plain_s = decode(requests)
    by_key = {completion.key: completion.tokens for completion in plain}
    found = Difference.of((completion.tokens, by_key[completion.key]) for completion in completions)
    compared = ReplayCompared(
        step=step,
        tokens=sum(len(completion.tokens) for completion in completions),
        tlt_s=seconds,
        plain_s=plain_s,
        identical=not found.differing,
        plain_tokens=sum(map(len, by_key.values())),
        compared=found.tokens,
        differing=found.differing,
        exact=config.engine.exact or config.model.dtype == "float64",
        at_once=min(config.engine.rows * config.cluster.workers, len(requests)),
    )
    return _with_sample(compared, requests, by_key, decode) if found.differing else compared


def _with_sample(
    compared: ReplayCompared, requests: Sequence[Request], plain: dict[Key, tuple[int, ...]], decode: Decode
) -> ReplayCompared:
    """Plain decoding against plain decoding of fewer requests at once; nothing where no fewer can run."""
    count = min(_SAMPLED, compared.at_once // _SMALLER or compared.at_once - 1)
    if count < 1:
        return compared
    started = time.perf_counter()
    again, _ = decode([_shortened(request) for request in requests[:: len(requests) // count][:count]])
    found = Difference.of((completion.tokens, plain[completion.key][:_SAMPLED_TOKENS]) for completion in again)
    return replace(
        compared,
        sample_at_once=count,
        sample_compared=found.tokens,
        sample_differing=found.differing,
        sample_s=time.perf_counter() - started,
    )


def _shortened(request: Request) -> Request:
    params = request.params
    return replace(request, params=replace(params, max_tokens=min(params.max_tokens, _SAMPLED_TOKENS)))
