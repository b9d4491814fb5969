"""Decodes the completions on which `tlt draft train` trains a drafter, within a time limit.

Always holds: an answer is the policy's completion for its key, or the start of it if the time limit cut it off. A
failed request always raises. Knows neither the source of the prompts nor drafters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from tlt.config import RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.policy import Policy
from tlt.train.pacing import Clock, TimeLimit
from tlt.train.packing import Example
from tlt.types import Completion, Key
from tlt.watch.progress import WorkProgress


@dataclass(frozen=True, slots=True)
class Answer:
    example: Example
    key: Key


@dataclass(frozen=True, slots=True)
class Written:
    answers: dict[Key, Answer]  # with two tokens or more: shorter ones have nothing to draft
    whole: int  # complete answers
    graphs: int = 0  # CUDA graphs captured
    capture_s: float = 0.0


def write_answers(
    policy: Policy, config: RunConfig, requests: Sequence[Request], limit: TimeLimit, console: Console, clock: Clock
) -> Written:
    """Decodes the requests in order. Requests that run at the time limit are cut there."""
    engine = EngineCore(policy.model, policy.tokenizer, config.engine)
    engine.compile(filtered=config.sampling.filtered)
    engine.submit(requests)
    done: list[Completion] = []
    with WorkProgress("answers", len(requests), console, clock) as shown:
        for completions in limit.fitting(_ticks(engine)):
            done += completions
            shown.at(len(done), f"{engine.running} being written", most_s=limit.left_s)
    if engine.idle:
        done += engine.drain()  # raises if a request failed
    tokens = {completion.key: completion.tokens for completion in done}
    for request in requests:
        if request.key not in tokens:
            tokens[request.key] = _begun(engine, request)
    found = {
        request.key: Answer(Example(request.prompt + tokens[request.key], len(request.prompt)), request.key)
        for request in requests
        if len(tokens[request.key]) >= 2
    }
    graphs = engine.report().graphs
    return Written(found, len(done), graphs.graphs if graphs else 0, graphs.capture_s if graphs else 0.0)


def _ticks(engine: EngineCore) -> Iterator[list[Completion]]:
    while not engine.idle:
        yield engine.tick()


def _begun(engine: EngineCore, request: Request) -> tuple[int, ...]:
    """The tokens written so far; none if the request still waits."""
    try:
        return engine.written(request.key)
    except KeyError:  # neither complete nor in flight: it failed
        engine.drain()  # raises the failure after the others are complete
        raise
