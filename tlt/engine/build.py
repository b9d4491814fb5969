"""An engine as a configuration asks for it: the policy, and who speculates."""

from collections.abc import Callable, Mapping
from functools import cache

from tlt.config import RunConfig, SpecSettings
from tlt.engine.engine import Engine
from tlt.engine.graphs import bucket, buckets
from tlt.engine.runner import Features
from tlt.policy import Policy
from tlt.spec.bandit import Bandit
from tlt.spec.costs import POLICY, CostTable, TickCosts
from tlt.spec.drafter import Drafter, SuffixDrafting
from tlt.spec.eagle_files import load_drafter
from tlt.spec.learned import LearnedDrafting
from tlt.spec.shape import Shape
from tlt.spec.speculation import Speculating
from tlt.spec.tuner import Tuner, TunerPolicy, candidates

_LAST_BUCKET = 32  # requests above which the paper decodes plainly; each larger verify size serves half as many


def build_engine(policy: Policy, config: RunConfig, chooser: TunerPolicy | None = None) -> Engine:
    """`chooser` picks the shapes instead of the one configured."""
    if config.spec.drafter == "none":
        return Engine(policy.model, policy.tokenizer, config.engine)
    learned = _learned(policy, config) if config.spec.drafter in ("eagle", "both") else None
    suffix = SuffixDrafting(config.spec.memory_tokens) if config.spec.drafter in ("suffix", "both") else None
    drafters: list[Drafter] = [drafter for drafter in (learned, suffix) if drafter is not None]
    return Engine(
        policy.model,
        policy.tokenizer,
        config.engine,
        taps=learned.drafter.config.taps if learned else (),
        on_features=_feeding(learned) if learned else None,
        speculation=Speculating(drafters, chooser or chooser_of(config.spec, config.engine.rows)),
    )


def shapes_of(spec: SpecSettings) -> tuple[Shape, ...]:
    """Every shape the configuration lets a tuner choose, off included."""
    sets: dict[str, list[tuple[str, ...]]] = {
        "none": [],
        "suffix": [("suffix",)],
        "eagle": [("eagle",)],
        "both": [("suffix",), ("eagle",), ("eagle", "suffix")],
    }
    return candidates(sets[spec.drafter], spec.depths, spec.widths, spec.verifies)


def chooser_of(spec: SpecSettings, rows: int, decode_s: Mapping[int, float] | None = None) -> TunerPolicy:
    """`decode_s`: what decoding so many tokens takes, where it was measured (`Engine.warm_up`)."""
    shapes = shapes_of(spec)
    if spec.chooser == "beg-mab":
        groups = len({shape.verify for shape in shapes if not shape.off})
        return Bandit(shapes, [_LAST_BUCKET >> later for later in reversed(range(groups))])
    sizes = buckets(rows * max(spec.verifies))
    table = CostTable()
    for size, seconds in (decode_s or {}).items():
        table.record(POLICY, size, seconds)
    pad = cache(lambda tokens: bucket(tokens, sizes) or sizes[-1])  # asked several times a tick
    return Tuner(shapes, TickCosts(table, pad, learned=("eagle",)))


def _learned(policy: Policy, config: RunConfig) -> LearnedDrafting:
    model = policy.model
    drafter = load_drafter(
        config.spec.path,
        model.config,
        window=config.draft.window,
        head_VD=model.head_weight,
        dtype=model.embed.dtype,
        device=model.embed.device,
    )
    return LearnedDrafting(drafter, model, config.engine.rows)


def _feeding(learned: LearnedDrafting) -> Callable[[Features], None]:
    """The engine's features on their way to the drafter."""

    def feed(features: Features) -> None:
        learned.absorb([stay.progress.request.key for stay in features.stays], features.first, features.taps)

    return feed
