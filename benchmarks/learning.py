"""Whether the recipes learn: 60 steps of GRPO, of DAPO and of GRPO on LoRA adapters of rank 32, with held-out accuracy
every 20 steps, as a record and a picture.

    python benchmarks/learning.py --model DIR --train gsm8k/train.jsonl --test gsm8k/test.jsonl --work W --budget 540
    python benchmarks/learning.py --quick --work W

Every variant is `tlt train` with a shipped recipe, in a process of its own. After `--budget` seconds the run under way
is stopped; the same command goes on from its newest checkpoint, until all variants have taken all steps. After every
call --out (or $OUT, or W/results) has learning.json, learning.svg, and the report and events of each run. Accuracy is
greedy, on the first 256 prompts of --test. Every knob is a flag, too, and counts for all variants:
--sampling.max_tokens 512. --quick is for a CPU: the tiny policy on arithmetic.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import hypot
from pathlib import Path
from typing import Any

from line_chart import Axis, Line, line_chart, standalone

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.bench.record import new_record, write_record
from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.policy import device_of
from tlt.recipe import flat, load_config, take_flags
from tlt.train.policy_files import OPTIMIZER
from tlt.watch.directory import CHECKPOINTS
from tlt.watch.events import Evaluated, Run, read_run
from tlt.watch.history import events_of, steps_of

STEPS = 60
TOLD = (  # of every step
    *("mean_reward", "reward_std", "no_signal", "groups", "groups_learned", "length_mean", "truncated", "tokens"),
    *("loss", "grad_norm", "learning_rate", "entropy", "kl", "clipped", "mismatch_mean", "accept_length"),
    *("rollout_s", "reward_s", "update_s", "drafting_s", "step_s"),
)


@dataclass(frozen=True, slots=True)
class LearningVariant:
    """A recipe, and what is changed in it."""

    name: str
    label: str
    recipe: str
    flags: tuple[str, ...] = ()


# Checkpoints are what a call that ran out of time loses steps since; those of all weights are 14 bytes a weight.
VARIANTS = (
    LearningVariant("grpo", "GRPO", "grpo", ("--train.learning_rate=3e-6", "--checkpoint.every=6")),
    LearningVariant("dapo", "DAPO, dynamic sampling", "dapo", ("--checkpoint.every=6",)),
    LearningVariant(
        "lora",
        "GRPO, LoRA rank 32",
        "grpo",
        ("--train.lora_rank=32", "--train.learning_rate=1e-4", "--checkpoint.every=3"),
    ),
)
QUICK = (
    *("--model.path=tiny", "--task.name=toy", "--task.path=", "--task.chat=false", "--task.template="),
    *(
        "--task.prompts=16",
        "--task.group=8",
        "--task.toy.median_ops=2",
        "--task.toy.spread=0",
        "--sampling.max_tokens=48",
    ),
    *(
        "--eval.paths=",
        "--eval.prompts=32",
        "--eval.every=2",
        "--checkpoint.every=2",
        "--task.overlong_tokens=8",
        "--train.learning_rate=0",
    ),
)
QUICK_STEPS = 6


def flags_of(variant: LearningVariant, options: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """Of `tlt train`. Later ones count."""
    where = [f"--run.name={variant.name}", f"--run.out={options.work}", f"--run.steps={options.steps}"]
    if options.quick:
        rewards = ["--task.rewards=task,overlong", "--eval.reward="] if variant.name == "dapo" else []
        return [*variant.flags, *QUICK, *rewards, *where, *more]
    files = [f"--model.path={options.model}", f"--task.path={options.train}", f"--eval.paths={options.test}"]
    return [*variant.flags, *files, "--checkpoint.keep=1", *where, *more]


# ---- running


def train(variant: LearningVariant, flags: Sequence[str], until: float) -> None:
    """Goes on with the run until it is over, or until that time on the clock of time.monotonic."""
    command = [sys.executable, "-m", "tlt", "train", variant.recipe, "--resume", *flags]
    process = subprocess.Popen(command)
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()
        return
    if code:
        raise TltError(f"the run {variant.name} failed with exit code {code}: see above, or its report")


def forget_state(config: RunConfig) -> None:
    """Removes the optimizer's state of a run that is over: 12 bytes a weight that the next run's checkpoints need."""
    for path in (Path(config.run.out) / config.run.name / CHECKPOINTS).glob(f"step_*/{OPTIMIZER}"):
        shutil.rmtree(path)


def taken(run: Run) -> int:
    return max((step.step for step in steps_of(run)), default=0)


def is_over(run: Run | None, config: RunConfig) -> bool:
    last = config.run.steps
    return run is not None and taken(run) == last and any(told.step == last for told in events_of(run, Evaluated))


def run_of(config: RunConfig) -> Run | None:
    directory = Path(config.run.out) / config.run.name
    return read_run(directory) if (directory / "events.jsonl").is_file() else None


# ---- what came of it


def outcome(variant: LearningVariant, config: RunConfig, run: Run) -> dict[str, Any]:
    """Of one variant, as far as it has come."""
    told = events_of(run, Evaluated)
    found: dict[str, Any] = {
        "label": variant.label,
        "recipe": variant.recipe,
        "settings": flat(config),
        "steps_taken": taken(run),
        "evaluations": [asdict(one) for one in told],
        "steps": [{"step": step.step, **{name: getattr(step, name) for name in TOLD}} for step in steps_of(run)],
    }
    return found | ({"gain": gain(told)} if told and told[-1].step else {})


def gain(told: Sequence[Evaluated]) -> dict[str, float | bool]:
    """Accuracy before and after, and whether it rose by more than two standard errors of the difference."""
    first, last = told[0], told[-1]
    error = hypot(first.reward_error, last.reward_error)
    difference = last.mean_reward - first.mean_reward
    return {
        "before": first.mean_reward,
        "after": last.mean_reward,
        "difference": difference,
        "standard_error": error,
        "rose": difference > 2 * error,
    }


def picture(outcomes: dict[str, dict[str, Any]]) -> str:
    """Accuracy over steps: a line for each variant, and faint ones a standard error above and below."""
    lines = []
    for colour, found in enumerate(outcomes.values(), start=2):
        for sign in (0, -1, 1):
            points = [(one["step"], one["mean_reward"] + sign * one["reward_error"]) for one in found["evaluations"]]
            lines.append(Line(found["label"], points, f"c{colour}", faint=sign != 0))
    chart = line_chart(lines, Axis("step", whole=True), Axis("held-out accuracy, greedy", percent=True))
    return standalone(chart, [(line.colour, line.label) for line in lines if not line.faint], at_bottom=True)


def write(options: argparse.Namespace, configs: dict[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """The record, the picture, and the reports of all runs that there are."""
    runs = {variant: run for variant in VARIANTS if (run := run_of(configs[variant.name])) is not None}
    outcomes = {variant.name: outcome(variant, configs[variant.name], run) for variant, run in runs.items()}
    record = new_record(device_of("auto"), options.commit, model=options.model, variants=outcomes)
    write_record(options.out / "learning.json", record)
    if any(found["evaluations"] for found in outcomes.values()):
        (options.out / "learning.svg").write_text(picture(outcomes), encoding="utf-8")
    for name in outcomes:
        for file in ("report.html", "events.jsonl"):
            source = Path(configs[name].run.out) / name / file
            if source.is_file():
                (options.out / name).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, options.out / name / file)
    return outcomes


def say(outcomes: dict[str, dict[str, Any]], steps: int) -> None:
    for found in outcomes.values():
        curve = ", ".join(
            f"{one['mean_reward']:.1%} ± {one['reward_error']:.1%} after {one['step']}" for one in found["evaluations"]
        )
        rose = {True: "; it rose", False: "; no rise beyond two standard errors", None: ""}[
            found.get("gain", {}).get("rose")
        ]
        print(f"{found['label']}: {found['steps_taken']} of {steps} steps; accuracy {curve or 'not known yet'}{rose}")


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    more, rest = take_flags(list(sys.argv[1:] if arguments is None else arguments))
    options = read(rest)
    chosen = [variant for variant in VARIANTS if variant.name in options.variants.split(",")]
    try:
        flags = {variant.name: flags_of(variant, options, more) for variant in VARIANTS}
        configs = {variant.name: load_config(variant.recipe, flags[variant.name]) for variant in VARIANTS}
        for variant in chosen:
            left_s = options.budget - (time.monotonic() - started)
            if left_s > 0 and not is_over(run_of(configs[variant.name]), configs[variant.name]):
                train(variant, flags[variant.name], started + options.budget)
            if is_over(run_of(configs[variant.name]), configs[variant.name]):
                forget_state(configs[variant.name])
        outcomes = write(options, configs)
    except TltError as error:
        print(f"learning.py: error: {error}", file=sys.stderr)
        return error.exit_code
    say(outcomes, options.steps)
    over = all(is_over(run_of(configs[variant.name]), configs[variant.name]) for variant in chosen)
    print(f"{'All is done' if over else 'There is more to do: run the same command again'}. See {options.out}.")
    return 0


def read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a Hugging Face directory, or a name in the local cache")
    parser.add_argument("--train", help="GSM8K's train.jsonl")
    parser.add_argument("--test", help="GSM8K's test.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs, kept between calls")
    parser.add_argument("--out", type=Path, help="where record, picture and reports go; default: $OUT, or WORK/results")
    parser.add_argument("--variants", default=",".join(one.name for one in VARIANTS), help="some of these")
    parser.add_argument("--steps", type=int, help=f"of each variant; default {STEPS}, with --quick {QUICK_STEPS}")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which the run under way is stopped")
    parser.add_argument("--quick", action="store_true", help="the tiny policy on arithmetic, for a CPU")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    options = parser.parse_args(arguments)
    if not options.quick and not (options.train and options.test):
        parser.error("--train and --test are needed, or --quick")
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.out = options.out or Path(os.environ.get("OUT") or options.work / "results")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
