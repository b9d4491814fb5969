"""Time the attention and row-wise kernels on a GPU, after checking them against torch in float64 on random inputs.

    python benchmarks/attention.py [--json FILE] [--quick] [--tune] [--pdl]

Each figure is the median over replays of a CUDA graph of many calls, which rotate among enough caches to overflow the
chip's own L2 cache (16 caches at most). GB/s counts keys and values read once, queries and outputs; the percentage is
of a device-to-device copy measured in the same run, bytes read plus bytes written.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tlt.bench.record import new_record, write_record
from tlt.kernels.attention import reference as attention
from tlt.kernels.attention import triton as attention_triton
from tlt.kernels.attention.kv_splits import list_kv_splits
from tlt.kernels.attention.plan import AttentionLaunch, plan_launch
from tlt.kernels.linear import elementwise, elementwise_triton

PAGE = 16
CACHED_BYTES = 120e6  # two L2 caches of an H200: rotate among at least this much
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a policy, and the widths of its rows."""

    name: str
    n_q: int
    n_kv: int
    d_head: int
    hidden: int
    mlp: int


SHAPES = (
    AttentionShape("7B", 48, 16, 64, 3840, 15360),
    AttentionShape("1.5B", 24, 8, 64, 1920, 6912),
    AttentionShape("135M", 9, 3, 64, 576, 1536),
)


@dataclass(frozen=True)
class Batch:
    """Requests with the same number of queries; contexts may differ. Caches: one pair per layer."""

    q: Tensor
    k_caches: Tensor
    v_caches: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    tree_mask: Tensor | None
    max_query: int
    bytes_moved: int
    listed: dict[AttentionLaunch, Tensor] = field(default_factory=dict)  # splits, by launch

    def call(
        self, layer: int, *, launch: AttentionLaunch | None = None, pdl: bool = False, out: Tensor | None = None
    ) -> Tensor:
        launch = launch or planned(self)
        if launch not in self.listed:
            self.listed[launch] = list_kv_splits(self.context_len, launch)  # once for all layers, as an engine does it
        return attention_triton.paged_attention(
            self.q, self.k_caches[layer], self.v_caches[layer], self.query_start, self.context_len, self.page_table,
            max_query=self.max_query, scale=self.q.shape[2] ** -0.5, tree_mask_TW=self.tree_mask,
            launch=launch, pdl=pdl, out=out, kv_splits_S=self.listed[launch],
        )  # fmt: skip

    def reference(self, layer: int) -> Tensor:
        return attention.paged_attention(
            self.q.double(), self.k_caches[layer].double(), self.v_caches[layer].double(), self.query_start,
            self.context_len, self.page_table, max_query=self.max_query, scale=self.q.shape[2] ** -0.5,
            tree_mask_TW=self.tree_mask,
        )  # fmt: skip


def make_batch(shape: AttentionShape, contexts: list[int], queries: int, *, tree: bool, most_layers: int = 16) -> Batch:
    pages_of = [math.ceil(context / PAGE) for context in contexts]
    kv_bytes = 4 * sum(contexts) * shape.n_kv * shape.d_head
    layers = max(1, min(most_layers, math.ceil(CACHED_BYTES / kv_bytes)))
    shuffled = torch.randperm(sum(pages_of), device="cuda", dtype=torch.int32)
    table = torch.zeros((len(contexts), max(pages_of)), dtype=torch.int32, device="cuda")
    first = 0
    for request, count in enumerate(pages_of):
        table[request, :count] = shuffled[first : first + count]
        first += count
    caches = [torch.randn((layers, sum(pages_of), PAGE, shape.n_kv, shape.d_head), **BF16) for _ in range(2)]
    q = torch.randn((len(contexts) * queries, shape.n_q, shape.d_head), **BF16)
    return Batch(
        q=q,
        k_caches=caches[0],
        v_caches=caches[1],
        query_start=torch.arange(len(contexts) + 1, dtype=torch.int32, device="cuda") * queries,
        context_len=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        page_table=table,
        tree_mask=random_tree(queries).repeat(len(contexts), 1) if tree else None,
        max_query=queries,
        bytes_moved=kv_bytes + 2 * q.numel() * q.element_size(),
    )


def random_tree(nodes: int) -> Tensor:
    """Ancestor bits, 32 to a word, of a tree where each node hangs under a random earlier one."""
    parents = [int(torch.randint(-1, node, ())) if node else -1 for node in range(nodes)]
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    words = math.ceil(nodes / 32)
    rows = [[bits >> 32 * word & 0xFFFFFFFF for word in range(words)] for bits in seen]
    return torch.tensor(rows).to("cuda", torch.int32)


def microseconds(call: Callable[[int], object], layers: int, *, replays: int = 15) -> float:
    """Median time of one call, from graphs of 16 or more calls."""
    calls = layers * math.ceil(16 / layers)
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % layers)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def copy_gigabytes_per_second() -> float:
    source = torch.randn(1 << 30, **BF16)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / microseconds(lambda _: target.copy_(source), 1, replays=7) / 1000


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check_all(shape: AttentionShape) -> None:
    """Every kernel once against float64 on inputs drawn now; raises where the error is more than bf16 explains."""
    cases = [([700, 1, 64, 333], 1, False), ([260, 0, 99], 8, True), ([90, 1500], 32, True), ([1000, 512], 512, False)]
    for contexts, queries, tree in [*cases, ([5000], 1, False), ([100] * 60, 40, True)]:
        batch = make_batch(shape, contexts, queries, tree=tree, most_layers=1)
        plan = planned(batch)
        for launch in (plan, replace(plan, extra=0), replace(plan, extra=23, min_split=plan.block_n)):
            out = batch.call(0, launch=launch, out=torch.full_like(batch.q, math.nan))
            report(f"attention {len(contexts)} requests, {queries} queries, {launch}", out, batch.reference(0))
            for _ in range(20):
                if not torch.equal(batch.call(0, launch=launch), out):
                    raise SystemExit(f"attention gives other bits on the same inputs: {launch}")
    check_rows(shape)


def check_rows(shape: AttentionShape) -> None:
    rows = torch.randn((37, shape.hidden), **BF16), torch.randn((37, shape.hidden), **BF16)
    weight = torch.rand(shape.hidden, **BF16)
    got = elementwise_triton.add_rms_norm(*rows, weight, 1e-5)
    expected = elementwise.add_rms_norm(*rows, weight, 1e-5)
    report("add_rms_norm", got[0], expected[0])
    report("add_rms_norm's residual", got[1], expected[1])
    gate_up = torch.randn((37, 2 * shape.mlp), **BF16)
    report("silu_mul", elementwise_triton.silu_mul(gate_up), elementwise.silu_mul(gate_up))
    arguments = rope_arguments(shape, 37)
    caches = [torch.zeros((8, PAGE, shape.n_kv, shape.d_head), **BF16) for _ in range(4)]
    report(
        "rope_and_write",
        attention_triton.rope_and_write(*arguments, *caches[:2], shape.n_q, shape.n_kv, shape.d_head, rotary=True),
        attention.rope_and_write(*arguments, *caches[2:], shape.n_q, shape.n_kv, shape.d_head, rotary=True),
    )
    report("rope_and_write's keys", caches[0], caches[2])
    report("rope_and_write's values", caches[1], caches[3])


def report(what: str, got: Tensor, expected: Tensor) -> None:
    error = relative_error(got, expected)
    if not error < 1e-2:
        raise SystemExit(f"{what}: relative error {error:.2e}; expected less than 1e-2")


def planned(batch: Batch) -> AttentionLaunch:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    n_kv = batch.k_caches.shape[3]
    return plan_launch(len(batch.context_len), n_kv, batch.q.shape[1] // n_kv, batch.max_query, multiprocessors)


def rope_arguments(shape: AttentionShape, tokens: int) -> tuple[Tensor, ...]:
    angles = torch.arange(4096, device="cuda")[:, None] * 1e4 ** (
        -torch.arange(shape.d_head // 2, device="cuda") * 2 / shape.d_head
    )
    return (
        torch.randn((tokens, (shape.n_q + 2 * shape.n_kv) * shape.d_head), **BF16),
        torch.randint(0, 4096, (tokens,), device="cuda", dtype=torch.int32),
        torch.arange(tokens, device="cuda", dtype=torch.int32),
        angles.cos(),
        angles.sin(),
    )


class Table:
    """Prints rows as they come, keeps them for the file."""

    def __init__(self, copy_speed: float) -> None:
        self.copy_speed = copy_speed
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, us: float, moved: float, **more: Any) -> None:
        speed = moved / us / 1000
        percent = 100 * speed / self.copy_speed
        self.rows.append({"name": name, "us": us, "gigabytes_per_second": speed, "percent_of_copy": percent, **more})
        extra = "  ".join(f"{key}={value}" for key, value in more.items())
        print(f"{name:<44}{us:>9.2f} µs {speed:>7.0f} GB/s {percent:>5.1f} %  {extra}", flush=True)


def time_decoding(table: Table, shape: AttentionShape, *, quick: bool, pdl: bool) -> None:
    for queries in (1, 8, 32):
        for requests in (1, 8, 64, 256):
            for context in (1024,) if quick else (128, 512, 1024, 4096):
                batch = make_batch(shape, [context] * requests, queries, tree=queries > 1)
                plan = planned(batch)
                us = microseconds(lambda layer, batch=batch: batch.call(layer, pdl=pdl), len(batch.k_caches))
                name = f"{shape.name} R={requests} L={context} q={queries}"
                table.add(name, us, batch.bytes_moved, rows=plan.block_m, splits=plan.kv_splits(requests))
    straggler = make_batch(shape, [256] * 63 + [8192], 1, tree=False)
    us = microseconds(lambda layer: straggler.call(layer, pdl=pdl), len(straggler.k_caches))
    table.add(f"{shape.name} R=64 L=256, one of 8192", us, straggler.bytes_moved)


def time_prefill(table: Table, shape: AttentionShape) -> None:
    for requests, queries, context in ((1, 4096, 4096), (8, 512, 512), (1, 1024, 4096)):
        batch = make_batch(shape, [context] * requests, queries, tree=False, most_layers=2)
        us = microseconds(lambda layer, batch=batch: batch.call(layer), len(batch.k_caches), replays=5)
        pairs = requests * (queries * context - queries * (queries - 1) / 2)
        flops = 4 * pairs * shape.n_q * shape.d_head
        name = f"{shape.name} prefill R={requests} q={queries} L={context}"
        table.add(name, us, batch.bytes_moved, teraflops=round(flops / us / 1e6))
    q, k, v = (torch.randn((1, heads, 4096, shape.d_head), **BF16) for heads in (shape.n_q, shape.n_q, shape.n_q))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    us = microseconds(lambda _: sdpa(q, k, v, is_causal=True), 1, replays=5)
    flops = 2 * 4096 * 4096 * shape.n_q * shape.d_head
    table.add(f"{shape.name} torch's own, 4096 causal", us, 8 * q.numel(), teraflops=round(flops / us / 1e6))


def time_rows(table: Table, shape: AttentionShape, *, pdl: bool) -> None:
    for tokens in (1, 64, 256, 4096):
        arguments = rope_arguments(shape, tokens)
        caches = [torch.zeros((math.ceil(tokens / PAGE), PAGE, shape.n_kv, shape.d_head), **BF16) for _ in range(2)]
        heads = shape.n_q, shape.n_kv, shape.d_head
        rope = partial(attention_triton.rope_and_write, *arguments, *caches, *heads, rotary=True, pdl=pdl)
        us = microseconds(lambda _, rope=rope: rope(), 1)
        table.add(f"{shape.name} rope_and_write T={tokens}", us, 4 * arguments[0].numel())
        x, residual = (torch.randn((tokens, shape.hidden), **BF16) for _ in range(2))
        weight, gate_up = torch.rand(shape.hidden, **BF16), torch.randn((tokens, 2 * shape.mlp), **BF16)
        us = microseconds(
            lambda _, x=x, y=residual, w=weight: elementwise_triton.add_rms_norm(x, y, w, 1e-5, pdl=pdl), 1
        )
        table.add(f"{shape.name} add_rms_norm T={tokens}", us, 8 * x.numel())
        us = microseconds(lambda _, g=gate_up: elementwise_triton.silu_mul(g, pdl=pdl), 1)
        table.add(f"{shape.name} silu_mul T={tokens}", us, 3 * gate_up.numel())


def time_chain(table: Table, shape: AttentionShape) -> None:
    """What a layer does beside its matrix products, with and without programmatic dependent launch."""
    for requests in (1, 64):
        batch = make_batch(shape, [1024] * requests, 1, tree=False)
        for pdl in (False, True):
            layer = layer_without_products(shape, batch, pdl=pdl)
            us = microseconds(layer, len(batch.k_caches))
            table.add(f"{shape.name} five kernels of a layer R={requests}", us, batch.bytes_moved, pdl=pdl)


def layer_without_products(shape: AttentionShape, batch: Batch, *, pdl: bool) -> Callable[[int], None]:
    tokens = batch.q.shape[0]
    arguments = rope_arguments(shape, tokens)
    x, residual = (torch.randn((tokens, shape.hidden), **BF16) for _ in range(2))
    weight, gate_up = torch.rand(shape.hidden, **BF16), torch.randn((tokens, 2 * shape.mlp), **BF16)
    heads = shape.n_q, shape.n_kv, shape.d_head

    def layer(index: int) -> None:
        caches = batch.k_caches[index], batch.v_caches[index]
        elementwise_triton.add_rms_norm(x, residual, weight, 1e-5, pdl=pdl)
        attention_triton.rope_and_write(*arguments, *caches, *heads, rotary=True, out=batch.q, pdl=pdl)
        batch.call(index, pdl=pdl)
        elementwise_triton.add_rms_norm(x, residual, weight, 1e-5, pdl=pdl)
        elementwise_triton.silu_mul(gate_up, pdl=pdl)

    return layer


def tune(table: Table, *, short: bool = False) -> None:
    """The planned launch and its neighbours, one field changed at a time; short: rollouts' usual sizes alone."""
    cases = [(1, 1024, 1), (1, 8192, 1), (8, 1024, 1), (64, 1024, 1), (256, 512, 1)]
    cases += [(1, 1024, 32), (8, 1024, 8), (64, 1024, 8), (64, 1024, 32)]
    if short:
        cases = [(64, 250, 1), (256, 250, 1), (8, 2000, 8), (8, 2000, 16), (32, 600, 8), (64, 400, 4)]
    for requests, context, queries in cases:
        shape = SHAPES[0]
        batch = make_batch(shape, [context] * requests, queries, tree=queries > 1)
        plan = planned(batch)
        neighbours = [plan, *(replace(plan, **change) for change in changes(plan, queries * shape.n_q // shape.n_kv))]
        times = [(time_launch(batch, launch), launch) for launch in neighbours]
        for us, launch in sorted(times, key=lambda pair: pair[0])[:5] + times[:1]:
            name = f"7B R={requests} L={context} q={queries}" + (" (planned)" if launch is plan else "")
            table.add(name, us, batch.bytes_moved, **asdict(launch))


def time_launch(batch: Batch, launch: AttentionLaunch) -> float:
    return microseconds(lambda layer: batch.call(layer, launch=launch), len(batch.k_caches), replays=7)


def changes(plan: AttentionLaunch, rows: int) -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = [{"num_stages": n} for n in (2, 3, 4) if n != plan.num_stages]
    changed += [{"num_warps": n} for n in (2, 4, 8) if n != plan.num_warps and not (n == 2 and plan.block_m >= 64)]
    tiles = [(block_n, stages) for block_n in (32, 64, 128, 256) for stages in (1, 2, 3, 4) if block_n * stages < 600]
    changed += [{"block_n": block_n, "num_stages": stages} for block_n, stages in tiles]
    changed += [{"extra": n, "min_split": 64} for n in (0, 8, 16, 32, 64, 128, 255) if n != plan.extra]
    heights = [n for n in (16, 32, 64, 128) if n != plan.block_m and n < 2 * rows]
    changed += [{"block_m": n, "num_warps": 8 if n == 128 else 4} for n in heights]
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the attention and row-wise kernels on this GPU.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="context 1024 only; with --tune: the usual sizes of rollouts"
    )
    parser.add_argument("--tune", action="store_true", help="try the neighbours of the planned launches, nothing else")
    parser.add_argument("--pdl", action="store_true", help="launch with programmatic dependent launch")
    parser.add_argument("--commit", default="", help="of the code that is timed, for the record")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU found; this benchmark times GPU kernels, and the tests check them without one")
    began = time.perf_counter()
    for shape in SHAPES[:1] if options.quick else SHAPES:
        check_all(shape)
    print(f"all kernels agree with float64 ({time.perf_counter() - began:.0f} s)", flush=True)
    table = Table(copy_gigabytes_per_second())
    print(f"{torch.cuda.get_device_name()}, copy {table.copy_speed:.0f} GB/s", flush=True)
    if options.tune:
        tune(table, short=options.quick)
    else:
        for shape in SHAPES:
            time_decoding(table, shape, quick=options.quick, pdl=options.pdl)
            time_rows(table, shape, pdl=options.pdl)
            time_chain(table, shape)
        time_prefill(table, SHAPES[0])
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.json:
        speed = table.copy_speed
        record = new_record("cuda", options.commit, copy_gigabytes_per_second=speed, rows=table.rows)
        write_record(options.json, record)


if __name__ == "__main__":
    main()
