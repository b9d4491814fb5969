"""What is told of speculation: how much of each drafter's tokens is accepted, depth by depth, and what switching cost,
from the worker's books through events to the curves; and in words, at the end of one answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tlt
from tests.training import LEARNED, small
from tlt.config import RunConfig, SpecSettings
from tlt.engine.build import shapes_of
from tlt.engine.graphs import padding
from tlt.event_builders import rollout_report, shapes_chosen, together
from tlt.fleet import LocalFleet
from tlt.generate import _of_drafts
from tlt.loop import Emit, RolloutReport
from tlt.spec.costs import CostModel
from tlt.spec.shape import OFF, Shape
from tlt.spec.speculation import SpeculationReport
from tlt.spec.tuner import Tuner
from tlt.watch.events import ShapesChosen, read_events
from tlt.watch.history import events_of, steps_of
from tlt.watch.metrics import metrics_of

BOTH = Shape(("eagle", "suffix"), 2, 1, 4)
NO_TIME: dict[str, Any] = {"drafting_s": 0.0, "alarms": ()}


class Eager(Tuner):
    """A tuner that keeps its books but not its head: it drafts, whatever it costs, and leaves off now and then."""

    def choose(self, batch: int, behind: int = 0) -> Shape:
        super().choose(batch, behind)
        return OFF if self._ticks % 4 == 3 else BOTH


def eager(spec: SpecSettings, rows: int, **_: object) -> Eager:
    return Eager(shapes_of(spec), CostModel(padding(rows), learned=("eagle",)))


def test_a_run_tells_acceptance_by_depth_and_what_switching_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.fleet.shape_policy_of", eager)
    fleets: list[LocalFleet] = []

    def kept(config: RunConfig, emit: Emit) -> LocalFleet:
        fleets.append(LocalFleet(config, emit))
        return fleets[0]

    flags = [*LEARNED, "--spec.depths=2", "--spec.widths=1", "--spec.verifies=4", "--drafting.frozen=true"]
    run = tlt.train(small(tmp_path, *flags, "--run.steps=2"), open_fleet=kept)
    first, last = events_of(run, ShapesChosen)
    books = fleets[0].worker.speculation()
    assert books is not None
    assert books.tuner is not None
    assert dict(last.by_depth) == books.tuner.by_depth
    assert set(books.tuner.by_depth) == {"eagle", "suffix"}
    assert 0 < dict(last.by_depth)["suffix"][0] < 1, "the test must accept drafts, and refuse some, to mean anything"
    assert first.switches + last.switches == books.switches > 0
    assert first.one_off_s + last.one_off_s == pytest.approx(books.one_off_s)
    assert last.one_off_s > 0, "a learned drafter that was left out has something to take in"
    found = metrics_of(last)
    assert found is not None
    assert found.step == 2
    expected = {
        f"acceptance/{drafter}/{depth}": share
        for drafter, shares in last.by_depth
        for depth, share in enumerate(shares, start=1)
    }
    assert "acceptance/eagle/1" in expected
    assert "acceptance/suffix/2" in expected
    cost = {"rollout/switches": last.switches, "rollout/switch_cost_s": last.one_off_s}
    assert found.values == expected | cost
    assert sum(step.verifies for step in steps_of(run)) == books.verifies


def report(verifies: int, by_depth: dict[str, tuple[float, ...]]) -> SpeculationReport:
    tuner = replace(eager(SpecSettings(drafter="both", path="new"), 8).report(), by_depth=by_depth, saved_s=0.25)
    ticks = {(3, BOTH): 5, (3, OFF): 1}
    return SpeculationReport(ticks, switches=2, verifies=verifies, accepted=6, **NO_TIME, one_off_s=0.125, tuner=tuner)


def test_a_worker_tells_what_its_books_say() -> None:
    told = rollout_report(report(12, {"eagle": (0.5, 0.25), "suffix": ()}))
    assert told.by_depth == (("eagle", (0.5, 0.25)),), "nobody looked at what the other one named"
    assert (told.verifies, told.accepted, told.saved_s, told.switches, told.one_off_s) == (
        12,
        6,
        0.25 - 0.125,
        2,
        0.125,
    ), "captures are no savings"
    assert told.chosen == ((4, str(BOTH), 5), (4, "off", 1))
    assert rollout_report(report(0, {"eagle": (0.5,)})).by_depth == (), "what was recalled is no news of this rollout"
    alone = replace(report(12, {"eagle": (0.0,), "suffix": (0.9,)}), ticks={(3, Shape(("suffix",), 3, 1, 4)): 5})
    assert rollout_report(alone).by_depth == (("suffix", (0.9,)),), "who was not asked has nothing to tell"
    assert rollout_report(None) == RolloutReport()


def test_workers_count_as_much_as_they_verified() -> None:
    reports = [
        rollout_report(report(30, {"eagle": (0.8, 0.5), "suffix": (0.2,)})),
        rollout_report(report(10, {"eagle": (0.4,)})),
        rollout_report(report(0, {"eagle": (0.0, 0.0, 0.0)})),
    ]
    told = together(reports, saved_s=3.0)
    assert dict(told.by_depth) == {"eagle": (pytest.approx(0.7), 0.5), "suffix": (0.2,)}
    assert (told.verifies, told.accepted, told.saved_s) == (40, 18, 3.0)
    assert (told.switches, told.one_off_s) == (6, 0.375)
    assert told.chosen == ((4, str(BOTH), 15), (4, "off", 3))
    assert together([], 0.0) == RolloutReport()
    event = shapes_chosen(7, told)
    assert (event.step, event.ticks, event.by_depth) == (7, told.chosen, told.by_depth)
    assert (event.switches, event.one_off_s) == (6, 0.375)


def test_events_of_earlier_versions_say_nothing_of_depths(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"time": 1.0, "kind": "ShapesChosen", "fields": {"step": 2, "ticks": [[4, "off", 9]]}}\n')
    (record,) = read_events(file)
    assert record.event == ShapesChosen(3, ((4, "off", 9),))
    found = metrics_of(record.event)
    assert found is not None
    assert found.values == {"rollout/switches": 0.0, "rollout/switch_cost_s": 0.0}


def test_one_token_is_not_many() -> None:
    report = SpeculationReport({}, switches=0, verifies=2, accepted=1, **NO_TIME, one_off_s=0.0, tuner=None)
    assert _of_drafts(report) == "; 1 token of it drafted, accept length 1.50"
    assert _of_drafts(replace(report, accepted=4)) == "; 4 tokens of it drafted, accept length 3.00"
