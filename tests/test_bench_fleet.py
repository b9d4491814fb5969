"""The fleet's benchmark: compares what it says it compares. Here with one worker in the place of many."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tlt.bench.fleet import Slowdown, _idle_share, _idle_used, bench_fleet
from tlt.bench.options import TrainOptions
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.recipe import load_config
from tlt.watch.workers import FleetRolledOut


class Workers(LocalFleet):
    def slowdown(self, requests: Sequence[Request]) -> Slowdown:
        return Slowdown(alone_s=1.0, beside_s=1.01, alone_cpu_s=1.0, beside_cpu_s=1.0, micro_steps=3)


def config(*flags: str) -> RunConfig:
    small = ["--engine.rows=8", "--draft.answers=8", "--draft.held_out=2", "--draft.steps=2", "--spec.drafter=eagle"]
    return load_config(None, [*small, "--spec.path=new", *flags])


def test_the_same_steps_are_taken_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    bench_fleet(
        config("--cluster.workers=2"), TrainOptions(json=file, steps=2, groups=2, group_size=2, cap=24), Workers
    )
    sections = json.loads(file.read_text())["sections"]
    steps = sections["steps"]["records"]
    assert [(one["variant"], one["step"]) for one in steps] == [
        (variant, step) for variant in ("one worker", "plain", "frozen", "spot") for step in range(2)
    ]
    assert {one["identical"] for one in steps} == {1.0}
    assert [one["same_rewards"] for one in sections["totals"]["records"]] == [True] * 4
    (busy,) = sections["busy"]["records"]
    assert busy["slowdown"] == pytest.approx(0.01)


def test_one_worker_is_no_fleet() -> None:
    with pytest.raises(ConfigError, match="expected several"):
        bench_fleet(config(), TrainOptions(), Workers)


def test_idle_time_and_what_became_of_it() -> None:
    rolled = FleetRolledOut(0, 2, 10.0, 15.0, 1.0, 4.0, 0.25, 0, 0.0, 0.0, 0, 0.1)
    assert _idle_share([rolled]) == 0.25
    assert _idle_used([rolled]) == 0.8
    assert _idle_used([]) is None
