"""A run's directory: one process at a time writes to it, each verb has its own, and no run is written over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tlt
from tests.training import small
from tests.watching import config_of, events_of_steps, step, write_run
from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.fleet import LocalFleet
from tlt.loop import Emit
from tlt.rollout import rollout
from tlt.warmup import warmup
from tlt.watch.directory import held
from tlt.watch.events import Event, PhaseStarted, RolloutFinished, RunFailed, RunResumed, WarmupStep, read_run
from tlt.watch.history import events_of, steps_of
from tlt.watch.log import start_run


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def write(config: RunConfig, verb: str, *events: Event) -> None:
    with start_run(config, verb, "0.1") as log:
        for event in events:
            log.emit(event)


# ---- each verb has its own


def test_other_verbs_with_its_recipe_leave_a_live_run_alone(tmp_path: Path) -> None:
    short = [
        "--task.prompts=1",
        "--task.group=2",
        "--sampling.max_tokens=4",
        "--warmup.steps=1",
        "--warmup.tokens_per_batch=256",
    ]
    config = small(tmp_path, "--run.steps=2", "--checkpoint.every=1", *short)

    def interrupted(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet = LocalFleet(config, emit)
        snapshot = fleet.snapshot

        def after_a_step() -> object:
            if not (tmp_path / "run-rollout").exists():
                before = contents(tmp_path / "run")
                rollout(config)
                warmup(config, "toy")
                assert contents(tmp_path / "run") == before
            return snapshot()

        fleet.snapshot = after_a_step  # type: ignore[method-assign,assignment]
        return fleet

    run = tlt.train(config, open_fleet=interrupted)
    assert [one.step for one in steps_of(run)] == [1, 2]
    assert len(events_of(read_run(tmp_path / "run-rollout"), RolloutFinished)) == 1
    assert len(events_of(read_run(tmp_path / "run-warmup"), WarmupStep)) == 1
    for again in (lambda: rollout(config), lambda: warmup(config, "toy"), lambda: tlt.train(config)):
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=r"no run is written over; .*another name with --run.name, or remove"):
            again()
        assert contents(tmp_path) == before


# ---- nothing is written over


def refusal(config: RunConfig, verb: str, resume: bool = False) -> str:
    with pytest.raises(ConfigError) as caught, held(config, verb, resume=resume):
        raise AssertionError("it is taken")
    return str(caught.value)


def test_a_refusal_says_what_is_there_and_what_to_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, events_of_steps(0, 3))
    assert refusal(config, "train") == (
        f"{tmp_path}/shown holds a run of `tlt train` that took 3 steps (config.toml, events.jsonl), and no run is "
        "written over; go on with --resume, give this run another name with --run.name, or remove the directory"
    )
    write(config, "warmup", WarmupStep(1, 2.5, 100, 0.5))
    (tmp_path / "shown-warmup" / "policy").mkdir()
    assert refusal(config, "warmup") == (
        f"{tmp_path}/shown-warmup holds a run of `tlt warmup` that took 1 step (config.toml, events.jsonl, policy), "
        "and no run is written over; give this run another name with --run.name, or remove the directory"
    )


@pytest.mark.parametrize("left", ["checkpoints/step_3/run.json", "policy/config.json", "rollouts.jsonl"])
def test_what_a_run_made_is_kept_without_its_events_too(tmp_path: Path, left: str) -> None:
    (tmp_path / "shown" / left).parent.mkdir(parents=True)
    (tmp_path / "shown" / left).write_text("")
    assert left.partition("/")[0] in refusal(config_of(tmp_path), "train")


def test_a_run_without_results_is_no_reason_to_refuse_the_next(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, [PhaseStarted(1, "rollout"), RunFailed("ModelError", "there is no such model")])
    (tmp_path / "shown" / "log.txt").write_text("the user's own")
    with held(config, "train"):
        run = read_run(write_run(config, [step(1)]))
    assert len(steps_of(run)) == 1
    assert len([record for record in run.events if isinstance(record.event, RunFailed)]) == 1  # its history is there


def test_only_a_run_of_its_own_verb_is_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with held(config, "train", resume=True):
        pass  # nothing there yet: it begins
    with start_run(config, "rollout", "0.1") as log:  # as earlier versions did, into out/name
        log.emit(RolloutFinished(1, 1, 0.0, 1, 1, 1, 1, 1.0))
    (tmp_path / "shown-rollout").rename(tmp_path / "shown" / "moved")
    (tmp_path / "shown" / "moved" / "events.jsonl").rename(tmp_path / "shown" / "events.jsonl")
    said = refusal(config, "train", resume=True)
    assert "holds a run of `tlt rollout` (events.jsonl)" in said
    assert "--resume" not in said
    write_run(config, [RunResumed(0, ""), *events_of_steps(0, 1)])
    with held(config, "train", resume=True):
        pass


# ---- one process at a time

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from tlt.recipe import load_config
from tlt.watch.directory import held
with held(load_config(None, [f"--run.out={sys.argv[1]}", "--run.name=shown"]), "train", resume=True):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_live_run_is_refused_with_its_pid_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    """Not even where a child that it started lives on."""
    config = config_of(tmp_path)
    write_run(config, events_of_steps(0, 1))
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            before = contents(tmp_path)
            for resume in (True, False):
                said = refusal(config, "train", resume=resume)
                assert said.startswith(f"{tmp_path}/shown is in use: process {process.pid} on ")
                assert said.endswith("wait until it has ended, or give this run another name with --run.name")
            assert contents(tmp_path) == before
            process.kill()
            process.wait()
            with held(config, "train", resume=True):
                assert refusal(config, "train").startswith(f"{tmp_path}/shown is in use: process {os.getpid()} on ")
            os.kill(child, 0)  # it was there all the time
        finally:
            process.kill()
            os.kill(child, 9)


def test_a_directory_is_free_again_once_it_is_left(tmp_path: Path) -> None:
    for _ in range(2):
        with held(config_of(tmp_path), "train"):
            pass
    with pytest.raises(ZeroDivisionError), held(config_of(tmp_path), "train"):
        print(1 // 0)
    with held(config_of(tmp_path), "train"):
        pass
