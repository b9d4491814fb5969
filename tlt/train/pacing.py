"""How many optimizer steps of a drafter fit before a moment: a few are taken on a copy, and timed.

What always holds: the drafter itself is not touched. Knows nothing of answers, of files or of who is waiting.
"""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice

from torch import Tensor

from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle
from tlt.train.drafter import DrafterBatch, DrafterTrainer

_FIRST_STEPS, _TIMED_STEPS = 4, 8  # kernels are compiled in the first ones
_UNROLLED_FROM_THE_START, _NEVER_UNROLLED = 0, 1 << 30

Batches = Callable[[], Iterator[DrafterBatch]]  # as training will get them: making them ready takes time too


def steps_until(
    deadline_s: float, drafter: Eagle, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, batches: Batches
) -> int:
    """As many of the settings' steps as such batches allow for until then, by `perf_counter`; at least one."""
    single_s, unrolled_s = (
        _step_s(DrafterTrainer(deepcopy(drafter), head_VD, embed_VD, replace(settings, single_steps=single)), batches())
        for single in (_NEVER_UNROLLED, _UNROLLED_FROM_THE_START)
    )
    return affordable(deadline_s - time.perf_counter(), settings, single_s, unrolled_s)


def affordable(seconds: float, settings: DraftSettings, single_s: float, unrolled_s: float) -> int:
    """The first steps unroll nothing and take `single_s` each, the others `unrolled_s`."""
    single = min(settings.single_steps, int(max(0.0, seconds) / single_s))
    unrolled = int(max(0.0, seconds - settings.single_steps * single_s) / unrolled_s)
    return max(1, min(settings.steps, single + unrolled))


def _step_s(trial: DrafterTrainer, batches: Iterator[DrafterBatch]) -> float:
    """Seconds of a step, from batch to batch; of the first ones only where there are no others."""
    started = time.perf_counter()
    ends = [time.perf_counter() for _ in trial.micro_steps(islice(batches, _FIRST_STEPS + _TIMED_STEPS))]
    if len(ends) <= _FIRST_STEPS:
        return (ends[-1] - started) / len(ends)
    return (ends[-1] - ends[_FIRST_STEPS - 1]) / (len(ends) - _FIRST_STEPS)
