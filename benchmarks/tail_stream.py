"""Whether training the drafter during the tail of a rollout pays: micro-steps on a low-priority stream beside ticks.

    python benchmarks/tail_stream.py --model DIR --shape 1.5B --json F [--budget 60] [--tokens 8192 2048]

The policy's weights are random: DIR needs config.json and a tokenizer. A few requests are decoded plainly or in one
shape of the learned drafter, while another thread takes micro-steps of `OnlineDrafter` as `tlt train` does. Per case:
ms per tick alone (before and after, so that the growing context cancels out), per micro-step alone, both together, and

    exchange = seconds of rollout lost per second of drafter training gained, each valued by what it takes alone

One after the other it is 1: beside the rollout pays only if it is clearly less. The engine's priority is that of the
stream it launches into and of the one it captures on, for a captured kernel keeps its own. What runs is not interrupted
by it. All graphs are captured before the other thread begins ("captured ms": what was not). The threads share the
interpreter's lock: "host slowdown" comes from the same launches at the same rate with few tokens, so at most that is
the host's. Micro-steps of 256 tokens or fewer would share split-K scratch with the engine. --quick: a CPU, no streams.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import preparing
import torch
from speculation import tell

from tlt.bench.record import write_record
from tlt.config import NEW, ModelSettings, RunConfig
from tlt.drafting import buffer, deadline, session, trainer
from tlt.engine import build, graphs, request, runner
from tlt.errors import TltError
from tlt.machine import describe, wait_for
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.policy import Policy, device_of, source_of
from tlt.spec.eagle_files import open_drafter
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed
from tlt.text import Tokenizer
from tlt.types import Key, SamplingParams

SPECULATING = Shape(("eagle",), 7, 1, 8)
MOST_S = 8.0  # of both together, where micro-steps hardly get on


@dataclass(frozen=True)
class TailScale:
    batches: tuple[int, ...]  # requests
    prompt: int  # tokens; the context grows from there
    tokens: tuple[int, ...]  # of a micro-step
    length: int  # of each prompt and answer to learn from; all micro-steps of a size then run the same kernels
    ticks: int  # measured alone, before and after; the same number is needed to settle
    seconds: float  # both are measured for so long …
    micro_steps: int  # … and for so many


FULL = TailScale((8, 32), 800, (8192, 2048), 512, 200, 0.8, 4)
QUICK = TailScale((2,), 40, (300,), 150, 4, 0.0, 2)


def exchange(seconds: float, ticks: int, tick_s: float, micro_steps: int, micro_s: float) -> float | None:
    """Of both together for so many seconds: what it cost the rollout, over what it gave the drafter."""
    return (seconds - ticks * tick_s) / (micro_steps * micro_s) if micro_steps else None


def pace(ends: Sequence[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class Tail:
    """The engine, on a stream of its own, with a few requests that end when they are told to."""

    def __init__(self, policy: Policy, config: RunConfig, stream: Any, priority: int) -> None:
        self._policy, self._stream, self._shape_policy, self._keys = policy, stream, Fixed(OFF), list[Key]()

        class Urgent(graphs.GraphPool[Any]):
            def __init__(self, device: torch.device) -> None:
                super().__init__(device)
                self._side = torch.cuda.Stream(device, priority=priority)

        with on(stream), patch.object(runner, "GraphPool", Urgent):
            self._engine = build.build_engine(policy, config, self._shape_policy)

    def begin(self, batch: int, shape: Shape, prompt: int) -> None:
        self._shape_policy._shape, self._policy.tokenizer.eos_ids = shape, frozenset()
        config, source = self._policy.model.config, random.Random(batch)
        params = SamplingParams(max_tokens=config.max_positions - prompt)  # more than will be measured
        self._keys = [Key(1, number) for number in range(batch)]
        prompts = [tuple(source.choices(range(config.vocab), k=prompt)) for _ in self._keys]
        self._engine.submit(request.Request(*pair, params) for pair in zip(self._keys, prompts, strict=True))

    def ticks(self, done: Callable[[int], bool]) -> list[float]:
        """Ticks until so many are enough: when the first began, and when each had ended."""
        ends = [time.perf_counter()]
        with on(self._stream):
            while not done(len(ends) - 1):
                if self._engine.tick():
                    raise TltError("a request has reached the end of the policy's context: measure fewer ticks")
                ends.append(time.perf_counter())
        return ends

    def now(self) -> tuple[float, float]:
        """Tokens of an answer so far, the mean; and ms that graphs have taken to capture."""
        report = self._engine.report().graphs
        tokens = sum(len(self._engine.written(key)) for key in self._keys)
        return tokens / len(self._keys), 1e3 * report.capture_s if report else 0.0

    def end(self) -> None:
        self._policy.tokenizer.eos_ids = frozenset(range(self._policy.model.config.vocab))  # any token is the last
        with on(self._stream):
            self._engine.drain()


class Learner:
    """The drafter past its cold start, so that draft steps are unrolled: all in one thread (its cuBLAS) and stream."""

    def __init__(self, drafter: trainer.OnlineDrafter, stream: Any, length: int) -> None:
        self._drafter, self._stream, self.thread = drafter, stream, ThreadPoolExecutor(1)
        source, words = random.Random(0), range(drafter.policy.config.vocab)
        texts = [source.choices(words, k=length) for _ in range(512)]  # many: no two the same in a micro-step
        drafter._buffer.add(buffer.Sample.of(text[:50], text[50:], "", 0) for text in texts)

    def train(self, tokens: int, done: Callable[[], bool], ends: list[float], every_s: float = 0.0) -> None:
        """Micro-steps until done, one every so many seconds at most; `ends` says when each did."""
        self._drafter._pace.tokens, self._drafter._upcoming = tokens, None
        with on(self._stream):
            while not done():
                started = time.perf_counter()
                self._drafter._micro_step(session.Session(), deadline.Deadline(lambda: False, 0.0))
                time.sleep(max(0.0, started + every_s - time.perf_counter()))
                ends.append(time.perf_counter())

    def seconds_alone(self, tokens: int, scale: TailScale) -> float:
        ends: list[float] = []  # the first two compile and allocate
        self.thread.submit(self.train, tokens, lambda: len(ends) > 2 * scale.micro_steps + 1, ends).result()
        return pace(ends[1:])


def together(
    tail: Tail, learner: Learner, tokens: int, scale: TailScale, every_s: float = 0.0
) -> tuple[float, int, int]:
    """Seconds, ticks and micro-steps of both, from the end of the first micro-step to that of the last."""
    ends, over, started = list[float](), Event(), time.perf_counter()

    def enough(_: int) -> bool:
        return time.perf_counter() - started > (scale.seconds if len(ends) > scale.micro_steps else MOST_S)

    training = learner.thread.submit(learner.train, tokens, over.is_set, ends, every_s)
    try:
        ticks = tail.ticks(enough)
    finally:
        over.set()
        training.result()
    inside = [end for end in ends if end <= ticks[-1]]  # the last one ended with nothing beside it
    first, *_, last = inside if len(inside) > 1 else ticks
    return last - first, max(1, sum(first < tick <= last for tick in ticks)), max(0, len(inside) - 1)


def measure(
    tail: Tail, learner: Learner, case: tuple[int, Shape, int], micro_s: float, scale: TailScale
) -> dict[str, Any]:
    tokens, shape, batch = case
    tail.begin(batch, shape, scale.prompt)
    tail.ticks(lambda ticks: ticks >= scale.ticks)
    _, captured_ms = tail.now()
    before_s = pace(tail.ticks(lambda ticks: ticks >= scale.ticks))
    seconds, ticks, micro_steps = together(tail, learner, tokens, scale)
    written, _ = tail.now()
    after_s = pace(tail.ticks(lambda ticks: ticks >= scale.ticks))
    host_s, host_ticks, _ = together(tail, learner, scale.length, scale, seconds / max(1, micro_steps))
    captured_ms = tail.now()[1] - captured_ms
    tail.end()
    tick_s, beside_s = (before_s + after_s) / 2, seconds / ticks
    what = {"shape": str(shape), "batch": batch, "context": round(scale.prompt + written), "micro tokens": tokens}
    alone = {"tick ms": 1e3 * tick_s, "micro ms": 1e3 * micro_s}
    both = {"tick ms beside": 1e3 * beside_s, "slowdown": beside_s / tick_s, "micro/s beside": micro_steps / seconds}
    checks = {"host slowdown": host_s / host_ticks / after_s, "micro steps": micro_steps, "captured ms": captured_ms}
    return what | alone | both | checks | {"exchange": exchange(seconds, ticks, tick_s, micro_steps, micro_s)}


def set_up(options: argparse.Namespace, scale: TailScale) -> tuple[Tail, Learner, torch.device]:
    device, source = device_of("cpu" if options.quick else "auto"), source_of(ModelSettings(path=options.model))
    on_gpu, base = device.type == "cuda", RunConfig()
    small = ModelConfig.from_hf(json.loads((source / "config.json").read_text()))
    wide = preparing.config_in_shape(small, options.shape)
    model = Transformer(wide, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    model.init_weights(0)
    config = replace(
        base,
        spec=replace(base.spec, drafter="eagle", path=NEW, depths=(7,), widths=(1,), verifies=(8,)),
        draft=replace(base.draft, vocab=options.draft_vocab if options.draft_vocab < wide.vocab else 0),
        drafting=replace(base.drafting, micro_s=0.0),  # as many tokens as asked for, however long they take
        engine=replace(base.engine, rows=max(scale.batches)),
    )
    # 0 is the least priority there is, and every stream's that asks for no other; greater ones are below
    urgent, patient = (torch.cuda.Stream(device, priority=p) if on_gpu else None for p in (options.priority, 0))
    wait_for(device)
    policy = Policy(model, Tokenizer.load(source), source)
    tail = Tail(policy, config, urgent, options.priority)
    drafter = trainer.OnlineDrafter(model, open_drafter(policy, config), config.draft, config.drafting)
    wait_for(device)
    return tail, Learner(drafter, patient, scale.length), device


def main(arguments: Sequence[str] | None = None) -> int:
    started, options, interval_s = time.perf_counter(), read(arguments), sys.getswitchinterval()
    scale = replace(QUICK if options.quick else FULL, **({"tokens": options.tokens} if options.tokens else {}))
    tail, learner, device = set_up(options, scale)
    machine, rows = asdict(describe(device, options.commit)), list[dict[str, Any]]()
    sys.setswitchinterval(options.switch_ms / 1e3)
    micro_s = {tokens: learner.seconds_alone(tokens, scale) for tokens in scale.tokens}
    print(f"{machine['device']}, shape {options.shape}: {time.perf_counter() - started:.1f} s to set up", flush=True)
    for case in ((t, s, b) for t in scale.tokens for s in (SPECULATING, OFF) for b in scale.batches):
        if time.perf_counter() - started > 0.9 * options.budget:  # a case takes a few seconds
            print(f"{case} is left out: the budget of {options.budget:g} s is spent")
            continue
        rows.append(measure(tail, learner, case, micro_s[case[0]], scale))
        tell(rows[-1:])
        if options.json:
            content = {"machine": machine, "options": vars(options), "scale": asdict(scale), "rows": rows}
            write_record(options.json, content)
    print(f"{time.perf_counter() - started:.1f} s in all")
    sys.setswitchinterval(interval_s)
    return 0


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="directory with config.json and a tokenizer, or tiny")
    parser.add_argument("--shape", default=preparing.OWN, help="own, 1.5B or 7B")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-step: multiples of 512")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens the drafter can name")
    parser.add_argument("--priority", type=int, default=-1, help="of the engine; 0: no greater than the drafter's")
    parser.add_argument("--switch-ms", type=float, default=0.1, help="after which a thread hands the interpreter over")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, set-up included")
    parser.add_argument("--quick", action="store_true", help="a size for a CPU")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
