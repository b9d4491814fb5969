"""While a run starts, it says what it does and how long that took: as lines, or on a terminal as a status."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tlt
from tests.training import small
from tests.watching import config_of, recorded
from tlt.errors import TaskError
from tlt.recipe import load_config
from tlt.rollout import rollout
from tlt.tasks.choose import task_of
from tlt.warmup import warmup
from tlt.watch.console import Lines, LiveLines
from tlt.watch.events import Event, PhaseStarted, Recorded, RunStarted, StartupFinished, StartupPhase, read_run
from tlt.watch.log import Reader
from tlt.watch.readers import startup_readers_of

EVENTS = recorded(
    RunStarted("rollout", 0, "0"), StartupPhase("opening the policy"), StartupPhase("building the engine")
)
READY = Recorded(EVENTS[0].time + 95.0, StartupFinished(95.0))


def shown(reader: Reader, records: list[Recorded], console: Console) -> str:
    for record in records:
        reader.show(record)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def console_of(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, highlight=False)


@pytest.mark.parametrize("verb", ["train", "rollout"])
def test_lines_name_a_phase_as_it_begins_and_the_seconds_of_each(tmp_path: Path, verb: str) -> None:
    console = console_of()
    reader = (
        Lines(load_config(None, ["--run.steps=3"]), console)
        if verb == "train"
        else startup_readers_of(config_of(tmp_path), console)[0]
    )
    began = ["  opening the policy …", "  building the engine …"]
    assert shown(reader, EVENTS, console).splitlines() == began
    ready = "  ready after 1 min 35 s: opening the policy 1.0 s, building the engine 1 min 33 s"
    assert shown(reader, [READY], console).splitlines() == [*began, ready]


def test_a_terminal_shows_the_phase_that_runs(tmp_path: Path) -> None:
    console = console_of(terminal=True)
    (reader,) = startup_readers_of(config_of(tmp_path), console)
    assert "building the engine …" in shown(reader, EVENTS, console)
    before = len(shown(reader, [READY], console))
    reader.close()
    after = shown(reader, [], console)
    assert "ready after 1 min 35 s: opening" in after
    assert len(after) == before  # the status was gone already: the verb has a display of its own
    console = console_of(terminal=True)
    live = LiveLines(load_config(None, ["--run.steps=3"]), console)
    shown(live, EVENTS, console)
    live.close()  # which draws it once more
    assert "building the engine · " in shown(live, [], console)
    assert "building the engine …" not in shown(live, [], console)


def test_nothing_is_shown_where_nothing_is_wanted(tmp_path: Path) -> None:
    assert startup_readers_of(config_of(tmp_path, "--watch.console=off"), console_of()) == []


# ---- of real runs


def phases(directory: Path) -> list[str]:
    """Of the last start-up, which must be over before the first step."""
    events: list[Event] = [record.event for record in read_run(directory).events]
    last = max(index for index, event in enumerate(events) if isinstance(event, RunStarted))
    (over,) = [index for index, event in enumerate(events[last:]) if isinstance(event, StartupFinished)]
    assert not any(isinstance(event, PhaseStarted) for event in events[last : last + over])
    found = [event.phase for event in events[last : last + over] if isinstance(event, StartupPhase)]
    assert len(found) == sum(isinstance(event, StartupPhase) for event in events[last:])
    return found


def test_runs_say_what_they_start_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--task.prompts=1", "--task.group=2", "--sampling.max_tokens=4", "--warmup.tokens_per_batch=256"]
    config = small(tmp_path, "--run.steps=1", "--warmup.steps=1", *short)
    config = replace(config, watch=replace(config.watch, console="lines"))
    engine = ["opening the policy tiny", "building the engine"]
    tlt.train(config)
    assert phases(tmp_path / "run") == ["reading the prompts", *engine]
    tlt.train(replace(config, run=replace(config.run, steps=2)), resume=True)
    resumed = ["reading the prompts", *engine, f"reading {tmp_path / 'run' / 'checkpoints' / 'step_1'}"]
    assert phases(tmp_path / "run") == resumed
    rollout(config)
    assert phases(tmp_path / "run-rollout") == ["reading the prompts", *engine]
    warmup(config, "toy")
    assert phases(tmp_path / "run-warmup") == ["opening the policy tiny", "reading toy"]
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  opening the policy tiny …") for line in said) == 4
    assert sum(line.startswith("  ready after ") for line in said) == 4


# ---- prompts that do not fit


def test_a_rollout_names_a_long_prompt_by_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the policy is opened. Prompts of the file that are not asked count too, unless they are filtered."""
    rows = ["1+1=", "5+5=", "2+2="]

    def write() -> None:
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": text, "answer": "4"}) for text in rows))

    write()
    files = [
        "--task.name=files",
        f"--task.path={tmp_path}/rows.jsonl",
        "--task.reward=gsm8k",
        "--sampling.max_tokens=4",
    ]
    last = task_of(small(tmp_path, *files)).sample(0, 3)[2].id
    line = int(last.partition(":")[2])
    rows[line - 1] = "2+" * 1500 + "2="
    write()
    few = ["--task.prompts=2", "--task.group=1"]
    rollout(small(tmp_path, *files, *few, "--task.long_prompts=filter", "--run.name=filtered"))
    monkeypatch.setattr("tlt.rollout.open_policy", lambda _: pytest.fail("it is too late"))
    expected = rf"the prompt rows\.jsonl:{line} has \d+ tokens; with sampling.max_tokens 4 .*1 of 3 prompts are"
    for asked in (few, ["--task.prompts=3"]):
        with pytest.raises(TaskError, match=expected):
            rollout(small(tmp_path, *files, *asked))
