"""How fast the linear layers stream their weights, and which configuration does it best.

`--tune` tries configurations per layer shape and batch bucket against the vendor's library and prints the table to
paste into `tlt/kernels/linear_table.py`: what was timed now, and the package's own entry where nothing was. With
`--known SUMMARY` only the surroundings of the best known configuration are searched, which is timed again beside them.
Then, or without `--tune`, all linear layers of a model are timed in one CUDA graph.
Weights rotate over far more memory than the second-level cache holds; a configuration is checked before it is timed.
`--summarize IN [IN ...] OUT` needs no GPU: the best per layer of one or more runs, a later run before an earlier one.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.kernels.linear import linear as torch_linear
from tlt.kernels.linear_table import BUCKETS, TABLE, Config, bucket_of, choose
from tlt.kernels.linear_triton import composed_linear, skinny_linear
from tlt.kernels.workspace import shared_workspace

# M rows, N outputs after gating, K inputs
EPS = 1e-5
TUNED_AT = {16: 8, 32: 32, 64: 64, 128: 128, 256: 256}


@dataclass(frozen=True)
class Layer:
    """One linear layer as a model uses it."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    gated: bool = False

    @property
    def rows(self) -> int:
        return self.n * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        return self.rows * self.k * 2


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int = 49152

    def block(self) -> tuple[Layer, ...]:
        return (
            Layer("qkv", (self.heads + 2 * self.kv_heads) * 64, self.hidden, norm=True),
            Layer("o", self.hidden, self.heads * 64, residual=True),
            Layer("gate_up", self.mlp, self.hidden, norm=True, gated=True),
            Layer("down", self.hidden, self.mlp, residual=True),
        )

    def head(self) -> Layer:
        return Layer("head", self.vocab, self.hidden, norm=True)


SHAPES = {
    "7b": Shape("7b", 3840, 32, 15360, 48, 16),
    "135m": Shape("135m", 576, 30, 1536, 9, 3),
    "1.5b": Shape("1.5b", 1920, 30, 6912, 24, 8),
}


def tiles_to_try(layer: Layer, bucket: int) -> list[Config]:
    """Tile shapes worth a look, before the split of K is decided."""
    if bucket == 16 and layer.bytes < 8e6:
        return [
            Config(16, 16, 64, stages=8, warps=2),
            Config(16, 16, 64, stages=8),
            Config(16, 16, 128, stages=5, warps=2),
            Config(16, 16, 128, stages=5),
            Config(16, 16, 256, stages=4),
            Config(16, 32, 64, stages=8),
            Config(16, 32, 128, stages=5),
            Config(16, 64, 64, stages=6, swap=True),
            Config(16, 64, 128, stages=4, swap=True, tma=True),
        ]
    if bucket == 16:
        return [
            Config(16, 16, 256, stages=4),
            Config(16, 16, 512, stages=3),
            Config(16, 32, 128, stages=5),
            Config(16, 32, 256, stages=4),
            Config(16, 64, 128, stages=4),
            Config(16, 64, 128, stages=4, swap=True),
            Config(16, 64, 256, stages=3, swap=True),
            Config(16, 128, 64, stages=5, swap=True),
            Config(16, 32, 256, stages=4, tma=True),
            Config(16, 64, 128, stages=4, swap=True, tma=True),
            Config(16, 64, 256, stages=3, swap=True, tma=True),
            Config(16, 128, 128, stages=4, swap=True, tma=True),
        ]
    if bucket in (32, 64):
        small = [Config(bucket, 16, 64, stages=6), Config(bucket, 16, 128, stages=4), Config(bucket, 32, 64, stages=6)]
        return (small if layer.bytes < 8e6 else []) + [
            Config(bucket, 32, 128, stages=4),
            Config(bucket, 64, 64, stages=5),
            Config(bucket, 64, 128, stages=4),
            Config(bucket, 64, 64, stages=6, swap=True),
            Config(bucket, 64, 128, stages=4, swap=True),
            Config(bucket, 128, 64, stages=4, swap=True),
            Config(bucket, 64, 128, stages=4, swap=True, tma=True),
            Config(bucket, 128, 64, stages=5, swap=True, tma=True),
            Config(bucket, 128, 128, stages=3, swap=True, tma=True),
        ]
    return [
        Config(64, 64, 64, stages=5),
        Config(64, 64, 64, stages=5, swap=True),
        Config(64, 128, 64, stages=4, swap=True, tma=True),
        Config(128, 64, 64, stages=4),
        Config(128, 64, 64, stages=4, swap=True, tma=True),
        Config(128, 128, 64, stages=4, swap=True, tma=True),
        Config(128, 128, 64, stages=4, swap=True, tma=True, warps=8),
        Config(128, 128, 64, stages=4, tma=True, warps=8),
    ]


def candidates(layer: Layer, bucket: int) -> list[Config]:
    """Tiles × splits of K that give about one, two or three programs per multiprocessor."""
    found = []
    m = TUNED_AT[bucket]
    for tile in tiles_to_try(layer, bucket):
        tiles = -(-layer.n // tile.block_n) * -(-m // tile.block_m)
        slot = tile.block_m * tile.block_n * (2 if layer.gated else 1) + tile.block_m
        most = max(1, min(8, layer.k // (2 * tile.block_k), (1 << 23) // (slot * tiles)))
        for split in sorted({min(most, max(1, round(target / tiles))) for target in (120, 264, 396)}):
            ahead = min(tile.block_k * (tile.stages - 1), -(-layer.k // split))
            ahead = max(64, 1 << (ahead.bit_length() - 1))
            found.append(replace(tile, split_k=split, prefetch=ahead))
    return found


SHARED_MEMORY = 227 * 1024  # bytes a multiprocessor can give to programs
MULTIPROCESSORS = 132


def shared_bytes(layer: Layer, config: Config) -> int:
    """Of one program's pipeline."""
    if config.wide:
        return 0
    return config.stages * (config.block_n * (2 if layer.gated else 1) + config.block_m) * config.block_k * 2


def refined(layer: Layer, bucket: int, seed: Config) -> list[Config]:
    """Around a good configuration: the moment of the signal, a norm of its own, whole waves, all of K at once."""
    found = [seed, *neighbours(seed)]
    if layer.norm:
        found += [replace(seed, apart=True), replace(seed, apart=True, late=True)]
    for tile in (
        Config(bucket, 32, 512 if bucket == 16 else 256, stages=4, tma=True),  # whole output rows need no split
        Config(bucket, 64, 128, stages=5, swap=True),
        Config(bucket, 64, 128, stages=4, swap=True, tma=True, warps=8),
        Config(bucket, 64, 256, stages=3, swap=True, tma=True),
        Config(bucket, 128, 64, stages=6, swap=True),
        Config(bucket, 128, 128, stages=3, swap=True, tma=True, warps=8),
    ):
        ahead = replace(tile, prefetch=4 * tile.block_k if tile.block_k < 256 else 512, late=True, apart=layer.norm)
        found += [replace(ahead, split_k=split) for split in whole_waves(layer, bucket, tile)]
    if layer.bytes < 8e6 or layer.k < 1024:
        found += wide_configs(layer, bucket)
    return list(dict.fromkeys(found))


def whole_waves(layer: Layer, bucket: int, tile: Config) -> set[int]:
    """Splits of K whose programs just about fill all multiprocessors once, twice or three times over."""
    tiles = -(-layer.n // tile.block_n) * -(-TUNED_AT[bucket] // tile.block_m)
    waves = range(1, 1 + min(3, SHARED_MEMORY // shared_bytes(layer, tile)))
    most = max(1, min(8, layer.k // (2 * tile.block_k)))
    return {max(1, min(most, MULTIPROCESSORS * wave // tiles)) for wave in waves}


def wide_configs(layer: Layer, bucket: int) -> list[Config]:
    columns = triton.next_power_of_2(layer.k)
    found = []
    for block_n in (8, 16, 32):
        for block_k, warps in ((128, 4), (128, 8), (256, 8)):
            for block_m in {16, min(32, bucket)}:
                operands = (block_m + block_n * (2 if layer.gated else 1)) * columns // 2
                if operands <= 160 * 32 * warps:  # registers, of which a thread has 255
                    wide = Config(block_m, block_n, block_k, 1, warps, 1, prefetch=columns, wide=True)
                    found += [wide, replace(wide, late=True)]
    return found


def neighbours(config: Config) -> list[Config]:
    """Small changes to a good configuration."""
    ahead = config.prefetch or 2 * config.block_k
    return [
        replace(config, prefetch=0 if config.prefetch else ahead),
        replace(config, prefetch=ahead * 2),
        replace(config, late=not config.late),
        replace(config, late=True, prefetch=ahead * 4),
        replace(config, warps=8 if config.warps == 4 else 4),
    ] + ([] if config.wide else [replace(config, stages=config.stages + more) for more in (1, 2)])


def compile_one(layer: Layer, m: int, config: Config, pdl: bool) -> str:
    """Run once in a worker process, which leaves the kernel in Triton's cache. Returns what went wrong, or nothing."""
    try:
        weight = torch.empty(layer.rows, layer.k, dtype=torch.bfloat16, device="cuda")
        x = torch.empty(m, layer.k, dtype=torch.bfloat16, device="cuda")
        skinny_linear(x, weight, config, out=torch.empty(m, layer.n, dtype=x.dtype, device="cuda"), pdl=pdl,
                      **extras(layer, m))  # fmt: skip
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  compilers' complaints have no common base, and must not end the run
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(
    pool: ProcessPoolExecutor, jobs: list[tuple[Layer, int, Config, bool]]
) -> set[tuple[Layer, int, Config]]:
    """The jobs that compile and launch. Kernels differ by configuration and fusion only, so most jobs are repeats."""
    unique: dict[Any, Future[str]] = {}
    keys = {}
    for layer, m, config, pdl in jobs:
        steps = layer.k if config.wide else layer.k % config.block_k == 0
        key = (layer.norm, layer.residual, layer.gated, steps, config, pdl)
        keys[layer, m, config] = key
        if key not in unique:
            try:
                unique[key] = pool.submit(compile_one, layer, m, config, pdl)
            except BrokenProcessPool:
                break
    failures = {}
    for key, future in unique.items():
        try:
            if complaint := future.result():
                failures[key] = complaint
        except BrokenProcessPool:  # a compiler crash took a worker down; what is left compiles where it is timed
            print("  a worker died while compiling", key[4])
            break
    kinds = Counter(complaint.split(":")[0] for complaint in failures.values())
    print(f"  compiled {len(unique)} kernels, not usable: {dict(kinds) or 'none'}")
    for key, complaint in failures.items():
        if not complaint.startswith("OutOfResources"):
            print(f"  for example {key[4]} norm={key[0]} gated={key[2]}: {complaint}")
            break
    return {(layer, m, config) for layer, m, config, _ in jobs if keys.get((layer, m, config)) not in failures}


def extras(layer: Layer, m: int) -> dict[str, Any]:
    options: dict[str, Any] = {"gated": layer.gated}
    if layer.norm:
        options |= {"norm_weight": torch.rand(layer.k, device="cuda").add_(0.5).bfloat16(), "norm_eps": EPS}
    if layer.residual:
        options["residual"] = torch.randn(m, layer.n, device="cuda").bfloat16()
    return options


def graph_seconds(record: Callable[[], None], repeats: int = 5) -> float:
    """Median time of one replay of what `record` launches."""
    # The first, ordinary run must not overtake the caller's work: its outputs may lie in memory that was just freed,
    # and which a kernel still in the queue has yet to read.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


@triton.jit
def _read(source_ptr, sink_ptr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    base = source_ptr + tl.program_id(0).to(tl.int64) * BLOCK * TIMES + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TIMES):
        total += tl.load(base + i * BLOCK, eviction_policy="evict_first").to(tl.float32)
    tl.store(sink_ptr + tl.program_id(0), tl.sum(total))


def read_bandwidth(pool: Tensor) -> float:
    """Bytes per second of a kernel that only reads."""
    best = 0.0
    for block, times in ((2048, 8), (4096, 8), (8192, 4)):
        programs = pool.numel() // (block * times)
        sink = torch.empty(programs, device="cuda")
        seconds = graph_seconds(lambda p=programs, s=sink, b=block, t=times: _read[(p,)](pool, s, b, t, num_warps=8))
        best = max(best, programs * block * times * 2 / seconds)
    return best


class Bench:
    """One layer at one M: its weights (slices of a common pool), input, reference."""

    def __init__(self, layer: Layer, m: int, pool: Tensor) -> None:
        self.layer, self.m = layer, m
        copies = min(128, pool.numel() // (layer.rows * layer.k))
        size = layer.rows * layer.k
        self.weights = [pool[i * size : (i + 1) * size].view(layer.rows, layer.k) for i in range(copies)]
        self.calls = min(128, max(8, int(5e8 // layer.bytes)))
        self.x = torch.randn(m, layer.k, device="cuda").bfloat16()
        self.options = extras(layer, m)
        wide = {k: v.float() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        torch.backends.cuda.matmul.allow_tf32 = False
        self.reference = torch_linear(self.x.float(), self.weights[0].float(), **wide)

    def error(self, run: Callable[[Tensor, Tensor], None]) -> float:
        out = torch.full((self.m, self.layer.n), float("nan"), dtype=torch.bfloat16, device="cuda")
        run(self.weights[0], out)
        return float((out.float() - self.reference).norm() / self.reference.norm())

    def seconds(self, run: Callable[[Tensor, Tensor], None]) -> float:
        outs = [torch.empty(self.m, self.layer.n, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

        def record() -> None:
            for i in range(self.calls):
                run(self.weights[i % len(self.weights)], outs[i % 2])

        return graph_seconds(record) / self.calls

    def ours(self, config: Config, pdl: bool = True) -> Callable[[Tensor, Tensor], None]:
        def run(w: Tensor, out: Tensor) -> None:
            skinny_linear(self.x, w, config, out=out, pdl=pdl, **self.options)

        return run

    def theirs(self, w: Tensor, out: Tensor) -> None:
        composed_linear(self.x, w, out=None if self.layer.gated else out, **self.options)


Best = dict[tuple[int, int, bool, int], Config | None]


def tune(shapes: list[Shape], buckets: list[int], pool: Tensor, bandwidth: float, workers: ProcessPoolExecutor,
         deadline: float, known: Best) -> tuple[Best, list[dict[str, Any]]]:  # fmt: skip
    best: Best = {}
    rows: list[dict[str, Any]] = []
    work = [(layer, bucket) for shape in shapes for bucket in buckets for layer in (*shape.block(), shape.head())]
    to_try = {}
    for layer, bucket in work:
        key = (layer.n, layer.k, layer.gated, bucket)
        seed = known.get(key) or TABLE.get(key)
        configs = [] if key in known else candidates(layer, bucket)
        configs += refined(layer, bucket, seed) if seed else []
        fitting = [config for config in configs if shared_bytes(layer, config) <= SHARED_MEMORY]
        to_try[layer, bucket] = list(dict.fromkeys(fitting))
    jobs = [(layer, TUNED_AT[bucket], config, True) for layer, bucket in work for config in to_try[layer, bucket]]
    usable = compile_all(workers, jobs)
    print(f"[{time.monotonic() - START:.0f}s] compiled; timing {len(jobs)} candidates", flush=True)
    leaders: dict[tuple[Layer, int], list[tuple[float, Config]]] = {}
    library: dict[tuple[Layer, int], float] = {}
    benches = {}
    for layer, bucket in work:
        if time.monotonic() > deadline:
            print("out of time: the rest is not tuned")
            break
        m = TUNED_AT[bucket]
        bench = benches[layer, bucket] = Bench(layer, m, pool)
        library[layer, bucket] = bench.seconds(bench.theirs)
        leaders[layer, bucket] = time_configs(bench, [c for c in to_try[layer, bucket] if (layer, m, c) in usable])
    jobs = [
        (layer, TUNED_AT[bucket], config, True)
        for (layer, bucket), timed in leaders.items()
        for _, leader in timed[:1]
        for config in neighbours(leader)
        if config not in to_try[layer, bucket] and shared_bytes(layer, config) <= SHARED_MEMORY
    ]
    usable = compile_all(workers, jobs)
    for (layer, bucket), timed in leaders.items():
        near = [c for job_layer, m, c in usable if (job_layer, m) == (layer, TUNED_AT[bucket])]
        if time.monotonic() < deadline:
            timed = sorted(timed + time_configs(benches[layer, bucket], near), key=lambda pair: pair[0])
        rows.append(report(layer, bucket, timed, library[layer, bucket], bandwidth))
        fastest = timed[0] if timed else (float("inf"), None)
        best[layer.n, layer.k, layer.gated, bucket] = fastest[1] if fastest[0] < library[layer, bucket] else None
    print_table(TABLE | best)
    return best, rows


def time_configs(bench: Bench, configs: list[Config]) -> list[tuple[float, Config]]:
    timed = []
    wrong = []
    for config in configs:
        try:
            error = bench.error(bench.ours(config))
        except triton.runtime.errors.OutOfResources:
            continue
        if error < 1e-2:
            timed.append((bench.seconds(bench.ours(config)), config))
        else:
            wrong.append(f"{config}: relative error {error:.2e}")
    if wrong:
        print(f"  WRONG {bench.layer.name} M={bench.m}: {len(wrong)} of {len(configs)}, first {wrong[0]}", flush=True)
    return sorted(timed, key=lambda pair: pair[0])


def report(
    layer: Layer, bucket: int, timed: list[tuple[float, Config]], library: float, bandwidth: float
) -> dict[str, Any]:
    floor = layer.bytes / bandwidth
    top = timed[0][0] if timed else float("nan")
    print(
        f"{layer.name:8} N={layer.n:5} K={layer.k:5} M<={bucket:3} floor {floor * 1e6:6.1f} us  ours {top * 1e6:6.1f}"
        f" ({floor / top:4.0%})  library {library * 1e6:6.1f} ({floor / library:4.0%})"
        f"  {brief(timed[0][1]) if timed else '-'}",
        flush=True,
    )
    return {
        "layer": dataclasses.asdict(layer), "bucket": bucket, "m": TUNED_AT[bucket], "floor_us": floor * 1e6,
        "library_us": library * 1e6,
        "ours": [{"us": seconds * 1e6, **dataclasses.asdict(config)} for seconds, config in timed],
    }  # fmt: skip


FLAGS = ("swap", "tma", "late", "apart", "wide")


def brief(config: Config) -> str:
    flags = "".join(f" {flag}" for flag in FLAGS if getattr(config, flag))
    return (f"{config.block_m}x{config.block_n}x{config.block_k} split {config.split_k} warps {config.warps}"
            f" stages {config.stages} prefetch {config.prefetch}{flags}")  # fmt: skip


def print_table(best: Best) -> None:
    print("TABLE: dict[tuple[int, int, bool, int], Config | None] = {")
    for key, config in best.items():
        value = "None"
        if config is not None:
            flags = "".join(f", {flag}=True" for flag in FLAGS if getattr(config, flag))
            value = (f"Config({config.block_m}, {config.block_n}, {config.block_k}, {config.split_k}, {config.warps},"
                     f" {config.stages}, prefetch={config.prefetch}{flags})")  # fmt: skip
        print(f"    {key}: {value},")
    print("}", flush=True)


class Model:
    """All linear layers of a model, to run at one M by one route: "library", "fused", or "dependent" (launches)."""

    def __init__(self, shape: Shape, table: Best) -> None:
        self.shape, self.table = shape, table
        self.weights = [[random_weight(layer) for layer in shape.block()] for _ in range(shape.layers)]
        self.head = random_weight(shape.head())
        self.norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.bytes = sum(layer.bytes for layer in shape.block()) * shape.layers + shape.head().bytes

    def config(self, layer: Layer, m: int) -> Config | None:
        key = (layer.n, layer.k, layer.gated, bucket_of(m) or 0)
        return self.table[key] if key in self.table else choose(m, layer.n, layer.k, layer.gated)

    def forward(self, hidden: Tensor, route: str) -> Tensor:
        """Updates `hidden` in place, returns logits. Attention is left out: its output is taken to be the queries."""
        qkv, o, gate_up, down = self.shape.block()
        for w_qkv, w_o, w_gate_up, w_down in self.weights:
            heads = self.run(qkv, hidden, w_qkv, None, route)
            self.run(o, heads[:, : o.k], w_o, hidden, route)
            inner = self.run(gate_up, hidden, w_gate_up, None, route)
            self.run(down, inner, w_down, hidden, route)
        return self.run(self.shape.head(), hidden, self.head, None, route)

    def run(self, layer: Layer, x: Tensor, weight: Tensor, hidden: Tensor | None, route: str) -> Tensor:
        options: dict[str, Any] = {"gated": layer.gated, "residual": hidden, "out": hidden}
        if layer.norm:
            options |= {"norm_weight": self.norm, "norm_eps": EPS}
        config = self.config(layer, x.shape[0])
        if route == "library" or config is None:
            return composed_linear(x, weight, pdl=route == "dependent", **options)
        return skinny_linear(x, weight, config, pdl=route == "dependent", **options)


def chain(model: Model, ms: list[int], bandwidth: float, workers: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Time a whole model's linear layers in one graph, by each route."""
    layers = (*model.shape.block(), model.shape.head())
    configs = [(layer, m, model.config(layer, m)) for layer in layers for m in ms]
    compile_all(workers, [(*job, pdl) for job in configs if job[2] is not None for pdl in (False, True)])
    return [chain_at(model, m, bandwidth) for m in ms]


def chain_at(model: Model, m: int, bandwidth: float) -> dict[str, Any]:
    floor = model.bytes / bandwidth * 1e3
    start = torch.randn(m, model.shape.hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(m, model.shape.vocab, device="cuda", dtype=torch.bfloat16)
    result: dict[str, Any] = {"shape": model.shape.name, "m": m, "floor_ms": floor}
    outs = {}
    for route in ("library", "fused", "dependent"):

        def record(route: str = route) -> None:
            logits.copy_(model.forward(start.clone(), route))

        result[f"{route}_ms"] = graph_seconds(record) * 1e3
        outs[route] = logits.clone()
    exact, fused = outs["library"].float(), outs["fused"].float()
    result["same_bits"] = torch.equal(outs["fused"], outs["dependent"])
    result["vs_library"] = float((fused - exact).norm() / exact.norm())
    print(
        f"chain {model.shape.name:5} M={m:3} floor {floor:.3f} ms  library {result['library_ms']:.3f}"
        f"  fused {result['fused_ms']:.3f}  + dependent launch {result['dependent_ms']:.3f}"
        f" = {floor / result['dependent_ms']:.0%} of floor  same bits {result['same_bits']}"
        f"  vs library {result['vs_library']:.1e}",
        flush=True,
    )
    return result


def random_weight(layer: Layer) -> Tensor:
    return torch.randn(layer.rows, layer.k, device="cuda", dtype=torch.bfloat16).mul_(layer.k**-0.5)


def versions() -> dict[str, str | None]:
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def summarize(runs: list[dict[str, Any]], commit: str, hardware: str | None) -> dict[str, Any]:
    """The best per layer and bucket. `run` of a row is its place in `runs`; a later run replaces an earlier one."""
    layers: dict[Any, dict[str, Any]] = {}
    chains: dict[Any, dict[str, Any]] = {}
    for index, run in enumerate(runs):
        for row in run.get("rows", []):
            top = dict(row["ours"][0]) if row["ours"] else {"us": None}
            best = {"ours_us": top.pop("us"), "config": top or None}
            kept = {name: row[name] for name in ("bucket", "m", "floor_us", "library_us")}
            key = (row["layer"]["n"], row["layer"]["k"], row["layer"]["gated"], row["bucket"])
            layers[key] = {"run": index, **row["layer"], **kept, **best}
        for row in run["chain"]:
            chains[row["shape"], row["m"]] = {"run": index, **row}
    unsaid = {"hardware": hardware, "versions": None}
    about = [{name: (unsaid | run)[name] for name in ("hardware", "versions", "read_bandwidth")} for run in runs]
    return rounded({"commit": commit, "runs": about, "layers": list(layers.values()), "chain": list(chains.values())})


def one_row_per_line(summary: dict[str, Any]) -> str:
    def lines(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"

    return "{\n" + ",\n".join(f' "{name}": {lines(value)}' for name, value in summary.items()) + "\n}\n"


def rounded(value: Any) -> Any:
    """To four digits: more is noise."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def known_best(summary: Path) -> Best:
    """The configurations of a summary, for the layers where one was found right."""
    rows = json.loads(summary.read_text())["layers"]
    return {(r["n"], r["k"], r["gated"], r["bucket"]): Config(**r["config"]) for r in rows if r["config"]}


START = time.monotonic()


def measure(options: argparse.Namespace) -> None:
    shapes = [SHAPES[name] for name in options.shapes]
    workers = ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"))
    torch.manual_seed(0)
    pool = torch.randn(800_000_000, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    shared_workspace(pool.device)
    bandwidth = read_bandwidth(pool)
    record = {"hardware": torch.cuda.get_device_name(), "versions": versions(), "read_bandwidth": bandwidth}
    print(f"{record['hardware']}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    table: Best = {}
    with torch.no_grad(), workers:
        if options.tune:
            known = known_best(options.known) if options.known else {}
            deadline = START + options.seconds
            table, record["rows"] = tune(shapes, options.buckets, pool, bandwidth, workers, deadline, known)
            options.out.write_text(json.dumps(record | {"chain": []}, indent=1))
        del pool
        rows = [row for shape in shapes for row in chain(Model(shape, table), options.rows, bandwidth, workers)]
    options.out.write_text(json.dumps(record | {"chain": rows}, indent=1))
    print(f"{time.monotonic() - START:.0f} s in all; wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try configurations, then time the chain with the best")
    parser.add_argument("--known", type=Path, help="a summary of earlier runs: search only around its best")
    parser.add_argument("--shapes", nargs="*", default=["7b", "135m", "1.5b"], choices=list(SHAPES))
    parser.add_argument("--buckets", nargs="*", type=int, default=list(BUCKETS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64], help="batch sizes of the chain")
    parser.add_argument("--seconds", type=float, default=200, help="stop tuning after this long")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "linear.json")
    parser.add_argument("--summarize", nargs="+", type=Path, metavar="FILE", help="IN [IN ...] OUT; measures nothing")
    parser.add_argument("--commit", default="", help="with --summarize: what was measured")
    parser.add_argument("--hardware", help="with --summarize: for runs that did not record it")
    options = parser.parse_args()
    if options.summarize:
        *sources, target = options.summarize
        runs = [json.loads(source.read_text()) for source in sources]
        summary = summarize(runs, options.commit, options.hardware)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(one_row_per_line(summary))
    else:
        measure(options)


if __name__ == "__main__":
    main()
