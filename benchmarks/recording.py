"""What a rollout's ticks tell beside its makespan: small batches, switching on, who was chosen when, graphs' memory."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Any

from tlt.bench.options import RolloutScale
from tlt.bench.variants import Variant, VariantRollout, VariantRunner
from tlt.config import RunConfig
from tlt.engine.build import shapes_of
from tlt.engine.engine import EngineCore
from tlt.engine.graphs import GraphPool, PoolReport, buckets
from tlt.policy import Policy
from tlt.spec.acceptance import Alarm
from tlt.spec.shape import Shape
from tlt.spec.shape import by_batch as ticks_by_batch
from tlt.spec.shape_policy import Outcome

_GIB = 1024**3
_ROLES = ("policy", "drafter", "drafter taking in")  # graphs that a shape needs at every batch size
_SHORT = 128  # tokens: answers up to which are taken together
_MEASURED_SIZES = (1, 16, 64, 256)  # tokens of a forward whose private graph is weighed


@dataclass(frozen=True, slots=True)
class Tick:
    batch: int  # requests
    shape: Shape
    tokens: int  # emitted by all of them
    seconds: float | None  # without what is done once; None: it cannot be told
    one_off_s: float  # drafters catching up, captures
    results: tuple[tuple[Hashable, int], ...] = ()  # whose answer, and by how many tokens it grew


class Recording(VariantRunner):
    """A stage that keeps the ticks of each variant's latest rollout, as its chooser was told of them."""

    def __init__(
        self, policy: Policy, config: RunConfig, prompts: Sequence[tuple[int, ...]], scale: RolloutScale
    ) -> None:
        super().__init__(policy, config, prompts, scale)
        self.latest: dict[str, list[Tick]] = {}
        self._ticks: list[Tick] = []
        told, choosers = self._choosers.observe, vars(self._choosers)

        def observe(outcome: Outcome) -> tuple[Alarm, ...]:
            results = tuple((walked.request, walked.accepted + 1) for walked in outcome.results)
            emitted = outcome.batch if outcome.shape.off else sum(tokens for _, tokens in results)
            self._ticks.append(
                Tick(outcome.batch, outcome.shape, emitted, outcome.times.seconds, outcome.one_off_s, results)
            )
            return told(outcome)

        choosers["observe"] = observe  # the engine calls it on this very object

    def write(self, variant: Variant, lengths: Sequence[int] | None = None) -> VariantRollout:
        self._ticks = []
        done = super().write(variant, lengths)
        self.latest[variant.name] = self._ticks
        return done

    def graphs(self) -> dict[str, Any]:
        engines = {"plain": self._plain, "speculating": self._speculating}
        return {name: engine.report().graphs for name, engine in engines.items()}


# ---- small batches


def plain_tick_s(plain: VariantRollout, most: int) -> float | None:
    """Seconds of a plain tick while at most `most` requests run: answers grow by one token a tick."""
    done = sorted(plain.completions, key=lambda completion: completion.timing.finished_s)
    if len(done) <= most:
        return plain.seconds / max(len(completion.tokens) for completion in done)
    first, last = done[-1 - most], done[-1]
    ticks = len(last.tokens) - len(first.tokens)
    return (last.timing.finished_s - first.timing.finished_s) / ticks if ticks > 0 else None


def small_batch(plain: VariantRollout, latest: Mapping[str, Sequence[Tick]], most: int) -> dict[str, Any]:
    """Of each variant, while at most `most` requests run: S, the accept length AL, and how much of AL became S.

    AL counts plain ticks too: tokens per request and tick. S is the time plain decoding takes for the same tokens, over
    the time it took.
    """
    plain_s = plain_tick_s(plain, most)
    found: dict[str, Any] = {"requests_at_most": most, "plain_tick_ms": plain_s and 1e3 * plain_s}
    for name, ticks in latest.items():
        told = [tick for tick in ticks if tick.batch <= most and tick.seconds is not None]
        if not told or plain_s is None:
            continue
        seconds = sum(tick.seconds or 0.0 for tick in told)
        length = sum(tick.tokens for tick in told) / sum(tick.batch for tick in told)
        speedup = plain_s * sum(tick.tokens / tick.batch for tick in told) / seconds
        found[name] = {
            "ticks": len(told),
            "off_share": sum(tick.shape.off for tick in told) / len(told),
            "tick_ms": 1e3 * seconds / len(told),
            "accept_length": length,
            "speedup": speedup,
            "speedup_per_accept": speedup / length,
            "once_ms": 1e3 * sum(tick.one_off_s for tick in told),
        }
    return found


# ---- switching on


def switching(latest: Mapping[str, Sequence[Tick]]) -> dict[str, Any]:
    """What the first tick of speculation after plain ones cost more than a tick: captures, drafters catching up."""
    found = {}
    for name, ticks in latest.items():
        firsts = [now for before, now in pairwise(ticks) if before.shape.off and not now.shape.off]
        if firsts:
            found[name] = {
                "times": len(firsts),
                "mean_ms": 1e3 * mean(tick.one_off_s for tick in firsts),
                "largest_ms": 1e3 * max(tick.one_off_s for tick in firsts),
                "requests": [tick.batch for tick in firsts[:8]],
                "first_ms": [1e3 * tick.one_off_s for tick in firsts[:8]],
            }
    return found


# ---- costs


def tick_costs(ticks: Sequence[Tick], shape_policy: Any) -> list[dict[str, Any]]:
    """By shape and number of requests (up to the power of two named): what ticks took, and what the tuner foresees."""
    told: dict[tuple[int, Shape], list[Tick]] = defaultdict(list)
    for tick in ticks:
        if tick.seconds is not None:
            told[1 << (tick.batch - 1).bit_length(), tick.shape].append(tick)
    found = []
    for (size, shape), some in sorted(told.items()):
        batch = round(mean(tick.batch for tick in some))
        length, seconds = shape_policy.expected(shape, batch) if hasattr(shape_policy, "expected") else (None, None)
        found.append(
            {
                "requests": f"≤ {size}",
                "batch": batch,
                "shape": str(shape),
                "ticks": len(some),
                "tick_ms": 1e3 * mean(tick.seconds or 0.0 for tick in some),
                "foreseen_ms": seconds and 1e3 * seconds,
                "accept_length": sum(tick.tokens for tick in some) / sum(tick.batch for tick in some),
                "foreseen_length": length,
            }
        )
    return found


# ---- contexts


def by_context(latest: Mapping[str, Sequence[Tick]]) -> dict[str, dict[str, Any]]:
    """Accept length by how long the answer was already, in the shape that was used most: does it fall with length?

    An answer's length is told only where it was written without plain ticks: the others count from where they began.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, ticks in latest.items():
        used = Counter(tick.shape for tick in ticks if not tick.shape.off)
        if not used:
            continue
        most, grown = used.most_common(1)[0][0], Counter[Hashable]()
        seen: dict[int, list[int]] = defaultdict(list)
        for tick in ticks:
            for request, tokens in tick.results:
                if tick.shape == most and request is not None:
                    seen[max(_SHORT, 1 << grown[request].bit_length())].append(tokens)
                grown[request] += tokens
        found[name] = {"shape": str(most)} | {
            f"< {size}": {"accept_length": mean(tokens), "verifies": len(tokens)}
            for size, tokens in sorted(seen.items())
        }
    return found


# ---- shapes


def by_batch(written: Sequence[VariantRollout]) -> dict[str, dict[str, dict[str, float]]]:
    """Share of ticks per shape, by variant and number of requests (up to the power of two named)."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for done in written:
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for size, shape, ticks in ticks_by_batch(done.speculation.ticks.items()) if done.speculation else ():
            counts[size][shape] += ticks
        if counts:
            found[done.variant.name] = {
                f"≤ {size}": {shape: ticks / counted.total() for shape, ticks in counted.most_common(8)}
                for size, counted in sorted(counts.items())
            }
    return found


# ---- memory of graphs


def graph_memory(stage: Recording, policy: Policy, config: RunConfig) -> dict[str, Any]:
    """The pool as it is, against a graph of its own for every shape at every batch size.

    The latter is estimated: a private graph's memory, weighed at a few sizes, is linear in the tokens of its forward.
    """
    reports = stage.graphs()
    found: dict[str, Any] = {name: pool_row(report) for name, report in reports.items() if report is not None}
    if not found:
        return {"none": "no graphs on this device"}
    shapes = [shape for shape in shapes_of(config.spec) if not shape.off]
    sizes = [size for size in buckets(config.engine.rows) if size <= max(stage.completions, 1)]
    base, slope = _private_graphs(policy, config)
    tokens = [shape.tokens(size) for shape in shapes for size in sizes]
    found["every shape at every batch size, estimated"] = {
        "graphs": len(_ROLES) * len(tokens),
        "gib": sum(base + slope * count for count in tokens) / _GIB,  # the policy's alone
        "bytes_per_graph": base,
        "bytes_per_token": slope,
    }
    return found


def pool_row(report: PoolReport) -> dict[str, Any]:
    """What the pool holds, and how runs were served: by a graph, or not, for there is none or none yet."""
    return {
        "graphs": report.graphs,
        "gib": report.memory_bytes / _GIB,
        "capture_s": report.capture_s,
        "replays": report.replays,
        "eager": report.eager,  # prompts mostly, which get no graph
        "first": report.first,  # fell back: of what had not run often enough yet
    }


def _private_graphs(policy: Policy, config: RunConfig) -> tuple[float, float]:
    """Bytes of a decode graph that shares nothing: what every one costs, and what a token adds (least squares)."""
    engine = EngineCore(policy.model, policy.tokenizer, replace(config.engine, kv_gib=0.5))
    inside: Any = engine
    points = []
    for size in (size for size in _MEASURED_SIZES if size <= config.engine.rows):
        inside._runner._pool = GraphPool(policy.model.embed.device)
        engine.warm_up([size])
        report = engine.report().graphs
        assert report is not None
        points.append((size, report.memory_bytes))
    middle = mean(x for x, _ in points), mean(y for _, y in points)
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread if spread else 0.0
    return max(0.0, middle[1] - slope * middle[0]), max(0.0, slope)
