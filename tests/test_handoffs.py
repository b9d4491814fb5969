"""A warm tick can be read in one sitting: it hands over between few modules."""

import sys
from pathlib import Path

import tlt
from tlt.config import ModelSettings
from tlt.policy import open_policy

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

from handoffs import SHAPES, warm_tick

MOST_MODULES, MOST_HANDOFFS = 21, 25


def test_a_tick_with_the_learned_drafter_has_few_hand_offs() -> None:
    found = warm_tick(open_policy(ModelSettings(device="cpu")), SHAPES["learned"])
    assert len(found.modules) <= MOST_MODULES, sorted(found.modules)
    assert len(found.handoffs) <= MOST_HANDOFFS, sorted(found.handoffs)
    assert ("tlt.engine.engine", "tlt.engine.runner") in found.handoffs
    assert ("tlt.spec.speculation", "tlt.spec.tuner") in found.handoffs
    assert "tlt.types" in found.only_read
