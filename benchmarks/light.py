"""What a draft level gains by matrices in 8 bits (`spec.quantized`), and which tiles read them fastest.

    python benchmarks/light.py [--shapes 7b 1.5b] [--buckets 16 32 64] [--seconds 120] [--out light.json]

A whole draft level of few requests in 16 and in 8 bits; then every product of it, and of taking in, in 16 and in 8
bits: as rollout runs it, and with the best of many tiles that are tried. Weights of products rotate over
more memory than the second-level cache holds; every way is checked against the matrix it reads before it is timed.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from drafter_kernels import DrafterBench as Level
from drafter_kernels import growth_triton, time_call
from linear import SHAPES, START, LinearShape, brief, read_bandwidth
from torch import Tensor

from tlt.bench.record import new_record, write_record
from tlt.kernels.linear.plan import Config, choose, choose_quantized, table_lines
from tlt.kernels.linear.reference import Matrix, QuantizedMatrix, bf16_of
from tlt.kernels.linear.reference import linear as torch_linear
from tlt.kernels.linear.triton import linear, skinny_linear
from tlt.kernels.linear.tuning import H200, ROWS_TIMED, Layer, neighbours
from tlt.kernels.linear.tuning_triton import around as call_options
from tlt.kernels.linear.tuning_triton import graph_seconds

_ROTATING = 400e6  # bytes of weights that take turns
_WRONG = 2e-2  # of the size of what is computed: more is an error
_TILE_ROWS, _TILE_COLUMNS = (32, 64, 128), (128, 256, 512)
_MOST_SPLITS = 16
_LEVEL_ROWS = (1, 8, 32, 64)


def products(shape: LinearShape, vocabularies: list[int]) -> list[Layer]:
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


class LightBench:
    """One product at one number of rows, in 16 and in 8 bits."""

    def __init__(self, layer: Layer, m: int) -> None:
        self.layer = layer
        copies = max(2, int(_ROTATING // layer.bytes))
        fine = [torch.randn(layer.rows, layer.k, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
        self.weights = [QuantizedMatrix.of(weight) for weight in fine]
        self.x = torch.randn(m, layer.k, device="cuda").bfloat16()
        self.options = call_options(layer, m)

    def bf16_of(self, weight: QuantizedMatrix) -> Tensor:
        return linear(self.x, weight.bf16_NK, pdl=True, **self.options)

    def by(self, weight: Matrix, config: Config) -> Tensor:
        return skinny_linear(self.x, weight, config, pdl=True, **self.options)

    def error(self, config: Config, quantized: bool) -> float:
        weight = self.weights[0]
        wide = {key: value.float() if isinstance(value, Tensor) else value for key, value in self.options.items()}
        read = weight.quantized_NK.float() * weight.scale_N[:, None] if quantized else weight.bf16_NK.float()
        expected = torch_linear(self.x.float(), read, **wide)
        return float(
            (self.by(weight if quantized else bf16_of(weight), config).float() - expected).norm() / expected.norm()
        )

    def seconds(self, run: Any) -> float:
        calls = max(16, len(self.weights))

        def record() -> None:
            for call in range(calls):
                run(self.weights[call % len(self.weights)])

        return graph_seconds(record) / calls


def to_try(layer: Layer, bucket: int, known: Config | None, size: int) -> list[Config]:
    """Tiles and splits of K whose programs fill all multiprocessors once, with one to four on each; `size`: bytes of a
    weight. Their pipelines are about as deep as fits."""
    found = [known, *neighbours(known)] if known else []
    for rows, block_k, each in itertools.product(_TILE_ROWS, _TILE_COLUMNS, (1, 2, 3, 4)):
        block_n = rows // (2 if layer.gated else 1)
        tiles = -(-layer.n // block_n)
        split = H200.multiprocessors * each // tiles
        most = min(_MOST_SPLITS, layer.k // (2 * block_k))
        deepest = min(8, (H200.shared_bytes - 2048) // each // (rows * block_k * size + bucket * block_k * 2))
        if not 1 <= split <= most or deepest < 2 or tiles * split < 0.8 * H200.multiprocessors * each:
            continue
        tile = Config(bucket, block_n, block_k, split, 4, deepest, tma=True)
        tile = replace(tile, swap=block_n >= 64, prefetch=min(512, 2 * block_k))
        found += [replace(tile, stages=stages) for stages in range(max(2, deepest - 1), deepest + 2)]
    return list(dict.fromkeys(config for config in found if not config.wide))


def around(config: Config) -> list[Config]:
    """Small changes to the best."""
    found = [
        *(replace(config, prefetch=ahead) for ahead in (0, 256, 512, 1024)),
        *(replace(config, late=True, prefetch=ahead) for ahead in (0, 512)),
        replace(config, warps=12 - config.warps),
        replace(config, tma=not config.tma),
        replace(config, tma_x=True),
        replace(config, stages=max(2, config.stages - 1)),
        replace(config, stages=config.stages + 1),
    ]
    return list(dict.fromkeys(found))


def compile_one(layer: Layer, m: int, config: Config, quantized: bool) -> bool:
    """In a worker, which leaves the kernels in Triton's cache."""
    try:
        weight = torch.zeros(layer.rows, layer.k, dtype=torch.bfloat16, device="cuda")
        x = torch.zeros(m, layer.k, dtype=torch.bfloat16, device="cuda")
        skinny_linear(
            x, QuantizedMatrix.of(weight) if quantized else weight, config, pdl=True, **call_options(layer, m)
        )
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  compilers' complaints have no common base, and must not end the run
        print(f"  {brief(config)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    return True


def compiled(
    workers: ProcessPoolExecutor, layer: Layer, m: int, configs: list[Config], quantized: bool
) -> list[Config]:
    """Those that compile, by workers beside each other; all, if a compiler took a worker down: then here."""
    try:
        jobs = [workers.submit(compile_one, layer, m, config, quantized) for config in configs]
        return [config for config, job in zip(configs, jobs, strict=True) if job.result()]
    except BrokenProcessPool:
        print("  a worker died while compiling", flush=True)
        return [config for config in configs if compile_one(layer, m, config, quantized)]


Timed = list[tuple[float, Config]]


def search(
    bench: LightBench, bucket: int, workers: ProcessPoolExecutor, known: Config | None, quantized: bool
) -> Timed:
    """What was tried, the fastest first: whole waves, then what lies around the best two."""
    timed: Timed = []
    configs = to_try(bench.layer, bucket, known, 1 if quantized else 2)
    for _ in range(2):
        tried = {config for _, config in timed}
        new = [config for config in configs if config not in tried]
        for config in compiled(workers, bench.layer, ROWS_TIMED[bucket], new, quantized):
            if not (error := bench.error(config, quantized)) < _WRONG:
                print(f"  WRONG {bench.layer.name} {brief(config)}: {error:.1e}", flush=True)
                continue
            by = partial(bench.by, config=config)
            timed.append((bench.seconds(by if quantized else lambda weight, by=by: by(bf16_of(weight))), config))
        timed.sort(key=lambda pair: pair[0])
        if not timed:
            raise SystemExit(f"no tiles for {bench.layer.name} could be run")
        configs = [near for _, config in timed[:2] for near in around(config)]
    return timed


def tune(layer: Layer, bucket: int, workers: ProcessPoolExecutor) -> tuple[dict[str, Any], Config | None]:
    m = ROWS_TIMED[bucket]
    bench, shape = LightBench(layer, m), (m, layer.n, layer.k, layer.gated)
    fine_s = bench.seconds(bench.bf16_of)
    light_s = bench.seconds(lambda weight: linear(bench.x, weight, pdl=True, **bench.options))
    tuned = search(bench, bucket, workers, choose(*shape), quantized=False)  # or tuning would seem a gain of 8 bits
    timed = search(bench, bucket, workers, choose_quantized(*shape) or choose(*shape), quantized=True)
    best_s, best = timed[0]
    print(
        f"{layer.name:11} N={layer.n:5} K={layer.k:5} M<={bucket:3}  16 bits {fine_s * 1e6:6.1f} us, best"
        f" {tuned[0][0] * 1e6:6.1f} {brief(tuned[0][1])}  8 bits, as chosen {light_s * 1e6:6.1f}, best"
        f" {best_s * 1e6:6.1f}  {brief(best)}",
        flush=True,
    )
    row = {
        "layer": dataclasses.asdict(layer),
        "bucket": bucket,
        "fine_us": fine_s * 1e6,
        "light_us": light_s * 1e6,
        "best_fine": [{"us": seconds * 1e6, **dataclasses.asdict(config)} for seconds, config in tuned[:4]],
        "best_light": [{"us": seconds * 1e6, **dataclasses.asdict(config)} for seconds, config in timed[:8]],
    }
    return row, best if best_s < tuned[0][0] else None


@torch.no_grad()
def levels(hidden: int, vocabulary: int) -> list[dict[str, Any]]:
    """A draft level of so many requests, one node each, by the package's own tiles."""
    found = []
    for rows in _LEVEL_ROWS:
        level = Level(hidden, rows, 1)
        level.head = level.head[:vocabulary].contiguous()
        fine_us = time_call(lambda one=level: one.level(True, growth_triton.expand), calls=14)
        level.model.quantize()
        level.head = QuantizedMatrix.of(level.head)  # type: ignore[assignment]
        light_us = time_call(lambda one=level: one.level(True, growth_triton.expand), calls=14)
        print(
            f"a level of {rows:3} requests, hidden {hidden}, {vocabulary} tokens: {fine_us:6.1f} us, light"
            f" {light_us:6.1f}",
            flush=True,
        )
        found.append(
            {"hidden": hidden, "vocabulary": vocabulary, "rows": rows, "fine_us": fine_us, "light_us": light_us}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["7b"], choices=list(SHAPES))
    parser.add_argument("--buckets", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--vocabularies", nargs="*", type=int, default=[1024, 16384])
    parser.add_argument("--seconds", type=float, default=120, help="stop tuning after this long; 0: levels alone")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "quantized.json")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth(torch.randn(200_000_000, device="cuda", dtype=torch.bfloat16))
    record = new_record("cuda", options.commit, read_bandwidth=bandwidth, rows=[])
    print(f"{record['machine']['device']}: reads {bandwidth / 1e12:.2f} TB/s, Triton {triton.__version__}", flush=True)
    hiddens = [SHAPES[name].hidden for name in options.shapes]
    cases = itertools.product(hiddens, options.vocabularies)
    record["levels"] = [row for hidden, vocabulary in cases for row in levels(hidden, vocabulary)]
    best = {}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as workers, torch.no_grad():
        for name in options.shapes:
            for bucket in options.buckets:
                for layer in products(SHAPES[name], options.vocabularies):
                    if time.monotonic() > START + options.seconds:
                        break
                    row, config = tune(layer, bucket, workers)
                    record["rows"].append(row)
                    best[layer.n, layer.k, layer.gated, bucket] = config
                    write_record(options.out, record)
    print(table_lines(best))
    write_record(options.out, record)
    print(f"{time.monotonic() - START:.0f} s in all; wrote {options.out}")


if __name__ == "__main__":
    main()
