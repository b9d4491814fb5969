"""Turns end when they are told to, also when the work goes wrong."""

import pytest

from tlt.cluster.interference import Over, Turns, count


def test_turns_end_when_told_and_can_be_taken_again() -> None:
    turns = Turns()

    def work(over: Over) -> None:
        count(over)
        turns.end()

    for _ in range(2):
        ((began, ended),) = turns.take(0.02, work)
        assert began < ended
        assert int(began / 0.02) % 2 == 0  # only in its own turn


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
    assert turns.take(1e-3, lambda over: turns.end())  # the end before was the failed one's
