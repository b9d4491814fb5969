"""`tlt watch` without a browser: what its server answers, how the command ends, and a run that is read on."""

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.pages import MARKUP, completion, some_steps, whole_run, whole_story, write_events
from tests.watching import step
from tlt.cli import main
from tlt.watch.events import EVENTS_FILE, RunFinished, RunResumed, StepFinished, read_run
from tlt.watch.history import counted
from tlt.watch.live import LiveRun, LiveRuns
from tlt.watch.metrics import columns_of
from tlt.watch.server import build_app


def test_only_what_is_there_is_answered_and_nothing_can_be_changed(tmp_path: Path) -> None:
    whole_run(tmp_path / "runs")
    (tmp_path / "secret.json").write_text("{}")
    with TestClient(build_app(tmp_path / "runs"), base_url="http://localhost") as client:
        assert client.get("/").status_code == 200
        assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
        assert client.get("/data/runs.json").json()["runs"][0]["name"] == "whole"
        for path in ("/data/../secret.json", "/data/%2e%2e/run.json", "/data/whole/events.jsonl", "/report.js", "/x"):
            assert client.get(path).status_code == 404
        assert client.get("/data/whole/run.json?rows=x&lives=-1&at=9e9").json()["from"] == 0
        for method in ("POST", "PUT", "DELETE"):
            assert client.request(method, "/data/whole/run.json").status_code == 405
        assert client.get("/", headers={"host": "evil.example"}).status_code == 400, (
            "a page elsewhere may ask in our name"
        )
    with TestClient(build_app(tmp_path / "runs", secret="s3cret")) as client:
        assert client.get("/").status_code == 404
        assert client.get("/data/runs.json").status_code == 404
        assert client.get("/s3cret/data/runs.json").status_code == 200
        assert client.get("/s3cret/").text.startswith("<!doctype html>")


def test_the_command_says_where_it_listens_and_ends_when_told(tmp_path: Path) -> None:
    whole_run(tmp_path)
    command = [sys.executable, "-m", "tlt", "watch", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.readline()
    found = re.fullmatch(r"tlt watch: http://[\w.-]+:(\d+)/([\w-]{24})/\n", said)
    assert found
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/{found[2]}/") as answer:
        assert answer.status == 200
    child.send_signal(signal.SIGINT)
    assert child.wait() == 0
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.stdout.close()
    child.stderr.close()


def test_mistakes_with_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["watch", str(tmp_path / "no")], "is no directory"),
        (["watch", str(tmp_path), "--port", "http"], "expected a number up to 65535"),
        (["watch", "--run.seed", "1"], "takes no settings, found --run.seed"),
        (["watch", str(tmp_path), "--host", "no.such.host.invalid"], "choose others"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


# ---- reading on


def test_what_is_read_on_is_what_is_read_at_once(tmp_path: Path) -> None:
    """A run that is resumed, line by line: the numbers are those of the whole file."""
    home = write_events(tmp_path, "shown", [*some_steps(2), *whole_story(5)[:-1]])
    write_events(tmp_path, "shown", [RunResumed(3, "there"), step(4, mean_reward=0.75), RunFinished(1.0)])
    text = (home / EVENTS_FILE).read_bytes()
    (home / EVENTS_FILE).write_bytes(b"")
    live = LiveRun(home)
    assert live.columns.steps == []
    for place in range(0, len(text), 997):
        with (home / EVENTS_FILE).open("ab") as file:
            file.write(text[place : place + 997])
        live.refresh()
        assert live.columns == columns_of(live.run), "columns are carried on from one look to the next"
    whole = [record.event for record in counted(read_run(home).events) if isinstance(record.event, StepFinished)]
    found = [record.event for record in counted(live.run.events) if isinstance(record.event, StepFinished)]
    assert found == whole
    assert live.lives == 2
    assert not live.refresh()
    (home / EVENTS_FILE).write_bytes(text[: text.index(b"\n") + 1])  # cut short: read again from the start
    live.refresh()
    assert (live.lives, len(live.run.events)) == (1, 1)


def test_a_directory_of_one_run_is_that_run(tmp_path: Path) -> None:
    home = whole_run(tmp_path)
    assert list(LiveRuns(home).refreshed()) == ["whole"]
    assert LiveRuns(tmp_path).one("../whole") is None
    assert completion(0, 1)["tokens"] == 3
    assert MARKUP.startswith("<script>")
