"""How fast the linear layers stream their weights, and which configuration does it best.

`--tune` tries configurations per layer shape and batch bucket against the vendor's library and prints the table
for `tlt/kernels/linear/tile_tables`: what was timed now, and the package's own entry where nothing was. With
`--known SUMMARY` only the surroundings of the best known configuration are searched, which is timed again beside them.
`--stream` searches where 32 to 128 rows are quickest (tall weight tiles, L2 running ahead), in rounds around the
leaders, and lets the whole model's chain decide among the best; what was found is on disk after every bucket.
`--settle SUMMARY` searches nothing: the chain decides between the package's entries, the summary's and the library.
Then, or without any of them, embedding, linear layers and norms of a model are timed in one CUDA graph, as the engine
runs them (`carried`: a layer that writes the residual stream prepares it for the next norm), beside earlier ways.
Weights rotate over far more memory than the second-level cache holds; a configuration is checked before it is timed.
`--summarize IN [IN ...] OUT` needs no GPU: the best per layer of one or more runs or earlier summaries, a later one
before an earlier one; `--write-table` puts what the last of them settled into the package's table.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
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

from tlt.bench.record import new_record, write_record
from tlt.kernels.linear import plan
from tlt.kernels.linear.elementwise_triton import rms_norm
from tlt.kernels.linear.plan import BUCKETS, QUANTIZED_TILES, TILES, Config, bucket_of, choose
from tlt.kernels.linear.reference import PreNormedRows
from tlt.kernels.linear.triton import composed_linear, room_for, skinny_linear, take_rows
from tlt.kernels.linear.tuning import H200, ROWS_TIMED, Layer, candidates, neighbours, shared_bytes
from tlt.kernels.linear.tuning_triton import EPS, LayerTimer, compile_one, graph_seconds
from tlt.kernels.linear.workspace import shared_workspace
from tlt.model.config import ModelConfig

# M rows, N outputs after gating, K inputs


@dataclass(frozen=True)
class LinearShape:
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

    def config(self) -> ModelConfig:
        """Of a policy of this shape."""
        return ModelConfig.from_hf(
            {
                "model_type": "llama",
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.mlp,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": 64,
                "max_position_embeddings": 4096,
            }
        )


SHAPES = {
    "7b": LinearShape("7b", 3840, 32, 15360, 48, 16),
    "135m": LinearShape("135m", 576, 30, 1536, 9, 3),
    "1.5b": LinearShape("1.5b", 1920, 30, 6912, 24, 8),
}


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
    tiles = -(-layer.n // tile.block_n) * -(-ROWS_TIMED[bucket] // tile.block_m)
    waves = range(1, 1 + min(3, H200.shared_bytes // shared_bytes(layer, tile)))
    most = max(1, min(8, layer.k // (2 * tile.block_k)))
    return {max(1, min(most, H200.multiprocessors * wave // tiles)) for wave in waves}


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


def streaming(layer: Layer, bucket: int) -> list[Config]:
    """Tall weight tiles, so that x, which every program reads, is little beside the weights, over one or two waves.

    Programs below half a multiprocessor's memory leave room for the next kernel's, which then prefetch meanwhile.
    """
    stage_counts = {
        (128, 64, 4): {32: (5, 8), 64: (4, 6, 8), 128: (3, 4, 6)},
        (128, 64, 8): {32: (5,), 64: (4, 8), 128: (3, 6)},
        (128, 128, 8): {32: (3, 5), 64: (3, 4), 128: (3,)},
        (256, 64, 8): {32: (3, 5), 64: (3, 5), 128: (4,)},
        (64, 128, 4): {32: (4, 6), 64: (3, 5), 128: ()},
        (64, 256, 4): {32: (4,), 64: (3,)},
        (64, 64, 4): {32: (8,), 64: (6,), 128: (4,)},
    }
    found = []
    for (rows, block_k, warps), by_bucket in stage_counts.items():
        for stages in by_bucket.get(bucket, ()):
            tile = Config(bucket, rows // (2 if layer.gated else 1), block_k, 1, warps, stages,
                          tma=True, tma_x=True, apart=layer.norm)  # fmt: skip
            tile = replace(tile, swap=tile.block_n >= 64)  # what the matrix units want of the tall operand
            if fits(layer, tile):
                whole = [replace(tile, split_k=split) for split in sorted(whole_waves(layer, bucket, tile))]
                found += [run_ahead(layer, bucket, config, 10e6) for config in whole]
                found += [replace(run_ahead(layer, bucket, config, 20e6), ahead=0, late=True) for config in whole]
    return list(dict.fromkeys(found))


def run_ahead(layer: Layer, bucket: int, config: Config, in_l2: float) -> Config:
    """Keep about `in_l2` bytes of weights waiting in the second-level cache for the pipeline, which is ahead itself."""
    programs = -(-layer.n // config.block_n) * -(-ROWS_TIMED[bucket] // config.block_m) * config.split_k
    resident = min(programs, H200.multiprocessors * (H200.shared_bytes // shared_bytes(layer, config)))
    rows = config.block_n * (2 if layer.gated else 1) * resident
    columns = in_l2 / (rows * 2) + (config.stages - 1) * config.block_k
    prefetch = max(2 * config.block_k, min(2048, 1 << round(math.log2(columns))))
    return replace(config, prefetch=prefetch, ahead=256)


def streaming_neighbours(layer: Layer, bucket: int, config: Config) -> list[Config]:
    """The other settings of a good tile: how far ahead, who copies, which operand is tall, when to signal."""
    found = [
        *(replace(config, prefetch=prefetch) for prefetch in (256, 512, 1024)),
        *(replace(config, ahead=columns) for columns in (0, 128, 256, 512) if columns >= config.block_k or not columns),
        replace(config, late=not config.late),
        replace(config, tma_x=not config.tma_x),
        replace(config, tma=not config.tma, tma_x=not config.tma),
        replace(config, warps=8 if config.warps == 4 else 4),
        replace(config, stages=config.stages + 1),
        replace(config, stages=max(2, config.stages - 1)),
    ]
    if bucket >= 64:
        found.append(replace(config, swap=not config.swap))
    if layer.norm:
        found.append(replace(config, apart=not config.apart))
    if config.split_k > 1:
        found.append(replace(config, split_k=config.split_k - 1))
    return [config for config in dict.fromkeys(map(as_run, found)) if fits(layer, config)]


def as_run(config: Config) -> Config:
    """Nothing runs ahead that never started."""
    return config if config.prefetch else replace(config, ahead=0)


def fits(layer: Layer, config: Config) -> bool:
    """Whether the pipeline fits a multiprocessor, and the sums half of a thread's registers."""
    sums = config.block_m * config.block_n * (2 if layer.gated else 1)
    return shared_bytes(layer, config) <= H200.shared_bytes and sums <= 128 * 32 * config.warps


def compile_all(
    pool: ProcessPoolExecutor, jobs: list[tuple[Layer, int, Config, bool]]
) -> set[tuple[Layer, int, Config]]:
    """The jobs that compile and launch. Kernels differ by configuration and fusion only, so most jobs are repeats."""
    unique: dict[Any, Future[str]] = {}
    keys = {}
    for layer, m, config, pdl in jobs:
        steps = layer.k if config.wide else layer.k % config.block_k == 0
        key = (layer.norm and not config.apart, layer.residual, layer.gated, steps, config, pdl)
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


Best = dict[tuple[int, int, bool, int], Config | None]


def tune(shapes: list[LinearShape], buckets: list[int], pool: Tensor, bandwidth: float, workers: ProcessPoolExecutor,
         deadline: float, known: Best) -> tuple[Best, list[dict[str, Any]]]:  # fmt: skip
    best: Best = {}
    rows: list[dict[str, Any]] = []
    work = [(layer, bucket) for shape in shapes for bucket in buckets for layer in (*shape.block(), shape.head())]
    to_try = {}
    for layer, bucket in work:
        key = (layer.n, layer.k, layer.gated, bucket)
        seed = known.get(key) or TILES.get(key)
        configs = [] if key in known else candidates(layer, bucket, H200)
        configs += refined(layer, bucket, seed) if seed else []
        fitting = [config for config in configs if shared_bytes(layer, config) <= H200.shared_bytes]
        to_try[layer, bucket] = list(dict.fromkeys(fitting))
    jobs = [(layer, ROWS_TIMED[bucket], config, True) for layer, bucket in work for config in to_try[layer, bucket]]
    usable = compile_all(workers, jobs)
    print(f"[{time.monotonic() - START:.0f}s] compiled; timing {len(jobs)} candidates", flush=True)
    leaders: dict[tuple[Layer, int], list[tuple[float, Config]]] = {}
    library: dict[tuple[Layer, int], float] = {}
    benches = {}
    for layer, bucket in work:
        if time.monotonic() > deadline:
            print("out of time: the rest is not tuned")
            break
        m = ROWS_TIMED[bucket]
        bench = benches[layer, bucket] = LayerTimer(layer, m, pool)
        library[layer, bucket] = bench.seconds(bench.library)
        leaders[layer, bucket] = time_configs(bench, [c for c in to_try[layer, bucket] if (layer, m, c) in usable])
    jobs = [
        (layer, ROWS_TIMED[bucket], config, True)
        for (layer, bucket), timed in leaders.items()
        for _, leader in timed[:1]
        for config in neighbours(leader)
        if config not in to_try[layer, bucket] and shared_bytes(layer, config) <= H200.shared_bytes
    ]
    usable = compile_all(workers, jobs)
    for (layer, bucket), timed in leaders.items():
        near = [c for job_layer, m, c in usable if (job_layer, m) == (layer, ROWS_TIMED[bucket])]
        if time.monotonic() < deadline:
            timed = sorted(timed + time_configs(benches[layer, bucket], near), key=lambda pair: pair[0])
        rows.append(report(layer, bucket, timed, library[layer, bucket], bandwidth))
        fastest = timed[0] if timed else (float("inf"), None)
        best[layer.n, layer.k, layer.gated, bucket] = fastest[1] if fastest[0] < library[layer, bucket] else None
    print_table(TILES | best)
    return best, rows


Timed = list[tuple[float, Config]]


def tune_streaming(
    shape: LinearShape, bucket: int, pool: Tensor, workers: ProcessPoolExecutor, deadline: float, rounds: int = 3
) -> tuple[dict[Layer, Timed], dict[Layer, float]]:
    """Seconds per configuration and of the library, per layer: tiles first, then what lies around the leaders."""
    layers = (*shape.block(), shape.head())
    benches = {layer: LayerTimer(layer, ROWS_TIMED[bucket], pool) for layer in layers}
    library = {layer: benches[layer].seconds(benches[layer].library) for layer in layers}
    timed: dict[Layer, Timed] = {layer: [] for layer in layers}
    seen: dict[Layer, set[Config]] = {layer: set() for layer in layers}
    for number in range(rounds):
        fresh = {}
        for layer in layers:
            known = TILES.get((layer.n, layer.k, layer.gated, bucket))
            wanted = ([known] if known else []) + streaming(layer, bucket)
            if number:
                wanted = [c for _, leader in timed[layer][:2] for c in streaming_neighbours(layer, bucket, leader)]
            fresh[layer] = [config for config in dict.fromkeys(wanted) if config not in seen[layer]]
            seen[layer].update(fresh[layer])
        jobs = [(layer, ROWS_TIMED[bucket], config, True) for layer in layers for config in fresh[layer]]
        usable = compile_all(workers, jobs)
        for layer in layers:
            good = [config for config in fresh[layer] if (layer, ROWS_TIMED[bucket], config) in usable]
            timed[layer] = sorted(timed[layer] + time_configs(benches[layer], good, deadline), key=lambda pair: pair[0])
        print(
            f"[{time.monotonic() - START:.0f}s] {shape.name} M<={bucket} round {number + 1}: {len(jobs)} tried",
            flush=True,
        )
        if time.monotonic() > deadline:
            break
    return {layer: ranked for layer, ranked in timed.items() if ranked}, library


def settle(model: "Model", m: int, timed: dict[Layer, Timed]) -> Best:
    """Of the package's choice, each layer's few best and the library, the one with which the whole model is quickest.

    Kernels overlap in their own ways, and what a layer's norm costs depends on the layer before it.
    """
    bucket = bucket_of(m) or 0
    best = before = chain_seconds(model, m)
    chosen: Best = {
        (layer.n, layer.k, layer.gated, bucket): choose(m, layer.n, layer.k, layer.gated) for layer in timed
    }
    model.table.update(chosen)
    for layer, ranked in timed.items():
        key = (layer.n, layer.k, layer.gated, bucket)
        for config in [*(config for _, config in ranked[:4]), None]:
            if config == chosen[key]:
                continue
            model.table[key] = config
            seconds = chain_seconds(model, m)
            if seconds < best * 0.998:  # less is noise
                best, chosen[key] = seconds, config
            model.table[key] = chosen[key]
    print(
        f"chain {model.shape.name} M={m}: {before * 1e3:.3f} ms with the package's table, {best * 1e3:.3f} settled",
        flush=True,
    )
    return chosen


def chain_seconds(model: "Model", m: int) -> float:
    tokens = torch.arange(m, device="cuda")
    return graph_seconds(lambda: model.forward(tokens, "carried"), repeats=9)


def stream(
    shapes: list[LinearShape], buckets: list[int], pool: Tensor, bandwidth: float, workers: ProcessPoolExecutor,
    deadline: float, save: Callable[[list[dict[str, Any]]], None],
) -> Best:  # fmt: skip
    best: Best = {}
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        model = Model(shape, {})
        for bucket in buckets:
            if time.monotonic() > deadline:
                print(f"out of time: {shape.name} M<={bucket} is not tuned", flush=True)
                continue
            timed, library = tune_streaming(shape, bucket, pool, workers, deadline)
            chosen = settle(model, ROWS_TIMED[bucket], timed)
            best |= chosen
            for layer, ranked in timed.items():
                config = chosen[layer.n, layer.k, layer.gated, bucket]
                row = report(layer, bucket, ranked, library[layer], bandwidth)
                rows.append(row | {"settled": config and dataclasses.asdict(config)})
            save(rows)
    print_table(best)
    return best


def settle_known(
    shapes: list[LinearShape], ms: list[int], summary: Path, workers: ProcessPoolExecutor
) -> tuple[Best, list[dict[str, Any]]]:
    """Per layer and bucket: the package's entry, one of the summary's or the library, as is quickest in the chain."""
    best: Best = {}
    rows: list[dict[str, Any]] = []
    known = {
        (row["n"], row["k"], row["gated"], row["bucket"]): row for row in json.loads(summary.read_text())["layers"]
    }
    ranked: dict[Any, Timed] = {key: ranked_in(row) for key, row in known.items() if row["config"]}
    places = range(max(map(len, ranked.values())))
    tables: list[Best] = [{}, *({key: r[min(i, len(r) - 1)][1] for key, r in ranked.items()} for i in places)]
    warm_up_all(workers, [(shape, m, table, "carried") for shape in shapes for m in ms for table in tables])
    for shape in shapes:
        model = Model(shape, {})
        for m in ms:
            keys = {each: (each.n, each.k, each.gated, bucket_of(m) or 0) for each in (*shape.block(), shape.head())}
            timed = {layer: ranked[key] for layer, key in keys.items() if key in ranked}
            chosen = settle(model, m, timed)
            best |= chosen
            rows += [settled_row(layer, known[keys[layer]], chosen[keys[layer]]) for layer in timed]
    print_table(best)
    return best, rows


def ranked_in(row: dict[str, Any]) -> Timed:
    """The configurations that a line of a summary keeps."""
    kept = [{"us": row["ours_us"], **row["config"]}, *row.get("also", [])]
    return [(each["us"], as_run(without_time(each))) for each in kept]


def without_time(row: dict[str, Any]) -> Config:
    return Config(**{name: value for name, value in row.items() if name != "us"})


def settled_row(layer: Layer, row: dict[str, Any], config: Config | None) -> dict[str, Any]:
    """As `report` gives it, of what the summary knew."""
    kept = {name: row[name] for name in ("bucket", "m", "floor_us", "library_us")}
    timed = [{"us": us, **dataclasses.asdict(each)} for us, each in ranked_in(row)]
    return {"layer": dataclasses.asdict(layer), **kept, "ours": timed, "settled": config and dataclasses.asdict(config)}


def time_configs(bench: LayerTimer, configs: list[Config], deadline: float = math.inf) -> Timed:
    timed = []
    wrong = []
    for config in configs:
        if time.monotonic() > deadline:
            break
        try:
            error = bench.error(bench.ours(config))
            if error < 1e-2:
                timed.append((bench.seconds(bench.ours(config)), config))
            else:
                wrong.append(f"{config}: relative error {error:.2e}")
        except triton.runtime.errors.OutOfResources:
            continue
        except Exception as failure:  # noqa: BLE001  one configuration must not end the run
            wrong.append(f"{config}: {type(failure).__name__}: {str(failure)[:200]}")
    if wrong:
        print(
            f"  WRONG {bench.layer.name} M={bench.rows}: {len(wrong)} of {len(configs)}, first {wrong[0]}", flush=True
        )
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
        "layer": dataclasses.asdict(layer), "bucket": bucket, "m": ROWS_TIMED[bucket], "floor_us": floor * 1e6,
        "library_us": library * 1e6,
        "ours": [{"us": seconds * 1e6, **dataclasses.asdict(config)} for seconds, config in timed],
    }  # fmt: skip


FLAGS = ("swap", "tma", "tma_x", "late", "apart", "wide")


def brief(config: Config) -> str:
    flags = "".join(f" {flag}" for flag in FLAGS if getattr(config, flag))
    return (f"{config.block_m}x{config.block_n}x{config.block_k} split {config.split_k} warps {config.warps}"
            f" stages {config.stages} prefetch {config.prefetch} ahead {config.ahead}{flags}")  # fmt: skip


def print_table(best: Best) -> None:
    print(plan.table_lines(best), flush=True)


def write_table(best: Best) -> None:
    """Put these entries into the package's table, in the place of those they replace."""
    path = Path(plan.__file__).with_name("tile_tables") / "h200.json"
    tables = {"bf16": TILES | best, "quantized": QUANTIZED_TILES}
    path.write_text(plan.table_text(H200.name, tables), encoding="utf-8")


def settled_in(run: dict[str, Any]) -> Best:
    rows = [row for row in run.get("rows", []) if "settled" in row]
    return {
        (row["layer"]["n"], row["layer"]["k"], row["layer"]["gated"], row["bucket"]): row["settled"]
        and as_run(Config(**row["settled"]))
        for row in rows
    }


ROUTES = {
    "library": "library",
    "fused": "ours, norms apart or inside the layer that reads",
    "dependent": "+ dependent launch",
    "carried": "+ norms carried by the layer that writes",
}


class Model:
    """All layers of a model but attention, to run at one M by one of the routes, each of which adds to the one before.

    Norms stand where the model has them: inside qkv and gate_up or before them, and one of its own before the head.
    """

    def __init__(self, shape: LinearShape, table: Best) -> None:
        self.shape, self.table = shape, table
        self.embed = torch.randn(4096, shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.weights = [[random_weight(layer) for layer in shape.block()] for _ in range(shape.layers)]
        self.head = random_weight(shape.head())
        self.norm = torch.rand(shape.hidden, device="cuda").add_(0.5).bfloat16()
        self.bytes = sum(layer.bytes for layer in shape.block()) * shape.layers + shape.head().bytes

    def config(self, layer: Layer, m: int) -> Config | None:
        key = (layer.n, layer.k, layer.gated, bucket_of(m) or 0)
        return self.table[key] if key in self.table else choose(m, layer.n, layer.k, layer.gated)

    def forward(self, tokens: Tensor, route: str) -> Tensor:
        """Logits. Attention is left out: its output is taken to be the queries."""
        qkv, o, gate_up, down = self.shape.block()
        stream = take_rows(self.embed, tokens, self.norm, pdl=True) if route == "carried" else self.embed[tokens]
        for w_qkv, w_o, w_gate_up, w_down in self.weights:
            heads = self.read(qkv, stream, w_qkv, route)
            stream = self.add(o, heads[:, : o.k], w_o, stream, route)
            inner = self.read(gate_up, stream, w_gate_up, route)
            stream = self.add(down, inner, w_down, stream, route)
        pdl = route in ("dependent", "carried")
        normed = rms_norm(rows_of(stream), self.norm, EPS, pdl=pdl)
        logits = torch.empty(len(normed), self.shape.vocab, device="cuda")
        return self.run(replace(self.shape.head(), norm=False), normed, self.head, route, out=logits)

    def read(self, layer: Layer, stream: Tensor | PreNormedRows, weight: Tensor, route: str) -> Tensor:
        return self.run(layer, stream, weight, route, norm_weight=self.norm, norm_eps=EPS, gated=layer.gated)

    def add(
        self, layer: Layer, x: Tensor, weight: Tensor, stream: Tensor | PreNormedRows, route: str
    ) -> Tensor | PreNormedRows:
        hidden, config = rows_of(stream), self.config(layer, len(x))
        if route == "carried" and config is not None:
            stream = room_for(hidden, self.norm, config.block_n)
            self.run(layer, x, weight, route, residual=hidden, out=hidden, leave=stream)
            return stream
        return self.run(layer, x, weight, route, residual=hidden, out=hidden)

    def run(self, layer: Layer, x: Tensor | PreNormedRows, weight: Tensor, route: str, **options: Any) -> Tensor:
        config, pdl = self.config(layer, len(rows_of(x))), route in ("dependent", "carried")
        if route == "library" or config is None:
            return composed_linear(rows_of(x), weight, pdl=pdl, **options)
        return skinny_linear(x, weight, config, pdl=pdl, **options)


def rows_of(x: Tensor | PreNormedRows) -> Tensor:
    return x.x_MD if isinstance(x, PreNormedRows) else x


def warm_up(shape: LinearShape, m: int, table: Best, route: str) -> None:
    """In a worker: leaves the kernels that the chain will need in Triton's cache."""
    with torch.no_grad():
        model = Model(replace(shape, layers=2), table)  # what the first layer reads may be cut otherwise
        model.forward(torch.arange(m, device="cuda"), route)
        torch.cuda.synchronize()


def warm_up_all(workers: ProcessPoolExecutor, jobs: list[tuple[LinearShape, int, Best, str]]) -> None:
    for future in [workers.submit(warm_up, *job) for job in jobs]:
        future.result()


def chain(model: Model, m: int, routes: list[str], bandwidth: float) -> dict[str, Any]:
    """Time a whole model in one graph, by each route."""
    floor = model.bytes / bandwidth * 1e3
    tokens = torch.arange(m, device="cuda")
    logits = torch.empty(m, model.shape.vocab, device="cuda")
    exact = model.forward(tokens, "library")
    result: dict[str, Any] = {"shape": model.shape.name, "m": m, "floor_ms": floor, "vs_library": {}}
    outs = {}
    for route in routes:

        def record(route: str = route) -> None:
            logits.copy_(model.forward(tokens, route))

        result[f"{route}_ms"] = graph_seconds(record, repeats=25) * 1e3
        result["vs_library"][route] = float((logits - exact).norm() / exact.norm())
        outs[route] = logits.clone()
    if {"fused", "dependent"} <= outs.keys():
        result["same_bits"] = torch.equal(outs["fused"], outs["dependent"])
    times = "  ".join(f"{route} {result[f'{route}_ms']:.3f}" for route in routes)
    errors = " ".join(f"{error:.1e}" for error in result["vs_library"].values())
    last = result[f"{routes[-1]}_ms"]
    gain = f"  ({last / result[f'{routes[-2]}_ms'] - 1:+.1%})" if len(routes) > 1 else ""
    print(
        f"chain {model.shape.name:5} M={m:3} floor {floor:.3f} ms  {times}{gain} = {last / floor:.2f} x floor"
        f"  vs library {errors}" + (f"  same bits {result['same_bits']}" if "same_bits" in result else ""),
        flush=True,
    )
    return result


def random_weight(layer: Layer) -> Tensor:
    return torch.randn(layer.rows, layer.k, device="cuda", dtype=torch.bfloat16).mul_(layer.k**-0.5)


def versions() -> dict[str, str | None]:
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def summarize(sources: list[dict[str, Any]], commit: str, hardware: str | None) -> dict[str, Any]:
    """The best per layer and bucket of runs and earlier summaries; a later source replaces an earlier one.

    `run` of a row is its place in `runs`.
    """
    layers: dict[Any, dict[str, Any]] = {}
    chains: dict[Any, dict[str, Any]] = {}
    about: list[dict[str, Any]] = []
    for source in sources:
        first = len(about)
        if "layers" in source:  # a summary itself
            about += source["runs"]
            rows = [row | {"run": row["run"] + first} for row in source["layers"]]
            chain_rows = [row | {"run": row["run"] + first} for row in source["chain"]]
        else:
            unsaid = {"hardware": hardware, "versions": None}
            about.append({name: (unsaid | source)[name] for name in ("hardware", "versions", "read_bandwidth")})
            rows = [{"run": first, **best_of(row)} for row in source.get("rows", [])]
            chain_rows = [{"run": first, **row} for row in source["chain"]]
        layers |= {(row["n"], row["k"], row["gated"], row["bucket"]): row for row in rows}
        chains |= {(row["shape"], row["m"]): row for row in chain_rows}
    return rounded({"commit": commit, "runs": about, "layers": list(layers.values()), "chain": list(chains.values())})


def best_of(row: dict[str, Any]) -> dict[str, Any]:
    """One layer's line of a summary: what was settled in the chain if it was, else the quickest alone."""
    ranked = [dict(config) for config in row["ours"]]
    settled = row.get("settled")
    top = next((c for c in ranked if settled and c.items() >= settled.items()), ranked[0] if ranked else {"us": None})
    kept = {name: row[name] for name in ("bucket", "m", "floor_us", "library_us")}
    also = [config for config in ranked if config is not top][:3]
    kept |= {"ours_us": top.pop("us"), "config": top or None} | ({"also": also} if also else {})
    return {**row["layer"], **kept} | ({"library_in_chain": settled is None} if "settled" in row else {})


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
    about = {"hardware": torch.cuda.get_device_name(), "versions": versions(), "read_bandwidth": bandwidth}
    record = new_record("cuda", options.commit, **about)
    print(f"{record['hardware']}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    table: Best = {}
    with torch.no_grad(), workers:
        if options.stream:
            deadline = START + options.seconds

            def save(rows: list[dict[str, Any]]) -> None:
                record["rows"] = rows
                write_record(options.out, record | {"chain": []})

            table = stream(shapes, options.buckets, pool, bandwidth, workers, deadline, save)
        elif options.settle:
            table, record["rows"] = settle_known(shapes, options.rows, options.settle, workers)
        elif options.tune:
            known = known_best(options.known) if options.known else {}
            deadline = START + options.seconds
            table, record["rows"] = tune(shapes, options.buckets, pool, bandwidth, workers, deadline, known)
            write_record(options.out, record | {"chain": []})
        del pool
        warm_up_all(workers, [(s, m, table, route) for s in shapes for m in options.rows for route in options.routes])
        models = (Model(shape, table) for shape in shapes)  # one at a time
        rows = [chain(model, m, options.routes, bandwidth) for model in models for m in options.rows]
    write_record(options.out, record | {"chain": rows})
    print(f"{time.monotonic() - START:.0f} s in all; wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try configurations, then time the chain with the best")
    parser.add_argument("--stream", action="store_true", help="the same, around tall weight tiles; buckets 32 to 128")
    parser.add_argument("--settle", type=Path, help="a summary of earlier runs: let the chain decide, per --rows")
    parser.add_argument("--known", type=Path, help="a summary of earlier runs: search only around its best")
    parser.add_argument("--shapes", nargs="*", default=["7b", "135m", "1.5b"], choices=list(SHAPES))
    parser.add_argument("--buckets", nargs="*", type=int, default=list(BUCKETS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64], help="batch sizes of the chain")
    parser.add_argument("--routes", nargs="*", default=list(ROUTES), choices=list(ROUTES), help=f"of it: {ROUTES}")
    parser.add_argument("--seconds", type=float, default=200, help="stop tuning after this long")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "linear.json")
    parser.add_argument("--summarize", nargs="+", type=Path, metavar="FILE", help="IN [IN ...] OUT; measures nothing")
    parser.add_argument("--write-table", action="store_true", help="with --summarize: into the package's table as well")
    parser.add_argument("--commit", default="", help="with --summarize: what was measured")
    parser.add_argument("--hardware", help="with --summarize: for runs that did not record it")
    options = parser.parse_args()
    if options.summarize:
        *sources, target = options.summarize
        runs = [json.loads(source.read_text()) for source in sources]
        summary = summarize(runs, options.commit, options.hardware)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(one_row_per_line(summary))
        if options.write_table:
            write_table(settled_in(runs[-1]))
    else:
        measure(options)


if __name__ == "__main__":
    main()
