"""Whether speculation pays in reinforcement learning: the same GRPO steps plainly, with a drafter that is kept sharp,
and with one left alone; everything included.

    python benchmarks/speculation.py   prepare --workload c --model DIR --work W
    python benchmarks/reinforcement.py --workload c --work W --shape 1.5B --budget 480 --json F
    python benchmarks/reinforcement.py --workload b --work W --shape 1.5B --prompts train.jsonl --steps 8 --budget 200

What `speculation.py prepare` tuned and trained is widened to the shape asked for, on disk, and handed to the bench of
`tlt bench train`: every variant is a run of its own from the same policy, drafter and seeds. The learning rate is high:
the policy is meant to leave its drafter behind within a few steps. Every knob is a flag too, and goes before those
below: --train.learning_rate 2e-5. Steps are printed and written as they are taken. --quick is for a CPU.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import preparing
import workloads
from workloads import WORKLOADS, Workload

from tlt.bench.options import TrainOptions, train_variants
from tlt.bench.train import bench_train
from tlt.config import RunConfig, TaskSettings
from tlt.errors import ConfigError, TltError
from tlt.model.weights import save_policy
from tlt.policy import open_policy
from tlt.recipe import load_config, take_flags

SEED = 404  # of prompts and sampling: neither tuning, drafter training nor rollouts were measured with it

# The policy: at 1e-5, one step of Adam in which all of a gradient's signs count moves SmolLM2-135M by 0.008 nats per
# token on the answers it learns from, at 3e-5 by 0.065; a wider one is moved further.
# The drafter: where a step lasts four seconds, a twentieth of it is a micro-step or two, so it trains whenever it has
# saved up for some, in full size from the first on, and what is measured around them is small. It has learned all it
# could: it is adapted with about the rate it ended with.
KNOBS = (
    f"--run.seed={SEED}",
    "--train.learning_rate=1e-5",
    "--train.warmup_steps=2",
    "--engine.kv_gib=32",
    "--draft.learning_rate=1e-4",
    "--draft.warmup_steps=2",
    "--drafting.forced_share=0.04",
    "--drafting.held_out=2048",
    "--drafting.micro_s=0",
    "--drafting.check=8",
    "--drafting.behind=0.01",
    "--drafting.gain=0",
)


def config_of(options: argparse.Namespace, workload: Workload, flags: Sequence[str]) -> RunConfig:
    """The task, the policy and the drafter of a prepared workload in a shape, and the knobs of this benchmark."""
    config = load_config(None, [*KNOBS, *flags])
    place = preparing.PreparedPlace(Path(options.work) / options.workload)
    policy, drafter = in_shape(config, place, options.shape)
    how = replace(
        config.draft, vocab=workload.draft.vocab, window=workload.draft.window, single_steps=workload.draft.single_steps
    )
    return replace(
        config,
        model=replace(config.model, path=policy),
        spec=replace(config.spec, drafter=options.drafter, path=drafter),
        draft=how,
        task=task_of(config.task, workload, options.prompts),
    )


def in_shape(config: RunConfig, place: preparing.PreparedPlace, shape: str) -> tuple[str, str]:
    """Directories of policy and drafter. What is widened is kept: every variant opens it, and later calls too."""
    if shape == preparing.OWN:
        return place.policy(), str(place.drafter())
    small = open_policy(replace(config.model, path=place.policy()))
    wide, directory = preparing.in_shape(small, shape), place.directory / f"policy-{shape}"
    if not (directory / "config.json").is_file():
        save_policy(wide.model, directory, tokenizer_from=small.source)
    return str(directory), str(preparing.ready_drafter(place, small.model, wide, shape))


def task_of(settings: TaskSettings, workload: Workload, prompts: Path | None) -> TaskSettings:
    if workload.steps:
        return replace(settings, name="steps", steps=workload.steps)
    if prompts is None:
        raise ConfigError(f"workload {workload.name} needs --prompts, a JSONL file in GSM8K's form")
    return replace(settings, name="files", path=str(prompts), chat=True, reward="gsm8k")


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.perf_counter()
    flags, rest = take_flags(list(sys.argv[1:] if arguments is None else arguments))
    options = read(rest)
    chosen = WORKLOADS[options.workload]
    workload = workloads.quick(chosen) if options.quick else chosen
    try:
        config = config_of(options, workload, flags)
        spent_s = time.perf_counter() - started
        print(f"policy {config.model.path}, drafter {config.spec.path}: {spent_s:.1f} s", flush=True)
        wanted = TrainOptions(
            json=Path(options.json or Path(options.work) / f"reinforcement-{options.workload}-{options.shape}.json"),
            commit=options.commit,
            variants=train_variants(options.variants),
            budget_s=max(1.0, options.budget - spent_s),
            steps=options.steps,
            groups=options.groups,
            group_size=options.group_size,
            cap=options.cap or workload.cap,
        )
        bench_train(config, wanted)
    except TltError as error:
        print(f"reinforcement.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--work", required=True, help="directory in which `speculation.py prepare` left its things")
    parser.add_argument("--shape", default=preparing.OWN, help="own, 1.5B or 7B")
    parser.add_argument("--prompts", type=Path, help="GSM8K's train.jsonl, for workloads a and b")
    parser.add_argument("--drafter", choices=("eagle", "both"), default="both")
    parser.add_argument("--variants", default="plain,adaptive,frozen", help="some of plain,adaptive,frozen,suffix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each")
    parser.add_argument("--cap", type=int, default=0, help="tokens of an answer, at most; default: the workload's")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no further step is begun")
    parser.add_argument("--json", help="where the results go; default: in the work directory")
    parser.add_argument("--quick", action="store_true", help="a size for a CPU")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.groups, options.group_size, options.cap = 3, 3, 2, 24
    return options


if __name__ == "__main__":
    raise SystemExit(main())
