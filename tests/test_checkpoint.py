"""Checkpoints are whole or not there: whatever operation a run is stopped at, whatever the disk says."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.errors import CheckpointError
from tlt.train.checkpoint import Checkpoints, load_state, save_state
from tlt.train.checksums import SUMS, damage


def fill(content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy" / "weights").write_text(content)
        (directory / "run.json").write_text(content)

    return write


def contents(path: Path) -> list[str]:
    return [(path / "policy" / "weights").read_text(), (path / "run.json").read_text()]


def test_the_newest_is_found_and_the_last_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    for step in (2, 9, 10):  # by number, not by name
        checkpoints.write(step, fill(f"step {step}"))
    assert checkpoints.steps() == [9, 10]
    step, path = checkpoints.newest() or (0, tmp_path)
    assert (step, path.name, contents(path)) == (10, "step_10", ["step 10"] * 2)
    assert {entry.name for entry in checkpoints.directory.iterdir()} == {"step_9", "step_10"}


def test_a_step_that_is_saved_again_replaces_itself(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(3, fill("first"))
    assert contents(checkpoints.write(3, fill("second"))) == ["second"] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


SYSTEM_CALLS = ("mkdir", "open", "fsync", "close", "rename", "replace", "rmdir", "unlink")


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Stops at the given system call, and at every one after it. Tells how many there were."""
    count = 0

    def count_up(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                raise Killed
            return real(*arguments, **options)

        return call

    for name in SYSTEM_CALLS:
        monkeypatch.setattr(os, name, count_up(getattr(os, name)))
    return lambda: count


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    """Before each of them in turn: what is found is the old checkpoint or the new one, whole; and writing goes on."""
    seen = set()
    for number in range(200):
        directory = tmp_path / str(number)
        checkpoints = Checkpoints(directory, keep=1)
        checkpoints.write(1, fill("old"))
        with pytest.MonkeyPatch.context() as patch:
            calls = killed_at(patch, number)
            with suppress(Killed):
                checkpoints.write(2, fill("new"))
            ended = calls() <= number
        step, path = Checkpoints(directory, keep=1).newest() or (0, tmp_path)
        assert contents(path) == [{1: "old", 2: "new"}[step]] * 2
        seen.add(step)
        Checkpoints(directory, keep=1).write(3, fill("next"))
        assert [entry.name for entry in directory.iterdir()] == ["step_3"]
        if ended:
            break
    assert ended
    assert number > 20
    assert seen == {1, 2}


def test_everything_is_forced_to_disk_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    fsync, rename = os.fsync, os.rename
    order: list[str] = []

    def forced(handle: int) -> None:
        fsync(handle)
        order.append(str(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path)))

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        order.append("rename")

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(os, "rename", renamed)
    checkpoints.write(1, fill("x"))
    before, after = order[: order.index("rename")], order[order.index("rename") + 1 :]
    names = ("", f"/{SUMS}", "/run.json", "/policy", "/policy/weights")
    assert {f"checkpoints/.step_1.writing{name}" for name in names} <= set(before)
    assert after == ["checkpoints", "."]


# ---- checksums


def test_the_list_of_checksums_is_one_that_sha256sum_reads(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(1, fill("x"))
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=path, check=True, capture_output=True)
    (path / "run.json").write_text("y")
    told = subprocess.run(["sha256sum", "--check", SUMS], cwd=path, check=False, capture_output=True, text=True)
    assert "run.json: FAILED" in told.stdout


def test_every_byte_counts(tmp_path: Path) -> None:
    """Of the files, and of the list itself: each of them flipped in turn, and the list cut off after each."""
    path = Checkpoints(tmp_path).write(1, fill("some words"))
    assert damage(path) == {}
    for name in ("policy/weights", "run.json", SUMS):
        content = (path / name).read_bytes()
        for index in range(len(content)):
            (path / name).write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            assert list(damage(path)) == [name]
            (path / name).write_bytes(content[:index])
            assert list(damage(path)) == [name]
        (path / name).write_bytes(content)
    assert damage(path) == {}


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(1, fill("x"))
    (path / "run.json").unlink()
    (path / "run.json").mkdir()
    assert damage(path) == {"run.json": "run.json cannot be read (Is a directory)"}


# ---- weights kept for longer than what resuming needs

STATE = ("*.json",)


def whole(checkpoints: Checkpoints) -> list[int]:
    return [step for step in checkpoints.steps() if not checkpoints.problems(step)]


def test_weights_are_kept_for_longer_than_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=4, keep_state=2, state=STATE)
    for step in range(1, 7):
        checkpoints.write(step, fill(f"step {step}"))
    assert checkpoints.steps() == [3, 4, 5, 6]
    assert whole(checkpoints) == [5, 6]
    for step in (3, 4):
        path = checkpoints.path(step)
        assert damage(path) == {}  # what is left is as it was written
        assert (path / "policy" / "weights").read_text() == f"step {step}"
        assert sorted(entry.name for entry in path.iterdir()) == [SUMS, "policy"]
        assert "weights only" in checkpoints.problems(step)[STATE[0]]


def test_killed_at_every_system_call_while_state_is_dropped(tmp_path: Path) -> None:
    dropped = set()
    for number in range(200):
        checkpoints = Checkpoints(tmp_path / str(number), keep=2, keep_state=1, state=STATE)
        checkpoints.write(1, fill("old"))
        with pytest.MonkeyPatch.context() as patch:
            calls = killed_at(patch, number)
            with suppress(Killed):
                checkpoints.write(2, fill("new"))
            ended = calls() <= number
        assert whole(checkpoints)[-1:] == checkpoints.steps()[-1:]  # the newest can be gone on from
        assert damage(checkpoints.path(1)) == {}
        dropped.add(1 not in whole(checkpoints))
        checkpoints.write(3, fill("next"))
        assert sum(1 for _ in checkpoints.directory.rglob("*.json")) == 1
        if ended:
            break
    assert ended
    assert dropped == {True, False}


def test_later_checkpoints_are_set_aside_until_there_is_a_newer_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.write(step, fill(f"step {step}"))
    checkpoints.go_on_from(1)
    assert checkpoints.steps() == [1]
    assert contents(tmp_path / "step_3.aside") == ["step 3"] * 2
    checkpoints.go_on_from(1)
    checkpoints.write(2, fill("again"))
    assert {entry.name for entry in tmp_path.iterdir()} == {"step_1", "step_2"}
    assert contents(tmp_path / "step_2") == ["again"] * 2


def test_a_checkpoint_of_an_earlier_step_is_not_removed_for_later_ones(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).write(9, fill("of another run"))
    Checkpoints(tmp_path, keep=1).write(1, fill("new"))
    assert contents(tmp_path / "step_1") == ["new"] * 2


@pytest.mark.parametrize("leftover", [".step_7.writing", ".step_7.replaced", "step_7.tmp", "step_", "notes"])
def test_what_is_no_checkpoint_is_not_picked_up(tmp_path: Path, leftover: str) -> None:
    Checkpoints(tmp_path).write(2, fill("x"))
    (tmp_path / leftover).mkdir()
    assert Checkpoints(tmp_path).steps() == [2]


def refused(checkpoints: Checkpoints, write: Callable[[Path], None]) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.write(9, write)
    return str(caught.value)


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    def full(directory: Path) -> None:
        fill("half")(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert "there was none before it" in refused(checkpoints, full)
    kept = checkpoints.write(8, fill("x"))
    told = refused(checkpoints, full)
    assert f"the last one, {kept}, is intact" in told
    assert "No space left on device" in told
    assert "make room" in told
    assert contents(kept) == ["x"] * 2
    assert [entry.name for entry in checkpoints.directory.iterdir()] == ["step_8"]  # and its room is free again


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file is in the way")
    assert "Not a directory; expected a directory" in refused(Checkpoints(tmp_path / "there"), fill("x"))
    (tmp_path / "checkpoints" / "step_9").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_9.replaced").write_text("likewise")
    told = refused(Checkpoints(tmp_path / "checkpoints"), fill("x"))
    assert "see that the directory can be written to" in told


LIMITED = """
import resource, sys, torch
from pathlib import Path
from tlt.errors import CheckpointError
from tlt.train.checkpoint import Checkpoints, save_state
checkpoints = Checkpoints(Path(sys.argv[1]))
small, large = ({"weights": torch.ones(size)} for size in (10, 100_000))
checkpoints.write(1, lambda directory: save_state(small, directory, "optimizer"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoints.write(2, lambda directory: save_state(large, directory, "optimizer"))
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    """Not an error we made up: the system stops a real file half-way."""
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert f"{tmp_path / 'step_1'}, is intact" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]
    assert torch.equal(load_state(tmp_path / "step_1", "optimizer")["weights"], torch.ones(10))


# ---- states

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers()
nested = st.recursive(
    plain,
    lambda part: (
        st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(max_size=5), nested | st.dictionaries(st.integers(), nested), max_size=4))
def test_plain_values_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    directory = tmp_path_factory.mktemp("state")
    save_state(state, directory, "x")
    assert load_state(directory, "x") == state


def test_an_optimizer_comes_back_bit_by_bit(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    adam = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(3):
        (weight**2).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    masters = [torch.randn(2, 4).T, torch.randn(6, 4, dtype=torch.float32)[::2]]  # one is not contiguous
    save_state(
        {"adam": adam.state_dict(), "masters": masters, "half": torch.ones(3, dtype=torch.bfloat16)}, tmp_path, "o"
    )
    loaded = load_state(tmp_path, "o")
    again = torch.optim.AdamW([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    again.load_state_dict(loaded["adam"])
    old, new = (optimizer.state_dict() for optimizer in (adam, again))
    assert old["param_groups"] == new["param_groups"]
    for name, value in old["state"][0].items():
        assert torch.equal(value, new["state"][0][name])
    assert all(torch.equal(a, b) for a, b in zip(masters, loaded["masters"], strict=True))
    assert loaded["half"].dtype == torch.bfloat16


def test_a_state_that_cannot_be_saved_or_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a state holds a set"):
        save_state({"x": {1, 2}}, tmp_path, "x")
    with pytest.raises(CheckpointError, match="resume from another checkpoint"):
        load_state(tmp_path, "y")
    save_state({"x": torch.ones(100)}, tmp_path, "z")
    file = tmp_path / "z.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="z cannot be read"):
        load_state(tmp_path, "z")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "w.json is nested deeper than"),
        ("[1]", "w.json holds .1.; expected an object"),
        ("\xff", "w.json is not valid JSON"),
        ('{"x": {"__tensor__": "7"}}', "w cannot be read"),
        ('{"x": {"__tensor__": 7}}', "w cannot be read"),
        ('{"x": {"__tuple__": 7}}', "w cannot be read"),
        ('{"x": {"__items__": [1]}}', "w cannot be read"),
        ('{"x": {"__items__": [[{}, 1]]}}', "w cannot be read"),
    ],
)
def test_words_of_a_state_that_are_none_are_told(tmp_path: Path, text: str, expected: str) -> None:
    save_state({"x": torch.ones(1)}, tmp_path, "w")
    (tmp_path / "w.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{expected}.*; resume from another checkpoint"):
        load_state(tmp_path, "w")
