"""How many optimizer steps of a drafter fit into a time: a few are taken on a copy, and timed.

What always holds: the drafter itself is not touched. Knows nothing of answers, of files or of who is waiting.
"""

import time
from copy import deepcopy
from dataclasses import replace

from torch import Tensor

from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle
from tlt.train.drafter import DrafterBatch, DrafterTrainer

_TIMED_STEPS = 6
_UNROLLED_FROM_THE_START, _NEVER_UNROLLED = 0, 1 << 30


def steps_within(
    seconds: float, drafter: Eagle, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, batch: DrafterBatch
) -> int:
    """As many of the settings' steps as such batches allow for in so many seconds; at least one."""
    single_s, unrolled_s = (
        _step_s(DrafterTrainer(deepcopy(drafter), head_VD, embed_VD, replace(settings, single_steps=single)), batch)
        for single in (_NEVER_UNROLLED, _UNROLLED_FROM_THE_START)
    )
    return affordable(seconds, settings, single_s, unrolled_s)


def affordable(seconds: float, settings: DraftSettings, single_s: float, unrolled_s: float) -> int:
    single = min(settings.single_steps, int(seconds / single_s))
    unrolled = int(max(0.0, seconds - settings.single_steps * single_s) / unrolled_s)
    return max(1, min(settings.steps, single + unrolled))


def _step_s(trial: DrafterTrainer, batch: DrafterBatch) -> float:
    """The first step compiles kernels and is not counted."""
    trial.micro_step(batch)
    started = time.perf_counter()
    for _ in trial.micro_steps([batch] * _TIMED_STEPS):
        pass
    return (time.perf_counter() - started) / _TIMED_STEPS
