"""What a command makes is never lost and never written over anything: places are checked first, failures keep it."""

import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training import small
from tests.watching import step
from tlt.cli import main
from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError
from tlt.model.stream import Read, write_safetensors
from tlt.model.weights import load_policy
from tlt.outputs import check_new, keep, write_new
from tlt.policy import TINY_POLICY, Policy, open_policy
from tlt.warmup import warmup
from tlt.watch.events import RunFailed, StepFinished, WarmupStep, read_events, read_run
from tlt.watch.history import events_of
from tlt.watch.log import EventLog

SHORT = ["--warmup.tokens_per_batch=256"]
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    return tmp_path / "elsewhere"


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100,000 bytes: the system refuses as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- before the work


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "is there already, and nothing is written over; give --out another name, or remove"),
        ("full", "is there already"),
        ("file/below", r"cannot be written \(.*file is a file\)"),
        ("/proc/nowhere/out", r"cannot be written \(.*\); expected a place that can: give --out another"),
        ("nul\0", r"cannot be written \(embedded null byte\)"),
        ("x" * 300, r"cannot be written \(File name too long\)"),
    ],
)
def test_a_place_that_cannot_take_it_is_refused(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(ConfigError, match=rf"--out .*{why}"):
        check_new(tmp_path / place, "--out", directory=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_new_place_is_left_as_it_is(tmp_path: Path) -> None:
    check_new(tmp_path / "new" / "place", "--out")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "empty").mkdir()
    check_new(tmp_path / "empty", "--out", directory=True)
    with pytest.raises(ConfigError, match="empty is there already"):
        check_new(tmp_path / "empty", "--json")


def test_a_disk_without_room_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .* needs 1,000,000,000,000.0 MB, and its disk has [\d,.]+ MB left"):
        check_new(tmp_path / "out", "--out", 10**18)


@pytest.mark.parametrize("out", ["taken", "taken/config.json/below"])
def test_warmup_refuses_before_anything_is_loaded(
    tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt.warmup.open_policy", lambda _: pytest.fail("it is too late"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("mine")
    assert main(["warmup", "tiny", "toy", "--out", str(tmp_path / out), f"--run.out={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: error: --out {tmp_path / out} ")
    assert (tmp_path / "taken" / "config.json").read_text() == "mine"


def test_warmup_refuses_a_disk_without_room_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.warmup.SupervisedTrainer", lambda *_: pytest.fail("it is too late"))
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000, "total": usage.f_blocks}))
    with pytest.raises(ConfigError, match=r"policy needs \d+\.\d MB, and its disk has 0.0 MB left"):
        warmup(small(tmp_path), "toy")


@pytest.mark.parametrize("command", [["bench", "engine", "tiny"], ["simulate", "tiny", "--lengths", "median=9,cap=20"]])
def test_results_are_not_written_over(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("mine")
    assert main([*command, "--json", str(tmp_path / "results.json")]) == 2
    assert "results.json is there already, and nothing is written over" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "mine"


# ---- when it fails all the same


def test_what_is_written_is_whole_or_not_there(tmp_path: Path, elsewhere: Path) -> None:
    write_new(tmp_path / "a" / "file", lambda place: place.write_text("all") and None)
    assert (tmp_path / "a" / "file").read_text() == "all"

    def half(place: Path) -> None:
        place.mkdir()
        (place / "part").write_text("half")
        raise FULL

    with pytest.raises(TltError, match=r"b cannot be written \(No space left on device\); it is lost, as it could not"):
        write_new(tmp_path / "b", half)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "elsewhere"]
    assert list(elsewhere.iterdir()) == []


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path, elsewhere: Path) -> None:
    def late(place: Path) -> None:
        place.write_text("ours")
        (tmp_path / "out").write_text("theirs")

    with pytest.raises(TltError, match=r"out cannot be written \(it is there already\); it is at (.*) instead"):
        write_new(tmp_path / "out", late)
    assert (tmp_path / "out").read_text() == "theirs"
    (kept,) = elsewhere.rglob("out")
    assert kept.read_text() == "ours"


def trained(config: RunConfig, data: str, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """The policy of a warm-up that fails, as it was trained."""
    opened: list[Policy] = []
    monkeypatch.setattr("tlt.warmup.open_policy", lambda settings: opened.append(open_policy(settings)) or opened[0])
    with pytest.raises(TltError):
        warmup(config, data)
    return opened[0]


def same(policy: Policy, kept: Path) -> bool:
    dtype = policy.model.embed.dtype
    return torch.equal(load_policy(kept, dtype=dtype).embed, policy.model.embed) and not torch.equal(
        load_policy(TINY_POLICY, dtype=dtype).embed, policy.model.embed
    )


def test_a_disk_that_is_full_after_the_training_keeps_the_weights(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second file of the first attempt finds no room; the system says so as it does of any disk."""

    def limited(file: Path, tensors: dict[str, torch.Tensor], read: Read | None = None) -> None:
        if elsewhere in file.parents:
            return write_safetensors(file, tensors, read)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            write_safetensors(file, tensors, read)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr("tlt.model.weights.write_safetensors", limited)
    config = small(
        tmp_path, "--warmup.steps=1", *SHORT, f"--warmup.save={tmp_path / 'out'}", "--warmup.learning_rate=0.01"
    )
    policy = trained(config, "toy", monkeypatch)
    (kept,) = elsewhere.iterdir()
    assert same(policy, kept / "out")
    assert not (tmp_path / "out").exists()
    (failed,) = events_of(read_run(tmp_path / "run-warmup"), RunFailed)
    assert "out cannot be written (" in failed.message
    assert f"; it is at {kept / 'out'} instead, to be moved" in failed.message
    flags = ["--warmup.steps=1", *SHORT, f"--run.out={tmp_path}", "--run.name=again", "--watch.console=off"]
    assert main(["warmup", "tiny", "toy", "--out", str(tmp_path / "out"), *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: error: {tmp_path / 'out'} cannot be written (")


def test_events_that_find_no_room_keep_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = EventLog._append

    def full(self: EventLog, line: bytes) -> None:
        if b'"step": 2' in line or b"RunFailed" in line:
            raise TltError("events.jsonl: cannot be written")
        append(self, line)

    monkeypatch.setattr(EventLog, "_append", full)
    config = small(
        tmp_path, "--warmup.steps=3", *SHORT, f"--warmup.save={tmp_path / 'out'}", "--warmup.learning_rate=0.01"
    )
    with pytest.raises(TltError, match=r"cannot be written\. The policy after step 2: it is at (.*) instead") as caught:
        warmup(config, "toy")
    (kept,) = tmp_path.glob("out-*/out")
    assert str(kept) in str(caught.value)
    assert not torch.equal(load_policy(kept).embed, load_policy(TINY_POLICY).embed)
    assert [event.step for event in events_of(read_run(tmp_path / "run-warmup"), WarmupStep)] == [1]
    assert "could not be written down" not in capsys.readouterr().out  # the error says it


def test_without_room_anywhere_it_says_so(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, small_files: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = keep("out", lambda place: place.write_text("x" * 200_000) and None)
    assert said == f"it is lost, as it could not be written to {elsewhere}, {tmp_path} either"
    assert [*elsewhere.iterdir(), *tmp_path.glob("out*")] == []


def emit_many(log: EventLog) -> None:
    for number in range(1, 10_000):
        log.emit(step(number))


def test_half_a_line_of_events_is_taken_back(tmp_path: Path, small_files: None) -> None:
    """A later event, once there is room, does not stand on the torn one's line."""
    with EventLog(tmp_path / "events.jsonl") as log:
        with pytest.raises(TltError, match=r"events\.jsonl: (the disk is full|cannot be written)"):
            emit_many(log)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        log.emit(RunFailed("TltError", "the disk is full"))
    *steps, last = (record.event for record in read_events(tmp_path / "events.jsonl"))
    assert last == RunFailed("TltError", "the disk is full")
    assert [one.step for one in steps if isinstance(one, StepFinished)] == list(range(1, len(steps) + 1))
