"""Whether the simulator foresees what is measured: a rollout written for real, plainly and by a warm tuner, and the
same lengths simulated from the costs measured in this very process.

    python benchmarks/simulated.py --model tiny --drafter DIR [--groups 32 --group-size 8 --rollouts 3]
    python benchmarks/simulated.py --workload c --shape 7B --work W   # prepared by benchmarks/speculation.py

Costs are measured before, rollouts take turns; the middle one of each counts, and the tuner's first are not among them.
Every knob is a flag too. Prints and writes (--json) seconds, ticks and accept lengths, measured and foreseen.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import staging
import workloads

from tlt.bench.options import RolloutScale
from tlt.bench.record import write_record
from tlt.bench.variants import PLAIN, WARM, Variant, VariantRollout, VariantRunner
from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.machine import describe
from tlt.policy import Policy, open_policy
from tlt.recipe import load_config, take_flags
from tlt.sim.book import words_of
from tlt.sim.measuring import measure_book
from tlt.sim.trace import Trace, TracedPrompt
from tlt.simulate import Foreseen, choose_next
from tlt.tasks.toy import ToyTask

_WARM_UP = 2  # rollouts of a tuner before those that count


def subject(options: argparse.Namespace, config: RunConfig) -> tuple[Policy, RunConfig, list[tuple[int, ...]], int]:
    """The policy, its configuration with a drafter, the prompts and the cap."""
    if options.workload:
        setting = staging.set_up(options, config, options.groups)
        return setting.policy, setting.config, setting.encoded, setting.cap
    spec = replace(config.spec, drafter="eagle", path=options.drafter_path)
    config = replace(config, model=replace(config.model, path=options.model), spec=spec)
    policy = open_policy(config.model)
    asked = ToyTask(config.task.toy, seed=config.run.seed).sample(0, options.groups)
    prompts = [tuple(policy.tokenizer.encode_prompt(prompt.content)) for prompt in asked]
    return policy, config, prompts, options.cap or config.sampling.max_tokens


def trace_of(done: VariantRollout, prompts: Sequence[tuple[int, ...]], cap: int) -> Trace:
    lengths = [len(completion.tokens) for completion in done.completions]
    size = len(lengths) // len(prompts)
    groups = [tuple(lengths[first : first + size]) for first in range(0, len(lengths), size)]
    return Trace(tuple(map(TracedPrompt, groups, map(len, prompts))), cap, "measured here")


def compare(options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    policy, config, prompts, cap = subject(options, config)
    book = measure_book(policy, config)
    stage = VariantRunner(policy, config, prompts, RolloutScale(len(prompts), options.group_size, cap, 1))
    for name in (PLAIN, *[WARM] * _WARM_UP):
        stage.write(Variant(name))
    runs: dict[str, list[VariantRollout]] = {PLAIN: [], WARM: []}
    for _ in range(options.rollouts):
        for name, written in runs.items():
            written.append(stage.write(Variant(name)))
            print(f"{name}: {written[-1].seconds:.2f} s, {written[-1].ticks} ticks", flush=True)
    found = choose_next(book, trace_of(runs[PLAIN][-1], prompts, cap), config, workers=1, rollouts=1 + _WARM_UP)
    return {
        "machine": asdict(describe(policy.model.embed.device, options.commit)),
        "book": words_of(book),
        "rollouts": {name: [run.seconds for run in written] for name, written in runs.items()},
        "compared": table(found, runs),
    }


def table(found: Foreseen, runs: dict[str, list[VariantRollout]]) -> dict[str, Any]:
    rows = {}
    for name, simulated in ((PLAIN, found.plain), (WARM, found.drafted)):
        assert simulated is not None, "the drafter has a record"
        measured = sorted(runs[name], key=lambda run: run.seconds)[len(runs[name]) // 2]
        told = measured.speculation
        rows[name] = {
            "measured_s": measured.seconds,
            "foreseen_s": simulated.seconds,
            "error": simulated.seconds / measured.seconds - 1.0,
            "measured_ticks": measured.ticks,
            "foreseen_ticks": simulated.ticks,
            "measured_accept_length": 1.0 + told.accepted / max(1, told.verifies) if told else 1.0,
            "foreseen_accept_length": simulated.accept_length,
        }
    measured = [median(run.seconds for run in runs[name]) for name in (PLAIN, WARM)]
    speedup = {"measured": measured[0] / measured[1], "foreseen": found.plain.seconds / found.best.seconds}
    return {**rows, "speedup": speedup}


def main(arguments: Sequence[str] | None = None) -> int:
    flags, rest = take_flags(list(sys.argv[1:] if arguments is None else arguments))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", dest="drafter_path", help="of --model: a directory")
    parser.add_argument("--workload", choices=sorted(workloads.WORKLOADS))
    parser.add_argument("--work", default=".")
    parser.add_argument("--shape", default="own")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--cap", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    parser.set_defaults(drafter="eagle", temperature=1.0, quick=False)
    options = parser.parse_args(rest)
    try:
        found = compare(options, load_config(None, flags))
    except TltError as error:
        print(f"simulated.py: error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found["compared"], indent=1))
    if options.json:
        write_record(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
