"""The fleet's benchmark: compares what it says it compares. Here with one worker in the place of many."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tlt.bench.fleet import Beside, Ticks, _busy, _idle_share, _idle_used, bench_fleet
from tlt.bench.options import FleetOptions
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.recipe import load_config
from tlt.watch.workers import FleetRolledOut


class Workers(LocalFleet):
    def slowdown(self, requests: Sequence[Request], repeats: int) -> Beside:
        alone = [Ticks((1.0, 3.0), (1.0, 1.0))] * repeats
        beside, counting = ((Ticks((1 + x, 3 + x), (1.0, 1.0)),) * repeats for x in (0.02, 0.1))
        return Beside(tuple(alone), beside, 3, counting)


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
    assert [(one["seed"], one["variant"], one["step"]) for one in steps] == list(product((0, 1), ways, range(2)))
    assert {one["identical"] for one in steps} == {1.0}
    assert [one["same_rewards"] for one in sections["totals"]["records"]] == [True] * 12
    drafters = sections["drafters"]["records"]
    assert [(one["seed"], one["step"]) for one in drafters] == list(product((0, 1), range(2)))
    # in the first step both draft with the same one, in the same shape: a chooser's moods are kept out
    for one in drafters:
        if one["step"] == 0:
            assert one["frozen"] == one["spot"] > 1.0
    assert drafters[0]["frozen"] != drafters[2]["frozen"]  # another seed, other answers
    (busy,) = sections["busy"]["records"]
    assert (busy["slowdown"], busy["counting"]) == (pytest.approx(0.01), pytest.approx(0.05))
    assert busy["noise"] == 0.0


def test_ticks_are_compared_with_themselves() -> None:
    alone = (Ticks((1.0, 4.0), (1.0, 1.0)), Ticks((1.1, 4.4), (1.0, 1.0)))
    beside = (Ticks((1.05, 4.2), (1.0, 1.5)), Ticks((9.0, 4.2), (1.0, 1.5)), Ticks((1.05, 9.0), (1.0, 1.5)))
    busy = _busy(Beside(alone, beside, 7, counting=alone))
    assert busy.counting == busy.cpu_counting == 0.0
    assert busy.noise == pytest.approx(0.1)
    assert busy.slowdown == pytest.approx(0.0)  # what hits a tick once is not the others' training
    assert busy.cpu_slowdown == pytest.approx(0.25)
    assert (busy.ticks, busy.repeats, busy.micro_steps) == (2, 2, 7)


def test_one_worker_is_no_fleet() -> None:
    with pytest.raises(ConfigError, match="expected several"):
        bench_fleet(config(), FleetOptions(), Workers)


def test_idle_time_and_what_became_of_it() -> None:
    rolled = FleetRolledOut(0, 2, 10.0, 15.0, 1.0, 4.0, 0.25, 0, 0.0, 0.0, 0, 0.1)
    assert _idle_share([rolled]) == 0.25
    assert _idle_used([rolled]) == 0.8
    assert _idle_used([]) is None
