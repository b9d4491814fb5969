"""How much the training of other workers slows the ticks of one worker: turns of work, and adjacent turns compared.

The speed of a machine drifts within seconds by more than the measured effect. So the other workers train in turns
of a fraction of a second, on the clock that all processes of a machine share, and each turn is compared with the
adjacent turns without training. A tick is compared with the same tick of other rollouts, because ticks of one rollout
differ. Every figure has a standard error.

What always holds: `Turns.take` ends as soon as the work checks `over` after `end`, also if `end` was called before.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from statistics import fmean, median, stdev
from threading import Event

_LEAST_TICKS = 4  # in a turn; its median is not used below that

Interval = tuple[float, float]  # start and end, seconds
Over = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Ticks:
    """Every tick of one rollout."""

    began_s: tuple[float, ...]  # by the machine's clock
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  # processor time of the thread


@dataclass(frozen=True, slots=True)
class TimedRollout:
    """One repetition of the same requests, which takes the same ticks every time."""

    ticks: Ticks
    active: tuple[tuple[Interval, ...], ...]  # per other worker: when it worked


@dataclass(frozen=True, slots=True)
class InterferenceRuns:
    training: tuple[TimedRollout, ...]  # the other workers train the drafter in turns
    counting: tuple[TimedRollout, ...]  # the other workers count in turns: busy cores without memory traffic
    micro_steps: int  # of all workers


@dataclass(frozen=True, slots=True)
class Interference:
    """How much training on other workers slows a worker that decodes. Errors are standard errors over the turns."""

    tick_ms: float  # mean while no other worker works
    slowdown: float  # relative, wall time
    error: float
    cpu_slowdown: float  # relative, processor time
    cpu_error: float
    counting: float  # relative wall time beside workers that only count
    counting_error: float
    turns: int  # of training that were compared
    ticks: int  # in a rollout
    micro_steps: int


def is_work_turn(now_s: float, turn_s: float) -> bool:
    """Every other turn is for work."""
    return int(now_s / turn_s) % 2 == 0


class Turns:
    def __init__(self) -> None:
        self._ended = Event()

    def take(self, turn_s: float, work: Callable[[Over], None]) -> list[Interval]:
        """Works in every working turn until `end` is called. Returns the intervals of work."""
        shifts: list[Interval] = []

        def over() -> bool:
            return self._ended.is_set() or not is_work_turn(time.perf_counter(), turn_s)

        try:
            while not self._ended.is_set():
                began = time.perf_counter()
                if is_work_turn(began, turn_s):
                    work(over)
                    shifts.append((began, time.perf_counter()))
                self._ended.wait(turn_s / 50)
        finally:
            self._ended.clear()
        return shifts

    def end(self) -> None:
        self._ended.set()


def count(over: Over) -> None:
    """Keeps a core busy without memory traffic."""
    while not over():
        pass


def interference(found: InterferenceRuns) -> Interference:
    wall, cpu = (_slowdowns(found.training, seconds) for seconds in (_wall, _cpu))
    counting = _slowdowns(found.counting, _wall)
    alone = [
        tick
        for rollout in found.training
        for tick, active in zip(rollout.ticks.wall_s, _labels(rollout), strict=True)
        if active is False
    ]
    return Interference(
        tick_ms=1e3 * fmean(alone) if alone else 0.0,
        slowdown=_mean(wall),
        error=_error(wall),
        cpu_slowdown=_mean(cpu),
        cpu_error=_error(cpu),
        counting=_mean(counting),
        counting_error=_error(counting),
        turns=len(wall),
        ticks=min((len(rollout.ticks.wall_s) for rollout in found.training), default=0),
        micro_steps=found.micro_steps,
    )


def _wall(ticks: Ticks) -> Sequence[float]:
    return ticks.wall_s


def _cpu(ticks: Ticks) -> Sequence[float]:
    return ticks.cpu_s


def _slowdowns(rollouts: Sequence[TimedRollout], seconds: Callable[[Ticks], Sequence[float]]) -> list[float]:
    """Per working turn, the slowdown against the adjacent idle turns."""
    labels = [_labels(rollout) for rollout in rollouts]
    baseline = _baseline([seconds(rollout.ticks) for rollout in rollouts], labels)
    found = []
    for rollout, mine in zip(rollouts, labels, strict=True):
        turns = list(_turns(seconds(rollout.ticks), mine, baseline))
        for number, (active, pace) in enumerate(turns):
            if active:
                beside = turns[max(0, number - 1) : number] + turns[number + 1 : number + 2]
                if alone := [other for idle, other in beside if not idle]:
                    found.append(pace / fmean(alone) - 1.0)
    return found


def _baseline(runs: Sequence[Sequence[float]], labels: Sequence[Sequence[bool | None]]) -> dict[int, float]:
    """Tick number → its median seconds over the rollouts in which no other worker worked."""
    told: dict[int, list[float]] = {}
    for times, mine in zip(runs, labels, strict=True):
        for tick, (took, active) in enumerate(zip(times, mine, strict=True)):
            if active is False:
                told.setdefault(tick, []).append(took)
    return {tick: max(median(times), 1e-9) for tick, times in told.items()}


def _turns(
    times: Sequence[float], labels: Sequence[bool | None], baseline: Mapping[int, float]
) -> Iterator[tuple[bool, float]]:
    """Per turn: whether the others worked, and the median of its ticks over the baseline."""
    told = ((labels[tick], times[tick] / baseline[tick]) for tick in range(len(times)) if tick in baseline)
    for active, ticks in groupby((pair for pair in told if pair[0] is not None), key=lambda pair: pair[0]):
        paces = [pace for _, pace in ticks]
        if len(paces) >= _LEAST_TICKS:
            yield bool(active), median(paces)


def _labels(rollout: TimedRollout) -> list[bool | None]:
    """Per tick: True if all others worked throughout, False if none worked at any time, None otherwise."""
    found: list[bool | None] = []
    for began, took in zip(rollout.ticks.began_s, rollout.ticks.wall_s, strict=True):
        ended = began + took
        inside = [any(first <= began and ended <= last for first, last in spans) for spans in rollout.active]
        touched = any(first < ended and began < last for spans in rollout.active for first, last in spans)
        found.append(True if inside and all(inside) else None if touched else False)
    return found


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
