"""`tlt generate`: one prompt and its completion, streamed."""

import time

from rich.console import Console

from tlt.config import RunConfig
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.policy import open_policy
from tlt.spec.speculation import SpeculationReport
from tlt.text import TextStream
from tlt.types import Key, Message


def generate(config: RunConfig, prompt: str, raw: bool) -> None:
    """Streams the completion to stdout. The summary goes to stderr, so that pipes get the completion only."""
    policy = open_policy(config.model)
    content = prompt if raw or not policy.tokenizer.has_chat_template else (Message("user", prompt),)
    tokens = tuple(policy.tokenizer.encode_prompt(content))
    engine = build_engine(policy, config)
    key = Key(config.run.seed, 0)
    engine.submit([Request(key, tokens, config.sampling)])
    stream, shown, started = TextStream(policy.tokenizer), 0, time.perf_counter()
    completions = engine.tick()
    while not engine.idle:
        written = engine.written(key)
        print(stream.feed(written[shown:]), end="", flush=True)
        shown = len(written)
        completions = engine.tick()
    completions += engine.drain()  # raises if the request failed
    print(stream.feed(completions[0].tokens[shown:]))
    seconds = time.perf_counter() - started
    count = len(completions[0].tokens)
    pace = f"{_tokens(count)} in {seconds:.1f} s ({count / seconds:.0f} tokens/s)"
    end = f"ended by {completions[0].finish_reason}, seed {config.run.seed}"
    drafts = _of_drafts(engine.report().speculation)
    Console(stderr=True).print(f"{pace}, {end}{drafts}", style="dim", highlight=False, soft_wrap=True)


def _of_drafts(report: SpeculationReport | None) -> str:
    """A summary of speculation, if configured."""
    if report is None:
        return ""
    if not report.verifies:
        return "; no drafts: none was expected to save time"
    return f"; {_tokens(report.accepted)} of it drafted, accept length {report.accept_length:.2f}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
