"""What is still to be taken in, as the host knows it: never less than there is, and hardly more."""

import random

import pytest

from tlt.spec.backlog import PASS_SIZES, Backlog

MOST = PASS_SIZES[-1]


def test_what_ticks_wrote_is_taken_in_with_the_first_guess_if_it_is_little() -> None:
    backlog = Backlog(512, at_once=16)
    for _ in range(16):
        backlog.add_written(1, 1.0)
    assert (backlog.needs_passes(8), backlog.lag(8)) == (False, 0)
    backlog.add_written(1, 1.0)
    assert backlog.needs_passes(8)
    assert backlog.lag(8) == 32, "one pass, with the least room that suffices for 17 of each"
    backlog.clear()
    assert (backlog.most, backlog.needs_passes(8), backlog.lag(8)) == (0, False, 0)


def test_one_who_comes_costs_room_for_one() -> None:
    """Of 256 rows one has a prompt of a hundred: two passes with next to no room, not two full ones; and nobody has to
    catch up because of it. If all have, everybody has to."""
    backlog = Backlog(512, at_once=16)
    backlog.add_written(2, 1.5)
    backlog.add_prompts(1, 100)
    assert backlog.passes == 2
    assert backlog.pass_sizes(256) == [2.0, 1.0]
    assert (backlog.needs_passes(256), backlog.lag(256)) == (False, 0)
    backlog.add_prompts(255, 100)
    assert (backlog.needs_passes(256), backlog.lag(256)) == (True, 2 * MOST)


def test_those_who_come_together_have_room_pass_by_pass() -> None:
    """Sixteen prompts of a hundred are 6.25 positions of each of 256 rows: four in the first pass, beside what was
    written, the rest in the second, and not as much as for the first again."""
    backlog = Backlog(512, at_once=16)
    backlog.add_written(2, 1.5)
    backlog.add_prompts(16, 100)
    assert backlog.pass_sizes(256) == [6.0, 4.0]
    assert backlog.prompt_positions(256) == 6.25
    assert not backlog.needs_passes(256)


def test_what_newcomers_wrote_is_taken_in_behind_their_prompts() -> None:
    """By the pass in which the prompt ends, or by the next; and by any, where much was written."""
    backlog = Backlog(512, at_once=16)
    backlog.add_prompts(1, 128)
    backlog.add_prompts(10, 64)
    backlog.add_written(2, 2.0)
    assert backlog.pass_sizes(11)[1] * 11 >= 64 + 10 * 2
    assert backlog.pass_sizes(11)[2] * 11 >= 2
    backlog.clear()
    backlog.add_prompts(1, 200)
    backlog.add_prompts(200, 3)
    backlog.add_written(130, 130.0)
    assert backlog.pass_sizes(201)[2] * 201 >= 64 + 200 * 5


def test_no_more_than_the_window_counts() -> None:
    backlog = Backlog(128, at_once=4)
    backlog.add_written(1000, 1000.0)
    assert (backlog.passes, backlog.lag(3)) == (2, 2 * MOST)
    backlog.clear()
    backlog.fill()
    assert (backlog.passes, backlog.lag(3)) == (2, 2 * MOST)


@pytest.mark.parametrize("seed", range(400))
def test_there_is_room_for_whatever_was_written(seed: int) -> None:
    """Rows that write and come in at random: every pass has room for all that it may take in."""
    drawn = random.Random(seed)
    window = drawn.choice([64, 128, 512])
    rows, backlog = [0] * drawn.randint(1, 40), Backlog(window, at_once=9)
    for _ in range(drawn.randint(1, drawn.choice([2, 60]))):
        if drawn.random() < 0.3:
            edges = [edge for edge in (63, 64, 65, 128, window) if edge <= window]
            count, positions = drawn.randint(1, len(rows)), drawn.choice([drawn.randint(1, window), *edges])
            rows[:count] = [positions] * count
            backlog.add_prompts(count, positions)
        most = drawn.choice([drawn.randint(1, 8), drawn.randint(1, 90)])
        wrote = [drawn.randint(1, most) for _ in rows]
        rows = [row + new for row, new in zip(rows, wrote, strict=True)]
        backlog.add_written(most, sum(wrote) / len(rows))
    rows = [min(row, window) for row in rows]
    assert max(rows) <= backlog.most
    for room in backlog.pass_sizes(len(rows)):
        taken = [min(row, MOST) for row in rows]
        assert sum(taken) <= room * len(rows) + 1e-6
        rows = [row - new for row, new in zip(rows, taken, strict=True)]
    assert max(rows) == 0
