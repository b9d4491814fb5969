"""What every part of the benchmark of speculation needs: a prepared workload in one shape, and where results go."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import preparing
import torch
import workloads
from recording import Recording
from workloads import WORKLOADS, Workload

from tlt.bench.options import RolloutScale
from tlt.bench.record import write_record
from tlt.bench.variants import PLAIN, Variant, VariantRollout
from tlt.config import RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.machine import describe
from tlt.policy import Policy, open_policy
from tlt.replay import Difference
from tlt.types import Completion, Key, Prompt

_WARM_TOKENS = 64  # of an answer, in the rollout that only warms plain decoding up
CAPTURED = 0.005  # a warm rollout that still spent this share of its time on new graphs is not the last …
MOST_RUNS = 8  # … unless there were so many already


@dataclass(frozen=True, slots=True)
class Setting:
    """A prepared workload in one shape, and everything that was asked for."""

    options: argparse.Namespace
    workload: Workload
    config: RunConfig
    policy: Policy
    prompts: list[Prompt]

    @property
    def encoded(self) -> list[tuple[int, ...]]:
        return [tuple(self.policy.tokenizer.encode_prompt(prompt.content)) for prompt in self.prompts]

    def scale(self, **changes: int) -> RolloutScale:
        return replace(RolloutScale(len(self.prompts), self.options.group_size, self.cap, 1), **changes)

    @property
    def cap(self) -> int:
        return self.options.cap or self.workload.cap


def workload_of(options: argparse.Namespace) -> Workload:
    chosen = WORKLOADS[options.workload]
    return workloads.quick(chosen) if options.quick else chosen


def place_of(options: argparse.Namespace) -> preparing.PreparedPlace:
    return preparing.PreparedPlace(Path(options.work) / options.workload)


def set_up(options: argparse.Namespace, config: RunConfig, groups: int) -> Setting:
    """The policy in its shape, and a configuration that speculates with the drafter of that shape."""
    workload, place = workload_of(options), place_of(options)
    config = replace(config, model=replace(config.model, path=place.policy()))
    small = open_policy(config.model)
    policy = preparing.in_shape(small, options.shape)
    learned = options.drafter in ("eagle", "both")
    drafter = str(preparing.ready_drafter(place, small.model, policy, options.shape)) if learned else ""
    spec = replace(config.spec, drafter=options.drafter, path=drafter)
    sampling = replace(config.sampling, temperature=options.temperature)
    config = replace(config, spec=spec, sampling=sampling, run=replace(config.run, seed=workloads.MEASURE_SEED))
    return Setting(options, workload, config, policy, workloads.measured_prompts(workload, options.prompts, groups))


class Results:
    """One JSON file, complete at any moment; what goes in is printed, or told in short."""

    def __init__(self, options: argparse.Namespace) -> None:
        name = "-".join(x for x in (options.part, options.workload, getattr(options, "shape", "")) if x)
        self.file = Path(options.json or Path(options.work) / f"{name}.json")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._content: dict[str, Any] = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "machine": asdict(describe(device, options.commit)),
        }
        self._started = time.perf_counter()

    def add(self, name: str, value: Any, *, show: bool = True) -> None:
        self._content[name] = value
        self._content["seconds"] = round(time.perf_counter() - self._started, 1)
        write_record(self.file, _plain(self._content))
        if show:
            print(f"{name}: {json.dumps(_plain(value, digits=4), ensure_ascii=False)}", flush=True)


def _plain(value: Any, digits: int = 6) -> Any:
    """As JSON has it: infinities in words, floats short."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, digits) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


# ---- answers


def requests(setting: Setting, cap: int, group_size: int = 0) -> list[Request]:
    params = replace(setting.config.sampling, max_tokens=cap)
    times = group_size or setting.options.group_size
    pairs = [(index, prompt) for index, prompt in enumerate(setting.encoded) for _ in range(times)]
    seed = setting.config.run.seed
    return [Request(Key(seed, number), prompt, params, f"prompt {i}") for number, (i, prompt) in enumerate(pairs)]


def answer(engine: EngineCore, asked: Sequence[Request]) -> list[Completion]:
    engine.submit(asked)
    return sorted(engine.drain(), key=lambda completion: completion.key.request)


def warm_up(stage: Recording, variant: Variant) -> VariantRollout:
    """Plain decoding was captured at every size: a few tokens show it the rest. Others meet shapes as they go."""
    cap = stage.cap
    if variant.name == PLAIN:
        stage.cap = min(cap, _WARM_TOKENS)
    done = stage.write(variant)
    stage.cap = cap
    return done


def divergence(
    one: VariantRollout | Sequence[Completion], other: VariantRollout | Sequence[Completion]
) -> dict[str, Any]:
    """How often two runs of the same requests turn into another token, per token that could have."""
    pairs = list(zip(_completions(one), _completions(other), strict=True))
    found = Difference.of((a.tokens, b.tokens) for a, b in pairs)
    return {
        "requests": len(pairs),
        "identical": len(pairs) - found.differing,
        "identical_share": 1.0 - found.differing / len(pairs),
        "tokens_compared": found.tokens,
        "per_1000_tokens": 1e3 * found.differing / max(1, found.tokens),
    }


def _completions(run: VariantRollout | Sequence[Completion]) -> Sequence[Completion]:
    return run.completions if isinstance(run, VariantRollout) else run


def by_turn(plain: Sequence[float], other: Sequence[float]) -> float:
    """Mean ratio over the turns: a GPU that grows faster or slower meanwhile changes it little."""
    return fmean(a / b for a, b in zip(plain, other, strict=True))


def ratio_error(plain: Sequence[float], other: Sequence[float]) -> float | None:
    """Standard error of the mean ratio over the turns."""
    ratios = [a / b for a, b in zip(plain, other, strict=True)]
    return stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None


# ---- telling


def tell(rows: Sequence[dict[str, Any]]) -> None:
    cells = [[_cell(value) for value in row.values()] for row in rows]
    columns = list(zip(list(rows[0]), *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
