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


_AGAIN = 2  # steps at the end of known columns that are read again: events of a step may come after it


def columns_of(run: Run, known: Columns | None = None) -> Columns:
    """Of the steps that are over. `known`: columns of the same run when it had fewer events; their steps are not read
    again, but for the last ones."""
    steps = steps_of(run)
    old = max(0, len(known.steps) - _AGAIN) if known else 0
    place = {step.step: index for index, step in enumerate(steps)}
    nothing: list[float | None] = [None] * (len(steps) - old)
    values = {name: each[:old] + nothing for name, each in known.values.items()} if known else {}
    empty: list[float | None] = [None] * len(steps)
    last_old = steps[old - 1].step if old else -1
    plain_s = tlt_s = 0.0  # of the rollouts replayed so far
    for record in counted(run.events):
        event = record.event
        if isinstance(event, ReplayCompared):
            plain_s, tlt_s = plain_s + event.plain_s, tlt_s + event.tlt_s
            if event.step in place:
                values.setdefault(REPLAY_RATIO, empty[:])[place[event.step]] = plain_s / max(1e-9, tlt_s)
        if getattr(event, "step", 0) <= last_old or not (metrics := metrics_of(event)) or metrics.step not in place:
            continue
        index = place[metrics.step]
        for name, value in metrics.values.items():
            if name not in values:
                values[name] = empty[:]
            values[name][index] = value
        if isinstance(event, StepFinished) and not drafted(event):
            values[ACCEPT_LENGTH][index] = None  # of no drafts there is none
    values[WHOLE_RATIO] = empty[:]
    for number, ratio in whole_steps(record.event for record in counted(run.events)).curve:
        if number in place:
            values[WHOLE_RATIO][place[number]] = ratio
    values["time/other_s"] = [phase_seconds(step)["other"] for step in steps]
    values[ROLLOUT_SUM] = list(accumulate(step.rollout_s for step in steps))
    values[PLAIN_SUM] = list(accumulate(step.rollout_s + step.saved_s for step in steps))
    return Columns([step.step for step in steps], values)
