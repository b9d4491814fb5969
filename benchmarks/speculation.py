"""Whether speculation pays: whole rollouts of three workloads, in the policy's own shape and widened, part by part.

    python benchmarks/speculation.py prepare  --workload c --model DIR --work W [--data F --prompts F] [--budget 240]
    python benchmarks/speculation.py measure  --workload c --shape 7B --work W
    python benchmarks/speculation.py drafts   --workload c --work W
    python benchmarks/speculation.py never    --workload c --shape 7B --work W [--cases useless,hot,many,short]
    python benchmarks/speculation.py fidelity --workload c --shape 7B --work W
    python benchmarks/speculation.py score    --workload c --work W

`prepare` tunes the policy and trains its drafter, `measure` writes one rollout in every way there is, `drafts` compares
greedy with shared-noise drafts at equal shape, `never` looks for a case in which speculation loses, `fidelity` tells
how often plain decoding turns a token when only the batch changes, `score` whether what speculation wrote is a sample
of the policy. (a) and (b) need GSM8K: --prompts test.jsonl for what is measured, --data train.jsonl for tuning and
drafter training. Every knob is a flag too: --spec.depths 2,4. Each part prints and writes its results as it goes
(--json). --quick is for a CPU: a random stand-in policy, a few tokens.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median, pstdev, stdev
from typing import Any
from unittest.mock import patch

import preparing
import scoring
import torch
import workloads
from recording import Recording, by_batch, by_context, graph_memory, small_batch, switching, tick_costs
from workloads import WORKLOADS, Workload

from tlt.bench import rollout as bench
from tlt.bench.fidelity import common_start
from tlt.bench.machine import describe
from tlt.bench.options import RolloutScale
from tlt.bench.variants import BANDIT, PLAIN, STAYS_OFF, TUNER, WARM, Variant, Written, fixed_shapes
from tlt.config import RunConfig
from tlt.engine.build import NEW, build_engine, learned_drafting, shapes_of
from tlt.engine.engine import Engine
from tlt.engine.request import Request
from tlt.errors import ConfigError, TltError
from tlt.policy import Policy, open_policy
from tlt.recipe import load_config, take_flags
from tlt.spec.candidates import GREEDY, Sharpness
from tlt.spec.fixed import Fixed
from tlt.spec.shape import Shape
from tlt.types import Completion, Key, Prompt

_SMALL = 8  # requests up to which a batch is small
_CAPTURED = 0.005  # a warm rollout that still spent this share of its time on new graphs is not the last …
_MOST_RUNS = 8  # … unless there were so many already
_CASE_S = 8.0  # of plain decoding in a case in which speculation might lose: short ones take many turns …
_MOST_TURNS = 24  # … but no more than these
_WARM_TOKENS = 64  # of an answer, in the rollout that only warms plain decoding up
_GROUPS, _GROUP_SIZE = 32, 8


# ---- what every part needs


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


def place_of(options: argparse.Namespace) -> preparing.Place:
    return preparing.Place(Path(options.work) / options.workload)


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
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(_plain(self._content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
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


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- prepare


def prepare(options: argparse.Namespace, config: RunConfig) -> None:
    if options.quick and not options.model:
        options.model = preparing.stand_in(Path(options.work) / "stand_in")
    if not options.model:
        raise ConfigError("--model is missing; expected a Hugging Face directory")
    results = Results(options)
    config = replace(config, model=replace(config.model, path=options.model))
    workload = workload_of(options)
    changes = {name: value for name in ("unroll", "mlp") if (value := getattr(options, name))}
    workload = replace(workload, draft=replace(workload.draft, **changes))
    wanted = preparing.Wanted(
        workload=workload,
        place=place_of(options),
        data=options.data,
        prompts=options.prompts,
        measured=options.groups,
        tune_budget_s=options.tune_budget,
        draft_budget_s=options.budget,
        processes=0 if options.quick else preparing.encoding_processes(),
    )
    for name, value in preparing.prepare(config, wanted).items():
        results.add(name, value)


# ---- measure


def measure(options: argparse.Namespace, config: RunConfig) -> None:
    results, started = Results(options), time.perf_counter()
    setting = set_up(options, config, options.groups)
    opened = time.perf_counter()
    stage = Recording(setting.policy, setting.config, setting.encoded, setting.scale())
    built_s = time.perf_counter() - opened  # both engines: kernels compiled, graphs captured, costs measured
    results.add("set_up", {"opening_s": opened - started, "engines_s": built_s})
    results.add("decode_ms", {size: 1e3 * seconds for size, seconds in stage.decode_s.items()}, show=False)
    results.add("measured_costs", [asdict(cost) for cost in stage.measured], show=False)
    written = write_all(stage, setting, results)
    small = small_batch(written[0], stage.latest, _SMALL)
    results.add("answers", answers(setting, written[0]))
    results.add("lengths", lengths(setting, written[0]), show=False)
    results.add("time", [asdict(record) for record in bench.time(written)], show=False)
    results.add("finished_s", {done.variant.name: finished(done) for done in written}, show=False)
    results.add("speculation", [asdict(record) for record in bench.speculated(written)], show=False)
    results.add("divergence", {done.variant.name: divergence(written[0], done) for done in written[1:]}, show=False)
    results.add("small_batch", small, show=False)
    results.add("switching_on", switching(stage.latest))
    results.add("prefills", {done.variant.name: done.prefills for done in written})
    results.add("costs", tick_costs(stage.latest.get(WARM, []), stage.warm), show=False)
    results.add("same_lengths", same_lengths(stage, written))
    results.add("shapes", by_batch(written), show=False)
    results.add("accept_length_by_context", by_context(stage.latest))
    if {TUNER, WARM} & {done.variant.name for done in written}:
        results.add("verdict", asdict(bench.verdict(written, stage.off_seconds())))
    tell_shapes(by_batch(written))
    tell(in_short(written, small))
    if options.rollouts:
        results.add("rollouts", rollouts(stage, options.rollouts, options.same_lengths))
    results.add("graphs", graph_memory(stage, setting.policy, setting.config))
    print(f"wrote {results.file}")


def write_all(stage: Recording, setting: Setting, results: Results) -> list[Written]:
    """The rollouts in order of importance, each variant once to warm up and then for good, while the budget lasts.

    A tuner's first rollout is told beside: what a new engine captures and compiles is in it. The warm tuner writes
    rollouts as training does, one after the other, until it asks for no new graphs, or until the budget is spent: then
    what it spent on them is in its time, and in the record beside it.
    """
    options = setting.options
    fixed = [Variant(str(shape), shape) for shape in _fixed(setting)]
    order = [Variant(PLAIN), Variant(TUNER), Variant(WARM), Variant(PLAIN), Variant(BANDIT), *fixed, Variant(STAYS_OFF)]
    started, warmed = time.perf_counter(), set[str]()
    runs: list[dict[str, Any]] = []
    written: list[Written] = []
    for variant in order * options.repeats:
        if written and time.perf_counter() - started > options.budget:
            runs.append({"variant": variant.name, "skipped": f"the budget of {options.budget:g} s was spent"})
            continue
        if variant.name not in warmed and variant.name != STAYS_OFF:  # which runs what plain decoding runs
            first = warm_up(stage, variant)
            warmed.add(variant.name)
            if variant.name in (TUNER, WARM):
                runs.append(_run(f"{variant.name}, first", first))
        done = stage.write(variant)
        while variant.name == WARM and done.capture_s > _CAPTURED * done.seconds and len(runs) < _MOST_RUNS:
            if time.perf_counter() - started > options.budget:
                break
            runs.append(_run(f"{WARM}, still capturing", done))
            print(f"{WARM}: {done.seconds:.2f} s, {done.capture_s:.2f} s of it capturing: once more", flush=True)
            done = stage.write(variant)
        written.append(done)
        runs.append(_run(variant.name, done))
        results.add("runs", runs, show=False)
        print(f"{variant.name}: {done.seconds:.2f} s, {done.ticks} ticks, {done.tokens / done.seconds:,.0f} tokens/s")
    return written


def _run(name: str, done: Written) -> dict[str, Any]:
    captured = {"capture_s": done.capture_s, "captures": done.captures, "stalls": done.stalls}
    return {"variant": name, "makespan_s": done.seconds, **captured}


def warm_up(stage: Recording, variant: Variant) -> Written:
    """Plain decoding was captured at every size: a few tokens show it the rest. Others meet shapes as they go."""
    cap = stage.cap
    if variant.name == PLAIN:
        stage.cap = min(cap, _WARM_TOKENS)
    done = stage.write(variant)
    stage.cap = cap
    return done


def _fixed(setting: Setting) -> list[Shape]:
    """Those named, or a few: with the learned drafter alone, if there is one, the larger trees first."""
    options = setting.options
    known = {str(shape): shape for shape in shapes_of(setting.config.spec)}
    if options.fixed_shapes:
        missing = [name for name in options.fixed_shapes.split(",") if name not in known]
        if missing:
            raise ConfigError(f"--fixed-shapes: no shape {missing[0]!r}; known: {', '.join(known)}")
        return [known[name] for name in options.fixed_shapes.split(",")]
    few = fixed_shapes(list(known.values()))
    names = ("eagle",) if setting.config.spec.drafter in ("eagle", "both") else ("suffix",)
    return sorted((shape for shape in few if shape.drafters == names), key=lambda shape: -shape.verify)[: options.fixed]


def rollouts(stage: Recording, count: int, also_same_lengths: bool = False) -> dict[str, Any]:
    """Other answers to the same prompts, plainly and by the warm tuner, one or the other first. A rollout lasts as long
    as its longest answer, and half precision turns tokens: several say more than one, or, if wanted, plain decoding
    once more with answers as long as the tuner's were."""
    runs: list[dict[str, Any]] = []
    names = (PLAIN, WARM)
    for number in range(1, count + 1):
        stage.reseed(workloads.MEASURE_SEED + number)
        done = {name: stage.write(Variant(name)) for name in (names if number % 2 else names[::-1])}
        few = small_batch(done[PLAIN], {WARM: stage.latest[WARM]}, _SMALL).get(WARM, {})
        alike = same_lengths(stage, [done[WARM]]) if also_same_lengths else None
        runs.append(
            {
                **{f"{name} s": done[name].seconds for name in names},
                "capturing s": done[WARM].capture_s,
                "longest": [max(len(completion.tokens) for completion in done[name].completions) for name in names],
                "last 32 s": [done[name].tail_s(32) for name in names],
                f"S, AL ≤ {_SMALL}": [few.get("speedup"), few.get("accept_length")],
                **({"plain, same lengths s": alike["plain_s"]} if alike else {}),
            }
        )
    stage.reseed(workloads.MEASURE_SEED)
    plain, warm = ([run[f"{name} s"] for run in runs] for name in names)
    alike_s = [run["plain, same lengths s"] for run in runs if "plain, same lengths s" in run]
    return {
        "runs": runs,
        "speedup at the same lengths": sum(alike_s) / sum(warm) if alike_s else None,
        "speedup": sum(plain) / sum(warm),
        "mean": mean(a / b for a, b in zip(plain, warm, strict=True)),
        "error": _ratio_error(plain, warm),
    }


def same_lengths(stage: Recording, written: Sequence[Written]) -> dict[str, Any] | None:
    """Half precision turns a token here and there, and the longest answer decides: plain decoding once more, with
    answers as long as the warm tuner's were."""
    warm = next((done for done in written if done.variant.name == WARM), None)
    if warm is None:
        return None
    lengths = [len(completion.tokens) for completion in warm.completions]
    plain = stage.write(Variant(PLAIN), lengths)
    last = {name: done.tail_s(32) for name, done in ((PLAIN, plain), (WARM, warm))}
    return {
        "tokens": sum(lengths),
        "plain_s": plain.seconds,
        "warm_s": warm.seconds,
        "speedup": plain.seconds / warm.seconds,
        "last_32_speedup": last[PLAIN] / last[WARM],
    }


def answers(setting: Setting, done: Written) -> dict[str, Any]:
    """What was asked and written: without it, no speed-up means anything."""
    completions = done.completions
    lengths = sorted(len(completion.tokens) for completion in completions)
    asked = [prompt for prompt in setting.prompts for _ in range(setting.options.group_size)]
    logprobs = [value for completion in completions for value in completion.policy_logprobs]
    rewards = [workloads.right(setting.workload, *pair) for pair in zip(asked, completions, strict=True)]
    return {
        "prompts": len(setting.prompts),
        "group_size": setting.options.group_size,
        "answers": len(completions),
        "tokens": sum(lengths),
        "prompt_tokens_mean": mean(map(len, setting.encoded)),
        "median": lengths[len(lengths) // 2],
        "p90": lengths[int(0.9 * len(lengths))],
        "p99": lengths[int(0.99 * len(lengths))],
        "max": lengths[-1],
        "cap": setting.cap,
        "at_cap": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        "sigma_log_length": pstdev([math.log(length) for length in lengths]),
        "nats_per_token": -mean(logprobs),  # at temperature 1: of the policy's own draws, hence its entropy
        "right": mean(rewards),
        "temperature": setting.config.sampling.temperature,
        "rows": setting.config.engine.rows,
    }


def lengths(setting: Setting, done: Written) -> list[dict[str, Any]]:
    """How long the answers to each prompt became: with what runs cost, all that `tlt simulate` needs of a rollout."""
    size, tokens = setting.options.group_size, [len(completion.tokens) for completion in done.completions]
    return [
        {"prompt": index, "prompt_tokens": len(prompt), "tokens": tokens[index * size : (index + 1) * size]}
        for index, prompt in enumerate(setting.encoded)
    ]


def finished(done: Written) -> list[float]:
    """When each answer ended, in order: `tail.py` draws it."""
    return sorted(completion.timing.finished_s for completion in done.completions)


def divergence(one: Written | Sequence[Completion], other: Written | Sequence[Completion]) -> dict[str, Any]:
    """How often two runs of the same requests turn into another token, per token that could have."""
    pairs = list(zip(_completions(one), _completions(other), strict=True))
    same = sum(a.tokens == b.tokens for a, b in pairs)
    tokens = sum(common_start(a.tokens, b.tokens) for a, b in pairs) + len(pairs) - same
    return {
        "requests": len(pairs),
        "identical": same,
        "identical_share": same / len(pairs),
        "tokens_compared": tokens,
        "per_1000_tokens": 1e3 * (len(pairs) - same) / max(1, tokens),
    }


def _completions(run: Written | Sequence[Completion]) -> Sequence[Completion]:
    return run.completions if isinstance(run, Written) else run


def in_short(written: Sequence[Written], small: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that count, a row per variant."""
    speculated = {record.variant: record for record in bench.speculated(written)}
    rows = []
    for record in bench.time(written):
        told, few = speculated[record.variant], small.get(record.variant, {})
        rows.append(
            {
                "variant": record.variant,
                "makespan s": record.makespan_s,
                "speed-up": record.speedup,
                "last 32 s": record.last_32_s,
                "speed-up of it": record.last_32_speedup,
                "accept": told.accept_length,
                "off": told.off_share,
                "identical": told.identical / len(written[0].completions),
                f"AL ≤ {_SMALL}": few.get("accept_length"),
                f"S/AL ≤ {_SMALL}": few.get("speedup_per_accept"),
            }
        )
    return rows


def tell(rows: Sequence[dict[str, Any]]) -> None:
    cells = [[_cell(value) for value in row.values()] for row in rows]
    columns = list(zip(list(rows[0]), *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def tell_shapes(shares: dict[str, dict[str, dict[str, float]]]) -> None:
    """What the tuner chose, by number of requests."""
    for size, chosen in shares.get(WARM, shares.get(TUNER, {})).items():
        most = sorted(chosen.items(), key=lambda pair: -pair[1])[:3]
        print(f"requests {size}: " + ", ".join(f"{shape} {share:.0%}" for shape, share in most))


# ---- drafts: greedy, β = 1, β fitted


class _Constant:
    """A sharpness that nobody fits."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def observe(self, hits: Sequence[int], nodes: int) -> None:
        pass


def drafts(options: argparse.Namespace, config: RunConfig) -> None:
    options.drafter = "eagle"
    results = Results(options)
    setting = set_up(options, config, options.groups)
    shapes = [_tree(word) for word in options.trees]
    found: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        for name, beta in (("greedy", GREEDY), ("β = 1", 1.0), ("β fitted", None)):
            found.setdefault(str(shape), {})[name] = _accepted(setting, shape, beta)
            results.add("accept_length", found, show=False)
    tell([{"shape": shape, "drafts": name, **one} for shape, ways in found.items() for name, one in ways.items()])


def _accepted(setting: Setting, shape: Shape, beta: float | None) -> dict[str, Any]:
    """Of a whole rollout in one shape. `beta` None is fitted as it goes."""
    with patch("tlt.spec.sharpening.Sharpness", Sharpness if beta is None else lambda: _Constant(beta)):
        learned = learned_drafting(setting.policy, setting.config)
    assert learned is not None
    engine = build_engine(setting.policy, setting.config, Fixed(shape), learned)
    completions = answer(engine, requests(setting, setting.cap))
    report = engine.report().speculation
    assert report is not None
    del engine
    release()
    return {
        "accept_length": report.accept_length,
        "verifies": report.verifies,
        "tokens": sum(len(completion.tokens) for completion in completions),
        "beta": learned.beta,
    }


def requests(setting: Setting, cap: int, group_size: int = 0) -> list[Request]:
    params = replace(setting.config.sampling, max_tokens=cap)
    times = group_size or setting.options.group_size
    pairs = [(index, prompt) for index, prompt in enumerate(setting.encoded) for _ in range(times)]
    seed = setting.config.run.seed
    return [Request(Key(seed, number), prompt, params, f"prompt {i}") for number, (i, prompt) in enumerate(pairs)]


def answer(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    engine.submit(asked)
    return sorted(engine.drain(), key=lambda completion: completion.key.request)


# ---- never slower


def _ratio_error(plain: Sequence[float], other: Sequence[float]) -> float | None:
    """Standard error of the mean ratio over the turns."""
    ratios = [a / b for a, b in zip(plain, other, strict=True)]
    return stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None


def never(options: argparse.Namespace, config: RunConfig) -> None:
    """Every case in one engine, but for the useless drafter, which needs another."""
    results = Results(options)
    wanted = options.cases.split(",")
    missing = [case for case in wanted if case not in CASES]
    if missing:
        raise ConfigError(f"--cases: there is no case {missing[0]!r}; expected some of {','.join(CASES)}")
    most = max(CASES[case].times for case in wanted)
    setting = set_up(options, config, most * options.groups)
    found: dict[str, Any] = {}
    for useless in (True, False):
        cases = [case for case in wanted if CASES[case].useless == useless]
        if not cases:
            continue
        stage = Recording(
            setting.policy,
            _with_a_useless_drafter(setting.config) if useless else setting.config,
            setting.encoded[: max(CASES[case].times for case in cases) * options.groups],
            setting.scale(),
        )
        for name in cases:
            found[name] = _case(stage, setting, CASES[name])
            results.add("never_slower", found, show=False)
            shown = {key: value for key, value in found[name].items() if not isinstance(value, dict)}
            tell([{"case": name, **shown}])
        del stage
        release()


@dataclass(frozen=True, slots=True)
class Case:
    """In which speculation might lose."""

    times: int = 1  # as many prompts as asked for
    cap: int = 1 << 30  # tokens, if that is less than asked for
    heat: float = 1.0
    useless: bool = False


CASES = {"useless": Case(useless=True), "hot": Case(heat=1.2), "many": Case(times=4), "short": Case(cap=32)}


def _with_a_useless_drafter(config: RunConfig) -> RunConfig:
    """A learned drafter that has learned nothing, and nobody else to ask."""
    return replace(config, spec=replace(config.spec, drafter="eagle", path=NEW), draft=replace(config.draft, vocab=0))


def _case(stage: Recording, setting: Setting, case: Case) -> dict[str, Any]:
    """Everybody's first rollout only warms up, and the warm tuner's first ones, until it asks for no new graphs."""
    sampling = setting.config.sampling
    stage.ask(
        setting.encoded[: case.times * setting.options.groups],
        min(setting.cap, case.cap),
        replace(sampling, temperature=case.heat * sampling.temperature),
    )
    first = {name: warm_up(stage, Variant(name)).seconds for name in (PLAIN, TUNER, WARM)}
    for _ in range(_MOST_RUNS):
        done = stage.write(Variant(WARM))
        if done.capture_s <= _CAPTURED * done.seconds:
            break
    runs = _in_turns(stage, setting.options.repeats, 0.0 if setting.options.quick else _CASE_S)
    seconds = {name: [done.seconds for done in written] for name, written in runs.items()}
    reports = {name: written[-1] for name, written in runs.items()}
    tuner = reports[TUNER].speculation
    assert tuner is not None
    return {
        "requests": len(reports[PLAIN].completions),
        "tokens": reports[PLAIN].tokens,
        "seconds": seconds,
        "first_s": {name: first[name] for name in (TUNER, WARM)},  # graphs captured on the way, kernels compiled
        "capture_s": {name: [done.capture_s for done in runs[name]] for name in (TUNER, WARM)},
        "shapes": {name: [_used(done) for done in runs[name]] for name in (TUNER, WARM)},
        "tuner": median(seconds[PLAIN]) / median(seconds[TUNER]),
        "tuner_fastest": min(seconds[PLAIN]) / min(seconds[TUNER]),
        "warm_tuner": median(seconds[PLAIN]) / median(seconds[WARM]),
        "warm_tuner_fastest": min(seconds[PLAIN]) / min(seconds[WARM]),
        "errors": {name: _ratio_error(seconds[PLAIN], seconds[name]) for name in (TUNER, WARM)},
        "accept_length": tuner.accept_length,
        "off_share": tuner.off_share,
        "explored_ms": 1e3 * tuner.tuner.explored_s if tuner.tuner else None,
        "once_ms": 1e3 * tuner.once_s,
        "identical_share": divergence(reports[PLAIN], reports[TUNER])["identical_share"],
    }


def _used(done: Written) -> dict[str, int]:
    """Ticks by shape, most first."""
    ticks: Counter[str] = Counter()
    for (_, shape), count in done.speculation.ticks.items() if done.speculation else ():
        ticks[str(shape)] += count
    return dict(ticks.most_common())


def _in_turns(stage: Recording, repeats: int, least_s: float) -> dict[str, list[Written]]:
    """Plain decoding and the tuners take turns, another one first each time: a GPU that grows warm slows down."""
    names = (PLAIN, TUNER, WARM)
    turns = max(repeats, min(_MOST_TURNS, math.ceil(least_s / stage.write(Variant(PLAIN)).seconds)))
    turns += -turns % len(names) if least_s else 0  # everybody as often
    runs: dict[str, list[Written]] = {name: [] for name in names}
    for turn, place in product(range(turns), range(len(names))):
        name = names[(turn + place) % len(names)]
        runs[name].append(stage.write(Variant(name)))
    return runs


# ---- fidelity: plain decoding against itself


def fidelity(options: argparse.Namespace, config: RunConfig) -> None:
    """The same requests in batches of another size, without any speculation."""
    options.drafter = "none"
    results = Results(options)
    setting = set_up(options, config, options.groups)
    runs = {}
    for rows in (options.rows_large, options.rows_small):
        engine = Engine(setting.policy.model, setting.policy.tokenizer, replace(setting.config.engine, rows=rows))
        asked = requests(setting, setting.cap, group_size=1)
        runs[rows] = answer(engine, asked if rows != options.rows_small else asked[: options.alone])
        del engine
        release()
    large, small = runs.values()
    found = divergence(large[: len(small)], small)
    results.add("plain_against_plain", {"batches": list(runs), "cap": setting.cap, **found})


# ---- score: is it a sample of the policy


def score(options: argparse.Namespace, config: RunConfig) -> None:
    """Of a rollout in one shape, so that every token was verified; and, to see that the test can fail, of the same
    answers against a policy that is a little hotter."""
    options.drafter = "eagle"
    results = Results(options)
    setting = set_up(options, config, options.groups)
    shape = _tree(options.trees[-1])
    engine = build_engine(setting.policy, setting.config, Fixed(shape))
    completions = answer(engine, requests(setting, setting.cap))
    report = engine.report().speculation
    assert report is not None
    del engine
    release()
    results.add("written", {"shape": str(shape), "accept_length": report.accept_length, "verifies": report.verifies})
    results.add("tokens", sum(len(completion.tokens) for completion in completions))
    results.add("z", scoring.score(setting.policy.model, completions, options.temperature))
    results.add("z_of_a_hotter_policy", scoring.score(setting.policy.model, completions, 1.05 * options.temperature))


def _tree(word: str) -> Shape:
    size, _, share = word.partition("~")
    depth, width, verify = map(int, size.replace("x", " ").replace("/", " ").split())
    return Shape(("eagle",), depth, width, verify, float(share or 0))


# ---- the command line


PARTS = {
    "prepare": prepare,
    "measure": measure,
    "drafts": drafts,
    "never": never,
    "fidelity": fidelity,
    "score": score,
}


def main(arguments: Sequence[str] | None = None) -> int:
    flags, rest = take_flags(list(sys.argv[1:] if arguments is None else arguments))
    options = read(rest)
    try:
        PARTS[options.part](options, load_config(None, flags))
    except TltError as error:
        print(f"speculation.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in PARTS:
        part = parts.add_parser(name)
        _common(part, groups={"drafts": 8, "fidelity": 64}.get(name, _GROUPS))
        _OWN_OPTIONS[name](part)
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in _QUICK.items():
            if getattr(options, name, None):
                setattr(options, name, value)
    return options


def _common(part: argparse.ArgumentParser, groups: int) -> None:
    part.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    part.add_argument("--work", required=True, help="directory in which policies and drafters are kept")
    part.add_argument("--prompts", type=Path, help="GSM8K's test.jsonl: what is measured")
    part.add_argument("--json", help="where the results go; default: in the work directory")
    part.add_argument("--quick", action="store_true", help="a size for a CPU")
    part.add_argument("--groups", type=int, default=groups, help="prompts")
    part.add_argument("--group-size", type=int, default=_GROUP_SIZE, help="answers to each")
    part.add_argument("--commit", help="the commit that is measured, where git cannot tell")


def _shaped(part: argparse.ArgumentParser) -> None:
    part.add_argument("--shape", default=preparing.OWN, help="own, 1.5B or 7B")
    part.add_argument("--drafter", choices=("eagle", "suffix", "both", "none"), default="both")
    part.add_argument("--temperature", type=float, default=1.0)
    part.add_argument("--cap", type=int, default=0, help="tokens of an answer, at most; default: the workload's")


def _prepare_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--model", help="a Hugging Face directory of SmolLM2-135M-Instruct")
    part.add_argument("--data", type=Path, help="GSM8K's train.jsonl: to tune and to draft from")
    part.add_argument("--tune-budget", type=float, default=110.0, help="seconds of supervised tuning")
    part.add_argument("--budget", type=float, default=240.0, help="seconds of drafter training, its rollouts included")
    part.add_argument("--unroll", type=int, default=0, help="draft tokens trained in a row; default: the workload's")
    part.add_argument("--mlp", type=float, default=0.0, help="width of the drafter's MLP, of the policy's; likewise")


def _measure_options(part: argparse.ArgumentParser) -> None:
    _shaped(part)
    part.add_argument("--budget", type=float, default=300.0, help="seconds after which no further rollout is begun")
    part.add_argument("--repeats", type=int, default=1)
    part.add_argument("--rollouts", type=int, default=0, help="how many more, of other seeds, plainly and warm")
    part.add_argument("--same-lengths", action="store_true", help="of those, plainly once more in the tuner's lengths")
    part.add_argument("--fixed", type=int, default=3, help="how many fixed shapes")
    part.add_argument("--fixed-shapes", help='which ones, as in "eagle 4x2/9,eagle+suffix 8x1/9"')


def _drafts_options(part: argparse.ArgumentParser) -> None:
    _shaped(part)
    part.add_argument("--trees", nargs="+", default=["4x1/5", "8x4/16"], help="depth x width / nodes verified")


def _never_options(part: argparse.ArgumentParser) -> None:
    _shaped(part)
    part.set_defaults(cap=512)
    part.add_argument("--cases", default=",".join(CASES))
    part.add_argument("--repeats", type=int, default=3)


def _fidelity_options(part: argparse.ArgumentParser) -> None:
    _shaped(part)
    part.set_defaults(cap=256)
    part.add_argument("--rows-large", type=int, default=64)
    part.add_argument("--rows-small", type=int, default=1)
    part.add_argument("--alone", type=int, default=16, help="requests answered in the small batch")


_OWN_OPTIONS = {
    "prepare": _prepare_options,
    "measure": _measure_options,
    "drafts": _drafts_options,
    "never": _never_options,
    "fidelity": _fidelity_options,
    "score": _drafts_options,
}
_QUICK = {"groups": 2, "group_size": 2, "cap": 24, "fixed": 1, "repeats": 1, "rollouts": 1, "alone": 1, "rows_large": 2}


if __name__ == "__main__":
    raise SystemExit(main())
