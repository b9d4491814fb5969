"""The fleet's benchmark: compares what it says it compares. Here with one worker in the place of many."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tlt.bench.fleet import _idle_share, _idle_used, bench_fleet
from tlt.bench.options import FleetOptions
from tlt.cluster.interference import InterferenceRuns, Ticks, TimedRollout, interference, is_work_turn
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.recipe import load_config
from tlt.watch.workers import FleetRolledOut


class Workers(LocalFleet):
    def slowdown(self, requests: Sequence[Request], repeats: int) -> InterferenceRuns:
        return InterferenceRuns(rollouts(repeats, beside=1.01), rollouts(repeats, beside=1.05), 3)


def rollouts(
    count: int, beside: float, cpu: float = 1.0, mood: float = 0.0, others: int = 2
) -> tuple[TimedRollout, ...]:
    """Ticks of one and of two seconds; the others work every other twenty seconds, and a tick is slower then. The
    machine gets slower all the time, or for a moment."""
    found = []
    for number in range(count):
        now, spans, columns = 1007.0 * number, list[tuple[float, float]](), list[tuple[float, float, float]]()
        for tick in range(90):
            active = is_work_turn(now, 20.0)
            if active and (not spans or spans[-1][1] < now):
                spans.append((now, (now // 20 + 1) * 20))
            baseline = (1.0 + tick % 2) * (1.0 + mood * now / 1000.0) * (9.0 if mood and tick == 33 else 1.0)
            columns.append((now, baseline * (beside if active else 1.0), cpu if active else 1.0))
            now += columns[-1][1]
        began_s, wall_s, cpu_s = zip(*columns, strict=True)
        found.append(TimedRollout(Ticks(began_s, wall_s, cpu_s), (tuple(spans),) * others))
    return tuple(found)


def config(*flags: str) -> RunConfig:
    small = ["--engine.rows=8", "--draft.answers=8", "--draft.held_out=2", "--draft.steps=2", "--spec.drafter=eagle"]
    one_size = ["--spec.depths=[2]", "--spec.widths=[1]", "--spec.verifies=[3]"]
    return load_config(None, [*small, *one_size, "--spec.path=new", *flags])


def test_the_same_steps_are_taken_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    options = FleetOptions(json=file, seeds=2, steps=2, groups=2, group_size=2, cap=16)
    bench_fleet(config("--cluster.workers=2"), options, Workers)
    sections = json.loads(file.read_text())["sections"]
    steps = sections["steps"]["records"]
    ways = ("one worker", "plain", "frozen", "spot", "frozen, one shape", "spot, one shape")
    assert [(one["seed"], one["variant"], one["step"]) for one in steps] == list(product((0, 1), ways, (1, 2)))
    assert {one["identical"] for one in steps} == {1.0}
    assert [one["same_rewards"] for one in sections["totals"]["records"]] == [True] * 12
    drafters = sections["drafters"]["records"]
    assert [(one["seed"], one["step"]) for one in drafters] == list(product((0, 1), (1, 2)))
    # in the first step both draft with the same one, in the same shape: a chooser's moods are kept out
    for one in drafters:
        if one["step"] == 1:
            assert one["frozen"] == one["spot"] > 1.0
    assert drafters[0]["frozen"] != drafters[2]["frozen"]  # another seed, other answers
    (busy,) = sections["busy"]["records"]
    assert (busy["slowdown"], busy["counting"]) == (pytest.approx(0.01), pytest.approx(0.05))
    assert busy["error"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("mood", [0.0, 0.04])
def test_a_turn_is_compared_with_those_beside_it(mood: float) -> None:
    """Ticks differ, the machine gets slower by a third during the measurement and stands still in one tick: the two
    percent are seen all the same, and the error says how well."""
    found = interference(InterferenceRuns(rollouts(8, 1.02, 1.5, mood), rollouts(8, 1.0, 1.0, mood), 7))
    assert found.slowdown == pytest.approx(0.02, abs=0.004)
    assert abs(found.slowdown - 0.02) <= 3 * found.error + 1e-9
    assert found.counting == pytest.approx(0.0, abs=0.004)
    assert found.cpu_slowdown == pytest.approx(0.5)
    assert (found.ticks, found.micro_steps) == (90, 7)
    assert found.turns > 8
    assert bool(found.error) == bool(mood)


def test_ticks_between_two_turns_belong_to_neither() -> None:
    """A tick counts as beside the others only if all of them were at it all the time, as alone if nobody ever was."""
    shifted = []
    for one in rollouts(8, 1.02):
        late = (tuple((began + 1.5, ended + 1.5) for began, ended in one.active[0]), *one.active[1:])
        shifted.append(TimedRollout(one.ticks, late))
    assert interference(InterferenceRuns(tuple(shifted), (), 0)).slowdown == pytest.approx(0.02, abs=1e-9)
    assert interference(InterferenceRuns((), (), 0)).slowdown == 0.0


def test_one_worker_is_no_fleet() -> None:
    with pytest.raises(ConfigError, match="expected several"):
        bench_fleet(config(), FleetOptions(), Workers)


def test_idle_time_and_what_became_of_it() -> None:
    rolled = FleetRolledOut(0, 2, 10.0, 15.0, 1.0, 4.0, 0.25, 0, 0.0, 0.0, 0, 0.1)
    assert _idle_share([rolled]) == 0.25
    assert _idle_used([rolled]) == 0.8
    assert _idle_used([]) is None
