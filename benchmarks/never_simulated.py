"""The tuner, the budget and the training forecast against plain decoding, on simulated costs: no GPU, about a minute.

    python benchmarks/never_simulated.py [--cases useless,short] [--steps 200] [--json FILE]

Costs are those measured on an H200 (`decode_ms` of benchmarks/results); every request accepts with a chance of its own
around the case's. Each case runs 6 rollouts with one tuner and tells plain time ÷ time: of
the first, of the slowest, of all, and of all with a policy that knows the truth. `--steps`: a run like
train_gsm8k_qwen_1.5b_1b67285_h200.json, drafter training included: plain time ÷ time of whole steps, cumulative.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.bench.record import new_record, write_record
from tlt.config import DraftingSettings, SpecSettings
from tlt.drafting.forecast import ranks_of
from tlt.drafting.planner import DrafterStatus, DraftShapes, TrainingPlanner
from tlt.engine.build import shapes_of
from tlt.engine.graphs import captured_sizes, padding
from tlt.spec.acceptance import Acceptance, AcceptResult, RankHits
from tlt.spec.budget import CostKind
from tlt.spec.costs import CATCH_UP, DECODE, DRAFT, EXTEND, INGEST, POLICY, CostModel, Measured, TickTimes
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome
from tlt.spec.tuner import Tuner

SIZES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
DECODE_MS = {  # by number of tokens
    "135m": (0.495, 0.507, 0.654, 0.787, 0.823, 0.918, 1.019, 1.325, 2.172),
    "1.5b": (1.215, 1.244, 1.357, 1.502, 1.693, 2.121, 3.030, 5.117, 9.836),
    "7b": (3.724, 3.805, 3.913, 4.182, 4.650, 6.145, 9.904, 18.42, 36.45),
}
LEVEL_MS = {"135m": 0.09, "1.5b": 0.12, "7b": 0.16}  # of one level of a draft tree
CONTEXT_S = {"135m": 3e-9, "1.5b": 9e-9, "7b": 3e-8}  # of a position of a row
GAP_S = {False: 0.15e-3, True: 0.35e-3}  # host time of a tick, without and with a tree
CAPTURE_S, ROWS, PROMPT, WINDOW, LOOKED = 0.03, 256, 100, 512, 8
SHAPES = shapes_of(SpecSettings(drafter="both", path="new"))
_PLAIN = [AcceptResult(accepted, ()) for accepted in range(40)]


def measured(size: str) -> list[Measured]:
    found = list[Measured]()
    for tokens, ms in zip(SIZES, DECODE_MS[size], strict=True):
        found += [Measured(POLICY, tokens, ms / 1e3), Measured(EXTEND, tokens, 0.28e-3 + 1e-6 * tokens)]
        found += [Measured(DRAFT, tokens, LEVEL_MS[size] / 1e3 + 5e-7 * tokens)]
        found += [Measured(CATCH_UP, tokens, 2e-6 + 4e-8 * tokens)]
    return found


def cost_model(size: str) -> CostModel:
    found = CostModel(padding(ROWS), learned=["eagle"], context_read_once=True)
    for one in measured(size):
        found.load_costs(one)
    return found


@dataclass
class World:
    """True costs, acceptance and captured graphs of one engine."""

    size: str
    chance: float  # of the learned drafter's first candidate, given that those before are right
    seed: int = 0
    clock_s: float = 0.0
    runs: dict[tuple[Shape, int], int] = field(default_factory=dict)  # the second one captures graphs

    def __post_init__(self) -> None:
        self.luck, self.costs, self.pad = np.random.default_rng(self.seed), cost_model(self.size), padding(ROWS)
        self._chances: dict[tuple[float, Shape], float] = {}

    def capture(self, tuner: Tuner) -> None:
        """At start-up, as the engine does: its seconds are none of the rollouts'."""
        self.runs = dict.fromkeys(tuner.precapture(captured_sizes(ROWS)), 2)

    def chance_in(self, shape: Shape) -> float:
        """The chance of a level, so that the mean accept length is that of the rule of the tree."""
        if (self.chance, shape) not in self._chances:
            known = Acceptance([shape], 1e9)
            for name in shape.drafters:
                chance = self.chance if name == "eagle" else min(0.1, self.chance)
                known.load_prior(name, ranks_of(chance, shape.depth, shape.width), 1e6)
            known.refresh()
            low, high, length = 0.0, 1.0, known.length(shape)
            for _ in range(30):
                middle = (low + high) / 2
                below = sum(middle**depth for depth in range(shape.depth + 1)) < length
                low, high = (middle, high) if below else (low, middle)
            self._chances[self.chance, shape] = low
        return self._chances[self.chance, shape]

    def true_s(self, shape: Shape, rows: int, context: float) -> tuple[dict[str, float], float]:
        parts = self.costs.parts(shape, rows)
        parts[DECODE if shape.off else "verify"] += CONTEXT_S[self.size] * context * rows
        noise = 1.0 + 0.02 * float(self.luck.standard_normal())
        parts = {part: max(1e-6, seconds * noise) for part, seconds in parts.items()}
        return parts, sum(parts.values()) + GAP_S[not shape.off]

    def rollout(self, choose: Callable[[int, int], Shape], lengths: list[int], tuner: Tuner | None = None) -> float:
        """Seconds until the last request has its tokens."""
        waiting, begun_s = sorted(lengths), self.clock_s
        left, tempers = np.zeros(0, int), np.zeros(0)
        position, lag, new, unread = float(PROMPT), 0.0, 0, 0
        while len(left) or waiting:
            if waiting and len(left) < ROWS:
                some = [waiting.pop() for _ in range(min(ROWS - len(left), len(waiting)))]
                left, new = np.concatenate([left, some]), new + len(some)
                tempers = np.concatenate([tempers, np.exp(self.luck.normal(0.0, 0.3, len(some)))])
            rows, unread = len(left), unread + new
            shape = choose(rows, math.ceil(lag) if lag > 16 else 0)
            parts, seconds = self.true_s(shape, rows, position)
            taken, results = np.zeros(rows, int), list[AcceptResult]()
            ingested, caught_up = 0.0, 0.0
            if not shape.off:
                deep = np.log(self.luck.random(rows)) / (np.log(max(1e-9, self.chance_in(shape))) * tempers)
                taken = np.minimum(deep.astype(int), shape.depth)
                results = [_PLAIN[n] for n in taken.tolist()]
                for row in range(0, rows, max(1, rows // LOOKED)):
                    results[row] = AcceptResult(results[row].accepted, self.hits(shape, int(taken[row])))
                if "eagle" in shape.drafters:
                    caught_up = lag if lag > 16 else 0.0
                    ingested, unread = unread * PROMPT / rows if not caught_up else 0.0, 0
                    ingest_s = (caught_up + ingested) * (2e-6 + 4e-8 * rows)
                    parts, seconds, lag = {**parts, INGEST: ingest_s}, seconds + ingest_s, 0.0
            lag = min(WINDOW, lag + 1 + float(taken.mean()))
            size = self.pad(rows)
            ready = shape.off or any(self.runs.get((shape, s), 0) > 1 for s in range(size, 2 * size + 1))
            runs = self.runs[shape, size] = self.runs.get((shape, size), 0) + 1
            one_off_s = 0.0 if ready else CAPTURE_S * (0.5 if runs == 1 else 2.0)
            self.clock_s += seconds + one_off_s
            if tuner is not None:
                times, spent = TickTimes(parts, seconds, one_off_s), int(left.max())
                known = (
                    times,
                    math.ceil(caught_up),
                    ingested,
                    new * PROMPT,
                    position,
                    lambda spent=spent: float(spent),
                )
                tuner.observe(Outcome(shape, rows, results, *known))
            left, new = left - 1 - taken, 0
            keep = left > 0
            if not keep.all():
                left, tempers = left[keep], tempers[keep]
            position += 1.0 + float(taken.mean()) if rows < ROWS else 0.0
        if tuner is not None:
            tuner.rollout_ended(sorted(lengths, reverse=True))
        return self.clock_s - begun_s

    def hits(self, shape: Shape, accepted: int) -> tuple[RankHits, ...]:
        """What one request shows of each drafter: the learned one gave all that was accepted."""
        own = RankHits((1,) * accepted, 0 if accepted == shape.depth else shape.width)
        none = RankHits((), shape.width)
        return tuple(own if name == "eagle" or len(shape.drafters) == 1 else none for name in shape.drafters)

    def oracle(self) -> Callable[[int, int], Shape]:
        best: dict[int, Shape] = {}

        def choose(rows: int, lag: int) -> Shape:
            if rows not in best:
                rates = {shape: self.rate(shape, rows) for shape in SHAPES if "suffix" not in shape.drafters}
                best[rows] = max(rates, key=rates.__getitem__)
                self.runs[best[rows], self.pad(rows)] = 2
            return best[rows]

        return choose

    def rate(self, shape: Shape, rows: int) -> float:
        length = 1.0 if shape.off else sum(self.chance_in(shape) ** depth for depth in range(shape.depth + 1))
        return length / ((self.costs.seconds(shape, rows) or 1.0) + GAP_S[not shape.off])


def lognormal(count: int, median: float, sigma: float, cap: int, seed: int) -> list[int]:
    drawn = np.exp(np.random.default_rng(seed).normal(math.log(median), sigma, count))
    return [max(1, min(cap, int(length))) for length in drawn]


CASES: dict[str, tuple[float, Callable[[int], list[int]]]] = {  # chance of a token, lengths of a rollout
    "useless": (0.01, lambda seed: lognormal(256, 280, 0.4, 2048, seed)),
    "short": (0.5, lambda seed: [32] * 512),
    "many": (0.5, lambda seed: lognormal(1024, 280, 0.4, 768, seed)),
    "hot": (0.3, lambda seed: lognormal(256, 300, 0.9, 2048, seed)),
    "gsm8k": (0.6, lambda seed: lognormal(512, 280, 0.35, 2048, seed)),
    "tail": (0.8, lambda seed: lognormal(256, 200, 1.1, 4096, seed)),
}


def case(size: str, name: str, rollouts: int = 6) -> dict[str, float]:
    chance, lengths_of = CASES[name]
    tuner = Tuner(SHAPES, cost_model(size))
    worlds = [World(size, chance) for _ in range(3)]
    worlds[1].capture(tuner)
    seconds = np.zeros((rollouts, 3))
    for number in range(rollouts):
        lengths = lengths_of(number)
        tuner.set_max_len(max(lengths))
        seconds[number] = (
            worlds[0].rollout(lambda rows, lag: OFF, lengths),
            worlds[1].rollout(tuner.choose, lengths, tuner),
            worlds[2].rollout(worlds[2].oracle(), lengths),
        )
    ratios, total = seconds[:, 0] / seconds[:, 1], seconds.sum(axis=0)
    all_, best = total[0] / total[1], total[0] / total[2]
    return {"first": ratios[0], "slowest": ratios.min(), "median": float(np.median(ratios)), "all": all_, "best": best}


# ---- a run like the recorded one

CURVE = [
    (0, 1.0),
    (97, 1.28),
    (191, 1.55),
    (284, 1.77),
    (378, 1.95),
    (479, 2.03),
    (572, 2.06),
    (761, 2.21),
    (1150, 2.4),
]
MICRO_S, MICRO_TOKENS, LOOK_S, UPDATE_S = 0.0115, 2048, 0.01, 3.5  # seconds and tokens of the record


def run(steps: int, worth: float = 0.7, seed: int = 0, told: list[str] | None = None) -> dict[str, Any]:
    """`worth`: what policies accept of the drafter in rollouts, as a share of what they do on held-out answers."""
    tuner, world, plain = Tuner(SHAPES, cost_model("1.5b")), World("1.5b", 1e-3, seed), World("1.5b", 0.0, seed)
    world.capture(tuner)
    tuner.load_prior("eagle", [[0.0]])
    shapes = DraftShapes(SHAPES, "eagle", tuner.expected)
    planner = TrainingPlanner(DraftingSettings(), steps, 3, ROWS, padding(ROWS), shapes, tuner.budget)
    tokens, total_s, plain_total_s, lowest, ratios = 0, 0.0, 0.0, math.inf, list[float]()
    for step in range(1, steps + 1):
        luck = np.random.default_rng((seed, step))
        lengths = lognormal(512, 285, 0.33, 900, step + 1000 * seed) + [2048] * int(luck.random() < 0.45)
        tuner.set_max_len(2048)
        before_s, rollout_s = tuner.report().saved_s, world.rollout(tuner.choose, lengths, tuner)
        plain_s = plain.rollout(lambda rows, lag: OFF, lengths) + UPDATE_S
        planner.rolled_out(lengths, rollout_s, rollout_s + UPDATE_S, tuner.report().saved_s - before_s)
        length = float(np.interp(tokens / 1e3, *zip(*CURVE, strict=True)))
        decision = planner.decide(step, DrafterStatus(length, True, MICRO_TOKENS, MICRO_S, LOOK_S, MICRO_S))
        micro_steps = int(decision.seconds / MICRO_S)
        spent_s = micro_steps * MICRO_S
        if micro_steps:
            tokens += micro_steps * MICRO_TOKENS
            after = float(np.interp(tokens / 1e3, *zip(*CURVE, strict=True)))
            planner.account.charge(CostKind.TRAINING, spent_s)
            planner.trained(length, micro_steps * MICRO_TOKENS, after)
            low, high = 0.0, 1.0
            for _ in range(30):
                middle = (low + high) / 2
                below = 1 + middle + middle**2 + middle**3 < 1 + worth * (after - 1)
                low, high = (middle, high) if below else (low, middle)
            world.chance = max(1e-3, low)
            tuner.drafter_changed("eagle")
        total_s, plain_total_s = total_s + rollout_s + UPDATE_S + spent_s, plain_total_s + plain_s
        ratios.append(plain_s / (rollout_s + UPDATE_S + spent_s))
        lowest = min(lowest, plain_total_s / total_s)
        if told is not None:
            found = decision.forecast
            told.append(
                f"{step}: ratio {ratios[-1]:.3f}, so far {plain_total_s / total_s:.4f}, rollout {rollout_s:.2f} s, "
                f"plain {plain_s - UPDATE_S:.2f}, {tokens // 1000}k tokens, balance {planner.account.balance_s:.2f} s, "
                f"{found}"
            )
    last = ratios[-10:]
    return {
        "steps": steps,
        "all": plain_total_s / total_s,
        "lowest": lowest,
        "last ten": len(last) / sum(1 / r for r in last),
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sizes", default=",".join(DECODE_MS))
    parser.add_argument("--steps", default="14,40")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for size in filter(None, options.sizes.split(",")):
        for name in filter(None, options.cases.split(",")):
            found[f"{size} {name}"] = one = case(size, name)
            print(f"{size:5} {name:8}" + "".join(f"  {key} {value:.3f}" for key, value in one.items()), flush=True)
    for steps in filter(None, options.steps.split(",")):
        told = list[str]()
        found[f"run of {steps} steps"] = one = run(int(steps), told=told)
        print(
            "\n".join(told) if options.verbose else "", {key: round(value, 4) for key, value in one.items()}, flush=True
        )
    if options.json:
        write_record(options.json, new_record("cpu", simulated=found))


if __name__ == "__main__":
    main()
