"""Turns end when they are told to, also when the work goes wrong."""

import threading
import time

import pytest

from tlt.cluster.turns import Over, Turns, count


def test_turns_end_when_told_and_can_be_taken_again() -> None:
    turns = Turns()
    for _ in range(2):
        threading.Timer(0.2, turns.end).start()
        shifts = turns.take(0.02, count)
        assert shifts
        assert all(began < ended for began, ended in shifts)
        assert all(int(began / 0.02) % 2 == 0 for began, _ in shifts)


def test_an_end_told_beforehand_counts() -> None:
    turns = Turns()
    turns.end()
    assert turns.take(1.0, count) == []


def test_work_that_fails_leaves_nothing_behind() -> None:
    turns = Turns()

    def fail(over: Over) -> None:
        turns.end()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        turns.take(1e-3, fail)
    threading.Timer(0.1, turns.end).start()
    started = time.monotonic()
    turns.take(0.01, count)
    assert time.monotonic() - started > 0.05  # the end before was the failed one's
