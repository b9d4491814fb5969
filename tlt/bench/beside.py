"""What the others' training costs a worker that writes: ticks beside them against ticks just before and after.

A machine's own moods last seconds and are larger than what is looked for, so the others train in turns of a fraction of
a second, by the clock that all processes of a machine share, and every turn is compared with its neighbours in which
nobody trained. What always holds: a tick is compared with the same tick of other rollouts, for they differ among each
other; a figure comes with its error. Knows no cluster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from statistics import fmean, median, stdev

_LEAST_TICKS = 4  # of a turn, for its median to say anything

Shift = tuple[float, float]  # when it began and ended


@dataclass(frozen=True, slots=True)
class Ticks:
    """Every tick of one rollout."""

    began_s: tuple[float, ...]  # by the machine's clock
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  # that its thread had a processor


@dataclass(frozen=True, slots=True)
class Rollout:
    """The same answers every time, in the same ticks."""

    ticks: Ticks
    active: tuple[tuple[Shift, ...], ...]  # when each of the others was at it


@dataclass(frozen=True, slots=True)
class Beside:
    training: tuple[Rollout, ...]  # the others training the drafter in turns
    counting: tuple[Rollout, ...]  # the others counting in turns: busy cores, and nothing else
    micro_steps: int  # taken in all


@dataclass(frozen=True, slots=True)
class Busy:
    """What the others' training costs a worker that writes. Errors are standard errors of the mean over the turns."""

    tick_ms: float  # the mean, nobody else at work
    slowdown: float  # share, in the time of a clock
    error: float
    cpu_slowdown: float  # in processor time
    cpu_error: float
    counting: float  # the same beside workers that only count: what busy cores cost each other anyway
    counting_error: float
    turns: int  # of training that were compared
    ticks: int  # in a rollout
    micro_steps: int


def at_it(now_s: float, turn_s: float) -> bool:
    """Whose turn it is: every other one is for work."""
    return int(now_s / turn_s) % 2 == 0


def busy(found: Beside) -> Busy:
    wall, cpu = (_slowdowns(found.training, seconds) for seconds in (_wall, _cpu))
    counting = _slowdowns(found.counting, _wall)
    alone = [
        tick
        for rollout in found.training
        for tick, active in zip(rollout.ticks.wall_s, _labels(rollout), strict=True)
        if active is False
    ]
    return Busy(
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


def _slowdowns(rollouts: Sequence[Rollout], seconds: Callable[[Ticks], Sequence[float]]) -> list[float]:
    """Of every turn in which the others worked, against the turns beside it in which they did not."""
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
    """Of each tick, what it takes while nobody else works, in the middle of the rollouts that show it."""
    told: dict[int, list[float]] = {}
    for times, mine in zip(runs, labels, strict=True):
        for tick, (took, active) in enumerate(zip(times, mine, strict=True)):
            if active is False:
                told.setdefault(tick, []).append(took)
    return {tick: max(median(times), 1e-9) for tick, times in told.items()}


def _turns(
    times: Sequence[float], labels: Sequence[bool | None], baseline: Mapping[int, float]
) -> Iterator[tuple[bool, float]]:
    """Whether the others worked, and how much slower than usual the ticks were: their median. Between two turns are
    ticks that belong to neither."""
    told = ((labels[tick], times[tick] / baseline[tick]) for tick in range(len(times)) if tick in baseline)
    for active, ticks in groupby((pair for pair in told if pair[0] is not None), key=lambda pair: pair[0]):
        paces = [pace for _, pace in ticks]
        if len(paces) >= _LEAST_TICKS:
            yield bool(active), median(paces)


def _labels(rollout: Rollout) -> list[bool | None]:
    """True: all of the tick, and of the others, at work; False: none of them at any time; None: neither."""
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
