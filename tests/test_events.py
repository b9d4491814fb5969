"""The event stream: what is written is read back, a crash costs at most the last line, nothing broken goes unseen."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.errors import TltError
from tlt.recipe import load_config
from tlt.watch.events import (
    Event,
    MachineDescribed,
    RolloutFinished,
    RunFailed,
    RunFinished,
    RunStarted,
    ShapesChosen,
    UnknownEvent,
    WarmupStep,
    read_events,
    read_run,
)
from tlt.watch.log import EventLog, start_run

EVENTS = (
    RunStarted(verb="rollout", seed=3, version="0"),
    RolloutFinished(step=1, n=4, mean_reward=0.25, length_p50=9, length_p90=20, length_max=31, tokens=60, seconds=1.5),
    WarmupStep(step=1, loss=2.5, tokens=100, seconds=0.25),
    RunFinished(seconds=2.0),
)


def written(path: Path) -> Path:
    with EventLog(path) as log:
        for event in EVENTS:
            log.emit(event)
    return path


def test_round_trip_in_order_with_times(tmp_path: Path) -> None:
    records = read_events(written(tmp_path / "deep" / "events.jsonl"))
    assert tuple(record.event for record in records) == EVENTS
    assert all(record.time > 0 for record in records)


def test_an_event_is_on_disk_once_emitted(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for count, event in enumerate(EVENTS, start=1):
            log.emit(event)
            assert len(read_events(tmp_path / "events.jsonl")) == count


@given(cut=st.integers(0))
def test_a_crash_at_any_byte_costs_only_the_torn_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = written(tmp_path_factory.mktemp("log") / "events.jsonl")
    content = path.read_bytes()
    content = content[: cut % (len(content) + 1)]
    path.write_bytes(content)
    whole = content.count(b"\n")
    assert tuple(record.event for record in read_events(path)) == EVENTS[:whole]
    with EventLog(path) as log:  # and a restarted run goes on from there
        log.emit(EVENTS[-1])
    assert tuple(record.event for record in read_events(path)) == (*EVENTS[:whole], EVENTS[-1])


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[1]",
        "[" * 100_000,
        '{"kind": "RunFinished"}',
        '{"time": "x", "kind": "", "fields": {}}',
        '{"time": 1e18, "kind": "RunFinished", "fields": {"seconds": 1.0}}',
        '{"time": 1, "kind": [], "fields": {"seconds": 1.0}}',
        '{"time": 1, "kind": "RunFinished", "fields": [["seconds", 1.0]]}',
        "",
    ],
)
def test_an_earlier_broken_line_is_an_error_naming_the_line(tmp_path: Path, broken: str) -> None:
    path = written(tmp_path / "events.jsonl")
    lines = path.read_text().splitlines()
    lines[1] = broken
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TltError, match="line 2: is not an event"):
        read_events(path)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (RunFinished, "seconds", '"x"'),
        (RunFinished, "seconds", "true"),
        (RunFinished, "seconds", "NaN"),
        (RunFinished, "seconds", "9" * 400),
        (RunStarted, "seed", "1.5"),
        (RunStarted, "version", "null"),
        (WarmupStep, "step", '"1"'),
        (RolloutFinished, "lengths", "[1, [2]]"),
        (ShapesChosen, "ticks", '[[1, "off"]]'),
        (ShapesChosen, "by_depth", '[["suffix", 0.5]]'),
        (MachineDescribed, "versions", '{"torch": 2}'),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, kind: type[Event], name: str, value: str) -> None:
    whole = {
        RunFinished: RunFinished(1.0),
        RunStarted: RunStarted("train", 1, "0"),
        WarmupStep: WarmupStep(1, 1.0, 1, 0),
    }
    whole |= {RolloutFinished: RolloutFinished(1, 1, 1.0, 1, 1, 1, 1, 0.1), ShapesChosen: ShapesChosen(1, ())}
    whole |= {MachineDescribed: MachineDescribed("cpu", 0.0, "", 1, {}, "", "")}
    fields = json.dumps({**asdict(whole[kind]), name: "HERE"}).replace('"HERE"', value)
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"time": 1, "format": 2, "kind": "{kind.__name__}", "fields": {fields}}}\n')
    with pytest.raises(TltError, match=f"line 1: is not an event .*`{name}` of {kind.__name__} is .*; expected"):
        read_events(path)


def test_what_is_no_text_can_be_read_back(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit(RunFailed("OSError", os.fsdecode(b"no file caf\xe9 ") + "\U0001f600\n\u2028"))
    (record,) = read_events(tmp_path / "events.jsonl")
    assert record.event == RunFailed("OSError", "no file caf? \U0001f600\n\u2028")


def test_what_a_newer_version_wrote_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    newer = [
        {"time": 1.0, "kind": "DrafterSwapped", "fields": {"version": 7}},
        {"time": 2.0, "kind": "RunFinished", "fields": {"seconds": 1.0, "joules": 5.0}},
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in newer)
    assert [record.event for record in read_events(path)[-2:]] == [
        UnknownEvent("DrafterSwapped", {"version": 7}),
        UnknownEvent("RunFinished", {"seconds": 1.0, "joules": 5.0}),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_are_finite(tmp_path: Path, value: float) -> None:
    with EventLog(tmp_path / "events.jsonl") as log, pytest.raises(TltError, match="WarmupStep has loss"):
        log.emit(WarmupStep(step=1, loss=value, tokens=1, seconds=0.0))
    assert read_events(tmp_path / "events.jsonl") == ()


def test_a_run_is_read_back_with_its_configuration(tmp_path: Path) -> None:
    config = load_config(None, [f"--run.out={tmp_path}", "--run.name=one", "--run.seed=9", "--sampling.stop=a,b"])
    with start_run(config, "rollout", "0.1") as log:
        log.emit(RunFinished(seconds=1.0))
    run = read_run(tmp_path / "one-rollout")
    assert run.config == config
    assert [record.event for record in run.events] == [RunStarted("rollout", 9, "0.1"), RunFinished(1.0)]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TltError, match=r"holds no events\.jsonl"):
        read_run(tmp_path)


def test_fields_that_were_renamed_are_read_by_their_old_names(tmp_path: Path) -> None:
    written = {"step": 3, "ticks": [], "once_s": 0.25}
    line = {"time": 1.0, "kind": "ShapesChosen", "format": 2, "fields": written}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_events(tmp_path / "events.jsonl")
    assert record.event == ShapesChosen(step=3, ticks=(), one_off_s=0.25)
