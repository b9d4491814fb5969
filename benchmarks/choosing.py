"""What a decision costs: `Tuner.choose` and `Tuner.observe`, per tick, on one CPU core. Needs no GPU and no files.

    python benchmarks/choosing.py [--rollouts 3] [--repeats 3] [--json FILE]

Rollouts are made up: so many answers of log-normal lengths are written at once, so that the batch shrinks from all of
them to one; what ticks take and what is accepted is drawn for a 7B policy on one card. The tuner is the engine's own,
with every shape of the default settings, and is told what the engine tells it: of each tick a few walks with what the
drafters named, of the others how far they went. It goes on from rollout to rollout, and the drafter changes in between,
as in training. A repeat makes the very same calls; the quickest of each counts, so that other work on the machine
hardly does, and the mean over all that were made is told beside it. The clock's own time (some 0.05 µs) is included.
"""

import argparse
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt.bench.record import new_record, write_record
from tlt.config import EngineSettings, SpecSettings
from tlt.engine.build import shape_policy_of, shapes_of
from tlt.spec.acceptance import AcceptResult, RankHits
from tlt.spec.costs import DECODE, DRAFT, EXTEND, INGEST, LOOKUP, POLICY, PRUNE, VERIFY, Measured, TickTimes
from tlt.spec.shape import MOST_NODES, OFF, Shape
from tlt.spec.shape_policy import Outcome
from tlt.spec.speculation import compared_rows
from tlt.spec.tuner import Tuner

LEARNED = "eagle"
FIRST = {LEARNED: 0.75, "suffix": 0.35}  # chance of a drafter's first candidate
PER_DEPTH, PER_RANK = 0.97, 0.4  # what is left of it one deeper, and at the next candidate where those before missed
NOISE = 0.03  # of a tick's time
WINDOW = 512  # positions that a learned drafter takes in at most
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
UNSEEN = tuple(AcceptResult(accepted, ()) for accepted in range(MOST_NODES))


# ---- the world


def policy_s(tokens: float) -> float:
    """Flat while the weights are read, then with the tokens."""
    return max(4.2e-3 + 2e-6 * tokens, 21e-6 * tokens)


def tick_s(shape: Shape, batch: int) -> float:
    learned = (
        0.35e-3 + (shape.depth - 1) * (0.15e-3 + 0.3e-6 * batch * shape.width) if LEARNED in shape.drafters else 0.0
    )
    return policy_s(shape.tokens(batch)) + learned + ("suffix" in shape.drafters) * (20e-6 + 2e-6 * batch)


def times_of(shape: Shape, seconds: float, ingest_s: float) -> TickTimes:
    """A tick that speculated, part by part."""
    parts = {VERIFY: 0.8 * seconds, LOOKUP: 50e-6} if "suffix" in shape.drafters else {VERIFY: 0.8 * seconds}
    if LEARNED in shape.drafters:
        parts |= {EXTEND: 0.05 * seconds, PRUNE: 0.01 * seconds}
        parts |= {DRAFT: 0.1 * seconds} if shape.depth > 1 else {}
        parts |= {INGEST: ingest_s} if ingest_s else {}
    return TickTimes(parts, seconds + ingest_s)


def measured() -> list[Measured]:
    """What an engine measures when it is built."""
    found = list[Measured]()
    for size in SIZES:
        found.append(Measured(POLICY, size, policy_s(size)))
        found.append(Measured(EXTEND, size, 0.35e-3 + 0.3e-6 * size))
        found.append(Measured(DRAFT, size, 0.15e-3 + 0.3e-6 * size))
    return found


@dataclass
class ChoosingWorld:
    """One rollout after the other. What happens depends on the seed, and on what is chosen."""

    luck: random.Random
    left: dict[int, int] = field(default_factory=dict)  # request → tokens it has yet to write
    verifies: int = 0
    alone: int = 0  # ticks since the learned drafter was asked

    def begin(self, requests: int, median: float, sigma: float, cap: int) -> None:
        drawn = (median * self.luck.lognormvariate(0.0, sigma) for _ in range(requests))
        first = self.luck.getrandbits(32)
        self.left = {first + number: max(1, min(cap, round(length))) for number, length in enumerate(drawn)}
        self.alone = WINDOW

    def remaining_ticks(self) -> float:
        return float(max(self.left.values(), default=0))

    def tick(self, shape: Shape) -> Outcome:
        """As it went. Whoever has written all is gone afterwards."""
        batch, seconds = len(self.left), tick_s(shape, len(self.left)) * (1.0 + self.luck.gauss(0.0, NOISE))
        if shape.off:
            self.alone += 1
            self._write([1] * batch)
            return Outcome(OFF, batch, (), TickTimes({DECODE: seconds}, seconds), remaining_ticks=self.remaining_ticks)
        results = self._walks(shape)
        self.verifies += batch
        self._write([walked.accepted + 1 for walked in results])
        lag = self.alone if LEARNED in shape.drafters and self.alone > 1 else 0
        times = times_of(shape, seconds, 0.4e-3 + 1e-6 * lag * batch if lag else 0.0)
        self.alone = 0 if LEARNED in shape.drafters else self.alone + 1
        return Outcome(shape, batch, results, times, lag, remaining_ticks=self.remaining_ticks)

    @property
    def lag(self) -> int:
        return min(self.alone, WINDOW)

    def _walks(self, shape: Shape) -> list[AcceptResult]:
        """A few with what each drafter named, as `tlt.spec.speculation` picks them."""
        looked = set(compared_rows(len(self.left), self.verifies))
        results = []
        for row, request in enumerate(self.left):
            rank_hits = tuple(self._track(drafter, shape) for drafter in shape.drafters)
            accepted = max(len(one.ranks) for one in rank_hits)
            if shape.share:  # the others' nodes were likelier
                accepted = min(accepted, int(shape.share - 1.0 + self.luck.random()))
            results.append(AcceptResult(accepted, rank_hits, request) if row in looked else UNSEEN[accepted])
        return results

    def _track(self, drafter: str, shape: Shape) -> RankHits:
        ranks: list[int] = []
        for depth in range(shape.depth):
            chance = FIRST[drafter] * PER_DEPTH**depth
            for rank in range(1, shape.width + 1):
                if self.luck.random() < chance:
                    ranks.append(rank)
                    break
                chance *= PER_RANK
            else:
                return RankHits(tuple(ranks), shape.width)
        return RankHits(tuple(ranks))

    def _write(self, tokens: Sequence[int]) -> None:
        left = ((request, n - written) for (request, n), written in zip(self.left.items(), tokens, strict=True))
        self.left = {request: n for request, n in left if n > 0}


# ---- timing


@dataclass(frozen=True, slots=True)
class Timed:
    """A tick: what deciding it and learning from it took."""

    batch: int
    reviewed: bool  # shapes were compared; otherwise the choice stood
    off: bool
    choose_us: float
    observe_us: float


def tuner_of(drafter: str) -> Tuner:
    """The engine's own."""
    tuner = shape_policy_of(SpecSettings(drafter=drafter, path="new"), EngineSettings().rows, measured(), on_gpu=True)
    assert isinstance(tuner, Tuner)
    return tuner


def rollouts(drafter: str, options: argparse.Namespace) -> list[Timed]:
    """The same calls every time."""
    tuner = tuner_of(drafter)
    tuner.set_max_len(options.cap)
    world, ticks = ChoosingWorld(random.Random(options.seed)), []
    for rollout in range(options.rollouts):
        if rollout:
            tuner.drafter_changed(LEARNED)
        world.begin(options.requests, options.median, options.sigma, options.cap)
        while world.left:
            batch, lag, evaluations = len(world.left), world.lag, tuner.evaluations
            started = time.perf_counter_ns()
            shape = tuner.choose(batch, lag)
            chosen = time.perf_counter_ns()
            outcome = world.tick(shape)
            told = time.perf_counter_ns()
            tuner.observe(outcome)
            observed = time.perf_counter_ns()
            reviewed = tuner.evaluations > evaluations
            ticks.append(Timed(batch, reviewed, shape.off, (chosen - started) / 1e3, (observed - told) / 1e3))
    return ticks


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    middle, last = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
    return {"mean": fmean(ordered), "median": middle, "p99": last, "max": ordered[-1]}


def summary(repeats: Sequence[Sequence[Timed]]) -> dict[str, Any]:
    """The quickest of each call, over all ticks and by number of requests."""
    calls = list(zip(*repeats, strict=True))
    choose = [min(one.choose_us for one in same) for same in calls]
    observe = [min(one.observe_us for one in same) for same in calls]
    first = repeats[0]
    reviews = [us for tick, us in zip(first, choose, strict=True) if tick.reviewed]
    drafted = [us for tick, us in zip(first, observe, strict=True) if not tick.off]
    by_batch: dict[int, list[int]] = {}
    for place, tick in enumerate(first):
        by_batch.setdefault(1 << (tick.batch - 1).bit_length(), []).append(place)
    return {
        "ticks": len(first),
        "off_share": sum(tick.off for tick in first) / len(first),
        "choose_us": spread(choose),
        "observe_us": spread(observe),
        "mean_of_all_us": {
            "choose": fmean(one.choose_us for same in calls for one in same),
            "observe": fmean(one.observe_us for same in calls for one in same),
        },
        "reviews": {"share": len(reviews) / len(first), "choose_us": spread(reviews)},
        "observe_drafted_us": spread(drafted) if drafted else None,
        "by_requests": {
            f"≤ {size}": {
                "ticks": len(places),
                "choose_us": fmean(choose[place] for place in places),
                "observe_us": fmean(observe[place] for place in places),
            }
            for size, places in sorted(by_batch.items())
        },
    }


def _short(value: Any) -> Any:
    """Nanoseconds are enough."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def tell(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['shapes']} shapes, {found['ticks']:,} ticks, {found['off_share']:.0%} of them off")
    for what in ("choose_us", "observe_us", "observe_drafted_us"):
        if found[what]:
            told = ", ".join(f"{word} {value:.1f}" for word, value in found[what].items())
            print(f"  {what.removesuffix('_us').replace('_', ', '):18} {told} µs")
    reviews = found["reviews"]
    print(f"  reviews: {reviews['share']:.1%} of the ticks, {reviews['choose_us']['mean']:.0f} µs each")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["eagle", "both"], choices=["eagle", "both"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--median", type=float, default=400.0, help="tokens of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of its length")
    parser.add_argument("--cap", type=int, default=8192)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    kept = {name: value for name, value in vars(options).items() if name not in ("json", "commit")}
    record = new_record("cpu", options.commit, options=kept, results={})
    for drafter in options.drafters:
        gc.collect()
        shapes = len(shapes_of(SpecSettings(drafter=drafter, path="new")))
        found = {"shapes": shapes, **summary([rollouts(drafter, options) for _ in range(options.repeats)])}
        record["results"][drafter] = _short(found)
        tell(drafter, found)
    if options.json:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
