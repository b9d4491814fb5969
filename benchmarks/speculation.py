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
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measuring
import never
import preparing
import scoring
from staging import (
    Results,
    Setting,
    answer,
    divergence,
    place_of,
    requests,
    set_up,
    tell,
    workload_of,
)
from workloads import WORKLOADS

from tlt.config import RunConfig
from tlt.engine.build import build_engine
from tlt.engine.engine import EngineCore
from tlt.errors import ConfigError, TltError
from tlt.machine import free_memory
from tlt.recipe import load_config, take_flags
from tlt.spec.candidates import GREEDY, BetaCalibrator
from tlt.spec.drafter import build_drafters
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Fixed

_GROUPS, _GROUP_SIZE = 32, 8


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
    with patch("tlt.spec.candidates.BetaCalibrator", BetaCalibrator if beta is None else lambda: _Constant(beta)):
        (learned,) = build_drafters(setting.policy, setting.config)
    engine = build_engine(setting.policy, setting.config, Fixed(shape), [learned])
    completions = answer(engine, requests(setting, setting.cap))
    report = engine.report().speculation
    assert report is not None
    del engine
    free_memory()
    return {
        "accept_length": report.accept_length,
        "verifies": report.verifies,
        "tokens": sum(len(completion.tokens) for completion in completions),
        "beta": learned.beta,
    }


# ---- fidelity: plain decoding against itself


def fidelity(options: argparse.Namespace, config: RunConfig) -> None:
    """The same requests in batches of another size, without any speculation."""
    options.drafter = "none"
    results = Results(options)
    setting = set_up(options, config, options.groups)
    runs = {}
    for rows in (options.rows_large, options.rows_small):
        engine = EngineCore(setting.policy.model, setting.policy.tokenizer, replace(setting.config.engine, rows=rows))
        asked = requests(setting, setting.cap, group_size=1)
        runs[rows] = answer(engine, asked if rows != options.rows_small else asked[: options.alone])
        del engine
        free_memory()
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
    free_memory()
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
    "measure": measuring.measure,
    "drafts": drafts,
    "never": never.never,
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
    part.add_argument("--cases", default=",".join(never.CASES))
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
