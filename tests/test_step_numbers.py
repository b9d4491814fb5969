"""Steps count from 1 wherever a step has a number: events, console, report, TensorBoard, checkpoints, resuming."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import tlt
from tests.training import small
from tests.watching import config_of, events_of_steps, step, write_run
from tlt.watch.events import (
    EVENTS_FILE,
    CheckpointSaved,
    PhaseStarted,
    RunResumed,
    StepFinished,
    read_events,
    read_run,
)
from tlt.watch.history import events_of, steps_of


def test_one_run_has_the_same_numbers_wherever_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = ["--watch.console=lines", "--watch.report=true", "--watch.tensorboard=true"]
    config = small(tmp_path, "--sampling.max_tokens=4", "--run.steps=2", "--checkpoint.keep=9", *shown)
    tlt.train(config)
    run = tlt.train(replace(config, run=replace(config.run, steps=3)), resume=True)
    expected = [1, 2, 3]
    said, directory = capsys.readouterr().out, tmp_path / "run"
    page = (directory / "report.html").read_text()
    curves = EventAccumulator(str(directory / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (directory / EVENTS_FILE).read_text().splitlines()]
    assert [one["fields"]["step"] for one in lines if one["kind"] == "StepFinished"] == expected
    assert [one.step for one in steps_of(run)] == expected
    assert [one.policy_version for one in steps_of(run)] == expected
    assert {one.step for one in events_of(run, PhaseStarted)} == set(expected)
    assert re.findall(r"^ +(\d+)/\d", said, re.MULTILINE) == [str(number) for number in expected]
    assert re.findall(r'<tr><th scope="row">(\d+)</th>', page) == [str(number) for number in expected]
    assert {int(number) for number in re.findall(r"Step (\d+), reward", page)} == set(expected)
    assert [scalar.step for scalar in curves.Scalars("reward/mean")] == expected
    assert [scalar.step for scalar in curves.Scalars("policy/version")] == expected
    saved = {int(path.name.removeprefix("step_")) for path in (directory / "checkpoints").iterdir()}
    assert saved == {one.step for one in events_of(run, CheckpointSaved)} == {2, 3}
    assert [one.step for one in events_of(run, RunResumed)] == [2]
    assert f"resumed from {directory / 'checkpoints' / 'step_2'}, 2 steps taken" in said


def test_events_of_earlier_versions_are_renumbered(tmp_path: Path) -> None:
    """They counted steps from 0, and said no format; checkpoints had the number of the last step all along."""
    config = config_of(tmp_path)
    path = write_run(config, [*events_of_steps(0, 3), CheckpointSaved(2, "step_2", 0.1)]) / EVENTS_FILE
    written = read_events(path)
    older = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record.pop("format") == 2
        if record["kind"] != "CheckpointSaved" and "step" in record["fields"]:
            record["fields"]["step"] -= 1
        older.append(json.dumps(record))
    assert [json.loads(line)["fields"].get("step") for line in older][1:4] == [0, 0, 0]
    path.write_text("\n".join(older) + "\n")
    assert read_events(path) == written
    write_run(config, [RunResumed(2, "step_2"), step(3, mean_reward=0.9)])  # goes on in the same file
    run = read_run(path.parent)
    assert [one.step for one in steps_of(run)] == [1, 2, 3]
    assert steps_of(run)[2].mean_reward == 0.9
    assert events_of(run, StepFinished)[0] == step(1)
