"""What counts in a run's events: every step once, as it was computed last, whatever crashes and restarts there were."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tlt.watch.events
from tests.watching import config_of, events_of_steps, step, write_run
from tlt.errors import ReaderError, TltError
from tlt.watch.events import (
    EVENTS_FILE,
    CheckpointSaved,
    Event,
    ReaderFailed,
    Recorded,
    RolloutFinished,
    RunFailed,
    RunFinished,
    RunResumed,
    UnknownEvent,
    read_events,
    read_run,
)
from tlt.watch.history import counted, events_of, steps_of
from tlt.watch.log import EventLog


def test_a_resumed_run_has_every_step_once_as_computed_last(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, [*events_of_steps(0, 4), CheckpointSaved(4, "a", 0.1), *events_of_steps(4, 7)])
    again = [step(number, mean_reward=0.9) for number in range(5, 7)]
    run = read_run(write_run(config, [RunResumed(4, "a"), *again]))
    assert [taken.step for taken in steps_of(run)] == [1, 2, 3, 4, 5, 6]  # 7 was lost with the crash
    assert [taken.mean_reward for taken in steps_of(run)[4:]] == [0.9, 0.9]
    assert steps_of(run)[3] == step(4)
    assert [rollout.step for rollout in events_of(run, RolloutFinished)] == [1, 2, 3, 4]
    assert [saved.step for saved in events_of(run, CheckpointSaved)] == [4]


def test_a_run_that_begins_anew_forgets_the_one_before(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, events_of_steps(0, 5))
    run = read_run(write_run(config, [step(1, mean_reward=0.7)]))
    assert [taken.mean_reward for taken in steps_of(run)] == [0.7]


def test_a_life_that_did_nothing_costs_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, events_of_steps(0, 5))
    run = read_run(write_run(config, [RunFailed("ModelError", "moved")]))
    assert len(steps_of(run)) == 5


def test_a_resumed_run_did_not_end_where_it_was_stopped(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, [*events_of_steps(0, 2), RunFailed("KeyboardInterrupt", "")])
    run = read_run(write_run(config, [RunResumed(2, "a"), *events_of_steps(2, 3), RunFinished(1.0)]))
    assert events_of(run, RunFailed) == ()
    assert len(events_of(run, RunFinished)) == 1


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=5))
def test_steps_are_whole_after_any_number_of_crashes(lives: list[tuple[int, int]]) -> None:
    """Each life resumes from some checkpoint at or before where the last one stopped, and takes a few steps."""
    records = [Recorded(0.0, event) for event in (tlt.watch.events.RunStarted("train", 0, "0"), *events_of_steps(0, 3))]
    reached = 3
    for back, more in lives:
        start = max(0, reached - back)
        reached = start + more
        events = [tlt.watch.events.RunStarted("train", 0, "0"), RunResumed(start, ""), *events_of_steps(start, reached)]
        records += [Recorded(0.0, event) for event in events]
    steps = [record.event for record in counted(records) if isinstance(record.event, tlt.watch.events.StepFinished)]
    assert steps == [step(number) for number in range(1, reached + 1)]


def test_every_kind_of_event_can_be_read_back() -> None:
    kinds = {kind.__name__ for kind in Event.__subclasses__()} - {"UnknownEvent"}
    assert kinds == set(tlt.watch.events._KINDS)


def test_a_field_added_later_may_be_missing(tmp_path: Path) -> None:
    path = write_run(config_of(tmp_path), events_of_steps(0, 1)) / EVENTS_FILE
    lines = path.read_text().splitlines()
    written = next(line for line in lines if "RolloutFinished" in line)
    older = written[: written.index(', "lengths"')] + "}}"
    path.write_text("\n".join([*lines, older, older.replace('"n": 100, ', "")]) + "\n")
    complete, incomplete = read_events(path)[-2:]
    assert isinstance(complete.event, RolloutFinished)
    assert complete.event.lengths == ()
    assert isinstance(incomplete.event, UnknownEvent)


class Fragile:
    """A reader that fails from its second event on."""

    name = "fragile"

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def show(self, record: Recorded) -> None:
        self.seen.append(record.event)
        if len(self.seen) > 1:
            raise ReaderError("no network")

    def close(self) -> None:
        raise AssertionError("it was left out")


class Sturdy(Fragile):
    name = "sturdy"
    closed = False

    def show(self, record: Recorded) -> None:
        self.seen.append(record.event)

    def close(self) -> None:
        self.closed = True


def test_a_reader_that_fails_costs_no_event_and_is_told(tmp_path: Path) -> None:
    fragile, sturdy = Fragile(), Sturdy()
    with EventLog(tmp_path / "events.jsonl", [fragile, sturdy]) as log:
        for number in range(1, 5):
            log.emit(step(number))
    told = [record.event for record in read_events(tmp_path / "events.jsonl")]
    failed = ReaderFailed("fragile", "no network")
    assert told == [step(1), step(2), failed, step(3), step(4)]
    assert fragile.seen == [step(1), step(2)]
    assert sturdy.seen == told
    assert sturdy.closed


def test_readers_see_what_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    class Checking(Sturdy):
        def show(self, record: Recorded) -> None:
            assert read_events(path)[-1] == record
            super().show(record)

    checking = Checking()
    with EventLog(path, [checking]) as log:
        log.emit(step(1))
    assert checking.seen == [step(1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.watch.log._drop_torn_line", lambda path: None)  # it has no end
    with EventLog("/dev/full") as log, pytest.raises(TltError, match=r"/dev/full: cannot be written \(No space left"):
        log.emit(step(1))
