"""What a graph costs, and a tick that shares: a random policy and drafter of one shape, a few batch sizes and trees.

    python benchmarks/capturing.py [--shape 7b] [--at 24:3x2/8~3 224:2x1/4~2] [--out capturing.json]

Of each: a plain tick and one in that shape, in milliseconds; what the first runs and the captures on the way took, part
by part; and every kernel of a few ticks. Random drafts are seldom right, which changes no kernel.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linear import SHAPES
from tick import busy, engine_of, kernels, policy_of, tick_ms, tree_of

import tlt.engine.graphs as graphs
from tlt.bench.record import new_record, write_record
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed, SwappableShapePolicy

_ROWS = 256
_SHOWN = 14


class Stopwatch:
    """How long parts of a capture take, added up by name; what is inside another part counts in both."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []

    def watch(self, owner: Any, name: str) -> None:
        wrapped = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return wrapped(*args, **named)
            finally:
                self.spent[name] += 1e3 * (time.perf_counter() - started)

        setattr(owner, name, timed)

    def watch_pool(self) -> None:
        pool, watch = graphs.GraphPool, self
        for name in ("capture_begin", "capture_end"):
            self.watch(torch.cuda.CUDAGraph, name)
        for name in ("synchronize", "mem_get_info", "empty_cache", "memory_reserved"):
            self.watch(torch.cuda, name)
        capture, run_first = pool.capture, pool.run_first

        def captured(self: Any, key: graphs.Key, function: Callable[[], Any]) -> None:
            passes: list[float] = []

            def work() -> Any:
                started = time.perf_counter()
                result = function()
                passes.append(1e3 * (time.perf_counter() - started))
                return result

            watch.spent.clear()
            started = time.perf_counter()
            capture(self, key, work)
            watch.note("capture", key, started, passes_ms=passes, **watch.spent)

        def ran(self: Any, key: graphs.Key, function: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = run_first(self, key, function)
            watch.note("first", key, started)
            return result

        pool.capture, pool.run_first = captured, ran  # type: ignore[method-assign]

    def note(self, what: str, key: graphs.Key, started: float, **more: Any) -> None:
        took = 1e3 * (time.perf_counter() - started)
        self.events.append({"what": what, "key": str(key), "ms": took, **more})

    def take(self) -> list[dict[str, Any]]:
        found, self.events = self.events, []
        return found


def built(name: str, vocabulary: int, trees: list[Shape]) -> tuple[EngineCore, SwappableShapePolicy]:
    shape_policy, settings = SwappableShapePolicy(), EngineSettings(rows=_ROWS, kv_gib=30)
    engine, learned = engine_of(policy_of(name), settings, shape_policy, trees, vocabulary, mlp=0.5)
    started = time.perf_counter()
    engine.compile()
    learned.compile(trees)
    print(f"compiled, and graphs that decode captured, in {time.perf_counter() - started:.1f} s", flush=True)
    return engine, shape_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--at", nargs="*", default=["224:2x1/4~2", "112:3x2/8~3", "24:3x2/8~3", "8:7x2/16~6"])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "capturing.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    watch, asked = Stopwatch(), [text.split(":") for text in options.at]
    wanted = [(int(requests), tree_of(tree)) for requests, tree in asked]
    watch.watch_pool()
    engine, shape_policy = built(options.shape, options.vocabulary, [tree for _, tree in wanted])
    record = new_record("cuda", options.commit, options={"shape": options.shape, "at": options.at})
    engine.measure()
    record["building"] = told("building", watch.take())
    for requests, tree in wanted:
        found: dict[str, Any] = {}
        for choice in (OFF, tree):
            shape_policy.now = Fixed(choice)
            busy(engine, requests, most=280)
            found[str(choice)] = {"tick_ms": tick_ms(engine), **kernels(engine)}
            engine.drain()
            shown(f"{requests} requests, {choice}", found[str(choice)])
        found["events"] = told(f"{requests} requests, {tree}", watch.take())
        record[f"{requests}:{tree}"] = found
        write_record(options.out, record)


def shown(what: str, found: dict[str, Any]) -> None:
    print(f"{what}: {found['tick_ms']:.3f} ms, idle {found['idle_us']:.0f} us", flush=True)
    for row in found["kernels"][:_SHOWN]:
        print(f"  {row['us']:8.1f} us  {row['launches']:6.1f} x  {row['name']}", flush=True)


def told(what: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(f"{what}: {len(events)} first runs and captures", flush=True)
    for event in events[:12]:
        rest = {name: value for name, value in event.items() if name not in ("what", "key", "ms", "passes_ms")}
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in rest.items())
        passes = "+".join(f"{ms:.1f}" for ms in event.get("passes_ms", ()))
        print(f"  {event['what']} {event['key']}: {event['ms']:.1f} ms ({passes}; {parts})", flush=True)
    return events


if __name__ == "__main__":
    main()
