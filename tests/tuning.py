"""A small world for tuners: true survival curves, true costs, seeded chance. Knows what no tuner is told."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from tlt.spec.acceptance import AcceptResult, Alarm, RankHits
from tlt.spec.costs import (
    DECODE,
    DRAFT,
    EXTEND,
    INDEX,
    INGEST,
    LOOKUP,
    POLICY,
    VERIFY,
    CostModel,
    Measured,
    TickTimes,
)
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy

# A 7B policy on one card: flat up to 64 tokens, then rising. Milliseconds.
POLICY_MS = [(1, 4.0), (32, 4.26), (64, 4.31), (128, 4.7), (256, 6.26), (512, 11.0), (1024, 22.0)]
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
LEARNED = "eagle"
MODEL_FREE = "suffix"


def pad(size: int) -> int:
    return SIZES[bisect_left(SIZES, size)]


def policy_s(tokens: int) -> float:
    for (small, low), (large, high) in pairwise(POLICY_MS):
        if tokens <= large:
            return (low + (high - low) * (tokens - small) / (large - small)) / 1e3
    return POLICY_MS[-1][1] * tokens / POLICY_MS[-1][0] / 1e3


def drafting_s(shape: Shape, batch: int) -> float:
    learned = LEARNED in shape.drafters
    device = 0.35e-3 + 0.4e-6 * batch + (shape.depth - 1) * (0.3e-3 + 0.4e-6 * batch * shape.width) if learned else 0.0
    return device + (20e-6 + 2e-6 * batch) * (MODEL_FREE in shape.drafters)


def tick_s(shape: Shape, batch: int, drafting: float = 1.0) -> float:
    return policy_s(shape.tokens(pad(batch))) + drafting * drafting_s(shape, pad(batch))


def parts_s(shape: Shape, batch: int, drafting: float = 1.0) -> dict[str, float]:
    """The parts that `tick_s` is the sum of."""
    size = pad(batch)
    if shape.off:
        return {DECODE: policy_s(size)}
    parts = {VERIFY: policy_s(shape.tokens(size))}
    if LEARNED in shape.drafters:
        parts[EXTEND] = drafting * (0.35e-3 + 0.4e-6 * size)
        if shape.depth > 1:
            parts[DRAFT] = drafting * (shape.depth - 1) * (0.3e-3 + 0.4e-6 * size * shape.width)
    if MODEL_FREE in shape.drafters:
        parts[LOOKUP] = drafting * (20e-6 + 2e-6 * size)
    return parts


def took(
    shape: Shape,
    batch: int,
    seconds: float | None,
    *,
    one_off_s: float = 0.0,
    ingest_s: float = 0.0,
    index_s: float = 0.0,
) -> TickTimes:
    """A tick that took this long without ingesting, its parts in proportion; None: its parts alone are known."""
    parts = parts_s(shape, batch)
    if seconds is not None:
        parts = {part: took_s * seconds / sum(parts.values()) for part, took_s in parts.items()}
        seconds += ingest_s + index_s
    more = {INGEST: ingest_s, INDEX: index_s}
    return TickTimes(parts | {part: more_s for part, more_s in more.items() if more_s}, seconds, one_off_s)


def outcome(
    shape: Shape,
    batch: int,
    results: Sequence[AcceptResult] = (),
    seconds: float | None = None,
    *,
    one_off_s: float = 0.0,
    ingest_s: float = 0.0,
    index_s: float = 0.0,
    **known: Any,
) -> Outcome:
    """A tick that took so many seconds, captures and what was ingested or indexed first left out."""
    times = took(shape, batch, seconds, one_off_s=one_off_s, ingest_s=ingest_s, index_s=index_s)
    return Outcome(shape, batch, results, times, **known)


def measured() -> list[Measured]:
    """What capture measured."""
    found = []
    for size in SIZES[:17]:
        found.append(Measured(POLICY, size, policy_s(size)))
        found.append(Measured(EXTEND, size, 0.35e-3 + 0.4e-6 * size))
        found.append(Measured(DRAFT, size, 0.3e-3 + 0.4e-6 * size))
    return found


def costs(read_once: bool = True, told: Sequence[Measured] | None = None) -> CostModel:
    """Of a GPU; else of a CPU, which computes no padded rows and reads a context for every node."""
    found = CostModel(pad, learned=[LEARNED], context_read_once=read_once)
    for one in measured() if told is None else told:
        found.load_costs(one)
    return found


@dataclass(frozen=True)
class Curve:
    """Chance of a drafter's candidates: of the first at depth 1, what is left of it per depth and per rank."""

    first: float
    per_depth: float = 0.97
    per_rank: float = 0.5

    @cache  # noqa: B019 (curves are few and live as long as the tests)
    def ranks(self, hard: bool) -> tuple[tuple[float, ...], ...]:
        """p_d(r) of contexts of one kind: half of them are harder."""
        rows = []
        for depth in range(12):
            chance, left, row = self.first * self.per_depth**depth * (0.8 if hard else 1.0), 1.0, []
            for _ in range(8):
                row.append(left * chance)
                left, chance = left * (1.0 - chance), chance * self.per_rank
            rows.append(tuple(row))
        return tuple(rows)


Path = tuple[int, ...]  # a node by the ranks on its way


@cache
def nodes(curve: Curve, depth: int, width: int) -> list[tuple[float, float, Path]]:
    """Every node of the full tree worth having: chance in easy and in hard contexts, likeliest first."""
    found: list[tuple[float, float, Path]] = []
    level: list[tuple[float, float, Path]] = [(1.0, 1.0, ())]
    for deep in range(depth):
        easy, hard = curve.ranks(False)[deep], curve.ranks(True)[deep]
        level = [
            (above * easy[r], hard_above * hard[r], (*path, r + 1))
            for above, hard_above, path in level
            for r in range(width)
        ]
        level = sorted(level, key=lambda node: -node[0] - node[1])[:128]
        found += level
    return sorted(found, key=lambda node: (-node[0] - node[1], len(node[2])))


@dataclass
class World:
    curves: dict[str, Curve]
    seed: int = 0
    noise: float = 0.03  # of a tick's time; one in a hundred takes three times as long
    drafting: float = 1.0  # how much dearer drafting is than the table says …
    trees: float = 1.0  # … and all of a tick that speculates
    slow: float = 1.0  # how many times as long as they take ticks seem to take
    context: float = 0.0  # positions that a row looks back on
    seconds: float = 0.0  # true, without noise
    ticks: Counter[Shape] = field(default_factory=Counter)
    alarms: list[tuple[int, Alarm]] = field(default_factory=list)  # with the verifies before it
    verifies: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def kept(self, shape: Shape) -> dict[str, dict[Path, tuple[float, float]]]:
        """Of each drafter's nodes those in the tree."""
        best = [
            (e, h, path, d) for d in shape.drafters for e, h, path in nodes(self.curves[d], shape.depth, shape.width)
        ]
        best.sort(key=lambda node: (-node[0] - node[1], len(node[2])))
        chosen: dict[str, dict[Path, tuple[float, float]]] = {drafter: {} for drafter in shape.drafters}
        for easy, hard, path, drafter in best[: shape.verify - 1]:
            chosen[drafter][path] = (easy, hard)
        return chosen

    def length(self, shape: Shape) -> float:
        """The true accept length: drafters in one tree err independently."""
        total = 1.0
        kept = self.kept(shape)
        for kind in (0, 1):
            for depth in range(1, shape.depth + 1):
                stopped = 1.0
                for tree in kept.values():
                    stopped *= 1.0 - sum(chance[kind] for path, chance in tree.items() if len(path) == depth)
                total += (1.0 - stopped) / 2
        return total

    def rate(self, shape: Shape, batch: int) -> float:
        """True tokens per second."""
        return batch * self.length(shape) / self.true_s(shape, batch)

    def true_s(self, shape: Shape, batch: int) -> float:
        return tick_s(shape, batch, self.drafting) * (1.0 if shape.off else self.trees)

    def told(self, shape: Shape, batch: int, true: float) -> TickTimes:
        """What an engine would tell of a tick that takes so long."""
        parts = parts_s(shape, batch, self.drafting)
        known = {part: seconds * (1.0 if shape.off else self.trees) for part, seconds in parts.items()}
        known[DECODE if shape.off else VERIFY] += self.context_s(shape, batch)
        factor = (self.measured(shape, batch, true) or 0.0) / sum(known.values())
        told = {part: seconds * factor for part, seconds in known.items()}
        return TickTimes(told, sum(told.values()))

    def context_s(self, shape: Shape, batch: int) -> float:
        """Of the policy's run."""
        return 0.0

    def measured(self, shape: Shape, batch: int, true: float) -> float | None:
        slow = 3.0 if self.random.random() < 0.01 else 1.0
        return self.slow * true * (1.0 + self.noise * self.random.uniform(-1.7, 1.7)) * (slow if self.noise else 1.0)

    def walk(self, shape: Shape, kept: dict[str, dict[Path, tuple[float, float]]]) -> AcceptResult:
        hard = self.random.random() < 0.5
        accepted, drawn = 0, []
        for drafter in shape.drafters:
            ranks = self._ranks(drafter, hard, shape)
            walked = next((n for n in range(len(ranks)) if ranks[: n + 1] not in kept[drafter]), len(ranks))
            accepted = max(accepted, walked)
            drawn.append(ranks)
        return AcceptResult(accepted, tuple(self._track(ranks, accepted, shape) for ranks in drawn))

    def _ranks(self, drafter: str, hard: bool, shape: Shape) -> Path:
        ranks: list[int] = []
        for row in self.curves[drafter].ranks(hard)[: shape.depth]:
            chance = self.random.random()
            rank = 0
            while rank < shape.width and chance >= row[rank]:
                chance -= row[rank]
                rank += 1
            if rank == shape.width:
                break
            ranks.append(rank + 1)
        return tuple(ranks)

    def _track(self, ranks: Path, accepted: int, shape: Shape) -> RankHits:
        """The policy's tokens are known as far as it walked, and one further."""
        seen = ranks[: accepted + 1]
        missed = len(seen) == len(ranks) < min(shape.depth, accepted + 1)
        return RankHits(seen, shape.width if missed else 0)

    def tick(self, policy: ShapePolicy, batch: int) -> Sequence[AcceptResult]:
        shape = policy.choose(batch)
        kept = self.kept_cached(shape)
        results = [] if shape.off else [self.walk(shape, kept) for _ in range(batch)]
        true = self.true_s(shape, batch)
        self.seconds += true
        self.ticks[shape] += 1
        alarms = policy.observe(Outcome(shape, batch, results, self.told(shape, batch, true), context=self.context))
        self.verifies += len(results)
        self.alarms += [(self.verifies, alarm) for alarm in alarms]
        return results

    def kept_cached(self, shape: Shape) -> dict[str, dict[Path, tuple[float, float]]]:
        key = (shape, *sorted(self.curves.items()))
        if key not in _TREES:
            _TREES[key] = self.kept(shape)
        return _TREES[key]


_TREES: dict[object, dict[str, dict[Path, tuple[float, float]]]] = {}


def steady(policy: ShapePolicy, world: World, batch: int, ticks: int, best: Callable[[], float] | None = None) -> float:
    """Runs so many ticks at one batch size. Loss: share of the time that the best fixed shape would not have needed."""
    started, wanted = world.seconds, 0.0
    before = Counter(world.ticks)
    for _ in range(ticks):
        world.tick(policy, batch)
    spent = world.seconds - started
    fastest = best() if best else world.rate(OFF, batch)
    wanted = sum(world.length(shape) * batch * count for shape, count in (world.ticks - before).items()) / fastest
    return (spent - wanted) / spent


def rollout(policy: ShapePolicy, world: World, lengths: Sequence[int]) -> float:
    """Seconds until the last of the requests has its tokens."""
    started, left = world.seconds, list(lengths)
    while left:
        results = world.tick(policy, len(left)) or [AcceptResult(0, ())] * len(left)
        left = [rest for n, walked in zip(left, results, strict=True) if (rest := n - 1 - walked.accepted) > 0]
    return world.seconds - started
