"""`speculation.py never`: cases in which speculation might lose, each in turns with plain decoding."""

import argparse
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from recording import Recording
from staging import (
    CAPTURED,
    MOST_RUNS,
    Results,
    Setting,
    by_turn,
    divergence,
    ratio_error,
    set_up,
    tell,
    warm_up,
)

from tlt.bench.variants import PLAIN, TUNER, WARM, Variant, VariantRollout
from tlt.config import NEW, RunConfig
from tlt.errors import ConfigError
from tlt.machine import free_memory

_CASE_S = 8.0  # of plain decoding in a case: short ones take many turns …
_MOST_TURNS = 24  # … but no more than these


@dataclass(frozen=True, slots=True)
class NeverCase:
    """In which speculation might lose."""

    times: int = 1  # as many prompts as asked for
    cap: int = 1 << 30  # tokens, if that is less than asked for
    heat: float = 1.0
    useless: bool = False


CASES = {
    "useless": NeverCase(useless=True),
    "hot": NeverCase(heat=1.2),
    "many": NeverCase(times=4),
    "short": NeverCase(cap=32),
}


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
        free_memory()


def _with_a_useless_drafter(config: RunConfig) -> RunConfig:
    """A learned drafter that has learned nothing, and nobody else to ask."""
    return replace(config, spec=replace(config.spec, drafter="eagle", path=NEW), draft=replace(config.draft, vocab=0))


def _case(stage: Recording, setting: Setting, case: NeverCase) -> dict[str, Any]:
    """Everybody's first rollout only warms up, and the warm tuner's first ones, until it asks for no new graphs."""
    sampling = setting.config.sampling
    stage.ask(
        setting.encoded[: case.times * setting.options.groups],
        min(setting.cap, case.cap),
        replace(sampling, temperature=case.heat * sampling.temperature),
    )
    first = {name: warm_up(stage, Variant(name)).seconds for name in (PLAIN, TUNER, WARM)}
    for _ in range(MOST_RUNS):
        done = stage.write(Variant(WARM))
        if done.capture_s <= CAPTURED * done.seconds:
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
        "spent": {name: [done.spent for done in runs[name]] for name in (TUNER, WARM)},
        "once_s": {
            name: [done.speculation and done.speculation.one_off_s for done in runs[name]] for name in (TUNER, WARM)
        },
        "shapes": {name: [_used(done) for done in runs[name]] for name in (TUNER, WARM)},
        "tuner_by_turn": by_turn(seconds[PLAIN], seconds[TUNER]),
        "warm_tuner_by_turn": by_turn(seconds[PLAIN], seconds[WARM]),
        "tuner": median(seconds[PLAIN]) / median(seconds[TUNER]),
        "tuner_fastest": min(seconds[PLAIN]) / min(seconds[TUNER]),
        "warm_tuner": median(seconds[PLAIN]) / median(seconds[WARM]),
        "warm_tuner_fastest": min(seconds[PLAIN]) / min(seconds[WARM]),
        "errors": {name: ratio_error(seconds[PLAIN], seconds[name]) for name in (TUNER, WARM)},
        "accept_length": tuner.accept_length,
        "off_share": tuner.off_share,
        "explored_ms": 1e3 * tuner.tuner.explored_s if tuner.tuner else None,
        "once_ms": 1e3 * tuner.one_off_s,
        "identical_share": divergence(reports[PLAIN], reports[TUNER])["identical_share"],
    }


def _used(done: VariantRollout) -> dict[str, int]:
    """Ticks by shape, most first."""
    ticks: Counter[str] = Counter()
    for (_, shape), count in done.speculation.ticks.items() if done.speculation else ():
        ticks[str(shape)] += count
    return dict(ticks.most_common())


def _in_turns(stage: Recording, repeats: int, least_s: float) -> dict[str, list[VariantRollout]]:
    """Plain decoding and the tuners take turns, another one first each time: a GPU that grows warm slows down."""
    names = (PLAIN, TUNER, WARM)
    turns = max(repeats, min(_MOST_TURNS, math.ceil(least_s / stage.write(Variant(PLAIN)).seconds)))
    turns += -turns % len(names) if least_s else 0  # everybody as often
    runs: dict[str, list[VariantRollout]] = {name: [] for name in names}
    for turn, place in product(range(turns), range(len(names))):
        name = names[(turn + place) % len(names)]
        runs[name].append(stage.write(Variant(name)))
    return runs
