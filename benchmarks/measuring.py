"""`speculation.py measure`: one rollout of a workload in every way there is, what it took and what was written."""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, pstdev
from typing import Any

import workloads
from recording import Recording, by_batch, by_context, graph_memory, small_batch, switching, tick_costs
from staging import (
    CAPTURED,
    MOST_RUNS,
    Results,
    Setting,
    divergence,
    ratio_error,
    set_up,
    tell,
    warm_up,
)

from tlt.bench import rollout as bench
from tlt.bench.variants import BANDIT, PLAIN, STAYS_OFF, TUNER, WARM, Variant, VariantRollout, fixed_shapes
from tlt.config import RunConfig
from tlt.engine.build import shapes_of
from tlt.errors import ConfigError
from tlt.spec.shape import Shape

_SMALL = 8  # requests up to which a batch is small


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


def write_all(stage: Recording, setting: Setting, results: Results) -> list[VariantRollout]:
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
    written: list[VariantRollout] = []
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
        while variant.name == WARM and done.capture_s > CAPTURED * done.seconds and len(runs) < MOST_RUNS:
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


def _run(name: str, done: VariantRollout) -> dict[str, Any]:
    captured = {"capture_s": done.capture_s, "captures": done.captures, "spent": done.spent, "stalls": done.stalls}
    return {"variant": name, "makespan_s": done.seconds, **captured}


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
    as its longest answer, and half precision turns tokens: several say more than one. If wanted, plain decoding is
    timed once more, with answers as long as the tuner's were."""
    runs: list[dict[str, Any]] = []
    names = (PLAIN, WARM)
    for number in range(1, count + 1):
        stage.reseed(workloads.MEASURE_SEED + number)
        done = {name: stage.write(Variant(name)) for name in (names if number % 2 else names[::-1])}
        few = small_batch(done[PLAIN], {WARM: stage.latest[WARM]}, _SMALL).get(WARM, {})
        run = {
            **{f"{name} s": done[name].seconds for name in names},
            "capturing s": done[WARM].capture_s,
            "longest": [max(len(completion.tokens) for completion in done[name].completions) for name in names],
            "last 32 s": [done[name].tail_s(32) for name in names],
            f"S, AL ≤ {_SMALL}": [few.get("speedup"), few.get("accept_length")],
        }
        if also_same_lengths:
            run["plain, same lengths s"] = in_lengths_of(stage, done[WARM]).seconds
        runs.append(run)
    stage.reseed(workloads.MEASURE_SEED)
    plain, warm = ([run[f"{name} s"] for run in runs] for name in names)
    told = {
        "runs": runs,
        "speedup": sum(plain) / sum(warm),
        "mean": mean(a / b for a, b in zip(plain, warm, strict=True)),
        "error": ratio_error(plain, warm),
    }
    if also_same_lengths:
        told["speedup at the same lengths"] = sum(run["plain, same lengths s"] for run in runs) / sum(warm)
    return told


def same_lengths(stage: Recording, written: Sequence[VariantRollout]) -> dict[str, Any] | None:
    """Half precision turns a token here and there, and the longest answer decides: plain decoding once more, with
    answers as long as the warm tuner's were."""
    warm = next((done for done in written if done.variant.name == WARM), None)
    if warm is None:
        return None
    plain = in_lengths_of(stage, warm)
    last = {name: done.tail_s(32) for name, done in ((PLAIN, plain), (WARM, warm))}
    return {
        "tokens": plain.tokens,
        "plain_s": plain.seconds,
        "warm_s": warm.seconds,
        "speedup": plain.seconds / warm.seconds,
        "last_32_speedup": last[PLAIN] / last[WARM] if last[WARM] else None,  # they may end in one tick
    }


def in_lengths_of(stage: Recording, done: VariantRollout) -> VariantRollout:
    """Plain decoding, with answers as long as these."""
    return stage.write(Variant(PLAIN), [len(completion.tokens) for completion in done.completions])


# ---- what was written


def answers(setting: Setting, done: VariantRollout) -> dict[str, Any]:
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


def lengths(setting: Setting, done: VariantRollout) -> list[dict[str, Any]]:
    """How long the answers to each prompt became: with what runs cost, all that `tlt simulate` needs of a rollout."""
    size, tokens = setting.options.group_size, [len(completion.tokens) for completion in done.completions]
    return [
        {"prompt": index, "prompt_tokens": len(prompt), "tokens": tokens[index * size : (index + 1) * size]}
        for index, prompt in enumerate(setting.encoded)
    ]


def finished(done: VariantRollout) -> list[float]:
    """When each answer ended, in order: `tail.py` draws it."""
    return sorted(completion.timing.finished_s for completion in done.completions)


# ---- telling


def in_short(written: Sequence[VariantRollout], small: dict[str, Any]) -> list[dict[str, Any]]:
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


def tell_shapes(shares: dict[str, dict[str, dict[str, float]]]) -> None:
    """What the tuner chose, by number of requests."""
    for size, chosen in shares.get(WARM, shares.get(TUNER, {})).items():
        most = sorted(chosen.items(), key=lambda pair: -pair[1])[:3]
        print(f"requests {size}: " + ", ".join(f"{shape} {share:.0%}" for shape, share in most))
