"""Writing the next step's completions ahead: the run stays the same run, whoever wrote what, and when."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partialmethod
from itertools import count
from typing import Any

import pytest

from tests.fleets import CONFIG, Letters, open_tiny
from tests.test_engine import MODEL, kv_gib, requests
from tests.tiny import letters
from tlt.config import EngineSettings, RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.fleet import LocalFleet
from tlt.loop import Loop, Step
from tlt.spec.ahead import ChunkPolicy, Prices
from tlt.spec.budget import Budget, CostKind
from tlt.spec.shape import OFF
from tlt.spec.shape_policy import Fixed
from tlt.spec.speculation import Speculating
from tlt.spec.tuner import Tuner
from tlt.tasks.judge import DirectJudge
from tlt.tasks.judging import Judging
from tlt.types import Completion, Key, SamplingParams
from tlt.writing_ahead import AheadWriter, WrittenText, WrittenTexts, longest_first, rows_beside

STEPS = 3
HOT = replace(
    CONFIG,
    run=replace(CONFIG.run, steps=STEPS),
    sampling=SamplingParams(temperature=1.6, max_tokens=96),
    train=replace(CONFIG.train, learning_rate=3e-5),
)


def with_ahead(config: RunConfig = HOT, **spec: Any) -> RunConfig:
    return replace(config, spec=replace(config.spec, ahead="auto", **spec))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.fleet.open_policy", open_tiny)


def priced(monkeypatch: pytest.MonkeyPatch, rate: Callable[[int], float]) -> None:
    """No clock decides: chunks always pay, and requests of a batch write so many tokens per second each."""
    always = Prices(lambda shape: 1.0, 0.0, lambda shape, gain: True)
    monkeypatch.setattr(ChunkPolicy, "choose", partialmethod(_choose, ChunkPolicy.choose, always))
    monkeypatch.setattr(Tuner, "prices", lambda tuner, batch: replace(always, rate=rate(batch)))


def _choose(policy: ChunkPolicy, choose: Any, always: Prices, batch: int, left: list[int], prices: Any) -> Any:
    return choose(policy, batch, left, always)


@pytest.fixture
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cost nothing: as soon as some stand empty, they are written ahead."""
    priced(monkeypatch, lambda batch: 100.0)


def steps_of(config: RunConfig, fleet: LocalFleet | None = None, steps: int = STEPS) -> list[Step]:
    task, fleet = Letters(), fleet or LocalFleet(config, lambda event: None)
    loop = Loop(config, task, letters(), DirectJudge(task), fleet, lambda event: None)
    found = [loop.step(taken) for taken in range(steps)]
    assert fleet.worker.engine.idle
    assert fleet.worker.engine.report().pages.used == 0
    return found


def same(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.update.loss, one.update.grad_norm) == pytest.approx((other.update.loss, other.update.grad_norm))
        for mine, its in zip(one.rollouts, other.rollouts, strict=True):
            assert (mine.completion.key, mine.completion.tokens) == (its.completion.key, its.completion.tokens)
            assert (mine.reward, mine.completion.finish_reason) == (its.reward, its.completion.finish_reason)
            assert mine.completion.logprobs == pytest.approx(its.completion.logprobs, abs=1e-5)
            assert mine.completion.policy_logprobs == pytest.approx(its.completion.policy_logprobs, abs=1e-5)
    return True


def ahead_share(step: Step) -> float:
    marks = b"".join(rollout.completion.drafted for rollout in step.rollouts)
    return marks.count(2) / len(marks)


@pytest.fixture(scope="module")
def usual() -> Iterator[list[Step]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.fleet.open_policy", open_tiny)
        yield steps_of(HOT)


@pytest.mark.usefixtures("_beside")
@pytest.mark.parametrize("drafter", ["eagle", "none", "both"])
def test_a_run_that_writes_ahead_is_the_same_run(drafter: str, usual: list[Step]) -> None:
    told = steps_of(with_ahead(drafter=drafter))
    assert same(told, usual)
    assert ahead_share(told[0]) == 0.0
    assert all(ahead_share(step) > 0.05 for step in told[1:])


def test_where_every_row_costs_as_much_as_the_others_none_is_written_beside_them(
    usual: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    priced(monkeypatch, lambda batch: 100.0 / batch)
    monkeypatch.setattr(Judging, "all_in", lambda judging: True)  # nor while rewards are waited for
    told = steps_of(with_ahead())
    assert same(told, usual)
    assert all(ahead_share(step) == 0.0 for step in told)


def test_while_rewards_are_waited_for_the_worker_writes_ahead(
    usual: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards take as long as forty ticks."""
    priced(monkeypatch, lambda batch: 100.0 / batch)
    fleet, looks = LocalFleet(with_ahead(drafter="none"), lambda event: None), count()
    fleet.worker.ahead._rows_beside = lambda others: 1  # type: ignore[method-assign]  # the others come afterwards
    all_in = Judging.all_in
    monkeypatch.setattr(Judging, "all_in", lambda judging: next(looks) % 40 == 39 and all_in(judging))
    told = steps_of(with_ahead(drafter="none"), fleet)
    assert same(told, usual)
    assert all(ahead_share(step) > 0.05 for step in told[1:])


@pytest.mark.usefixtures("_beside")
def test_what_is_accepted_is_what_a_direct_comparison_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request accepts its text up to the first token that the updated policy writes differently."""
    config = with_ahead(replace(HOT, train=replace(HOT.train, learning_rate=3e-4)), drafter="none")
    fleet, given = LocalFleet(config, lambda event: None), dict[Key, tuple[int, ...]]()
    submit = EngineCore.submit

    def spy(engine: EngineCore, asked: Sequence[Request]) -> None:
        given.update((request.key, request.draft_tokens) for request in asked if request.draft_tokens)
        submit(engine, asked)

    steps_of(config, fleet, steps=1)
    monkeypatch.setattr(EngineCore, "submit", spy)
    task = Letters()
    step = Loop(config, task, letters(), DirectJudge(task), fleet, lambda event: None).step(1)
    common = differ = 0
    for rollout in step.rollouts:
        one = rollout.completion
        text = given.get(one.key, ())
        pairs = list(zip(text, one.tokens, strict=False))
        agree = next((place for place, (ours, its) in enumerate(pairs) if ours != its), len(pairs))
        common, differ = common + agree, differ + (agree < len(pairs))
        if text:
            assert one.drafted.count(2) <= agree
    report = fleet.worker.engine.report().speculation
    assert report is not None
    assert (report.ahead_compared - report.ahead_turned, report.ahead_turned) == pytest.approx((common, differ), abs=24)
    assert differ > 0, "the update must turn something to mean anything"
    assert common > 10 * differ


@pytest.mark.usefixtures("_beside")
def test_a_task_whose_prompts_change_between_two_looks_loses_only_time() -> None:
    """Text for another prompt than is asked then is dropped."""

    class Fickle(Letters):
        looks = 0

        def sample(self, step: int, count: int):  # type: ignore[no-untyped-def]
            self.looks += 1
            return [
                replace(prompt, content=str(prompt.content) + "ABCDEFGH"[self.looks])
                for prompt in super().sample(step, count)
            ]

    config = with_ahead(drafter="none")
    fleet, task = LocalFleet(config, lambda event: None), Fickle()
    loop = Loop(config, task, letters(), DirectJudge(task), fleet, lambda event: None)
    assert all(ahead_share(loop.step(taken)) == 0.0 for taken in range(2))
    assert task.looks == 4


@pytest.mark.usefixtures("_beside")
def test_a_restored_fleet_uses_no_text(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config, task = with_ahead(drafter="none"), Letters()
    fleet = LocalFleet(config, lambda event: None)
    loop = Loop(config, task, letters(), DirectJudge(task), fleet, lambda event: None)
    loop.step(0)
    fleet.snapshot()(tmp_path / "saved")
    fleet.restore(tmp_path / "saved", 1)
    assert ahead_share(loop.step(1)) == 0.0


# ---- texts


def request_of(number: int, prompt: tuple[int, ...] = (3, 4), max_tokens: int = 50) -> Request:
    return Request(Key(1, number), prompt, SamplingParams(max_tokens=max_tokens), f"p{number}")


def test_texts_are_given_to_the_requests_they_were_written_for_in_the_next_step_alone() -> None:
    texts, asked = WrittenTexts(), [request_of(number) for number in range(3)]
    texts.begin(7, asked)
    texts.put([WrittenText.of(asked[0].key, [5, 6]), WrittenText.of(asked[1].key, [7]), WrittenText.of(Key(9, 9), [1])])
    texts.put([WrittenText.of(asked[0].key, [5])])  # a shorter one
    assert [request.draft_tokens for request in texts.given(8, asked)] == [(5, 6), (7,), ()]
    assert all(not request.draft_tokens for step in (7, 9) for request in texts.given(step, asked))
    others = [request_of(0, prompt=(3, 5)), request_of(1, max_tokens=51)]
    assert all(not request.draft_tokens for request in texts.given(8, others))
    assert [len(request.draft_tokens) for request in texts.unfinished(7)] == [2, 1, 0]
    assert not texts.unfinished(8)
    texts.put([WrittenText.of(asked[0].key, [5, 6])], whole=True)
    assert [len(request.draft_tokens) for request in texts.unfinished(7)] == [1, 0]
    texts.begin(8, [])
    assert not any(request.draft_tokens for request in texts.given(9, asked))


def test_texts_have_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.writing_ahead._MOST_TOKENS", 100)
    texts, asked = WrittenTexts(), [request_of(number) for number in range(10)]
    texts.begin(0, asked)
    texts.put(WrittenText.of(request.key, range(5 * (number + 1))) for number, request in enumerate(asked))
    assert texts.tokens <= 100
    assert [len(request.draft_tokens) for request in texts.given(1, asked)][-2:] == [45, 50]  # the longest stay


# ---- the writer


def engine_of(**knobs: object) -> EngineCore:
    return EngineCore(MODEL, letters(), EngineSettings(**knobs), speculation=Speculating([], Fixed(OFF)))


class Free:
    """Rows cost nothing."""

    def __init__(self) -> None:
        self.budget = Budget()

    def prices(self, batch: int) -> Prices:
        return Prices(lambda shape: 1.0, 100.0, lambda shape, gain: True)


def drained(engine: EngineCore, writer: AheadWriter) -> dict[Key, Completion]:
    done = dict[Key, Completion]()
    while writer.others:
        done.update((completion.key, completion) for completion in writer.tick())
    return done


@pytest.mark.parametrize("pages", [17, 60])
def test_rows_written_ahead_give_way(pages: int) -> None:
    """Few pages: requests that are waited for take those of rows written ahead. What was cut is gone on with."""
    asked, upcoming = requests(12, group=3), requests(6, seed=6, params=[SamplingParams(max_tokens=60)])
    plain = engine_of(rows=8)
    plain.submit([*asked, *upcoming])
    expected = {completion.key: completion.tokens for completion in plain.drain()}
    engine = engine_of(rows=8, kv_gib=kv_gib(pages + 128 // 16, 16))
    writer = AheadWriter(engine, (1, 2, 4, 8), Free())
    writer.offer(upcoming)
    engine.submit(asked[:6])
    done = drained(engine, writer)
    assert writer.running
    cut = writer.give_way()
    assert engine.idle
    engine.submit(asked[6:])
    done |= drained(engine, writer)
    assert {key: one.tokens for key, one in done.items()} == {request.key: expected[request.key] for request in asked}
    while writer.open:
        assert not writer.tick()
    texts = WrittenTexts()
    texts.begin(0, upcoming)
    texts.put(writer.take_texts())
    for request in texts.given(1, upcoming):
        assert request.draft_tokens == expected[request.key]
    assert all(completion.tokens == expected[completion.key][: len(completion.tokens)] for completion in cut)
    assert writer.written == sum(len(expected[request.key]) for request in upcoming)
    assert engine.report().pages.used == 0


def test_no_row_is_written_ahead_while_a_request_waits() -> None:
    """Rows stand empty, but there are no pages for those who wait."""
    engine = engine_of(rows=16, kv_gib=kv_gib(12 + 128 // 16, 16))
    writer, crowded = AheadWriter(engine, (1, 2, 4, 8, 16), Free()), 0
    writer.offer(requests(4, seed=6))
    engine.submit(requests(8, group=1))
    while writer.others:
        waits, before = engine.running < engine.in_flight, writer.running
        crowded += waits and engine.running > 0
        writer.tick()
        assert not waits or writer.running <= before
    assert crowded > 5


def test_the_longest_expected_are_written_first() -> None:
    asked = [request_of(number) for number in range(4)]
    lengths = dict(zip((request.prompt_id for request in asked), (3.0, 9.0, 1.0, 5.0), strict=True))
    found = longest_first(asked, lambda request: lengths[request.prompt_id])
    assert [request.key.request for request in found] == [1, 3, 0, 2]


# ---- what it may cost


def rates(floor_s: float, row_s: float) -> dict[int, float]:
    return {size: 1.0 / max(floor_s, size * row_s) for size in (1, 2, 4, 8, 16, 32, 64)}


def test_rows_that_cost_next_to_nothing_are_written_ahead() -> None:
    """A GPU that reads its weights for one row as for sixteen; from there on each row costs its share."""
    gpu = rates(1e-2, 1e-2 / 16)
    assert rows_beside(2, gpu, kept=0.5) == (14, 0.0)
    assert rows_beside(16, gpu, kept=0.5) == (0, 0.0)  # twice as many would halve their pace
    assert rows_beside(2, gpu, kept=0.0) == (0, 0.0)
    assert rows_beside(1, rates(0.0, 1e-3), kept=1.0) == (0, 0.0)  # a CPU


def test_more_must_come_back_than_the_others_lose() -> None:
    dearer = {4: 100.0, 64: 93.0}  # 7 % slower for 60 rows more
    rows, slower = rows_beside(4, dearer, kept=0.9)
    assert (rows, slower) == (60, pytest.approx(0.07))
    assert rows_beside(4, dearer, kept=0.1) == (0, 0.0)
    assert rows_beside(4, {4: 100.0, 64: 80.0}, kept=1.0) == (0, 0.0)  # whatever comes back: nobody waits so long


def test_the_account_knows_what_rows_beside_cost_and_nothing_of_idle_time() -> None:
    account = Budget()
    account.ran(10.0, 10.0)
    account.shared(0.5)
    assert account.took_s == pytest.approx(10.0)
    assert (account.plain_s, account.spent[CostKind.AHEAD]) == (9.5, 0.5)
    account.nothing_waits = True
    account.ran(5.0, 1.0)
    account.charge(CostKind.CAPTURES, 1.0)
    account.tried(1.0)
    assert (account.took_s, account.tried_s, account.plain_s) == (pytest.approx(10.0), 0.0, 9.5)
