"""Who enters next: the line against a plain sort, and entering together."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.engine.admission import ADMISSIONS, FirstComeFirst, LongestFirst
from tlt.engine.pages import PageAllocator
from tlt.engine.request import Request, RequestState
from tlt.engine.scheduler import Scheduler
from tlt.engine.waiting import Waiting
from tlt.types import Key, SamplingParams


def state(order: int, prompt: int = 0, limit: int = 100, length: int = 5) -> RequestState:
    request = Request(Key(0, order), tuple(range(length)), SamplingParams(max_tokens=limit), f"prompt {prompt}")
    return RequestState(request, order, 0.0)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("seed", range(20))
def test_the_next_ones_are_those_a_sort_would_name(admission: str, seed: int) -> None:
    """Whatever comes, enters, leaves from the middle, and is learned of a prompt's answers meanwhile."""
    dice, order = random.Random(seed), ADMISSIONS[admission]()
    waiting, all_of_them = Waiting(order.rank), list[RequestState]()
    for number in range(300):
        event = dice.random()
        if event < 0.5 or not all_of_them:
            all_of_them.append(state(number, prompt=dice.randrange(12), limit=dice.choice((50, 100))))
            waiting.add(all_of_them[-1])
        elif event < 0.8:
            gone = dice.choice(all_of_them[:3] if event < 0.7 else all_of_them)
            all_of_them.remove(gone)
            waiting.remove(gone)
            order.started(gone.request)
            waiting.rank_changed(gone.request.prompt_id)
        else:
            request = state(0, prompt=dice.randrange(14)).request
            order.finished(request, dice.choice((4, 8, 16, 32)))  # so that ranks change and come back
            waiting.rank_changed(request.prompt_id)
        expected = sorted(all_of_them, key=lambda one: (order.rank(one.request), one.order))
        count = dice.randrange(40)
        assert waiting.first(count) == expected[:count]
        assert len(waiting) == len(all_of_them)
        assert waiting.first(len(waiting)) == expected


def test_a_rank_that_comes_back_names_nobody_twice() -> None:
    order = LongestFirst()
    waiting, two = Waiting(order.rank), [state(0), state(1)]
    for one in two:
        waiting.add(one)
    for length in (16, 32, 8):  # expected: 16, 24, 16
        order.finished(two[0].request, length)
        waiting.rank_changed(two[0].request.prompt_id)
    assert waiting.first(4) == two


def test_a_tick_does_not_look_at_all_who_wait() -> None:
    ranked = 0

    def rank(request: Request) -> tuple[float, ...]:
        nonlocal ranked
        ranked += 1
        return ()

    waiting = Waiting(rank)
    for number in range(5000):
        waiting.add(state(number, prompt=number // 8))
    ranked = 0
    for _ in range(100):
        (first,) = waiting.first(1)
        waiting.remove(first)
        waiting.rank_changed(first.request.prompt_id)
    assert ranked <= 300


def test_those_who_wait_enter_together_but_not_for_ever() -> None:
    """One row of 128 is free: nobody enters until 32 ticks have passed; with eight they do at once, and so does whoever
    is all that waits."""
    scheduler = Scheduler(PageAllocator(4096), 16, 128, 10**6, FirstComeFirst())
    for number in range(127):
        scheduler.submit(state(number))
    assert len(scheduler.plan().entries) == 127
    for number in range(127, 130):
        scheduler.submit(state(number))
    entered = [len(scheduler.plan().entries) for _ in range(40)]
    assert entered.index(1) == 32
    assert sum(entered) == 1
    scheduler = Scheduler(PageAllocator(4096), 16, 128, 10**6, FirstComeFirst())
    for number in range(120):
        scheduler.submit(state(number))
    scheduler.plan()
    for number in range(120, 140):
        scheduler.submit(state(number))
    assert len(scheduler.plan().entries) == 8
    scheduler = Scheduler(PageAllocator(4096), 16, 128, 10**6, FirstComeFirst())
    for number in range(128):
        scheduler.submit(state(number))
        assert len(scheduler.plan().entries) == 1


def test_a_prompt_under_way_is_not_held_up() -> None:
    """Its chunks come tick after tick, although only one row is free."""
    scheduler = Scheduler(PageAllocator(4096), 16, 128, 64, FirstComeFirst())
    for number in range(127):
        scheduler.submit(state(number))
    while scheduler.running < 127:
        scheduler.plan()
    for one in (state(127, length=400), state(128), state(129)):
        scheduler.submit(one)
    chunks = [bool(scheduler.plan().chunks) for _ in range(60)]
    first = chunks.index(True)
    assert chunks[first : first + 7] == [True] * 7


# ---- rows that move


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 12))
def test_rows_end_up_with_what_stays_in_them(picks: list[int], rows: int) -> None:
    """Whoever leaves in whatever order, and others come: made one after the other, moves bring every row its own."""
    scheduler = Scheduler(PageAllocator(4096), 16, rows, 10**6, FirstComeFirst())
    for number in range(40):
        scheduler.submit(state(number))
    content: dict[int, object] = {}
    for pick in picks:
        plan = scheduler.plan()
        for source, target in plan.moves:
            assert source > target
            content[target] = content[source]
        for entry in plan.entries:
            content[entry.row] = entry.request.key
        assert {req.row: req.state.request.key for req in plan.reqs} == {
            row: content[row] for row in range(len(plan.reqs))
        }
        assert len({row for move in plan.moves for row in move}) == 2 * len(plan.moves)
        for _ in range(pick % 4):
            if scheduler._reqs:
                scheduler.finish(scheduler._reqs[pick % len(scheduler._reqs)])


def test_a_batch_that_ends_at_once_moves_nothing() -> None:
    scheduler = Scheduler(PageAllocator(4096), 16, 64, 10**6, FirstComeFirst())
    for number in range(64):
        scheduler.submit(state(number))
    reqs = scheduler.plan().reqs
    for req in reqs:
        scheduler.finish(req)
    scheduler.submit(state(64))
    assert scheduler.plan().moves == ()
