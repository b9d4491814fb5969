"""Request and response records passed between the event loop and the engine thread."""

from dataclasses import dataclass

from tlt.engine.scoring import Scores
from tlt.types import Completion, FinishReason, Key, SamplingParams

Versions = tuple[tuple[int, int], ...]  # (first token, version of the policy that wrote from there on)


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One completion of a call."""

    index: int  # in the call
    prompt: tuple[int, ...]
    params: SamplingParams | None  # None: the prompt is scored, and nothing is generated
    noise: Key
    streamed: bool = False  # outputs are sent while the completion is generated
    top: int | None = None  # likeliest tokens per position in `scores`; None: no scores


@dataclass(frozen=True, slots=True)
class ServeOutput:
    """The tokens of one completion since its previous output."""

    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_logprobs: tuple[float, ...] = ()
    reason: FinishReason | None = None  # None: more outputs follow
    completion: Completion | None = None  # the whole completion, in the last output
    scores: Scores | None = None  # of prompt and completion, where requested
    versions: Versions = ()  # in the last output
    failure: str = ""  # the request ended without a completion
