"""What a call asks of the engine, and what comes back: records that pass between clients and the engine's thread."""

from dataclasses import dataclass

from tlt.engine.scoring import Scores
from tlt.types import Completion, FinishReason, Key, SamplingParams

Versions = tuple[tuple[int, int], ...]  # (first token, version of the policy that wrote from there on)


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion."""

    index: int  # in the call
    prompt: tuple[int, ...]
    params: SamplingParams | None  # None: the prompt is scored, and nothing is written
    noise: Key
    streamed: bool = False  # parts are wanted as they are written
    top: int | None = None  # likeliest tokens per position that scores name; None: no scores


@dataclass(frozen=True, slots=True)
class Delta:
    """What was written since the part before."""

    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_logprobs: tuple[float, ...] = ()
    reason: FinishReason | None = None  # None: more will come
    completion: Completion | None = None  # all of it, with the last part; None: nothing was written
    scores: Scores | None = None  # of prompt and completion, if they were asked for
    versions: Versions = ()  # with the last part
    failure: str = ""  # the request has ended without an answer
