"""Times the kernels of the learned drafter's rollout on this GPU, and one whole draft level, against plain torch.

    python benchmarks/drafter_kernels.py [--out PATH] [--workers 12]

Each time is the median over replays of one CUDA graph that holds several calls, so small tensors come from the L2
cache. The torch path differs in what surrounds the matrix products only: those are the same kernels in both. Results
are compared before anything is timed. Worker processes compile beforehand, beside each other.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from linear import SHAPES
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt.bench.record import new_record, write_record
from tlt.kernels.attention import window as ring_attention
from tlt.kernels.attention import window_triton as ring_attention_triton
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import growth, growth_triton
from tlt.kernels.draft_tree import layer as drafter
from tlt.kernels.draft_tree import layer_triton as drafter_triton
from tlt.kernels.sampling import candidates, candidates_triton
from tlt.model.linear import rows_of
from tlt.spec import candidates as naming
from tlt.spec import eagle, window
from tlt.spec.eagle import Eagle, EagleConfig

# R rows, w width of the tree, D hidden, v vocabulary

HIDDEN = (576, 3840)
ROWS, WIDTHS = (1, 8, 32, 64), (1, 4, 8)
VOCAB, WINDOW, DEPTH, HEAD = 49_152, 512, 8, 64


@dataclass(frozen=True)
class DrafterTiming:
    """One line of the table."""

    what: str
    hidden: int
    rows: int
    width: int
    fused_us: float
    torch_us: float


class DrafterBench:
    """A drafter of one size, random, and everything one draft level reads."""

    def __init__(self, hidden: int, rows: int, width: int) -> None:
        torch.manual_seed(0)
        self.rows, self.width = rows, width
        self.model = drafter_of(hidden)
        self.embed, self.head = weight(VOCAB, hidden), weight(VOCAB, hidden)
        self.ring, self.nodes = self.model.new_ring(rows), self.model.new_nodes(rows, width * DEPTH)
        for x in (self.ring.k_RKWd, self.ring.v_RKWd, self.nodes.k_RKNd, self.nodes.v_RKNd):
            x.normal_()
        self.ring.position_RW.copy_(torch.arange(WINDOW + 1, device="cuda") + 1000)
        self.token = torch.randint(VOCAB, (rows, width), device="cuda")
        self.parent = torch.randn(rows, width, hidden, device="cuda", dtype=torch.bfloat16)
        self.position = torch.full((rows, 1), 1000 + WINDOW + 2, device="cuda").expand(-1, width)
        self.slot = (torch.arange(width, device="cuda") + 3 * width).expand(rows, -1)
        self.seen = torch.rand(rows, width, width * DEPTH, device="cuda") < 0.5
        self.seen.scatter_(2, self.slot[:, :, None], True)
        count = torch.arange(rows, device="cuda")
        self.keys = naming.DrawKeys(count * 7919, count, count + 1100, torch.ones(rows, device="cuda"))
        self.beta = torch.ones((), device="cuda")
        self.logits = torch.randn(rows * width, VOCAB, device="cuda", dtype=torch.bfloat16) * 3
        self.qkv = torch.randn(rows * width, len(self.model.qkv), device="cuda", dtype=torch.bfloat16)
        self.trees = growth.Growing.empty(rows, width, DEPTH, hidden, torch.bfloat16, torch.device("cuda"))
        self.named = torch.randint(VOCAB, (rows * width, width), device="cuda"), torch.randn(rows * width, width).cuda()
        self.q = torch.randn(rows, width, self.model.heads.query, HEAD, device="cuda", dtype=torch.bfloat16)

    def calls(self, fused: bool) -> dict[str, Callable[[], Any]]:
        """Every part by its name; the results of both ways are alike."""
        model, layer, options = self.model, drafter_triton if fused else drafter, {"pdl": True}
        attention, named = (ring_attention_triton, candidates_triton) if fused else (ring_attention, candidates)
        grow = growth_triton.expand if fused else growth.expand
        key = (self.keys.seed_N, self.keys.request_N, self.keys.position_N)
        beside = (self.nodes.k_RKNd, self.nodes.v_RKNd, self.seen)
        return {
            "embed + norms": lambda: layer.embed_and_norm(
                self.token, self.parent, self.embed, model.embed_norm, model.feature_norm, 1e-5, **options
            ),
            "rope + write": lambda: layer.rope_into_nodes(
                *(self.qkv, self.position, self.slot, model.cos_PR, model.sin_PR),
                *(self.nodes.k_RKNd, self.nodes.v_RKNd),
                **options,
            ),
            "attention": lambda: attention.attend(
                *(self.q, self.ring.k_RKWd, self.ring.v_RKWd, self.ring.position_RW, self.position, beside), **options
            ),
            "candidates": lambda: named.name(
                *(self.logits, key, self.keys.temperature_N, self.beta, self.width),
                repeat=self.width,
                **(options if fused else {}),
            ),
            "growth": lambda: grow(self.trees, *self.named, self.parent, **options),
            "level": lambda: self.level(fused, grow),
        }

    def level(self, fused: bool, grow: Callable[..., None]) -> tuple[Tensor, ...]:
        with fused_path() if fused else torch_path():
            g = self.model.step(
                *(self.ring, self.nodes, self.token, self.parent, self.position, self.slot, self.seen, self.embed)
            )
            logits = self.model.logits(g, self.head)
            found = naming.candidates(logits, self.keys, self.beta, self.width, repeat=self.width)
            g_RwD = rows_of(g).view(self.parent.shape)
            grow(self.trees, found.token_Nk, found.score_Nk, g_RwD, pdl=True)
        return g_RwD, found.token_Nk, found.score_Nk


@contextmanager
def fused_path() -> Iterator[None]:
    yield


@contextmanager
def torch_path() -> Iterator[None]:
    """Everything but the products by torch operations."""
    modules = (eagle, window, naming)
    for module in modules:
        module.dispatch = lambda reference, in_triton: reference
    try:
        yield
    finally:
        for module in modules:
            module.dispatch = dispatch


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def drafter_of(hidden: int) -> Eagle:
    shape = next(shape for shape in SHAPES.values() if shape.hidden == hidden)
    config = EagleConfig.of_policy(shape.config(), window=WINDOW)
    model = Eagle(config, dtype=torch.bfloat16, device="cuda")
    model.init_weights(0)
    return model


def check(bench: DrafterBench, what: str) -> None:
    """Both ways give the same, up to bfloat16; ids may differ only where their scores hardly do."""
    nodes = (bench.nodes.k_RKNd, bench.nodes.v_RKNd)
    results = [(*as_tuple(bench.calls(fused)[what]()), *(x.clone() for x in nodes)) for fused in (True, False)]
    for ours, theirs in zip(*results, strict=True):
        if ours.dtype == torch.int64:
            continue
        error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        limit = 1e-4 if what == "candidates" else 2e-2
        if not error < limit:
            sys.exit(f"{what} at R {bench.rows}, w {bench.width}: off by {error:.1e} of its size, expected {limit:.0e}")
    if what == "candidates":
        same, close = results[0][0] == results[1][0], (results[0][1] - results[1][1]).abs() < 1e-4
        if not bool((same | close).all()) or same.float().mean() < 0.99:
            sys.exit(f"candidates at R {bench.rows}, w {bench.width}: {int((~same).sum())} of {same.numel()} differ")


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    if result is None:  # trees grow in place; tests hold both ways equal
        return ()
    return result if isinstance(result, tuple) else (result,)


def time_call(call: Callable[[], Any], calls: int = 8, replays: int = 12) -> float:
    """µs per call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


@torch.no_grad()
def warm(cases: list[tuple[int, int, int]]) -> None:
    """Compiles what these cases need, for whoever comes next."""
    for case in cases:
        for call in DrafterBench(*case).calls(fused=True).values():
            call()
    torch.cuda.synchronize()


def warm_beside_each_other(cases: list[tuple[int, int, int]], workers: int) -> None:
    shares = [cases[first::workers] for first in range(min(workers, len(cases)))]
    processes = [subprocess.Popen([sys.executable, __file__, "--warm", json.dumps(share)]) for share in shares]
    for process in processes:
        if process.wait():
            sys.exit("a worker failed while compiling; its message is above")


@torch.no_grad()
def measure(case: tuple[int, int, int]) -> list[DrafterTiming]:
    hidden, rows, width = case
    bench, timings = DrafterBench(*case), []
    ours, theirs = bench.calls(fused=True), bench.calls(fused=False)
    for what in ours:
        check(bench, what)
        timings.append(
            DrafterTiming(what, hidden, rows, width, time_call(ours[what]), time_call(theirs[what], calls=2))
        )
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0: none")
    parser.add_argument("--warm", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm is not None:
        warm([tuple(case) for case in arguments.warm])
        return
    started = time.perf_counter()
    cases = list(itertools.product(HIDDEN, ROWS, WIDTHS))
    if arguments.workers:
        warm_beside_each_other(cases, arguments.workers)
        print(f"compiled in {time.perf_counter() - started:.0f} s")
    timings: list[DrafterTiming] = []
    print(f"{'D':>5} {'R':>3} {'w':>2}  " + "  ".join(f"{name:>19}" for name in PARTS) + "   (µs, ours / torch)")
    for case in cases:
        found = measure(case)
        timings += found
        columns = "  ".join(f"{t.fused_us:>8.1f} / {t.torch_us:>8.1f}" for t in found)
        print(f"{case[0]:>5} {case[1]:>3} {case[2]:>2}  {columns}", flush=True)
    print(f"all of it in {time.perf_counter() - started:.0f} s")
    if arguments.out:
        about = {
            "vocab": VOCAB,
            "window": WINDOW,
            "timings": [asdict(timing) for timing in timings],
        }
        write_record(arguments.out, new_record("cuda", **about))


PARTS = ("embed + norms", "rope + write", "attention", "candidates", "growth", "level")

if __name__ == "__main__":
    main()
