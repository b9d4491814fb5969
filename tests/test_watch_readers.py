"""Those who show a run: they tell what the events say, fail in the open, and cannot take the run with them."""

import io
import json
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from tests.watching import MACHINE, config_of, events_of_steps, recorded, rollout, step
from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError
from tlt.recipe import load_config
from tlt.watch.console import WIDE, Lines, Progress, heading, notice, step_line
from tlt.watch.events import (
    AcceptanceCollapsed,
    DrafterTrained,
    Event,
    PhaseStarted,
    ReaderFailed,
    ReplayCompared,
    RewardsFailed,
    RolloutProgress,
    RunFailed,
    RunFinished,
    RunResumed,
    ShapesChosen,
    StepFinished,
    read_run,
)
from tlt.watch.history import events_of, steps_of
from tlt.watch.metrics import STEP_METRICS, metrics_of
from tlt.watch.readers import readers_of
from tlt.watch.session import Watched


def console_of(width: int = 120, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def watch(config: RunConfig, console: Console, events: Iterable[Event], resumed: bool = False) -> None:
    with Watched(config, "train", "0.1", resumed=resumed, console=console) as log:
        for event in events:
            log.emit(event)


# ---- the console


def test_a_line_holds_the_numbers_of_its_step_under_their_headings() -> None:
    line, head = step_line(step(3), 12), heading()
    assert len(line) == len(head) == WIDE
    expected = {"reward": "0.174", "p90": "112", "accept": "1.70", "rollout": "4.00s", "saved": "3.00s"}
    for name, said in expected.items():
        end = head.index(name) + len(name)
        assert line[:end].endswith(said)
    assert line.split()[0] == "3/12"
    for reward in (-123.4567, 1e12, -99999.9):
        large = step_line(replace(step(3), mean_reward=reward), 12)
        assert float(large.split()[1]) == pytest.approx(reward, rel=0.05)
        assert len(large) == WIDE


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    console = console_of(width=80, terminal=True)
    lines = Lines(load_config(None, ["--run.steps=12"]), console)
    for record in recorded(*events_of_steps(0, 2)):
        lines.show(record)
    assert "update" not in printed(console)
    assert len(step_line(step(1), 12, wide=False)) <= 80


def test_only_a_new_version_of_the_drafter_is_worth_a_line() -> None:
    console = console_of()
    lines = Lines(load_config(None, ["--run.steps=12"]), console)
    versions = (1, 1, 1, 2, 2)
    trained = (
        DrafterTrained(n, version, 5, 100, 2.0, 1.5, 0.5, "behind") for n, version in enumerate(versions, start=1)
    )
    for record in recorded(*trained):
        lines.show(record)
    assert [line.split(":")[0].strip() for line in printed(console).splitlines()] == ["drafter 1", "drafter 2"]


def test_a_replayed_step_shows_both_ratios_when_it_is_over() -> None:
    console = console_of()
    lines = Lines(load_config(None, ["--run.steps=12"]), console)
    for record in recorded(ReplayCompared(1, 10, tlt_s=4.0, plain_s=7.0, identical=True), step(1), step(2)):
        lines.show(record)
    assert "against plain training so far: rollout 1.75 ×, whole step 1.36 × as fast" in printed(console)
    assert printed(console).count("whole step") == 1


def test_what_is_piped_is_plain_lines(tmp_path: Path) -> None:
    console = console_of(width=40)
    watch(config_of(tmp_path), console, [*events_of_steps(0, 3), RunFinished(9.0)])
    lines = printed(console).splitlines()
    assert "\x1b" not in printed(console)
    assert lines[0].split() == ["●", "learning", "●", "rewards", "●", "truncation", "○", "speculation", "●", "machine"]
    assert lines[1:5] == [heading(), *(step_line(step(number), 12) for number in range(1, 4))]
    assert lines[-1] == f"Report: {tmp_path / 'shown' / 'report.html'}"
    assert (tmp_path / "shown" / "report.html").exists()


def test_a_terminal_shows_what_is_going_on(tmp_path: Path) -> None:
    console = console_of(terminal=True)
    events = [*events_of_steps(0, 2), PhaseStarted(3, "rollout"), RolloutProgress(3, 60, 100, 40, 3000)]
    watch(config_of(tmp_path, "--watch.console=live"), console, events)
    assert "starting" in printed(console)
    assert "60 of 100 completions, 40 running" in printed(console)
    assert "2 of 12 steps · 1 min 10 s left" in printed(console)  # ten steps of 7 s
    assert step_line(step(2), 12) in printed(console)


def test_time_left_follows_the_recent_steps_and_a_resumed_run_counts_on() -> None:
    progress = Progress(planned=20)
    assert progress.left_s is None
    for record in recorded(RunResumed(5, "x"), *(step(number, step_s=2.0) for number in range(6, 9))):
        progress.note(record)
    assert (progress.taken, progress.left_s) == (8, 24.0)


def test_trouble_is_said_aloud() -> None:
    troubles: list[Event] = [
        RewardsFailed(1, "raised", 3, "data.jsonl:7", "ZeroDivisionError"),
        AcceptanceCollapsed(1, "eagle", "8x2", recent=1.1, baseline=2.5, verifies=100),
        ReaderFailed("W&B", "no network"),
        ReplayCompared(1, 10, 1.0, 2.0, identical=False, exact=True),
        RunFailed("TaskError", "no such column"),
    ]
    expected = ("3 rewards failed", "collapsed", "W&B is left out", "OTHER TOKENS", "stopped by TaskError")
    for trouble, words in zip(troubles, expected, strict=True):
        said = notice(trouble)
        assert said
        assert words in said[0]
        assert said[1].startswith("bold")
    assert notice(PhaseStarted(1, "update")) is None


def test_nothing_is_said_where_nothing_is_wanted(tmp_path: Path) -> None:
    console = console_of()
    watch(config_of(tmp_path, "--watch.console=off", "--watch.report=false"), console, events_of_steps(0, 2))
    assert printed(console) == ""
    assert not (tmp_path / "shown" / "report.html").exists()


# ---- however a run ends


def test_an_error_is_on_record_and_goes_on_to_the_caller(tmp_path: Path) -> None:
    def events() -> Iterator[Event]:
        yield step(1)
        raise TltError("first line\nsecond line")

    with pytest.raises(TltError, match="first line"):
        watch(config_of(tmp_path), console_of(), events())
    run = read_run(tmp_path / "shown")
    assert events_of(run, RunFailed) == (RunFailed("TltError", "first line\nsecond line"),)
    page = (tmp_path / "shown" / "report.html").read_text()
    assert "was stopped after 1 of 12 steps (TltError: first line)" in page
    assert "<pre>first line\nsecond line</pre>" in page


def test_a_bug_leaves_its_traceback_in_the_events_and_in_the_report(tmp_path: Path) -> None:
    console = console_of()
    with pytest.raises(ZeroDivisionError), Watched(config_of(tmp_path), "train", "0.1", console=console):
        print(1 // 0)
    (failed,) = events_of(read_run(tmp_path / "shown"), RunFailed)
    assert failed.message.startswith("integer division or modulo by zero\nTraceback")
    assert "print(1 // 0)" in failed.message
    assert "print(1 // 0)" in (tmp_path / "shown" / "report.html").read_text()
    assert "Traceback" not in printed(console)


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "shown").write_text("a file")
    with pytest.raises(TltError, match=r"shown cannot be written to \(.*give another with --run.out"):
        watch(config_of(tmp_path), console_of(), [])


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "shown" / f".report.html.{os.getpid()}").mkdir(parents=True)
    with pytest.raises(TltError, match=r"report.html cannot be written \(.*events are whole.*`tlt report"):
        watch(config_of(tmp_path), console_of(), events_of_steps(0, 2))
    assert len(steps_of(read_run(tmp_path / "shown"))) == 2


def test_a_resumed_run_says_what_is_not_as_it_was() -> None:
    assert notice(RunResumed(4, "runs/a/step_4")) == ("resumed from runs/a/step_4, 4 steps taken", "bold")
    said = notice(RunResumed(4, "step_4", ("run.steps 8 → 16",)))
    assert said
    assert said[0].endswith("4 steps taken; with other settings: run.steps 8 → 16")
    said = notice(RunResumed(0, ""))
    assert said
    assert "begins" in said[0]


def test_what_fails_while_telling_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlt.watch.session.write_report", full)
    console = console_of()
    with pytest.raises(TltError, match="the error"), Watched(config_of(tmp_path), "train", "0.1", console=console):
        raise TltError("the error")
    assert "No space left on device" in printed(console)


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    events = [*events_of_steps(0, 3), RunFinished(1.0)]
    watch(config_of(tmp_path), Console(file=Closed(), force_terminal=False), events)
    run = read_run(tmp_path / "shown")
    assert len(events_of(run, StepFinished)) == 3
    assert [failed.reader for failed in events_of(run, ReaderFailed)] == ["console"]


# ---- metrics


def test_every_number_of_a_step_has_a_name_and_only_one() -> None:
    fields = set(StepFinished.__dataclass_fields__) - {"step"}
    assert sorted(STEP_METRICS.values()) == sorted(fields)
    found = metrics_of(step(3))
    assert found
    assert found.step == 3
    assert {name: found.values[name] for name in STEP_METRICS} == {
        name: getattr(step(3), field) for name, field in STEP_METRICS.items()
    }
    assert metrics_of(PhaseStarted(1, "update")) is None


# ---- TensorBoard


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory / "shown" / "tensorboard")).Reload()
    return [(scalar.step, scalar.value) for scalar in read.Scalars(tag)]


def test_tensorboard_reads_back_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = config_of(tmp_path, "--watch.tensorboard=true")
    watch(config, console_of(), [*events_of_steps(0, 4), RunFinished(1.0)])
    for name, field in STEP_METRICS.items():
        expected = [(number, pytest.approx(getattr(step(number), field), rel=1e-6)) for number in range(1, 5)]
        assert scalars(tmp_path, name) == expected


def test_tensorboard_shows_acceptance_by_depth(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    chosen = ShapesChosen(3, ((8, "eagle 2x1/4", 9),), (("eagle", (0.75, 0.5)),), switches=3, one_off_s=0.25)
    watch(config_of(tmp_path, "--watch.tensorboard=true"), console_of(), [*events_of_steps(0, 3), chosen])
    expected = {"acceptance/eagle/1": 0.75, "acceptance/eagle/2": 0.5, "rollout/switch_cost_s": 0.25}
    assert {name: scalars(tmp_path, name) for name in expected} == {n: [(3, value)] for n, value in expected.items()}


def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = config_of(tmp_path, "--watch.tensorboard=true")
    watch(config, console_of(), events_of_steps(0, 4))
    again: list[Event] = [RunResumed(2, "x"), *(step(number, mean_reward=0.5) for number in range(3, 6))]
    watch(config, console_of(), again, resumed=True)
    found = scalars(tmp_path, "reward/mean")
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert [value for _, value in found][2:] == [0.5, 0.5, 0.5]


def test_tensorboard_asked_for_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tlt-rl\[watch\]'"):
        readers_of(config_of(tmp_path, "--watch.tensorboard=true"), console_of())


# ---- W&B, in the place of whose package stands this one


class FakeRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.logged, self.metrics = arguments, [], []  # type: ignore[var-annotated]
        self.exit_code: int | None = None
        self.fails_from = 10**9

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        if len(self.logged) >= self.fails_from:
            raise RuntimeError("the service is down")
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb(ModuleType):
    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.fails_from = 10**9
        self.refuses = False

    def init(self, **arguments: Any) -> FakeRun:
        if self.refuses:
            raise self.Error("not logged in")
        self.runs.append(FakeRun(arguments))
        self.runs[-1].fails_from = self.fails_from
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_told_the_numbers(tmp_path: Path, wandb: FakeWandb) -> None:
    watch(config_of(tmp_path, "--watch.wandb=mine"), console_of(), [MACHINE, *events_of_steps(0, 2), RunFinished(1.0)])
    (run,) = wandb.runs
    assert run.arguments["project"] == "mine"
    assert run.arguments["name"] == "shown"
    assert run.arguments["config"]["run.steps"] == 12
    assert ("*", "step") in run.metrics
    assert [values["step"] for values in run.logged] == [1, 2]
    assert run.logged[1]["reward/mean"] == step(2).mean_reward
    assert run.exit_code == 0


def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_a_new_one_does_not(tmp_path: Path, wandb: FakeWandb) -> None:
    config = config_of(tmp_path, "--watch.wandb=mine")
    watch(config, console_of(), events_of_steps(0, 2))
    watch(config, console_of(), [RunResumed(2, "x"), step(3)], resumed=True)
    watch(config, console_of(), events_of_steps(0, 1))
    first, resumed, other = (run.arguments["id"] for run in wandb.runs)
    assert first == resumed != other


def test_wandb_that_goes_down_costs_nothing_but_itself(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.fails_from = 1
    console = console_of()
    watch(config_of(tmp_path, "--watch.wandb=mine"), console, [*events_of_steps(0, 3), RunFinished(1.0)])
    run = read_run(tmp_path / "shown")
    assert len(events_of(run, StepFinished)) == 3
    assert events_of(run, ReaderFailed) == (ReaderFailed("W&B", "RuntimeError: the service is down"),)
    assert "W&B is left out from now on" in printed(console)
    assert "W&amp;B: RuntimeError: the service is down" in (tmp_path / "shown" / "report.html").read_text()


def test_wandb_that_cannot_start_ends_the_run_before_it_began(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refuses = True
    with pytest.raises(TltError, match=r"not logged in.*WANDB_MODE=offline"):
        watch(config_of(tmp_path, "--watch.wandb=mine"), console_of(), [rollout(1)])
    assert not (tmp_path / "shown" / "events.jsonl").exists()


def test_wandb_hears_of_a_failure(tmp_path: Path, wandb: FakeWandb) -> None:
    config = config_of(tmp_path, "--watch.wandb=mine")
    with pytest.raises(TltError), Watched(config, "train", "0.1", console=console_of()):
        raise TltError("x")
    assert wandb.runs[0].exit_code == 1


def test_wandb_asked_for_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"watch.wandb is 'mine'.*pip install 'tlt-rl\[wandb\]'"):
        readers_of(config_of(tmp_path, "--watch.wandb=mine"), console_of())


# ---- trackio, likewise


class FakeTrackio(ModuleType):
    """Keeps what it is told as the real one does: a run has `log(metrics, step)` and `finish()`."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> "FakeTrackio":
        self.opened.append(arguments)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


def test_trackio_is_told_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    watch(
        config_of(tmp_path, "--watch.trackio=mine"), console_of(), [MACHINE, *events_of_steps(0, 2), RunFinished(1.0)]
    )
    assert [(one["project"], one["name"], one["resume"]) for one in fake.opened] == [("mine", "shown", "never")]
    assert [number for number, _ in fake.logged] == [1, 2]
    assert fake.logged[1][1]["reward/mean"] == step(2).mean_reward
    assert fake.finished == 1


def test_trackio_itself_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs trackio: install tlt-rl[trackio]")
    watch(
        config_of(tmp_path, "--watch.trackio=mine"), console_of(), [MACHINE, *events_of_steps(0, 2), RunFinished(1.0)]
    )
    with closing(sqlite3.connect(tmp_path / "trackio" / "mine.db")) as kept:
        rows = kept.execute("select step, metrics from metrics order by step").fetchall()
    assert [number for number, _ in rows] == [1, 2]
    assert json.loads(rows[1][1])["reward/mean"] == step(2).mean_reward


def test_trackio_asked_for_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"pip install 'tlt-rl\[trackio\]'"):
        readers_of(config_of(tmp_path, "--watch.trackio=mine"), console_of())
