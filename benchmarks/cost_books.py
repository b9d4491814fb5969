"""Cost books of an H200 for `tlt simulate`, put together from committed records: nothing is measured here.

    python benchmarks/cost_books.py write                 # benchmarks/books/*.json
    python benchmarks/cost_books.py check                 # the 7B book against the rollouts measured in its record
    python benchmarks/cost_books.py paper --json FILE     # 8 to 64 GPUs at 7B and 32B, beside the paper's table

7B: forwards, drafter and context costs as measured (`speculation_c_7b`, `engine_7b`). 32B: an engine of four GPUs by
assumption, a 7B's forwards scaled by the weights of one GPU, and two all-reduces a layer. Acceptance: of the record's
drafter (`check`), of the paper's, fitted to its table of accept lengths, and of a drafter on text that is hard to
predict (`speculation_a_prepare`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tlt.bench.record import write_record
from tlt.config import RunConfig, TaskSettings
from tlt.machine import describe
from tlt.recipe import load_config
from tlt.sim.book import CostBook, read_book, write_book
from tlt.sim.measuring import pad_of
from tlt.sim.trace import Trace, TracedPrompt, draw_trace
from tlt.sim.world import World
from tlt.simulate import Foreseen, choose_next
from tlt.spec.acceptance import Acceptance
from tlt.spec.costs import POLICY, Measured
from tlt.spec.shape import Shape

HERE = Path(__file__).parent
BOOKS = HERE / "books"
SPECULATION = HERE / "results" / "speculation_c_7b_c269349_h200.json"
ENGINE = HERE / "results" / "engine_7b_h200.json"
HARD = HERE / "results" / "speculation_a_prepare_c269349_h200.json"

GIB = 1024**3
PAGE = 16
ROWS = 256
WINDOW = 512
DEPTHS = 15

# The paper's accept lengths at batch 1 with 8 candidates a node, by depth and tokens verified.
PAPER_LENGTHS = {
    (4, 16): 4.63, (4, 32): 4.74, (4, 64): 4.81, (4, 128): 4.82,
    (8, 16): 6.34, (8, 32): 7.01, (8, 64): 7.39, (8, 128): 7.51,
    (12, 16): 7.02, (12, 32): 8.05, (12, 64): 8.76, (12, 128): 9.06,
    (16, 16): 7.25, (16, 32): 8.44, (16, 64): 9.23, (16, 128): 9.78,
}  # fmt: skip
# Fitted to it by least squares: the chance that any candidate is right, at each of four depths in a row; and how much
# likelier a candidate is than the next one.
_PAPER_TOTALS = (0.975625, 0.924375, 0.904375, 0.983125)
_PAPER_RATIO = 0.073125
# Its whole steps against verl, by nodes of 8 GPUs.
PAPER_SPEEDUPS = {"7B": {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}, "32B": {4: 1.83, 8: 2.12}}


def record(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


# ---- acceptance


def ranks_of_chain(lengths: Sequence[tuple[int, float]]) -> tuple[tuple[float, ...], ...]:
    """Chances of the first candidate by depth, from the accept lengths of chains, shortest first."""
    chances: list[float] = []
    reached, before = 1.0, 1.0
    for depth, length in lengths:
        more = depth - len(chances)
        chance = _bisected(lambda p, n=more, r=reached: r * sum(p**i for i in range(1, n + 1)), length - before)
        chances += [chance] * more
        reached, before = reached * chance**more, length
    return tuple((chance,) for chance in chances)


def _bisected(rising: Any, value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return low


def chain_ranks(book_record: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    """Of the drafter that wrote the record."""
    found = {row["shape"]: row["foreseen_length"] for row in book_record["costs"]}
    return ranks_of_chain(
        [(int(s.split()[1].split("x")[0]), found[s]) for s in sorted(found, key=_depth) if "x1/" in s]
    )


def _depth(shape: str) -> int:
    return int(shape.split()[1].split("x")[0])


def hard_ranks() -> tuple[tuple[float, ...], ...]:
    """Of a drafter of a policy that was tuned for nothing: GSM8K in its own words."""
    measured = record(HARD)["drafting"]["measured"]
    lengths = dict(zip(measured["widths"], measured["β = 1"]["after"]["lengths"], strict=True))
    depth = measured["draft_tokens"]
    one, four, eight = (_bisected(lambda p: sum(p**i for i in range(depth + 1)), lengths[width]) for width in (1, 4, 8))
    return ((one, *[(four - one) / 3] * 3, *[(eight - four) / 4] * 4),) * DEPTHS


def paper_ranks() -> tuple[tuple[float, ...], ...]:
    """Chances by depth and candidate with which the paper's table is met within 4 %."""
    shares = [_PAPER_RATIO**rank for rank in range(8)]
    return tuple(tuple(total * share / sum(shares) for share in shares) for total in _PAPER_TOTALS for _ in range(4))


def length_of(ranks: Sequence[Sequence[float]], depth: int, verify: int, width: int = 8) -> float:
    """Expected accept length of the likeliest tree."""
    shape = Shape(depth=depth, width=width, verify=verify, drafters=("eagle",))
    acceptance = Acceptance([shape], horizon=1e9)
    acceptance.load_prior("eagle", ranks, 1e9)
    return acceptance.length(shape)


# ---- costs


def book_7b(kv_gib: float = 90.0) -> CostBook:
    """Of one H200, and the drafter of the record."""
    speculation, engine = record(SPECULATION), record(ENGINE)
    kv_bytes = engine["sections"]["floor"]["records"][0]["kv_bytes_per_token"]
    context_s, gap_s = _context_and_gap(speculation, engine)
    off_s = gap_s + speculation["verdict"]["off_host_us"] / 1e6
    book = CostBook(
        device=speculation["machine"]["device"],
        policy="SmolLM2-135M, widened to the 7B shape",
        gpu=True,
        rows=ROWS,
        pages=int(kv_gib * GIB / (kv_bytes * PAGE)),
        page_size=PAGE,
        measured=tuple(Measured(**cost) for cost in speculation["measured_costs"] if cost["role"] != "capture"),
        context_s=context_s,
        padded=False,
        prefill_s=_largest(speculation) / 2048,
        plain_tick_s=gap_s,
        off_tick_s=off_s,
        verify_tick_s=0.0,
        window=WINDOW,
        ranks=chain_ranks(speculation),
    )
    return replace(book, verify_tick_s=_verify_gap(book, speculation))


def _largest(speculation: dict[str, Any]) -> float:
    found: float = next(cost["seconds"] for cost in speculation["measured_costs"] if cost["size"] == 2048)
    return found


def _context_and_gap(speculation: dict[str, Any], engine: dict[str, Any]) -> tuple[float, float]:
    """Seconds per position looked back on, and of a tick beside its forward: the line through measured steps, of
    which the forwards over an empty cache are taken away."""
    points = [
        (row["batch"] * row["context"], row["step_ms"] / 1e3 - speculation["decode_ms"][str(row["batch"])] / 1e3)
        for row in engine["sections"]["step"]["records"]
    ]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, max(0.0, mean_y - slope * mean_x)


def _verify_gap(book: CostBook, speculation: dict[str, Any]) -> float:
    """Of ticks that verify: measured, less their forwards. The record's requests looked back on half the mean length
    of its completions and a prompt."""
    told = speculation["answers"]
    context = round(told["prompt_tokens_mean"] + told["tokens"] / told["answers"] / 2)
    gaps = []
    for row in speculation["costs"]:
        depth, width, verify = (int(number) for number in row["shape"].split()[1].replace("/", "x").split("x"))
        shape = Shape(depth=depth, width=width, verify=verify, drafters=("eagle",))
        known = World(book, (shape,), pad_of(book), 0).tick_s(shape, [context] * row["batch"], may_draft=True)
        gaps += [row["tick_ms"] / 1e3 - known] * row["ticks"]
    return max(0.0, median(gaps))


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """What is assumed of an engine of several GPUs. Nothing of it was measured."""

    gpus: int = 4
    weights: float = 32.5e9  # of the policy
    layers: int = 64
    kv_bytes: int = 262_144  # of a token, on all GPUs together: 64 layers, 8 heads of 128, bfloat16
    hidden: int = 5120
    reduce_s: float = 12e-6  # of an all-reduce of little, in a graph
    reduce_bytes_s: float = 200e9  # of a large one


def book_32b(small: CostBook, assumed: TensorParallel, kv_gib: float = 90.0) -> CostBook:
    """The 7B's forwards, by the weights that a GPU reads; the drafter's by the width of its layer, on every GPU."""
    floor = record(ENGINE)["sections"]["floor"]["records"][0]
    heavier = assumed.weights / assumed.gpus / floor["parameters"]
    wider = (assumed.hidden / record(ENGINE)["config"]["hidden_size"]) ** 2
    kv_each = assumed.kv_bytes / assumed.gpus

    def reduced(tokens: int) -> float:
        return 2 * assumed.layers * (assumed.reduce_s + tokens * assumed.hidden * 2 / assumed.reduce_bytes_s)

    measured = tuple(
        Measured(cost.role, cost.size, cost.seconds * heavier + reduced(cost.size))
        if cost.role == POLICY
        else replace(cost, seconds=cost.seconds * wider)
        for cost in small.measured
    )
    return replace(
        small,
        policy="32B by assumption, four GPUs an engine",
        pages=int(kv_gib * GIB / (kv_each * PAGE)),
        measured=measured,
        context_s=small.context_s * kv_each / floor["kv_bytes_per_token"],
        prefill_s=small.prefill_s * heavier + reduced(2048) / 2048,
    )


# ---- against what was measured


def check() -> dict[str, Any]:
    """The record's own rollouts: plain decoding, and a warm tuner."""
    speculation, book = record(SPECULATION), book_7b()
    asked = tuple(TracedPrompt(tuple(one["tokens"]), one["prompt_tokens"]) for one in speculation["lengths"])
    trace = Trace(asked, speculation["answers"]["cap"], SPECULATION.name)
    found = choose_next(book, trace, RunConfig(), workers=1, rollouts=3)
    assert found.drafted is not None
    measured = {row["variant"]: row for row in speculation["time"]}
    rows = {}
    for name, simulated in (("plain", found.plain), ("tuner, warm", found.drafted)):
        took, ticks = measured[name]["makespan_s"], measured[name]["ticks"]
        rows[name] = {
            "measured_s": took,
            "foreseen_s": simulated.seconds,
            "error": simulated.seconds / took - 1.0,
            "measured_ticks": ticks,
            "foreseen_ticks": simulated.ticks,
            "accept_length": simulated.accept_length,
        }
    return rows


# ---- beside the paper


@dataclass(frozen=True, slots=True)
class Scene:
    """Assumed of a training step. The paper does not tell its lengths."""

    prompts: int = 64
    group: int = 8
    median: int = 2000
    sigma: float = 1.0
    cap: int = 32768
    prompt: int = 256
    update_flop: float = 10.0  # per weight and token: forward, backward, and two forwards of log-probabilities
    flop_s: float = 0.4 * 989e12  # of a GPU

    def trace(self, config: RunConfig) -> Trace:
        wanted = f"median={self.median},sigma={self.sigma},cap={self.cap},prompt={self.prompt}"
        return draw_trace(wanted, replace(config, task=TaskSettings(prompts=self.prompts, group=self.group)))

    def rest_s(self, trace: Trace, weights: float, gpus: int) -> float:
        return self.update_flop * weights * sum(trace.lengths) / (self.flop_s * gpus)


def paper(scene: Scene, rollouts: int, gpus: Sequence[int]) -> Iterator[dict[str, Any]]:
    config = load_config(None, [])
    trace, small, assumed = scene.trace(config), read_book(BOOKS / "h200_7b.json"), TensorParallel()
    policies = (("7B", small, 1, 7.6e9), ("32B", book_32b(small, assumed), assumed.gpus, assumed.weights))
    drafters = {"the paper's accept lengths": paper_ranks(), "hard to predict": hard_ranks()}
    for (name, book, each, weights), (drafter, ranks), count in product(policies, drafters.items(), gpus):
        found = choose_next(replace(book, ranks=ranks), trace, config, count // each, rollouts)
        rest_s = scene.rest_s(trace, weights, count)
        yield _row(found, name, drafter, count, rest_s)


def _row(found: Foreseen, name: str, drafter: str, gpus: int, rest_s: float) -> dict[str, Any]:
    plain, best = found.plain.seconds, found.best.seconds
    return {
        "policy": name,
        "drafter": drafter,
        "gpus": gpus,
        "plain_s": plain,
        "tlt_s": best,
        "rest_s": rest_s,
        "rollout_share": plain / (plain + rest_s),
        "rollout_speedup": plain / best,
        "step_speedup": (plain + rest_s) / (best + rest_s),
        "paper": PAPER_SPEEDUPS[name].get(gpus // 8),
        "accept_length": found.best.accept_length,
        "idle_plain": found.plain.idle_share,
        "idle_tlt": found.best.idle_share,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check", "paper"))
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--gpus", default="8,16,32,64")
    parser.add_argument("--prompts", type=int, default=Scene().prompts)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    if options.what == "write":
        small = book_7b()
        BOOKS.mkdir(exist_ok=True)
        write_book(small, BOOKS / "h200_7b.json")
        write_book(book_32b(small, TensorParallel()), BOOKS / "h200_32b_tp4_assumed.json")
    elif options.what == "check":
        print(json.dumps(check(), indent=1))
    else:
        scene, rows = Scene(prompts=options.prompts), []
        for row in paper(scene, options.rollouts, [int(count) for count in options.gpus.split(",")]):
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
            rows.append(row)
        if options.json:
            import torch

            machine = asdict(describe(torch.device("cpu"), options.commit))
            write_record(options.json, {"machine": machine, "check": check(), "scene": asdict(scene), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
