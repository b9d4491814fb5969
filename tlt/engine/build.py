"""An engine as a configuration asks for it: the policy, and who speculates."""

from tlt.config import RunConfig, SpecSettings
from tlt.engine.engine import Engine
from tlt.engine.graphs import bucket, buckets
from tlt.policy import Policy
from tlt.spec.bandit import Bandit
from tlt.spec.costs import CostTable, TickCosts
from tlt.spec.drafter import SuffixDrafting
from tlt.spec.speculation import Speculating, Speculation
from tlt.spec.tuner import Tuner, TunerPolicy, candidates

_LAST_BUCKET = 32  # requests above which the paper decodes plainly; each larger verify size serves half as many


def build_engine(policy: Policy, config: RunConfig) -> Engine:
    speculation = speculation_of(config.spec, config.engine.rows)
    return Engine(policy.model, policy.tokenizer, config.engine, speculation=speculation)


def speculation_of(spec: SpecSettings, rows: int) -> Speculation | None:
    """None where nobody is to guess."""
    if spec.drafter == "none":
        return None
    return Speculating([SuffixDrafting(spec.memory_tokens)], _chooser(spec, rows))


def _chooser(spec: SpecSettings, rows: int) -> TunerPolicy:
    shapes = candidates([(spec.drafter,)], spec.depths, spec.widths, spec.verifies)
    if spec.chooser == "beg-mab":
        groups = len({shape.verify for shape in shapes if not shape.off})
        return Bandit(shapes, [_LAST_BUCKET >> later for later in reversed(range(groups))])
    sizes = buckets(rows * max(spec.verifies))
    return Tuner(shapes, TickCosts(CostTable(), lambda tokens: bucket(tokens, sizes) or sizes[-1]))
