"""What a draft level gains by matrices in 8 bits (`spec.light`), and which tiles read them fastest.

    python benchmarks/light.py [--shapes 7b 1.5b] [--buckets 16 32 64] [--seconds 120] [--out light.json]

A whole draft level of few requests in 16 and in 8 bits; then every product of it, and of taking in: as rollout runs it
in 16 bits, in 8 bits with the same tiles, and with the best of many that are tried. Weights of products rotate over
more memory than the second-level cache holds; every way is checked against the matrix it reads before it is timed.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from drafter_kernels import Bench as Level
from drafter_kernels import growth_triton, time_call
from linear import (
    SHAPES,
    SHARED_MEMORY,
    START,
    TUNED_AT,
    Layer,
    Shape,
    brief,
    candidates,
    extras,
    graph_seconds,
    neighbours,
    read_bandwidth,
    shared_bytes,
    table_text,
    versions,
)
from torch import Tensor

from tlt.kernels.linear import Light, Matrix
from tlt.kernels.linear import linear as torch_linear
from tlt.kernels.linear_table import Config, choose
from tlt.kernels.linear_triton import linear, skinny_linear

_ROTATING = 400e6  # bytes of weights that take turns
_WRONG = 2e-2  # of the size of what is computed: more is an error
_FIRST = 12  # of those to try all are, of the others a third
_LEVEL_ROWS = (1, 8, 32)


def products(shape: Shape, vocabularies: list[int]) -> list[Layer]:
    """Of a draft level: what it reads is twice as wide as the residual stream; and of the states, where it takes in."""
    qkv, o, gate_up, down = shape.block()
    return [
        Layer("fc", shape.hidden, 3 * shape.hidden),
        Layer("qkv", qkv.n, 2 * shape.hidden),
        o,
        gate_up,
        down,
        *(Layer(f"head {vocab}", vocab, shape.hidden, norm=True) for vocab in vocabularies),
    ]


class Bench:
    """One product at one number of rows, in 16 and in 8 bits."""

    def __init__(self, layer: Layer, m: int) -> None:
        self.layer = layer
        copies = max(2, int(_ROTATING // layer.bytes))
        fine = [torch.randn(layer.rows, layer.k, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
        self.weights = [Light.of(weight) for weight in fine]
        self.x = torch.randn(m, layer.k, device="cuda").bfloat16()
        self.options = extras(layer, m)

    def fine(self, weight: Light) -> Tensor:
        return linear(self.x, weight.fine_NK, pdl=True, **self.options)

    def by(self, weight: Matrix, config: Config) -> Tensor:
        return skinny_linear(self.x, weight, config, pdl=True, **self.options)

    def error(self, config: Config) -> float:
        weight = self.weights[0]
        wide = {key: value.float() if isinstance(value, Tensor) else value for key, value in self.options.items()}
        read = weight.light_NK.float() * weight.scale_N[:, None]
        expected = torch_linear(self.x.float(), read, **wide)
        return float((self.by(weight, config).float() - expected).norm() / expected.norm())

    def seconds(self, run: Any) -> float:
        calls = max(16, len(self.weights))

        def record() -> None:
            for call in range(calls):
                run(self.weights[call % len(self.weights)])

        return graph_seconds(record) / calls


def to_try(layer: Layer, bucket: int, known: Config | None) -> list[Config]:
    """As for 16 bits, and with twice as much of K at a time: a tile of as many bytes."""
    found = [*([known, *neighbours(known)] if known else []), *candidates(layer, bucket)]
    found += [replace(config, block_k=2 * config.block_k) for config in found if not config.wide]
    small = [config for config in found if shared_bytes(layer, config) // 2 <= SHARED_MEMORY and not config.wide]
    few = list(dict.fromkeys(small))
    return [config for number, config in enumerate(few) if number < _FIRST or number % 3 == 0]


def compile_one(layer: Layer, m: int, config: Config) -> bool:
    """In a worker, which leaves the kernels in Triton's cache."""
    try:
        weight = Light.of(torch.zeros(layer.rows, layer.k, dtype=torch.bfloat16, device="cuda"))
        x = torch.zeros(m, layer.k, dtype=torch.bfloat16, device="cuda")
        skinny_linear(x, weight, config, pdl=True, **extras(layer, m))
        if shared_bytes(layer, config) <= SHARED_MEMORY:
            skinny_linear(x, weight.fine_NK, config, pdl=True, **extras(layer, m))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  compilers' complaints have no common base, and must not end the run
        print(f"  {brief(config)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    return True


def compiled(workers: ProcessPoolExecutor, layer: Layer, m: int, configs: list[Config]) -> list[Config]:
    """Those that compile, by workers beside each other; all, if a compiler took a worker down: then here."""
    try:
        jobs = [workers.submit(compile_one, layer, m, config) for config in configs]
        return [config for config, job in zip(configs, jobs, strict=True) if job.result()]
    except BrokenProcessPool:
        print("  a worker died while compiling", flush=True)
        return [config for config in configs if compile_one(layer, m, config)]


def tune(
    layer: Layer, bucket: int, workers: ProcessPoolExecutor, deadline: float
) -> tuple[dict[str, Any], Config | None]:
    m = TUNED_AT[bucket]
    bench, known = Bench(layer, m), choose(m, layer.n, layer.k, layer.gated)
    fine_s = best_fine_s = bench.seconds(bench.fine)
    timed: list[tuple[float, Config]] = []
    for config in compiled(workers, layer, m, to_try(layer, bucket, known)):
        if timed and time.monotonic() > deadline:
            break
        if not (error := bench.error(config)) < _WRONG:
            print(f"  WRONG {layer.name} {brief(config)}: {error:.1e}", flush=True)
            continue
        timed.append((bench.seconds(lambda weight, c=config: bench.by(weight, c)), config))
        if shared_bytes(layer, config) <= SHARED_MEMORY:  # the same search, or tuning would seem to be a gain of 8 bits
            tuned_s = bench.seconds(lambda weight, c=config: bench.by(weight.fine_NK, c))
            best_fine_s = min(best_fine_s, tuned_s)
    timed.sort(key=lambda pair: pair[0])
    same_s = next((seconds for seconds, config in timed if config == known), None)
    best = timed[0] if timed else (float("inf"), None)
    print(
        f"{layer.name:11} N={layer.n:5} K={layer.k:5} M<={bucket:3}  16 bits {fine_s * 1e6:6.1f} us, best"
        f" {best_fine_s * 1e6:6.1f}  8 bits, same tiles {(same_s or float('nan')) * 1e6:6.1f}, best"
        f" {best[0] * 1e6:6.1f}  {brief(best[1]) if best[1] else '-'}",
        flush=True,
    )
    row = {
        "layer": dataclasses.asdict(layer),
        "bucket": bucket,
        "fine_us": fine_s * 1e6,
        "best_fine_us": best_fine_s * 1e6,
        "same_tiles_us": same_s and same_s * 1e6,
        "light": [{"us": seconds * 1e6, **dataclasses.asdict(config)} for seconds, config in timed[:8]],
    }
    return row, best[1] if best[0] < fine_s else None


@torch.no_grad()
def levels(hidden: int) -> list[dict[str, Any]]:
    """A draft level of so many requests, one node each, by the package's own tiles."""
    found = []
    for rows in _LEVEL_ROWS:
        level = Level(hidden, rows, 1)
        fine_us = time_call(lambda one=level: one.level(True, growth_triton.deepen))
        level.model.lighten()
        level.head = Light.of(level.head)  # type: ignore[assignment]
        light_us = time_call(lambda one=level: one.level(True, growth_triton.deepen))
        print(f"a level of {rows:3} requests, hidden {hidden}: {fine_us:6.1f} us, light {light_us:6.1f}", flush=True)
        found.append({"hidden": hidden, "rows": rows, "fine_us": fine_us, "light_us": light_us})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["7b"], choices=list(SHAPES))
    parser.add_argument("--buckets", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--vocabularies", nargs="*", type=int, default=[1024, 16384])
    parser.add_argument("--seconds", type=float, default=120, help="stop tuning after this long")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "light.json")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth(torch.randn(200_000_000, device="cuda", dtype=torch.bfloat16))
    record: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": options.commit,
        "read_bandwidth": bandwidth,
        "rows": [],
    }
    print(f"{record['hardware']}: reads {bandwidth / 1e12:.2f} TB/s, Triton {triton.__version__}", flush=True)
    hiddens = [SHAPES[name].hidden for name in options.shapes]
    record["levels"] = [row for hidden in hiddens if hidden in (576, 3840) for row in levels(hidden)]
    best = {}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as workers, torch.no_grad():
        for name in options.shapes:
            for bucket in options.buckets:
                for layer in products(SHAPES[name], options.vocabularies):
                    if time.monotonic() > START + options.seconds:
                        break
                    row, config = tune(layer, bucket, workers, START + options.seconds)
                    record["rows"].append(row)
                    best[layer.n, layer.k, layer.gated, bucket] = config
                    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table_text(best).replace("TABLE", "LIGHT", 1))
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.monotonic() - START:.0f} s in all; wrote {options.out}")


if __name__ == "__main__":
    main()
