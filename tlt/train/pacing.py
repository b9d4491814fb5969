"""How many optimizer steps of a drafter fit before a moment: a few are taken on a copy, and timed.

What always holds: the drafter itself is not touched; whatever was planned, batches end soon after the moment. Knows
nothing of answers, of files or of who is waiting.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice

from torch import Tensor

from tlt.config import DraftSettings
from tlt.spec.eagle import Eagle
from tlt.train.drafter import TOKENS_AT_ONCE, DrafterBatch, DrafterTrainer

_FIRST_STEPS, _TIMED_STEPS = 4, 8  # at least; kernels are compiled in the first ones
_PLANNED = 0.95  # of the time left: batches differ, and somebody has to save the drafter
_UNROLLED_FROM_THE_START, _NEVER_UNROLLED = 0, 1 << 30

Batches = Callable[[], Iterator[DrafterBatch]]  # as training will get them: making them ready takes time too


def steps_until(
    deadline_s: float, drafter: Eagle, head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings, batches: Batches
) -> int:
    """As many of the settings' steps as such batches allow for until then, by `perf_counter`; at least one."""
    left_s = deadline_s - time.perf_counter()
    if left_s <= 0.0:
        return 1
    planned_s = deadline_s - (1.0 - _PLANNED) * left_s
    together = _together(settings, head_VD)
    single_s, unrolled_s = (
        _step_s(
            DrafterTrainer(deepcopy(drafter), head_VD, embed_VD, replace(settings, single_steps=single)),
            batches(),
            together,
        )
        for single in (_NEVER_UNROLLED, _UNROLLED_FROM_THE_START)
    )
    return affordable(planned_s - time.perf_counter(), settings, single_s, unrolled_s)


def until(deadline_s: float, batches: Iterable[DrafterBatch]) -> Iterator[DrafterBatch]:
    """As many as come in time, one at least."""
    for batch in batches:
        yield batch
        if time.perf_counter() > deadline_s:
            return


def affordable(seconds: float, settings: DraftSettings, single_s: float, unrolled_s: float) -> int:
    """The first steps unroll nothing and take `single_s` each, the others `unrolled_s`."""
    single = min(settings.single_steps, int(max(0.0, seconds) / single_s))
    unrolled = int(max(0.0, seconds - settings.single_steps * single_s) / unrolled_s)
    return max(1, min(settings.steps, single + unrolled))


def _together(settings: DraftSettings, head_VD: Tensor) -> int:
    """Batches whose states may come from one run of the policy, which is then part of one step in so many."""
    return max(1, TOKENS_AT_ONCE // settings.tokens_per_batch) if head_VD.is_cuda else 1


def _step_s(trial: DrafterTrainer, batches: Iterator[DrafterBatch], together: int) -> float:
    """Seconds of a step, from batch to batch, over whole runs of the policy; of the first ones only where there are no
    others."""
    first, timed = (-(-steps // together) * together for steps in (_FIRST_STEPS, _TIMED_STEPS))
    started = time.perf_counter()
    ends = [time.perf_counter() for _ in trial.micro_steps(islice(batches, first + timed))]
    if len(ends) < first + timed:
        return (ends[-1] - started) / len(ends)
    return (ends[-1] - ends[first - 1]) / timed
