"""Cost books from committed records: they foresee the rollouts that were measured in them."""

import sys
from pathlib import Path

import pytest

import tlt
from tlt.cli import main
from tlt.sim.book import read_book

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import cost_books
from cost_books import BOOKS, PAPER_LENGTHS, TensorParallel, book_7b, book_32b, length_of, paper_ranks, ranks_of_chain


def test_the_books_are_what_the_records_say() -> None:
    assert read_book(BOOKS / "h200_7b.json") == book_7b()
    assert read_book(BOOKS / "h200_32b_tp4_assumed.json") == book_32b(book_7b(), TensorParallel())


def test_measured_rollouts_are_foreseen() -> None:
    """A rollout of a 7B shape on an H200, plainly and by a warm tuner, within 3 %."""
    for row in cost_books.check().values():
        assert abs(row["error"]) < 0.03
        assert row["foreseen_ticks"] == pytest.approx(row["measured_ticks"], rel=0.15)


def test_the_papers_accept_lengths_are_met() -> None:
    ranks = paper_ranks()
    for (depth, verify), length in PAPER_LENGTHS.items():
        assert length_of(ranks, depth, verify) == pytest.approx(length, rel=0.04)


def test_chances_by_depth_give_the_accept_lengths_they_came_from() -> None:
    ranks = ranks_of_chain([(3, 3.1), (7, 4.4)])
    assert len(ranks) == 7
    assert length_of(ranks, 3, 4, width=1) == pytest.approx(3.1)
    assert length_of(ranks, 7, 8, width=1) == pytest.approx(4.4)


def test_steps_are_foreseen_from_a_book_and_the_rest_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = "median=40,sigma=0.5,cap=200,prompt=16,rest=8"
    flags = ["--task.prompts=4", "--task.group=2", "--workers", "1,2", "--rollouts", "1"]
    assert main(["simulate", str(BOOKS / "h200_7b.json"), "--lengths", lengths, *flags]) == 0
    told = capsys.readouterr().out
    assert "Steps, if their other 8 s on 1 worker are shared by all: 1: 8." in told
    assert "; 2: 4." in told or ", 2: 4." in told
    assert "×)" in told
