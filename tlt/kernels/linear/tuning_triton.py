"""Times tiles of a linear layer on this GPU: CUDA graphs of launches over rotating weights, checked before timed.

Always holds: weights rotate over more memory than the second-level cache holds, so every launch reads from memory;
tiles that compute something else than the reference are left out. Does not know which tiles to try (`tuning`).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.errors import TritonError

from tlt.kernels.linear.plan import Config
from tlt.kernels.linear.reference import linear as torch_linear
from tlt.kernels.linear.triton import composed_linear, skinny_linear
from tlt.kernels.linear.tuning import Gpu, Layer, Timed

EPS = 1e-5
LARGEST_ERROR = 1e-2
"""Relative, against float32; bfloat16 results stay below 8e-3."""
UNUSABLE = (TritonError, RuntimeError, ValueError)
"""Errors of tiles that this GPU, the compiler or the split-K workspace cannot take."""

Run = Callable[[Tensor, Tensor], object]  # of a weight into an output


def this_gpu() -> Gpu:
    properties = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return Gpu(torch.cuda.get_device_name(), properties["multiprocessor_count"], properties["max_shared_mem"])


def weight_pool(layers: Iterable[Layer]) -> Tensor:
    """Memory for the weights of any of these layers, and for 1 GB of copies of the smaller ones."""
    elements = max(500_000_000, *(layer.rows * layer.k for layer in layers))
    return torch.randn(elements, device="cuda", dtype=torch.bfloat16).mul_(0.02)


class LayerTimer:
    """One layer with one number of rows: its weights (slices of a pool), input and reference."""

    def __init__(self, layer: Layer, rows: int, pool: Tensor) -> None:
        self.layer, self.rows = layer, rows
        size = layer.rows * layer.k
        copies = min(128, pool.numel() // size)
        self.weights = [pool[i * size : (i + 1) * size].view(layer.rows, layer.k) for i in range(copies)]
        self.calls = min(128, max(8, int(5e8 // layer.bytes)))
        self.x = torch.randn(rows, layer.k, device="cuda").bfloat16()
        self.options = around(layer, rows)
        wide: dict[str, Any] = {k: v.float() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        torch.backends.cuda.matmul.allow_tf32 = False
        self.reference = torch_linear(self.x.float(), self.weights[0].float(), **wide)

    def error(self, run: Run) -> float:
        """Relative to the reference."""
        out = self._out().fill_(float("nan"))
        run(self.weights[0], out)
        return float((out.float() - self.reference).norm() / self.reference.norm())

    def seconds(self, run: Run) -> float:
        """Of one launch, among launches of its kind."""
        outs = [self._out() for _ in range(2)]

        def record() -> None:
            for i in range(self.calls):
                run(self.weights[i % len(self.weights)], outs[i % 2])

        return graph_seconds(record) / self.calls

    def ours(self, config: Config, pdl: bool = True) -> Run:
        return lambda weight, out: skinny_linear(self.x, weight, config, out=out, pdl=pdl, **self.options)

    def library(self, weight: Tensor, out: Tensor) -> object:
        return composed_linear(self.x, weight, out=None if self.layer.gated else out, **self.options)

    def time_all(self, configs: Sequence[Config], deadline: float = float("inf")) -> Timed:
        """Seconds of the usable tiles, the fastest first; stops at the deadline (`time.monotonic`)."""
        timed = []
        for config in configs:
            if time.monotonic() > deadline:
                break
            try:
                if self.error(self.ours(config)) < LARGEST_ERROR:
                    timed.append((self.seconds(self.ours(config)), config))
            except UNUSABLE:
                continue
        return sorted(timed, key=lambda pair: pair[0])

    def _out(self) -> Tensor:
        dtype = torch.float32 if self.layer.float32_out else torch.bfloat16
        return torch.empty(self.rows, self.layer.n, dtype=dtype, device="cuda")


def around(layer: Layer, rows: int) -> dict[str, Any]:
    """The options of a layer's call: what is fused around its product."""
    options: dict[str, Any] = {"gated": layer.gated}
    if layer.norm:
        options |= {"norm_weight": torch.rand(layer.k, device="cuda").add_(0.5).bfloat16(), "norm_eps": EPS}
    if layer.residual:
        options["residual"] = torch.randn(rows, layer.n, device="cuda").bfloat16()
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
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def compile_one(layer: Layer, rows: int, config: Config, pdl: bool = True) -> str:
    """Runs once in a worker process, which leaves the kernel in Triton's cache. Returns what went wrong, or nothing."""
    try:
        weight = torch.empty(layer.rows, layer.k, dtype=torch.bfloat16, device="cuda")
        x = torch.empty(rows, layer.k, dtype=torch.bfloat16, device="cuda")
        dtype = torch.float32 if layer.float32_out else x.dtype
        out = torch.empty(rows, layer.n, dtype=dtype, device="cuda")
        skinny_linear(x, weight, config, out=out, pdl=pdl, **around(layer, rows))
        torch.cuda.synchronize()
    except UNUSABLE as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(workers: ProcessPoolExecutor, jobs: Iterable[tuple[Layer, int, Config]]) -> None:
    """Compiles in the worker processes. Layers that are fused alike share their kernels."""
    unique: dict[Any, tuple[Layer, int, Config]] = {}
    for layer, rows, config in jobs:
        divisible = layer.k if config.wide else layer.k % config.block_k == 0
        fusion = (layer.norm and not config.apart, layer.residual, layer.gated, layer.float32_out)
        unique.setdefault((*fusion, divisible, rows, config), (layer, rows, config))
    try:
        for future in [workers.submit(compile_one, *job) for job in unique.values()]:
            future.result()
    except BrokenProcessPool:  # a compiler crash took a worker down: the rest compiles when it is timed
        return
