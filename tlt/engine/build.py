"""Builds an engine from a configuration: the policy, its drafters and its shape policy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tlt.config import NEW, RunConfig, SpecSettings
from tlt.engine.engine import EngineCore
from tlt.engine.exact import chains_only
from tlt.engine.features import Features
from tlt.engine.graphs import captured_sizes, padding
from tlt.errors import ConfigError
from tlt.policy import Policy
from tlt.spec.bandit import Bandit
from tlt.spec.costs import CostModel, Measured
from tlt.spec.drafter import Drafter, build_drafters, drafter_class
from tlt.spec.record import DraftRecord
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Fixed, ShapePolicy, candidates
from tlt.spec.speculation import Speculating
from tlt.spec.tuner import Tuner

_LAST_BUCKET = 32  # requests; the paper decodes plainly above it. Each larger verify size gets half the range

_NOTHING_LEARNED = ((0.0,),)  # chance of the first guess at depth 1


def build_engine(
    policy: Policy,
    config: RunConfig,
    shape_policy: ShapePolicy | None = None,
    drafters: Sequence[Drafter] = (),
    on_features: Callable[[Features], None] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EngineCore:
    """`shape_policy` and `drafters` replace the configured ones.

    `on_features` receives the hidden states that the drafter on the device reads. `on_phase` receives the name of each
    phase before it starts.
    """
    on_phase("building the engine")
    if not config.spec.drafters and config.spec.ahead == "off":
        engine = EngineCore(policy.model, policy.tokenizer, config.engine)
        engine.compile(filtered=config.sampling.filtered)
        return engine
    drafters = drafters or build_drafters(policy, config)
    on_gpu = policy.model.embed.is_cuda
    shape_policy = shape_policy or shape_policy_of(
        config.spec, config.engine.rows, exact=config.engine.exact, on_gpu=on_gpu
    )
    engine = speculating_engine(policy, config, shape_policy, drafters, on_features)
    on_phase("timing the engine's passes")
    shape_policy.load_costs(engine.measure())
    on_phase("capturing graphs for speculation")
    make_ready(engine, shape_policy, config)
    if config.spec.path == NEW:  # graphs are captured for the trained drafter; trying the untrained one wastes time
        for drafter in drafters:
            if drafter.learned:
                shape_policy.load_prior(drafter.name, _NOTHING_LEARNED)
    return engine


def speculating_engine(
    policy: Policy,
    config: RunConfig,
    shape_policy: ShapePolicy,
    drafters: Sequence[Drafter],
    on_features: Callable[[Features], None] | None = None,
) -> EngineCore:
    """An engine with compiled kernels and captured decode graphs. Costs and other graphs are left to the caller."""
    widest = max(config.spec.verifies)
    speculating = Speculating(
        *(drafters, shape_policy),
        deepest=max(config.spec.depths) if drafters else 0,
        widest=widest,
        most_chunk_tokens=config.engine.rows * widest,  # the memory plan covers this many
    )
    taps = speculating.state_sink.taps
    engine = EngineCore(
        *(policy.model, policy.tokenizer, config.engine),
        taps=taps,
        on_features=on_features if taps else None,
        speculation=speculating,
    )
    engine.compile(filtered=config.sampling.filtered, chunks=config.spec.ahead != "off")
    speculating.compile(shapes_of(config.spec, exact=config.engine.exact))
    return engine


def make_ready(engine: EngineCore, shape_policy: ShapePolicy, config: RunConfig) -> None:
    """Captures all graphs that the shape policy may use, so that no rollout waits for a capture."""
    if engine.report().graphs is None:
        return
    for shape, size in shape_policy.precapture(captured_sizes(config.engine.rows)):
        engine.ready(shape, size, filtered=config.sampling.filtered)


def shapes_of(spec: SpecSettings, *, exact: bool = False) -> tuple[Shape, ...]:
    """Every shape that the configuration allows, off included: for each drafter, and for all drafters in one tree.

    `exact`: chains of one drafter only.
    """
    if exact:
        return tuple(shape for shape in shapes_of(chains_only(spec)) if len(shape.drafters) < 2)
    sets = {(name,) for name in spec.drafters} | ({spec.drafters} if spec.drafters else set())
    shares = spec.shares if spec.shape_policy == "tuner" else ()
    found = candidates(sets, spec.depths, spec.widths, spec.verifies, shares)
    if spec.drafters and all(shape.off for shape in found):
        raise ConfigError(
            f"spec.depths {spec.depths}, widths {spec.widths} and verifies {spec.verifies} allow no tree: a tree of n "
            "nodes needs a depth below n and about depth × width of n or more"
        )
    return found


def shape_policy_of(
    spec: SpecSettings, rows: int, measured: Iterable[Measured] = (), *, exact: bool = False, on_gpu: bool = False
) -> ShapePolicy:
    """A new shape policy. It starts from the hit rates that were recorded when its drafters were trained.

    `measured`: costs of runs, where they are known (`EngineCore.measure`). `exact`: the setting `engine.exact`.
    """
    shape_policy = _shape_policy(spec, rows, exact, on_gpu)
    shape_policy.load_costs(measured)
    for name, record in _priors(spec):
        shape_policy.load_prior(name, record.ranks)
    return shape_policy


def _priors(spec: SpecSettings) -> Iterator[tuple[str, DraftRecord]]:
    for name in spec.drafters:
        record = drafter_class(name).prior(spec)
        if record is not None:
            yield name, record


def record_of(spec: SpecSettings) -> DraftRecord | None:
    """Hit rates recorded when the configured learned drafter was trained; None: none were recorded."""
    return next((record for _, record in _priors(spec)), None)


def _shape_policy(spec: SpecSettings, rows: int, exact: bool, on_gpu: bool) -> ShapePolicy:
    if not on_gpu:  # on a CPU, attention over trees of unequal size costs more than it saves
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
    on_device = [name for name in spec.drafters if drafter_class(name).on_device]
    return Tuner(shapes, CostModel(padding(rows), learned=on_device, context_read_once=on_gpu))
