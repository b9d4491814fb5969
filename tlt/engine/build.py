"""An engine as a configuration asks for it: the policy, and who speculates."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tlt.config import DraftSettings, RunConfig, SpecSettings
from tlt.engine.engine import EngineCore
from tlt.engine.exact import chains_only
from tlt.engine.features import Features
from tlt.engine.graphs import buckets, padding
from tlt.errors import ConfigError
from tlt.policy import Policy
from tlt.spec.bandit import Bandit
from tlt.spec.choices import candidates
from tlt.spec.costs import CostTable, Measured, TickCosts
from tlt.spec.drafter import Drafter
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import load_drafter
from tlt.spec.fixed import Fixed
from tlt.spec.learned import LearnedDrafting
from tlt.spec.record import DraftRecord, read_record
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import ShapePolicy
from tlt.spec.speculation import Speculating
from tlt.spec.suffix_drafting import SuffixDrafting
from tlt.spec.tuner import Tuner

NEW = "new"  # spec.path of a drafter that starts from nothing
_LAST_BUCKET = 32  # requests above which the paper decodes plainly; each larger verify size serves half as many


def build_engine(
    policy: Policy,
    config: RunConfig,
    shape_policy: ShapePolicy | None = None,
    learned: LearnedDrafting | None = None,
    on_features: Callable[[Features], None] | None = None,
) -> EngineCore:
    """`shape_policy` replaces the configured one; `learned` replaces the drafter at `spec.path`.

    `on_features` is handed the states that the learned drafter reads.
    """
    if config.spec.drafter == "none":
        engine = EngineCore(policy.model, policy.tokenizer, config.engine)
        engine.compile(filtered=config.sampling.filtered)
        return engine
    learned = learned or learned_drafting(policy, config)
    on_gpu = policy.model.embed.is_cuda
    shape_policy = shape_policy or shape_policy_of(
        config.spec, config.engine.rows, exact=config.engine.exact, on_gpu=on_gpu
    )
    engine = speculating_engine(policy, config, shape_policy, learned, on_features)
    shape_policy.load_costs(engine.measure())
    make_ready(engine, shape_policy, config)
    return engine


def speculating_engine(
    policy: Policy,
    config: RunConfig,
    shape_policy: ShapePolicy,
    learned: LearnedDrafting | None,
    on_features: Callable[[Features], None] | None = None,
) -> EngineCore:
    """Put together and compiled, with the graphs that decode; nothing is measured yet, nothing else captured."""
    suffix = SuffixDrafting(config.spec.memory_tokens) if config.spec.drafter in ("suffix", "both") else None
    drafters: list[Drafter] = [drafter for drafter in (learned, suffix) if drafter is not None]
    speculating = Speculating(drafters, shape_policy, deepest=max(config.spec.depths), widest=max(config.spec.verifies))
    taps = speculating.state_sink.taps
    engine = EngineCore(
        *(policy.model, policy.tokenizer, config.engine),
        taps=taps,
        on_features=on_features if taps else None,
        speculation=speculating,
    )
    engine.compile(filtered=config.sampling.filtered)
    speculating.compile(shapes_of(config.spec, exact=config.engine.exact))
    return engine


def make_ready(engine: EngineCore, shape_policy: ShapePolicy, config: RunConfig) -> None:
    """Captures what the chooser may use, at every size that batches are padded to."""
    for shape, size in shape_policy.precapture(buckets(config.engine.rows)):
        engine.ready(shape, size, filtered=config.sampling.filtered)


def shapes_of(spec: SpecSettings, *, exact: bool = False) -> tuple[Shape, ...]:
    """Every shape the configuration lets a tuner choose, off included; exact: chains of one drafter."""
    if exact:
        return tuple(shape for shape in shapes_of(chains_only(spec)) if len(shape.drafters) < 2)
    sets: dict[str, list[tuple[str, ...]]] = {
        "none": [],
        "suffix": [("suffix",)],
        "eagle": [("eagle",)],
        "both": [("suffix",), ("eagle",), ("eagle", "suffix")],
    }
    shares = spec.shares if spec.shape_policy == "tuner" else ()
    found = candidates(sets[spec.drafter], spec.depths, spec.widths, spec.verifies, shares)
    if spec.drafter != "none" and all(shape.off for shape in found):
        raise ConfigError(
            f"spec.depths {spec.depths}, widths {spec.widths} and verifies {spec.verifies} allow no tree: a tree of n "
            "nodes needs a depth below n and about depth × width of n or more"
        )
    return found


def shape_policy_of(
    spec: SpecSettings, rows: int, measured: Iterable[Measured] = (), *, exact: bool = False, on_gpu: bool = False
) -> ShapePolicy:
    """A new one, that has seen no tick and knows what was measured of the drafter at `spec.path` when it was trained.

    `measured`: what runs cost, where that is known (`EngineCore.measure`); `exact`: `engine.exact`.
    """
    shape_policy = _shape_policy(spec, rows, exact, on_gpu)
    shape_policy.load_costs(measured)
    record = record_of(spec)
    if record is not None:
        shape_policy.load_prior(LearnedDrafting.name, record.ranks)
    return shape_policy


def record_of(spec: SpecSettings) -> DraftRecord | None:
    """What was measured of the learned drafter that is configured, when it was trained; None if nothing was."""
    return read_record(spec.path) if spec.drafter in ("eagle", "both") and spec.path != NEW else None


def _shape_policy(spec: SpecSettings, rows: int, exact: bool, on_gpu: bool) -> ShapePolicy:
    if not on_gpu:  # attention over trees of unequal size costs a CPU more than it saves
        spec = replace(spec, shares=())
    shapes = shapes_of(spec, exact=exact)
    if spec.shape_policy == "fixed":
        return Fixed(max(shapes, key=lambda shape: (shape.depth, -shape.verify)))
    if spec.shape_policy == "beg-mab":
        groups = len({shape.verify for shape in shapes if not shape.off})
        if groups > _LAST_BUCKET.bit_length():
            raise ConfigError(
                f'spec.chooser is "beg-mab" and spec.verifies has {groups} sizes that shapes use; it gives each '
                f"a range of batches of its own, and there are {_LAST_BUCKET.bit_length()}: name fewer"
            )
        return Bandit(shapes, [_LAST_BUCKET >> later for later in reversed(range(groups))])
    return Tuner(shapes, TickCosts(CostTable(), padding(rows), learned=("eagle",), context_read_once=on_gpu))


def learned_drafting(policy: Policy, config: RunConfig) -> LearnedDrafting | None:
    """The learned drafter that is configured, at work for this policy; None if none is."""
    if config.spec.drafter not in ("eagle", "both"):
        return None
    drafter, deepest = open_drafter(policy, config), max(config.spec.depths)
    return LearnedDrafting(drafter, policy.model, config.engine.rows, deepest, quantized=config.spec.quantized)


def open_drafter(policy: Policy, config: RunConfig) -> Eagle:
    """The drafter at `spec.path`; "new" is one that has learned nothing yet."""
    if config.spec.path == NEW:
        return _new_drafter(policy, config)
    model = policy.model
    return load_drafter(
        config.spec.path,
        model.config,
        window=config.draft.window,
        head_VD=model.head_weight,
        dtype=model.embed.dtype,
        device=model.embed.device,
    )


def drafter_shape(policy: Policy, draft: DraftSettings) -> EagleConfig:
    """Of a new drafter for this policy, as it is configured."""
    return EagleConfig.of_policy(policy.model.config, window=draft.window, draft_vocab=draft.vocab, mlp=draft.mlp)


def _new_drafter(policy: Policy, config: RunConfig) -> Eagle:
    model, shape = policy.model, drafter_shape(policy, config.draft)
    drafter = Eagle(shape, dtype=model.embed.dtype, device=model.embed.device)
    # any tokens will do: which are frequent is known, and named anew, when there are answers to learn from
    drafter.init_weights(config.run.seed, torch.arange(shape.draft_vocab) if shape.reduced else None)
    return drafter
