"""Writing ahead in a simulated fleet of H200s: rollout times by the share of tokens that an update turns.

    python benchmarks/writing_ahead.py --workers 8 --json FILE

A worker costs what an H200 costs with a 7B policy (`benchmarks/books/h200_7b.json`). Nothing is drafted: the policy's
text is as hard to predict as can be. Lengths are lognormal, those of the next rollout are not known beforehand.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt.bench.record import new_record, write_record
from tlt.config import EngineSettings, RunConfig, SpecSettings, TaskSettings
from tlt.engine.build import shape_policy_of
from tlt.sim.book import CostBook, read_book
from tlt.sim.fleet import SimFleet, Simulated
from tlt.sim.measuring import pad_of
from tlt.sim.trace import Trace, draw_trace
from tlt.sim.world import World
from tlt.spec.shape_policy import ShapePolicy

BOOK = Path(__file__).parent / "books" / "h200_7b.json"
TURN_RATES = (None, 0.0003, 0.001, 0.003, 0.01, 0.03, 1.0)  # measured: 0.003 at a learning rate of 2e-6


def rollouts(book: CostBook, trace: Trace, workers: int, turn_rate: float | None, count: int) -> list[Simulated]:
    """The first rollout has no text yet."""
    settings = EngineSettings(rows=book.rows, page_size=book.page_size)

    def tuner() -> ShapePolicy:
        return shape_policy_of(SpecSettings(), book.rows, book.measured, on_gpu=book.gpu)

    pad = pad_of(book)
    fleet = SimFleet(trace, workers, lambda number: World(book, (), pad, number), settings, tuner, 0, turn_rate)
    return [fleet.rollout() for _ in range(count)]


def row(found: Sequence[Simulated], turn_rate: float | None) -> dict[str, Any]:
    later = found[1:]
    return {
        "turn_rate": turn_rate,
        "seconds": [one.seconds for one in found],
        "mean_s": fmean(one.seconds for one in later),
        "ahead_share": fmean(one.ahead / one.tokens for one in later),
        "written_share": fmean(one.written_ahead / one.tokens for one in found[:-1]),
        "idle_share": fmean(one.idle_share for one in later),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lengths", default="median=400,sigma=1.0,cap=8192,prompt=128")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    config = replace(RunConfig(), task=TaskSettings(prompts=asked.prompts, group=asked.group))
    book, trace = replace(read_book(BOOK), ranks=()), draw_trace(asked.lengths, config)
    rows: list[dict[str, Any]] = []
    for turn_rate in TURN_RATES:
        rows.append(row(rollouts(book, trace, asked.workers, turn_rate, asked.rollouts), turn_rate))
        speedup = rows[0]["mean_s"] / rows[-1]["mean_s"]
        rate = "off" if turn_rate is None else f"{turn_rate:g}"
        print(
            f"{rate:>7} {rows[-1]['mean_s']:8.2f} s {speedup:6.3f} x, {rows[-1]['ahead_share']:6.1%} ahead", flush=True
        )
    if asked.json:
        words = {"workers": asked.workers, "lengths": asked.lengths, "tokens": sum(trace.lengths), "rows": rows}
        write_record(asked.json, new_record("cpu", writing_ahead=words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
