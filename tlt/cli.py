"""The `tlt` command: a table of verbs. Parses, then imports; the work lives elsewhere.

`--help` and every mistake in a command or recipe are answered without importing torch. A TltError becomes one line and
its exit code; anything else is a bug and keeps its traceback.
"""

import os
import re
import sys
import time
import warnings
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from tlt import __version__
from tlt.config import RunConfig
from tlt.errors import ConfigError, StateLost, Terminated, TltError, shown
from tlt.model.shapes import MODEL_SHAPES
from tlt.recipe import load_config, nearest_key, take_flags, to_toml
from tlt.shipped import recipe_names, recipe_summary, recipe_text
from tlt.signals import sigterm_raises
from tlt.verb_help import Argument, verb_help


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: what it does, its arguments as (name, help) with options starting with `--`, and who does it.

    `sections` are the knobs that it reads, by prefix. `subjects` are the values of its argument `what`; an argument of
    some of them alone names these in a third place.
    """

    summary: str
    arguments: tuple[tuple[str, str] | tuple[str, str, str], ...]
    run: Callable[[Namespace, list[str]], None]
    sections: tuple[str, ...] = ()
    subjects: Mapping[str, str] = field(default_factory=dict)
    sections_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of subjects that read others


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    # Before torch comes in: idle CPU threads sleep instead of spinning, which on a busy machine is tenfold faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    format_of_python, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        with sigterm_raises():
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except TltError as error:
        print(f"tlt: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tlt: interrupted", file=sys.stderr)
        return 130
    except Terminated as ended:
        print(f"tlt: terminated: {ended}", file=sys.stderr)
        return 143
    finally:
        warnings.formatwarning = format_of_python


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"tlt: warning: {message}\n"


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return ConfigError.exit_code
    flags, rest = take_flags(arguments)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        _refuse(unknown)
    VERBS[options.verb].run(options, flags)
    return 0


def _refuse(unknown: Sequence[str]) -> NoReturn:
    name = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
    near = nearest_key(name.strip("-")) if name.startswith("--") else None
    raise ConfigError(f"unexpected argument {name}" + (f"; did you mean --{near}?" if near else ""))


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="tlt",
        description="Reinforcement learning for reasoning language models that does not wait for the long tail.",
        epilog="Every knob is also a flag: --section.key VALUE. `tlt config` lists them all.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tlt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, verb in VERBS.items():
        child = verbs.add_parser(name, help=verb.summary, add_help=False, allow_abbrev=False)
        child.set_defaults(verb=name)
        child.add_argument("-h", "--help", action=_Help, nargs=0, const=name, help="show this help")
        for argument in _arguments(name):
            if not argument.takes_value:
                child.add_argument(argument.name, action="store_true")
            else:
                metavar = argument.name.strip("-").upper()
                child.add_argument(argument.name, metavar=metavar, **({"nargs": "?"} if argument.optional else {}))  # type: ignore[arg-type]
    return parser


class _Help(Action):
    """Prints what a verb can do; of a subject alone, if it is named before."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, *_: Any) -> None:
        name, subject = str(self.const), str(getattr(namespace, "what", ""))
        verb = VERBS[name]
        if subject in verb.subjects:
            chosen = [each for each in _arguments(name) if each.name != "what"]
            chosen = [each for each in chosen if not each.subjects or subject in each.subjects]
            sections = verb.sections_of.get(subject, verb.sections)
            told = verb_help(f"tlt {name} {subject}", verb.subjects[subject], chosen, {}, sections)
        else:
            told = verb_help(f"tlt {name}", verb.summary, _arguments(name), verb.subjects, verb.sections)
        print(told, end="")
        parser.exit()


def _arguments(verb: str) -> list[Argument]:
    return [
        Argument(
            name,
            meaning,
            takes_value=name not in _SWITCHES,
            optional=name in _OPTIONAL or (verb, name) in _OPTIONAL_OF,
            subjects=tuple(" ".join(subjects).split()),
        )
        for name, meaning, *subjects in VERBS[verb].arguments
    ]


def _config(options: Namespace, flags: list[str]) -> RunConfig:
    """The recipe if one is named, then what the verb's own arguments set, then the flags."""
    own = [("model", "model.path"), ("out", "warmup.save")] if options.verb != "draft" else [("source", "model.path")]
    given = [f"--{key}={getattr(options, name)}" for name, key in own if getattr(options, name, None) is not None]
    if getattr(options, "task", None):
        given += ["--task.name=files", f"--task.path={options.task}"]
    return load_config(getattr(options, "recipe", None), [*given, *flags])


def _generate(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    from tlt.generate import generate

    generate(config, options.prompt, options.raw)


def _rollout(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    from tlt.rollout import rollout

    rollout(config)


def _evaluate(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    from tlt.evaluate import evaluate

    evaluate(config)


def _warmup(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    from tlt.warmup import warmup

    warmup(config, options.data)


def _bench(options: Namespace, flags: list[str]) -> None:
    if options.what == "compare":
        return _bench_compare(options, flags)
    for name in ("new", "tolerance"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{shown(getattr(options, name))} is only for tlt bench compare; leave it out")
    if options.model is None and options.what == "engine" and options.shape in MODEL_SHAPES:
        options.model = "tiny"  # its tokenizer alone is used
    if options.model is None and not (options.what == "train" and options.recipe):
        raise ConfigError(f"tlt bench {options.what} needs a MODEL; see tlt bench --help")
    config = _config(options, flags)
    if options.what == "rollout":
        return _bench_rollout(config, options)
    if options.what == "train":
        return _bench_train(config, options)
    if options.what == "fleet":
        return _bench_fleet(config, options)
    from tlt.bench.options import read_options

    wanted = read_options(options)
    from tlt.bench.engine import bench_engine

    return bench_engine(config, wanted)


def _bench_compare(options: Namespace, flags: list[str]) -> None:
    if flags or options.new is None:
        raise ConfigError("tlt bench compare needs two records and takes no settings; expected OLD NEW [--tolerance 3]")
    from tlt.bench.compare import bench_compare, read_tolerance

    for line in bench_compare(Path(options.model), Path(options.new), read_tolerance(options.tolerance)):
        print(line)


def _bench_rollout(config: RunConfig, options: Namespace) -> None:
    from tlt.bench.options import read_rollout_options

    wanted = read_rollout_options(options)
    from tlt.bench.rollout import bench_rollout

    bench_rollout(config, wanted)


def _bench_train(config: RunConfig, options: Namespace) -> None:
    from tlt.bench.options import read_train_options

    wanted = read_train_options(options)
    if options.recipe:
        from tlt.bench.turns import bench_turns

        return bench_turns(config, wanted)
    from tlt.bench.train import bench_train

    return bench_train(config, wanted)


def _bench_fleet(config: RunConfig, options: Namespace) -> None:
    from tlt.bench.options import read_fleet_options

    wanted = read_fleet_options(options)
    from tlt.library import ray_fleet

    workers = ray_fleet(config)
    from tlt.bench.fleet import bench_fleet

    bench_fleet(config, wanted, workers)


def _draft(options: Namespace, flags: list[str]) -> None:
    needed = {"train": ("prompts",), "measure": ("prompts",), "export": ("target",)}
    if options.what not in needed:
        raise ConfigError(f"tlt draft knows {', '.join(needed)}, not {options.what!r}")
    for name in needed[options.what]:
        if getattr(options, name) is None:
            shown = name.upper() if name in _OPTIONAL else f"--{name}"
            raise ConfigError(f"tlt draft {options.what} needs {shown}; see tlt draft --help")
    config = _config(options, flags)
    began_s = time.perf_counter()  # before torch comes in, which takes seconds
    from tlt.draft import draft_export, draft_measure, draft_train

    if options.what == "train":
        draft_train(config, options.prompts, options.out or f"{Path(options.source).name}-drafter", began_s=began_s)
    elif options.what == "measure":
        draft_measure(config, options.source, options.prompts, options.policy)
    else:
        draft_export(options.source, options.target, options.format or "flat", options.policy)


def _train(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    from tlt.library import train

    resume, resume_from = options.resume, options.resume_from or ""
    for restarts_left in reversed(range(config.cluster.restarts + 1)):
        try:
            train(config, resume=resume, resume_from=resume_from)
            return
        except StateLost as error:
            if not restarts_left:
                raise
            print(f"tlt: {error}: going on from the last checkpoint", file=sys.stderr)
            resume, resume_from = True, ""


def _serve(options: Namespace, flags: list[str]) -> None:
    drafters = {"none": ["none"], "suffix": ["suffix"], None: ["suffix"], "new": ["both", "new"]}
    drafter, *path = drafters.get(options.drafter) or ["both", options.drafter]
    usual = [f"--spec.drafter={drafter}", *(f"--spec.path={each}" for each in path), "--engine.admission=fifo"]
    kept = [flag for flag in usual if not any(given.startswith(flag.partition("=")[0]) for given in flags)]
    config = _config(options, [*kept, *flags])
    from tlt.serve.options import read_options

    names = ("host", "port", "name", "queue", "logprobs")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    chosen = read_options(given, options.api_key or os.environ.get("TLT_API_KEY", ""))
    from tlt.serve.server import serve

    serve(config, chosen)


def _report(options: Namespace, flags: list[str]) -> None:
    if flags:
        raise ConfigError(f"tlt report takes no settings, found {flags[0].partition('=')[0]}; it tells a run as it was")
    from tlt.watch.report import report

    print(report(options.run))


def _watch(options: Namespace, flags: list[str]) -> None:
    if flags:
        raise ConfigError(f"tlt watch takes no settings, found {flags[0].partition('=')[0]}; it shows runs as they are")
    from tlt.watch.command import watch_command

    watch_command(options.runs, options.host, options.port, options.export, lambda line: print(line, flush=True))


def _simulate(options: Namespace, flags: list[str]) -> None:
    named = [] if options.subject.endswith(".json") else [f"--model.path={options.subject}"]
    config = load_config(options.recipe, [*named, *flags])
    if options.lengths is None:
        raise ConfigError("tlt simulate needs --lengths; see tlt simulate --help")
    if options.save and not named:
        raise ConfigError(f"--save keeps what is measured, but {options.subject} was measured before; leave it out")
    counts = {name: _counts(f"--{name}", getattr(options, name)) for name in ("workers", "rollouts")}
    if len(counts["rollouts"]) > 1:
        raise ConfigError(f"--rollouts is {options.rollouts!r}; expected one whole number ≥ 1")
    from tlt.simulate import SimulateOptions, simulate

    given: dict[str, Any] = {"workers": counts["workers"], "rollouts": counts["rollouts"] and counts["rollouts"][0]}
    files = {name: Path(value) for name in ("save", "json") if (value := getattr(options, name))}
    chosen = {name: value for name, value in given.items() if value} | files
    simulate(config, SimulateOptions(options.subject, options.lengths, **chosen))


def _counts(name: str, value: str | None) -> tuple[int, ...]:
    parts = value.split(",") if value else []
    if not all(part.strip().isdecimal() and len(part) <= 9 and int(part) for part in parts):
        raise ConfigError(f"{name} is {shown(value)}; expected whole numbers ≥ 1, as in 1,2,8")
    return tuple(map(int, parts))


def _tune_kernels(options: Namespace, flags: list[str]) -> None:
    if flags:
        raise ConfigError(f"tlt tune-kernels takes no settings, found {flags[0].partition('=')[0]}; leave it out")
    from tlt.tune_kernels import TuneOptions, read_budget, read_rows, tune_kernels

    tune_kernels(TuneOptions(options.model, read_budget(options.budget), read_rows(options.rows)))


def _plan(options: Namespace, flags: list[str]) -> None:
    config = _config(options, flags)
    gpu = options.gpu or "0"
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", gpu):
        raise ConfigError(f"--gpu is {shown(gpu)}; expected the memory of one GPU in GiB, as in 80")
    from tlt.plan import plan

    lines, refused = plan(config, float(gpu))
    print("\n".join(lines))
    if refused:
        raise ConfigError(refused)


def _show_config(options: Namespace, flags: list[str]) -> None:
    print(to_toml(_config(options, flags), documented=True), end="")


def _init(options: Namespace, flags: list[str]) -> None:
    if flags:
        raise ConfigError(f"tlt init takes no settings, found {flags[0].partition('=')[0]}; give them to the verb")
    if options.name:
        print(recipe_text(options.name), end="")
        return
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        print(f"{name:<{width}}  {recipe_summary(name)}")


_RECIPE = ("recipe", "a TOML file of knobs, or the name of a recipe of tlt's own (`tlt init` lists them)")
_MODEL = (
    "model",
    'a Hugging Face model directory, a name in the local Hugging Face cache, or "tiny" for the one shipped with tlt',
)
_SWITCHES = {"--raw", "--resume", "--quick", "--full", "--peers", "--no-peers", "--snapshot"}  # options without a value
_OPTIONAL = {"target", "new", "name"}  # positions that may stay empty
_OPTIONAL_OF = {("bench", "model"), ("watch", "runs")}  # the same, of one verb
_OPTIONAL_RECIPE = ("--recipe", "a TOML file of knobs to start from, or the name of a recipe of tlt's own")

_ENGINE = ("model", "sampling", "engine", "spec", "draft.window", "draft.vocab", "draft.mlp")  # what an engine reads
_RUN = ("run", "task", *_ENGINE, "watch")

VERBS: dict[str, Verb] = {
    "generate": Verb(
        "answer one prompt",
        (_MODEL, ("prompt", "what to ask"), ("--raw", "no chat template: continue the text"), _OPTIONAL_RECIPE),
        _generate,
        ("run.seed", *_ENGINE),
    ),
    "rollout": Verb("answer a task's prompts and judge the answers", (_RECIPE,), _rollout, _RUN),
    "warmup": Verb(
        "train a model on prompts and answers",
        (
            _MODEL,
            ("data", "a file of prompts and answers, in a format that task.path has, or the name of a task"),
            ("--out", "where to save the model"),
            _OPTIONAL_RECIPE,
        ),
        _warmup,
        ("run", "model", "task", "warmup", "watch"),
    ),
    "draft": Verb(
        "train a drafter for a model, measure one, or write one in another engine's format",
        (
            ("what", "`train`, `measure` or `export`"),
            (
                "source",
                "train: a model directory, a name in the Hugging Face cache or `tiny`; else a drafter directory",
            ),
            ("target", "where to write", "export"),
            ("--prompts", "a file with a prompt or question column, or the name of a task", "train measure"),
            ("--out", "where to save the drafter; unless told, MODEL-drafter in this directory", "train"),
            ("--format", "flat (vLLM and SGLang, the default) or speculators (`vllm serve DIR`)", "export"),
            ("--policy", "the drafter's policy, where it has moved", "measure export"),
            _OPTIONAL_RECIPE,
        ),
        _draft,
        ("run.seed", "model", "task", "sampling", "engine", "draft"),
        {
            "train": "train a drafter for a model on the model's own answers",
            "measure": "measure a drafter on answers that it did not learn from",
            "export": "write a drafter in another engine's format",
        },
        {"export": ()},
    ),
    "bench": Verb(
        "measure the rollout engine: against the machine's limit and transformers, or with and without speculation",
        (
            ("what", "`engine`, `rollout`, `train`, `fleet` or `compare`"),
            ("model", "a model directory, or `tiny`; compare: the older record; train: may be the recipe's"),
            ("new", "the newer record", "compare"),
            ("--tolerance", "percent of change that is not shown; 3 by default", "compare"),
            ("--json", "write the results to this file", "engine rollout train fleet"),
            (
                "--prompts",
                "a file with a question or prompt column; without one, prompts are made up",
                "engine rollout",
            ),
            ("--raw", "no chat template: plain prompts", "engine rollout"),
            (
                "--shape",
                "widen the policy to this shape first: 1.5B or 7B; engine: or, with MODEL left out, random weights in "
                f"the shape of {', '.join(MODEL_SHAPES)}",
                "engine rollout train",
            ),
            ("--sections", "some of floor,start,step,context,natural,identity,logprobs,features,sync,peers", "engine"),
            ("--batches", "batch sizes of the step section, as in 1,8,64", "engine"),
            ("--cap", "tokens of a natural answer, at most", "engine rollout train fleet"),
            ("--groups", "prompts", "rollout train fleet"),
            ("--group-size", "answers to each prompt", "rollout train fleet"),
            ("--steps", "steps of reinforcement learning", "train fleet"),
            ("--seeds", "seeds that take these steps, one after the other", "fleet"),
            ("--task", "a file of prompts, as task.path", "train"),
            ("--variants", "some of plain,adaptive,frozen,suffix", "train"),
            ("--snapshot", "with a recipe: time the copy of a first checkpoint, after the last step", "train"),
            ("--repeats", "times every variant is run; fleet: rollouts beside workers that train", "rollout fleet"),
            (
                "--budget",
                "seconds for each peer, and for the context sweep; train: after which no step, or no pair, is begun",
                "engine train",
            ),
            ("--commit", "the commit that is measured, where git cannot tell", "engine rollout train fleet"),
            ("--peer", "set another engine's figures beside ours, from a file as in benchmarks/peers", "engine"),
            ("--peers", "measure transformers too, even if --sections leaves it out", "engine"),
            ("--no-peers", "leave transformers out", "engine"),
            ("--quick", "a size for a CPU (the default there)", "engine rollout train fleet"),
            ("--full", "the size for a GPU (the default there)", "engine rollout train fleet"),
            (
                "--recipe",
                "a TOML file of knobs to start from; train: its steps plainly and as it is, in turns",
                "engine rollout train fleet",
            ),
        ),
        _bench,
        ("run.seed", "task", *_ENGINE, "train", "grpo", "draft", "drafting", "cluster"),
        {
            "engine": "measure the rollout engine against the machine's limit and transformers",
            "rollout": "measure one long-tail rollout with every way to speculate",
            "train": "measure steps of reinforcement learning plainly and with speculation",
            "fleet": "measure the same steps on several workers",
            "compare": "show what moved between two records",
        },
        {"compare": ()},
    ),
    "train": Verb(
        "train a policy with reinforcement learning",
        (
            _RECIPE,
            ("--resume", "go on from the run's newest checkpoint that is whole, or begin where there is none yet"),
            ("--resume-from", "go on from this checkpoint, as in step_20; later ones are removed by the next"),
        ),
        _train,
        (*_RUN, "eval", "draft", "train", "grpo", "drafting", "checkpoint", "cluster"),
    ),
    "plan": Verb(
        "show the GPU memory that a recipe's run needs, by part, and what takes less",
        (_RECIPE, ("--gpu", "memory of one GPU in GiB, as in 80; without it, that of this machine's, if it has one")),
        _plan,
        (*_RUN, "draft", "train", "grpo", "drafting", "cluster"),
    ),
    "init": Verb(
        "print a recipe of tlt's own, to make it yours: tlt init gsm8k > my.toml; without a name, list them",
        (("name", "the recipe's name"),),
        _init,
    ),
    "eval": Verb(
        "answer held-out prompts and judge the answers: the recipe's [eval], for any model",
        (_MODEL, _RECIPE),
        _evaluate,
        ("eval", *_RUN),
    ),
    "tune-kernels": Verb(
        "time tile shapes of a model's linear layers on this GPU, and keep the fastest for later runs",
        (
            (
                "model",
                f"a model directory, a name in the local Hugging Face cache, or one of {', '.join(MODEL_SHAPES)}",
            ),
            ("--budget", "seconds after which no layer is begun (300)"),
            ("--rows", "batch sizes up to which to tune: some of 16,32,64,128,256 (all of them)"),
        ),
        _tune_kernels,
    ),
    "simulate": Verb(
        "foresee a rollout on so many workers, plainly and with TLT, from the lengths of answers",
        (
            (
                "subject",
                "a model to measure on this machine (a directory, or `tiny`), or the .json of one measured before",
            ),
            ("--lengths", "a run's directory, a JSONL file with `prompt` and `tokens`, or median=400,sigma=1,cap=8192"),
            ("--workers", "how many, as in 1,2,4,8 (these are the default)"),
            ("--rollouts", "one after the other, of which the last is told (3)"),
            ("--save", "keep what was measured in this .json file"),
            ("--json", "write the results to this file"),
            _OPTIONAL_RECIPE,
        ),
        _simulate,
        ("run.seed", "task.prompts", "task.group", *_ENGINE, "cluster.workers"),
    ),
    "serve": Verb(
        "serve a model over HTTP: OpenAI's endpoints, and those that trainers use",
        (
            _MODEL,
            ("--host", "where to listen; 127.0.0.1 by default, others need an --api-key"),
            ("--port", "8000 by default; 0 takes any that is free"),
            ("--name", "what the model is called; MODEL by default"),
            ("--api-key", "asked of every caller; the environment's TLT_API_KEY by default"),
            ("--drafter", "`suffix` (the default), `none`, `new` for one that learns while serving, or its directory"),
            ("--queue", "completions that may be under way or waiting; 2048 by default"),
            ("--logprobs", "`raw`, of the policy (the default), or `processed`, with temperature and filters"),
            _OPTIONAL_RECIPE,
        ),
        _serve,
        ("run.seed", *_ENGINE, "drafting"),
    ),
    "report": Verb(
        "make a run's report.html from its events: again, while it runs, or after a crash",
        (("run", "the run's directory, as in runs/quickstart"),),
        _report,
    ),
    "watch": Verb(
        "show runs in a browser, while they go on and afterwards: from the curves down to single tokens",
        (
            ("runs", "the directory of runs, or of one run; `runs` by default"),
            (
                "--host",
                "where to listen; 127.0.0.1 by default. Others can reach any other: the address then has a secret",
            ),
            ("--port", "8080 by default; 0 takes any that is free"),
            ("--export", "write a static site to this directory instead, for any web server"),
        ),
        _watch,
    ),
    "config": Verb(
        "list every knob with its value and meaning, as TOML",
        (_OPTIONAL_RECIPE,),
        _show_config,
        tuple(section.name for section in fields(RunConfig)),
    ),
}
