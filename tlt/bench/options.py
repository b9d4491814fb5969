"""Options of the benchmarks: sections, sizes, budgets. Checked before anything is loaded.

A full run is for a GPU; a quick one has the same sections in a size that a CPU finishes within a minute. Without torch.
"""

import difflib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path

from tlt.config import RunConfig
from tlt.errors import ConfigError, shown
from tlt.outputs import check_new

SECTIONS = (  # in running order: `start` needs a fresh process, and sections that share an engine are adjacent
    "floor",
    "start",
    "step",
    "context",
    "natural",
    "identity",
    "logprobs",
    "features",
    "sync",
    "peers",
)


@dataclass(frozen=True, slots=True)
class EngineScale:
    """Sizes of the engine benchmark."""

    batches: tuple[int, ...]  # of the step section
    short: int  # tokens of the short run; a step's time is the difference of the long and the short run per token
    long: int
    repeats: int  # of a run that is compared with another; the fastest counts
    contexts: tuple[int, ...]
    context_batches: tuple[int, ...]
    naturals: tuple[int, ...]  # numbers of prompts whose completions end by themselves
    peer_prompts: int
    cap: int  # most tokens of such a completion
    fidelity_cap: int  # most tokens of a completion that is computed again elsewhere
    features_cap: int  # most tokens of a completion whose hidden states are read
    ticks: int  # that are timed one by one
    sync_batch: int
    read_gib: float  # memory read to measure bandwidth
    budget_s: float  # for each peer, and for the context sweep

    @property
    def rows(self) -> int:
        return max(*self.batches, *self.context_batches, *self.naturals, self.peer_prompts, self.sync_batch)


FULL = EngineScale(
    batches=(1, 8, 32, 64, 128, 256),
    short=32,
    long=288,
    repeats=2,
    contexts=(512, 2048, 8192),
    context_batches=(1, 64),
    naturals=(64, 256),
    peer_prompts=64,
    cap=1024,
    fidelity_cap=256,
    features_cap=512,
    ticks=64,
    sync_batch=64,
    read_gib=8.0,
    budget_s=60.0,
)
QUICK = EngineScale(
    batches=(1, 4, 16),
    short=4,
    long=36,
    repeats=2,
    contexts=(128, 512),
    context_batches=(1, 4),
    naturals=(8, 16),
    peer_prompts=8,
    cap=128,
    fidelity_cap=64,
    features_cap=128,
    ticks=16,
    sync_batch=8,
    read_gib=0.25,
    budget_s=10.0,
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    sections: tuple[str, ...] = SECTIONS
    shape: str | None = None  # widen the policy to this predefined shape
    prompts: Path | None = None  # a file of prompts
    raw: bool = False  # no chat template
    json: Path | None = None  # where the results go
    commit: str | None = None
    peer: Path | None = None  # figures of another engine
    quick: bool | None = None  # None: quick on a CPU
    batches: tuple[int, ...] = ()  # these override the scale's
    cap: int = 0
    budget_s: float = 0.0

    def scale(self, on_gpu: bool) -> EngineScale:
        scale = QUICK if _quick(self.quick, on_gpu) else FULL
        cap = self.cap or scale.cap
        return replace(
            scale,
            batches=self.batches or scale.batches,
            cap=cap,
            fidelity_cap=min(cap, scale.fidelity_cap),
            features_cap=min(cap, scale.features_cap),
            budget_s=self.budget_s or scale.budget_s,
        )


@dataclass(frozen=True, slots=True)
class RolloutScale:
    """Sizes of the rollout benchmark."""

    groups: int  # prompts
    group_size: int  # answers to each
    cap: int  # tokens of an answer, at most
    repeats: int  # rollouts of every variant


FULL_ROLLOUT = RolloutScale(groups=32, group_size=8, cap=1024, repeats=3)
QUICK_ROLLOUT = RolloutScale(groups=4, group_size=4, cap=256, repeats=2)


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    shape: str | None = None  # widen the policy to this predefined shape
    prompts: Path | None = None  # a file of prompts
    raw: bool = False  # no chat template
    json: Path | None = None  # where the results go
    commit: str | None = None
    quick: bool | None = None  # None: quick on a CPU
    groups: int = 0  # these override the scale's
    group_size: int = 0
    cap: int = 0
    repeats: int = 0

    def scale(self, on_gpu: bool) -> RolloutScale:
        given = {name: getattr(self, name) for name in ("groups", "group_size", "cap", "repeats")}
        return replace(QUICK_ROLLOUT if _quick(self.quick, on_gpu) else FULL_ROLLOUT, **_told(given))


@dataclass(frozen=True, slots=True)
class TrainScale:
    """Sizes of the training benchmarks."""

    steps: int
    prompts: int  # per step
    group: int  # answers to each
    cap: int  # tokens of an answer, at most


_TRAIN_ONLY = ("task", "snapshot")
VARIANTS = ("plain", "adaptive", "frozen", "suffix")  # of training, the most important first
FULL_TRAIN = TrainScale(steps=20, prompts=32, group=8, cap=1024)
QUICK_TRAIN = TrainScale(steps=4, prompts=8, group=4, cap=256)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    shape: str | None = None  # widen the policy to this predefined shape
    json: Path | None = None  # where the results go
    commit: str | None = None
    quick: bool | None = None  # None: quick on a CPU
    variants: tuple[str, ...] = VARIANTS
    budget_s: float = 0.0  # after which no step is begun; 0: as long as it takes
    steps: int = 0  # these override the scale's
    groups: int = 0
    group_size: int = 0
    cap: int = 0
    snapshot: bool = False  # with a recipe: time the copy of a first checkpoint, after the last step

    def scale(self, on_gpu: bool) -> TrainScale:
        return _train_scale(self, QUICK_TRAIN, on_gpu)

    def recipe_scale(self, config: RunConfig) -> TrainScale:
        """The scale of a recipe. `--steps` may be lower than `run.steps`, for which the run still plans."""
        if self.steps > config.run.steps:
            raise ConfigError(
                f"--steps is {self.steps}, and the run ends after run.steps, {config.run.steps}: raise it"
            )
        own = TrainScale(config.run.steps, config.task.prompts, config.task.group, config.sampling.max_tokens)
        return replace(own, **_sizes(self))


QUICK_FLEET = TrainScale(steps=8, prompts=32, group=4, cap=256)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    json: Path | None = None  # where the results go
    commit: str | None = None
    quick: bool | None = None  # None: quick on a CPU
    seeds: int = 1  # that take the steps, one after the other
    repeats: int = 20  # rollouts beside workers that train in turns, and as many beside workers that count
    steps: int = 0  # these override the scale's
    groups: int = 0
    group_size: int = 0
    cap: int = 0

    def scale(self, on_gpu: bool) -> TrainScale:
        return _train_scale(self, QUICK_FLEET, on_gpu)


def _train_scale(options: TrainOptions | FleetOptions, quick: TrainScale, on_gpu: bool) -> TrainScale:
    return replace(quick if _quick(options.quick, on_gpu) else FULL_TRAIN, **_sizes(options))


def _sizes(options: TrainOptions | FleetOptions) -> dict[str, int]:
    sizes = {"steps": options.steps, "prompts": options.groups, "group": options.group_size, "cap": options.cap}
    return _told(sizes)


def _quick(asked: bool | None, on_gpu: bool) -> bool:
    """`asked`, or by default quick on a CPU."""
    return not on_gpu if asked is None else asked


def _told(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that were given; 0 means not given."""
    return {name: size for name, size in sizes.items() if size}


def read_options(given: Namespace) -> BenchOptions:
    """From the command line's words."""
    if given.what != "engine":
        raise ConfigError(
            f"nothing called {given.what!r} to measure; expected tlt bench engine, rollout, train or fleet, and a MODEL"
        )
    _refuse(given, ("groups", "group_size", "repeats", "steps", "variants", "seeds", *_TRAIN_ONLY))
    return BenchOptions(
        sections=_sections(given),
        shape=given.shape,
        prompts=_prompts(given),
        raw=given.raw,
        json=_json(given),
        commit=given.commit,
        peer=Path(given.peer) if given.peer else None,
        quick=_either(given.quick, given.full, "--quick", "--full"),
        batches=tuple(_positive("--batches", word) for word in given.batches.split(",")) if given.batches else (),
        cap=_positive("--cap", given.cap) if given.cap else 0,
        budget_s=float(_positive("--budget", given.budget)) if given.budget else 0.0,
    )


def read_rollout_options(given: Namespace) -> RolloutOptions:
    """From the command line's words."""
    _refuse(given, ("sections", "batches", "budget", "peer", "peers", "no_peers", "steps", "variants", "seeds"))
    _refuse(given, _TRAIN_ONLY)
    sizes = {name: getattr(given, name) for name in ("groups", "group_size", "cap", "repeats")}
    return RolloutOptions(
        shape=given.shape,
        prompts=_prompts(given),
        raw=given.raw,
        json=_json(given),
        commit=given.commit,
        quick=_either(given.quick, given.full, "--quick", "--full"),
        **{name: _positive(_flag(name), word) for name, word in sizes.items() if word},
    )


def read_train_options(given: Namespace) -> TrainOptions:
    """From the command line's words."""
    _refuse(given, ("sections", "batches", "peer", "peers", "no_peers", "repeats", "prompts", "raw", "seeds"))
    if given.recipe:
        _refuse(given, ("variants", "quick", "full"), " with a recipe")
    else:
        _refuse(given, ("snapshot",), " without a recipe")
    sizes = {name: getattr(given, name) for name in ("steps", "groups", "group_size", "cap")}
    return TrainOptions(
        shape=given.shape,
        json=_json(given),
        commit=given.commit,
        quick=_either(given.quick, given.full, "--quick", "--full"),
        variants=train_variants(given.variants) if given.variants else VARIANTS,
        budget_s=float(_positive("--budget", given.budget)) if given.budget else 0.0,
        snapshot=given.snapshot,
        **{name: _positive(_flag(name), word) for name, word in sizes.items() if word},
    )


def read_fleet_options(given: Namespace) -> FleetOptions:
    """From the command line's words."""
    others = ("sections", "batches", "peer", "peers", "no_peers", "prompts", "raw", "variants", "budget", "shape")
    _refuse(given, (*others, *_TRAIN_ONLY))
    sizes = {name: getattr(given, name) for name in ("seeds", "steps", "groups", "group_size", "cap", "repeats")}
    return FleetOptions(
        json=_json(given),
        commit=given.commit,
        quick=_either(given.quick, given.full, "--quick", "--full"),
        **{name: _positive(_flag(name), word) for name, word in sizes.items() if word},
    )


def train_variants(word: str) -> tuple[str, ...]:
    """The named variants, in the order in which they are measured."""
    chosen = word.split(",")
    for name in chosen:
        if name not in VARIANTS:
            raise ConfigError(f"--variants: there is no variant {name!r}; expected some of {','.join(VARIANTS)}")
    return tuple(name for name in VARIANTS if name in chosen)


def _refuse(given: Namespace, names: Sequence[str], how: str = "") -> None:
    """Raises ConfigError if one of these options is given: they belong to another benchmark or mode."""
    for name in names:
        if getattr(given, name, None):
            raise ConfigError(f"{_flag(name)} is not for tlt bench {given.what}{how}; leave it out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _json(given: Namespace) -> Path | None:
    if not given.json:
        return None
    check_new(Path(given.json), "--json")
    return Path(given.json)


def _prompts(given: Namespace) -> Path | None:
    if given.prompts and not isfile(given.prompts):
        raise ConfigError(f"--prompts: {given.prompts}: no such file; expected a file with a question or prompt column")
    return Path(given.prompts) if given.prompts else None


def _sections(given: Namespace) -> tuple[str, ...]:
    chosen = given.sections.split(",") if given.sections else list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected some of {','.join(SECTIONS)}"
            raise ConfigError(f"--sections: there is no section {name!r}; {hint}")
    peers = _either(given.peers, given.no_peers, "--peers", "--no-peers")
    wanted = {*chosen, *(["peers"] if peers else [])} - ({"peers"} if peers is False else set())
    return tuple(name for name in SECTIONS if name in wanted)


def _either(yes: bool, no: bool, yes_name: str, no_name: str) -> bool | None:
    if yes and no:
        raise ConfigError(f"{yes_name} and {no_name} exclude each other; give one of them")
    return True if yes else False if no else None


def _positive(name: str, word: str) -> int:
    if not word.strip().isdecimal() or len(word) > 9 or int(word) < 1:
        raise ConfigError(f"{name} is {shown(word)}; expected a positive whole number of at most 9 digits")
    return int(word)
