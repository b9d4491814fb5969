"""Where the time of a verify tick goes: a policy and a drafter of one shape, random, few requests, one tree shape.

    python benchmarks/tick.py [--shape 7b] [--requests 8] [--tree 15x1/16] [--vocabulary 1024] [--out tick.json]

In 16 and in 8 bits (`spec.quantized`): seconds of a tick and of a plain one; then the kernels of a few ticks as
the profiler saw them: how often in a tick, how long, and for how long no kernel ran. Random drafts are seldom right,
which changes no kernel: all are padded to what the shape may accept.
"""

import argparse
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from linear import SHAPES
from torch.profiler import ProfilerActivity, profile

from tlt.bench.record import new_record, write_record
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.transformer import Transformer
from tlt.policy import TINY_POLICY
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.learned import LearnedDrafting
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Fixed, ShapePolicy
from tlt.spec.speculation import Speculating
from tlt.text import Tokenizer
from tlt.types import Key, SamplingParams

_WARM, _TIMED, _PROFILED, _PROMPT = 60, 60, 8, 200


def policy_of(name: str) -> Transformer:
    model = Transformer(SHAPES[name].config(), dtype=torch.bfloat16, device="cuda")
    model.init_weights(0)
    return model


def tree_of(text: str) -> Shape:
    """`7x2/16` or `7x2/16~6`, as shapes print themselves."""
    depth, width, nodes, *share = re.split("[x/~]", text)
    return Shape((LearnedDrafting.name,), int(depth), int(width), int(nodes), float(share[0]) if share else 0.0)


def engine_of(
    model: Transformer,
    settings: EngineSettings,
    shape_policy: ShapePolicy,
    trees: Sequence[Shape],
    vocabulary: int,
    *,
    quantized: bool = True,
    mlp: float = 1.0,
) -> tuple[EngineCore, LearnedDrafting]:
    """With a random drafter, for a chooser of these trees."""
    deepest, widest = max(tree.depth for tree in trees), max(tree.verify for tree in trees)
    config = EagleConfig.of_policy(model.config, window=512, draft_vocab=vocabulary, mlp=mlp)
    drafter = Eagle(config, dtype=torch.bfloat16, device="cuda")
    drafter.init_weights(0, torch.arange(config.draft_vocab) if config.reduced else None)
    learned = LearnedDrafting(drafter, model, settings.rows, deepest, quantized=quantized)
    speculating = Speculating([learned], shape_policy, deepest=deepest, widest=widest)
    tokenizer = Tokenizer.load(TINY_POLICY)
    return EngineCore(model, tokenizer, settings, taps=config.taps, speculation=speculating), learned


def busy(engine: EngineCore, requests: int, most: int = 3000) -> None:
    """Gives it answers to write that do not end for long."""
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    prompts = torch.randint(10, 900, (requests, _PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    engine.submit([Request(Key(0, i), tuple(prompt), params, str(i)) for i, prompt in enumerate(prompts)])
    for _ in range(_WARM):
        engine.tick()


def tick_ms(engine: EngineCore) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_TIMED):
        engine.tick()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / _TIMED


def kernels(engine: EngineCore) -> dict[str, Any]:
    """Microseconds and launches of each kernel in a tick."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(_PROFILED):
            engine.tick()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events() or []
        if str(event.device_type).endswith("CUDA")
    )
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    idle, reached = 0.0, spans[0][0]
    for begun, ended, name in spans:
        part = total[re.sub(r"<.*|\(.*", "", name)[:60]]
        idle += max(0.0, begun - reached)
        part[0] += (ended - max(begun, reached)) if ended > reached else 0.0  # what overlaps counts for the first
        part[1] += 1
        reached = max(reached, ended)
    rows = sorted(((us / _PROFILED, count / _PROFILED, name) for name, (us, count) in total.items()), reverse=True)
    found = {"idle_us": idle / _PROFILED, "span_us": (reached - spans[0][0]) / _PROFILED}
    return found | {"kernels": [{"name": name, "us": us, "launches": count} for us, count, name in rows]}


@torch.no_grad()
def levels_ms(learned: LearnedDrafting, rows: int, tree: Shape) -> dict[str, float]:
    """All levels of a tree but the first: a graph for each, and one graph for all."""
    _, level = learned._levels(rows, learned._builder(tree.width))
    count, found = tree.depth - 1, {}
    for each in (1, count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(each):
                level.work(rows)
        times = []
        for _ in range(20):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for _ in range(count // each):
                graph.replay()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        found[f"{count} levels, {each} in a graph"] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tree", default="15x1/16", help="depth x width / nodes verified")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--light", nargs="*", default=["false", "true"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "tick.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    model, tree = policy_of(options.shape), tree_of(options.tree)
    settings = EngineSettings(rows=options.requests, kv_gib=8)
    plain = EngineCore(model, Tokenizer.load(TINY_POLICY), settings)
    busy(plain, options.requests)
    asked = {"shape": options.shape, "requests": options.requests, "tree": options.tree}
    record = new_record("cuda", options.commit, options=asked, plain_tick_ms=tick_ms(plain))
    print(f"plain {record['plain_tick_ms']:.3f} ms", flush=True)
    for quantized in options.quantized:
        engine, learned = engine_of(
            model, settings, Fixed(tree), [tree], options.vocabulary, quantized=quantized == "true"
        )
        busy(engine, options.requests)
        found = {"tick_ms": tick_ms(engine), **kernels(engine), **levels_ms(learned, options.requests, tree)}
        record[f"light {quantized}"] = found
        print(
            f"{options.tree}, light {quantized}: {found['tick_ms']:.3f} ms, idle {found['idle_us']:.0f} us", flush=True
        )
        print("  " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items() if "graph" in name), flush=True)
        for row in found["kernels"][:32]:
            print(f"  {row['us']:8.1f} us  {row['launches']:6.1f} x  {row['name']}", flush=True)
        write_record(options.out, record)
        del engine, learned


if __name__ == "__main__":
    main()
