"""The ways to write one rollout: plainly, with speculation that stays off, in one shape, or as a chooser likes.

All variants share the policy, the requests and their seeds. Two engines lie side by side, one that never heard of
speculation and one built with the drafters of the configuration; what differs between the variants of the latter is
who chooses. A chooser starts every rollout anew, with no more than what was measured of costs and of the drafter
beforehand, but for the one warm tuner that goes on as it would in training. What drafters remember of a prompt starts
anew in any case: prompts have another name in each rollout.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from tlt.bench.options import RolloutScale
from tlt.config import RunConfig, SpecSettings
from tlt.engine.build import build_engine, make_ready, shape_policy_of, shapes_of
from tlt.engine.engine import EngineCore
from tlt.engine.graphs import PoolReport, buckets
from tlt.engine.request import Request
from tlt.machine import wait_for
from tlt.model.kv import KVCache
from tlt.policy import Policy
from tlt.spec.costs import DECODE, POLICY, Measured, TickTimes
from tlt.spec.shape import MOST_NODES, Shape
from tlt.spec.shape_policy import Fixed, ShapePolicy, SwappableShapePolicy
from tlt.spec.speculation import Speculating, SpeculationReport
from tlt.types import Completion, Key, SamplingParams

PLAIN, STAYS_OFF, BANDIT, TUNER, WARM = "plain", "off", "BEG-MAB", "tuner", "tuner, warm"

_GIB = 1024**3
_MEMORY_SHARE = 0.4  # of what is free on a GPU, for the cache of each engine


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    shape: Shape | None = None  # the one shape of a fixed variant

    @property
    def fixed(self) -> bool:
        return self.shape is not None


@dataclass(frozen=True, slots=True)
class VariantRollout:
    """One rollout of one variant."""

    variant: Variant
    completions: tuple[Completion, ...]  # in the order of their keys
    seconds: float  # from the first submit to the last answer
    cpu_s: float  # of this process: on a busy machine it says more than the makespan
    ticks: int
    capture_s: float  # of these, spent capturing graphs
    speculation: SpeculationReport | None
    prefills: int | None = None  # passes over prompts; None where nobody counts them
    captures: int = 0  # graphs captured
    stalls: tuple[tuple[str, float], ...] = ()  # those that took far longer than most, and their seconds
    spent: Mapping[str, float] = field(default_factory=dict)  # kind of work → seconds of `capture_s`

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    def tail_s(self, left: int) -> float:
        """Time during which at most `left` requests still ran."""
        finished = sorted(completion.timing.finished_s for completion in self.completions)
        return finished[-1] - (finished[-1 - left] if left < len(finished) else 0.0)


def variants(spec: SpecSettings, *, exact: bool = False) -> list[Variant]:
    fixed = [Variant(str(shape), shape) for shape in fixed_shapes(shapes_of(spec, exact=exact))]
    return [Variant(PLAIN), Variant(STAYS_OFF), *fixed, Variant(BANDIT), Variant(TUNER), Variant(WARM)]


def fixed_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """Of every set of drafters and verify size the deepest shape, and of those the narrowest; none that is shared."""
    chosen: dict[tuple[tuple[str, ...], int], Shape] = {}
    for shape in sorted(shapes, key=lambda shape: (-shape.depth, shape.width)):
        if not shape.off and not shape.share:
            chosen.setdefault((shape.drafters, shape.verify), shape)
    return sorted(chosen.values(), key=lambda shape: (shape.drafters, shape.verify))


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """What a benchmark keeps of every tick is much, and looking through all of it for garbage takes a third of a
    second, in one tick: before the rollout, not in it."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _captured(before: PoolReport | None, after: PoolReport | None) -> dict[str, Any]:
    """What a rollout asked of the pool of graphs, if there is one."""
    if before is None or after is None:
        return {"capture_s": 0.0}
    return {
        "capture_s": after.capture_s - before.capture_s,
        "captures": after.graphs - before.graphs,
        "spent": {kind: more for kind in after.spent if (more := after.spent[kind] - before.spent.get(kind, 0.0))},
        "stalls": tuple((str(key), seconds) for key, seconds in after.stalls[len(before.stalls) :]),
        "prefills": after.eager - before.eager,
    }


class VariantRunner:
    """The two engines, and the requests they are asked."""

    def __init__(
        self, policy: Policy, config: RunConfig, prompts: Sequence[tuple[int, ...]], scale: RolloutScale
    ) -> None:
        model = policy.model
        self.cap = min(scale.cap, model.config.max_positions - max(map(len, prompts)))
        self.completions = len(prompts) * scale.group_size
        self._config = replace(config, engine=replace(config.engine, kv_gib=self._cache_gib(policy, config, prompts)))
        self._prompts = prompts
        self._group_size = scale.group_size
        self._device = model.embed.device
        self._choosers = SwappableShapePolicy()
        self._plain = EngineCore(model, policy.tokenizer, self._config.engine)
        self._plain.compile(filtered=config.sampling.filtered)
        self._speculating = build_engine(policy, self._config, self._choosers)
        sizes = self._sizes()
        self._plain.warm_up(sizes)
        self._speculating.warm_up(sizes)
        self.measured: Sequence[Measured] = self._speculating.measure()  # what every tuner here starts from
        # tokens of a forward → seconds
        self.decode_s = {cost.size: cost.seconds for cost in self.measured if cost.role == POLICY}
        self.warm = self.shape_policy(Variant(WARM))
        self._rollouts = 0

    def ask(self, prompts: Sequence[tuple[int, ...]], cap: int, sampling: SamplingParams) -> None:
        """Something else from now on; there must be room for it among what the stage was made for."""
        self._prompts, self.cap = prompts, cap
        self.completions = len(prompts) * self._group_size
        self._config = replace(self._config, sampling=sampling)
        self.warm = self.shape_policy(Variant(WARM))

    def reseed(self, seed: int) -> None:
        """Other answers to the same prompts from now on. The warm tuner stays: in training every step's differ, too."""
        self._config = replace(self._config, run=replace(self._config.run, seed=seed))

    def write(self, variant: Variant, lengths: Sequence[int] | None = None) -> VariantRollout:
        """One rollout, from prompts that nobody has computed yet; answers of these lengths, if they are given."""
        engine = self._plain if variant.name == PLAIN else self._speculating
        self._choosers.now = self.warm if variant.name == WARM else self.shape_policy(variant)
        engine.load_policy(engine.version + 1)  # the same weights under a new name: forgets cached prompts
        requests = self._requests(lengths)
        before = engine.report()
        wait_for(self._device)
        with _nothing_collected():
            started, cpu = time.perf_counter(), time.process_time()
            engine.submit(requests)
            completions = engine.drain()
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        after = engine.report()
        return VariantRollout(
            variant=variant,
            completions=tuple(sorted(completions, key=lambda completion: completion.key.request)),
            seconds=seconds,
            cpu_s=cpu_s,
            ticks=after.ticks - before.ticks,
            speculation=after.speculation.since(before.speculation)
            if after.speculation and before.speculation
            else None,
            **_captured(before.graphs, after.graphs),
        )

    def shape_policy(self, variant: Variant) -> ShapePolicy:
        """A fresh one. The variant that stays off has a tuner all the same, with nothing to choose from."""
        spec, rows, exact = self._config.spec, self._config.engine.rows, self._config.engine.exact
        if variant.shape is not None:
            return Fixed(variant.shape)
        if variant.name == BANDIT:
            return shape_policy_of(replace(spec, shape_policy="beg-mab"), rows, exact=exact)
        tuned = replace(spec, shape_policy="tuner")
        on_gpu = self._device.type == "cuda"
        if variant.name in (TUNER, WARM):
            tuner = shape_policy_of(tuned, rows, self.measured, exact=exact, on_gpu=on_gpu)
            make_ready(self._speculating, tuner, self._config)
            return tuner
        return shape_policy_of(replace(tuned, drafter="none"), rows, self.measured, on_gpu=on_gpu)

    def off_seconds(self, ticks: int = 1024) -> float:
        """What an engine with speculation does more in a plain tick than one without, on the host."""
        speculating = Speculating([], self.shape_policy(Variant(STAYS_OFF)))
        batches = [1 + tick * min(self.completions, self._config.engine.rows) // ticks for tick in range(ticks)]
        fastest, times = inf, TickTimes({DECODE: 1e-3}, 1e-3)
        for _ in range(5):
            started = time.perf_counter()
            for batch in batches:
                speculating.choose(batch)
                speculating.decoded(batch, times)
            fastest = min(fastest, (time.perf_counter() - started) / ticks)
        return fastest

    def _requests(self, lengths: Sequence[int] | None) -> list[Request]:
        self._rollouts += 1
        params = replace(self._config.sampling, max_tokens=self.cap)
        asked = [(index, prompt) for index, prompt in enumerate(self._prompts) for _ in range(self._group_size)]
        every = [replace(params, max_tokens=n, ignore_eos=True) for n in lengths] if lengths else [params] * len(asked)
        return [
            Request(Key(self._config.run.seed, number), prompt, own, f"rollout {self._rollouts}, prompt {index}")
            for number, ((index, prompt), own) in enumerate(zip(asked, every, strict=True))
        ]

    def _sizes(self) -> list[int]:
        """Batches to warm up: all that decode, and beyond them what verifying may come to."""
        rows, most = self._config.engine.rows, self.completions * max(self._config.spec.verifies)
        return [size for size in buckets(rows) if size <= max(most, buckets(min(rows, self.completions))[-1])]

    def _cache_gib(self, policy: Policy, config: RunConfig, prompts: Sequence[tuple[int, ...]]) -> float:
        """Room for everybody's longest answer in each of two engines, as far as there is; or what is configured."""
        if config.engine.kv_gib:
            return config.engine.kv_gib
        model, page_size = policy.model, config.engine.page_size
        longest = max(map(len, prompts)) + self.cap + MOST_NODES
        pages = (self.completions + len(prompts)) * (-(-longest // page_size) + 1)
        needed = pages * KVCache.page_bytes(model.config, page_size, model.embed.dtype)
        if model.embed.is_cuda:
            needed = min(needed, int(_MEMORY_SHARE * torch.cuda.mem_get_info(model.embed.device)[0]))
        return needed / _GIB
