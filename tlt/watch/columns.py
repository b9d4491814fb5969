"""A run's numbers by step, in columns: every metric that TensorBoard and W&B get, under the same name, and a few sums.

What always holds: all columns have a place for every step, None where a step has no such number.
"""

from dataclasses import dataclass
from itertools import accumulate

from tlt.watch.events import ReplayCompared, Run, StepFinished
from tlt.watch.history import counted, drafted, steps_of
from tlt.watch.metrics import metrics_of
from tlt.watch.summary import phase_seconds
from tlt.watch.verdict import whole_steps

WHOLE_RATIO, REPLAY_RATIO = "sum/whole_step_ratio", "sum/rollout_ratio"
ACCEPT_LENGTH = "rollout/accept_length"
ROLLOUT_SUM, PLAIN_SUM = "sum/rollout_s", "sum/plain_rollout_s"


@dataclass(frozen=True, slots=True)
class Columns:
    steps: list[int]
    values: dict[str, list[float | None]]


def columns_of(run: Run) -> Columns:
    """Of the steps that are over."""
    steps = steps_of(run)
    place = {step.step: index for index, step in enumerate(steps)}
    values: dict[str, list[float | None]] = {}
    plain_s = tlt_s = 0.0  # of the rollouts replayed so far

    def put(name: str, step: int, value: float) -> None:
        if step in place:
            values.setdefault(name, [None] * len(steps))[place[step]] = value

    for record in counted(run.events):
        if isinstance(record.event, ReplayCompared):
            plain_s, tlt_s = plain_s + record.event.plain_s, tlt_s + record.event.tlt_s
            put(REPLAY_RATIO, record.event.step, plain_s / max(1e-9, tlt_s))
        if metrics := metrics_of(record.event):
            for name, value in metrics.values.items():
                put(name, metrics.step, value)
        if isinstance(record.event, StepFinished) and not drafted(record.event):
            values[ACCEPT_LENGTH][place[record.event.step]] = None  # of no drafts there is none
    for number, ratio in whole_steps(record.event for record in counted(run.events)).curve:
        put(WHOLE_RATIO, number, ratio)
    values.setdefault(WHOLE_RATIO, [None] * len(steps))
    values["time/other_s"] = [phase_seconds(step)["other"] for step in steps]
    values[ROLLOUT_SUM] = list(accumulate(step.rollout_s for step in steps))
    values[PLAIN_SUM] = list(accumulate(step.rollout_s + step.saved_s for step in steps))
    return Columns([step.step for step in steps], values)
