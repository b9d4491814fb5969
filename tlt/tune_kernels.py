"""`tlt tune-kernels`: times tiles of a policy's linear layers on this GPU and keeps the fastest for later runs.

Always holds: the cache file is replaced whole after every layer, so an interrupted run keeps what it has measured;
entries of other policies stay. Does not know how tiles are chosen or timed.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tlt.config import ModelSettings
from tlt.errors import ConfigError, shown
from tlt.kernels.linear import plan
from tlt.kernels.linear.plan import BUCKETS, Config, Table
from tlt.kernels.linear.tuning import ROWS_TIMED, Layer, Timed, Tuned, table_of, tune_layer, work_order
from tlt.model.config import ModelConfig
from tlt.policy import config_of

BUDGET_S = 300.0
_MOST_WORKERS = 16  # processes that compile


@dataclass(frozen=True, slots=True)
class TuneOptions:
    model: str  # as model.path, or a name in MODEL_SHAPES
    budget_s: float = BUDGET_S  # no layer is begun after it
    rows: tuple[int, ...] = BUCKETS


def read_budget(word: str | None) -> float:
    if word is None:
        return BUDGET_S
    if not word.isdecimal() or len(word) > 6 or int(word) < 1:
        raise ConfigError(f"--budget is {shown(word)}; expected a whole number of seconds")
    return float(word)


def read_rows(word: str | None) -> tuple[int, ...]:
    if word is None:
        return BUCKETS
    chosen = word.split(",")
    if not all(each in map(str, BUCKETS) for each in chosen):
        raise ConfigError(f"--rows is {shown(word)}; expected some of {','.join(map(str, BUCKETS))}")
    return tuple(bucket for bucket in BUCKETS if str(bucket) in chosen)


def tune_kernels(options: TuneOptions) -> None:
    """Needs a GPU; raises ConfigError without one."""
    config = config_of(ModelSettings(path=options.model))
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "tlt tune-kernels times kernels on a GPU, and torch sees none here; run it on the machine that will run "
            f"{options.model}"
        )
    from rich.console import Console

    from tlt.kernels.linear.tuning_triton import LayerTimer, compile_all, this_gpu, weight_pool

    gpu, layers = this_gpu(), layers_of(config)
    deadline = time.monotonic() + options.budget_s
    path, console = plan.cache_file(gpu.name), Console(highlight=False, soft_wrap=True)
    console.print(f"{gpu.name}: tuning the linear layers of {options.model} for up to {options.budget_s:g} s")
    processes = min(_MOST_WORKERS, os.cpu_count() or 1)
    with torch.no_grad(), ProcessPoolExecutor(processes, get_context("spawn")) as workers:
        pool = weight_pool(layers)

        def tune(layer: Layer, bucket: int) -> Tuned:
            timer = LayerTimer(layer, ROWS_TIMED[bucket], pool)

            def time_all(configs: Sequence[Config]) -> Timed:
                compile_all(workers, [(layer, ROWS_TIMED[bucket], config) for config in configs])
                return timer.time_all(configs, deadline)

            in_use = plan.choose(bucket, layer.n, layer.k, layer.gated)
            return tune_layer(layer, bucket, gpu, in_use, timer.seconds(timer.library), time_all)

        work, done = work_order(layers, options.rows), 0
        for tuned in tune_all(work, tune, lambda: time.monotonic() > deadline):
            console.print(told(tuned))
            keep(path, gpu.name, table_of([tuned]))
            done += 1
    if done < len(work):
        console.print(f"the time is over: {len(work) - done} of {len(work)} were not tuned; give --budget more seconds")
    console.print(f"written to {path}; later runs on this GPU use it")


def tune_all(
    work: Sequence[tuple[Layer, int]], tune: Callable[[Layer, int], Tuned], over: Callable[[], bool]
) -> Iterator[Tuned]:
    """Tunes one after the other, and begins none once the time is over."""
    for layer, bucket in work:
        if over():
            return
        yield tune(layer, bucket)


def keep(path: Path, gpu: str, table: Table) -> None:
    """Adds entries to the cache file, in the place of those they replace."""
    tables = {"bf16": (plan.read_table(path, "bf16") if path.is_file() else {}) | table}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(plan.table_text(gpu, tables), encoding="utf-8")
    aside.rename(path)


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """The linear layers that a decode tick runs."""
    attended = config.heads * config.head_dim
    return (
        Layer("qkv", config.qkv_width, config.hidden, norm=True),
        Layer("attention out", config.hidden, attended, residual=True),
        Layer("gate and up", config.mlp, config.hidden, norm=True, gated=True),
        Layer("down", config.hidden, config.mlp, residual=True),
        Layer("LM head", config.vocab, config.hidden, float32_out=True),
    )


def told(tuned: Tuned) -> str:
    """A line of progress."""
    layer, by = tuned.layer, "the vendor's library" if tuned.config is None else "a kernel of tlt"
    return (
        f"{layer.name:14}{layer.n:7} x {layer.k:<6} up to {tuned.bucket:3} rows: {1e6 * tuned.seconds:8.1f} µs "
        f"by {by}, {tuned.seconds / tuned.seconds_before:.2f} of the time before; {tuned.tried} tried"
    )
