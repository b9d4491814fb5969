"""Decoding speed: floor, start, decode steps over batch sizes and contexts, and completions of natural length.

The time of a step is the difference of a long and a short run over the difference in tokens, so that prompts, starts
and ends cancel. Its floor is the time to read all weights and the KV cache once from memory.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tlt.bench.lab import Lab
from tlt.bench.peer_file import SHORT_PROMPT
from tlt.engine.request import Request
from tlt.event_builders import Lengths
from tlt.types import Key


@dataclass(frozen=True, slots=True)
class Floor:
    parameters: int
    dtype: str
    weight_bytes: int  # read per step, LM head included
    kv_bytes_per_token: int
    bandwidth_gb_s: float  # measured, reading only
    floor_ms: float  # of a step with an empty cache


@dataclass(frozen=True, slots=True)
class EngineStart:
    first_token_s: float  # from weights on the device to the first token: kernels, one graph, one prompt
    capture_s: float
    graphs: int
    pool_mib: float
    triton_cache: str


@dataclass(frozen=True, slots=True)
class DecodeStep:
    batch: int
    context: float  # mean over the measured tokens
    step_ms: float
    floor_ms: float
    weights_floor_ms: float
    over_floor: float
    tokens_per_s: float
    temperature: float
    measured_tokens: int
    peer: str = ""  # another engine, when it was measured, and whether beside ours
    peer_ms: float | None = None
    times_peer: float | None = None


@dataclass(frozen=True, slots=True)
class Natural:
    prompts: int
    tokens_per_s: float
    makespan_s: float
    tokens: int
    median: int
    p90: int
    p99: int
    longest: int
    cap: int
    at_cap: int  # answers cut off
    temperature: float
    preemptions: int
    peer: str = ""
    peer_tokens_per_s: float | None = None
    times_peer: float | None = None


def floor(lab: Lab) -> Iterator[Floor]:
    yield Floor(
        parameters=sum(p.numel() for p in lab.model.parameters()),
        dtype=str(lab.model.embed.dtype).removeprefix("torch."),
        weight_bytes=lab.weight_bytes,
        kv_bytes_per_token=lab.kv_bytes_per_token,
        bandwidth_gb_s=lab.bandwidth / 1e9,
        floor_ms=lab.floor_ms(0, 0),
    )


def start(lab: Lab) -> Iterator[EngineStart]:
    lab.engine()
    begun = lab.start
    assert begun is not None, "an engine was made just now"
    yield EngineStart(
        first_token_s=begun.first_token_s,
        capture_s=begun.capture_s,
        graphs=begun.graphs,
        pool_mib=begun.pool_bytes / 1024**2,
        triton_cache=lab.machine.triton_cache,
    )


def step(lab: Lab) -> Iterator[DecodeStep]:
    for batch in lab.scale.batches:
        prompt = sum(len(tokens) for tokens in lab.prompts[:batch]) / batch
        yield _step(lab, batch, prompt, partial(_asked, lab, batch))


def context(lab: Lab) -> Iterator[DecodeStep]:
    """Steps at long contexts. Prompts are random tokens and all different, so no page is shared."""
    started = time.perf_counter()
    most = lab.model.config.max_positions - lab.scale.long
    pairs = sorted((batch * min(length, most), batch, min(length, most)) for batch, length in _pairs(lab))
    for _, batch, length in dict.fromkeys(pairs):
        if time.perf_counter() - started > lab.scale.budget_s:
            return
        prompts = _random_prompts(lab, batch, length)
        yield _step(lab, batch, length, partial(_asked_these, lab, prompts))


def natural(lab: Lab) -> Iterator[Natural]:
    for count in lab.scale.naturals:
        run = lab.natural_once(count, lab.scale.cap)
        lengths = Lengths.of(run.lengths)
        rate = run.tokens / run.seconds
        figures = lab.peer if lab.peer and lab.peer.cap == lab.scale.cap else None
        peer = figures.tokens_per_s.get(count) if figures else None
        yield Natural(
            prompts=count,
            tokens_per_s=rate,
            makespan_s=run.seconds,
            tokens=run.tokens,
            median=lengths.p50,
            p90=lengths.p90,
            p99=lengths.p99,
            longest=lengths.longest,
            cap=lab.scale.cap,
            at_cap=sum(completion.finish_reason == "length" for completion in run.completions),
            temperature=lab.temperature,
            preemptions=sum(completion.timing.preemptions for completion in run.completions),
            peer=figures.label if figures and peer else "",
            peer_tokens_per_s=peer,
            times_peer=rate / peer if peer else None,
        )


def _step(lab: Lab, batch: int, prompt: float, asked: Callable[[int], list[Request]]) -> DecodeStep:
    """Measures one batch size. `asked(tokens)`: its requests, with that many tokens each."""
    scale, engine = lab.scale, lab.engine()
    lab.completion(engine, asked(2))  # fills the prefix cache for both runs
    short = lab.completion(engine, asked(scale.short)).seconds
    long = lab.completion(engine, asked(scale.long)).seconds
    measured = scale.long - scale.short
    step_ms = 1e3 * (long - short) / measured
    mean_context = prompt + (scale.short + scale.long) / 2
    floor_ms = lab.floor_ms(batch, mean_context)
    figures = lab.peer if prompt < SHORT_PROMPT else None
    peer = figures.step_ms.get(batch) if figures else None
    return DecodeStep(
        batch=batch,
        context=mean_context,
        step_ms=step_ms,
        floor_ms=floor_ms,
        weights_floor_ms=lab.floor_ms(0, 0),
        over_floor=step_ms / floor_ms,
        tokens_per_s=1e3 * batch / step_ms,
        temperature=lab.temperature,
        measured_tokens=measured,
        peer=figures.label if figures and peer else "",
        peer_ms=peer,
        times_peer=peer / step_ms if peer else None,
    )


def _asked(lab: Lab, batch: int, tokens: int) -> list[Request]:
    return lab.requests(batch, max_tokens=tokens, ignore_eos=True)


def _asked_these(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> list[Request]:
    params = lab.params(tokens, ignore_eos=True)
    return [Request(Key(0, index), prompt, params, f"random {index}") for index, prompt in enumerate(prompts)]


def _pairs(lab: Lab) -> Iterator[tuple[int, int]]:
    for batch in lab.scale.context_batches:
        for length in lab.scale.contexts:
            yield batch, length


def _random_prompts(lab: Lab, batch: int, length: int) -> list[tuple[int, ...]]:
    draw = random.Random(f"context/{batch}/{length}")
    return [tuple(draw.choices(range(lab.model.config.vocab), k=length)) for _ in range(batch)]
