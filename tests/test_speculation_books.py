"""What speculation tells of itself: counts, costs kept apart from one-off work, and alarms that reach the log."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tlt.rollout
import tlt.spec.speculation as speculation_module
from tests.test_engine import MODEL, requests
from tests.test_learned import drafting
from tests.tiny import letters
from tlt.config import EngineSettings, RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.spec.acceptance import AcceptResult, Alarm, CollapseWatch, RankHits, rank_hits_of
from tlt.spec.costs import DECODE, INDEX, INGEST, LOOKUP, UNTIMED, VERIFY, CostModel, TickTimes
from tlt.spec.drafter import Drafter
from tlt.spec.shape import OFF, Draft, Shape
from tlt.spec.shape_policy import Fixed, Outcome
from tlt.spec.speculation import LifecycleQueue, Speculating, Speculation
from tlt.spec.suffix import SuffixDrafting, SuffixIndex
from tlt.spec.tuner import Tuner
from tlt.types import Key, SamplingParams
from tlt.watch.events import AcceptanceCollapsed, RolloutFinished, read_run

CHAIN = Shape(("x",), 2, 1, 3)
SUFFIX = Shape(("suffix",), 4, 1, 5)
PARAMS = SamplingParams()


class Recording(Fixed):
    """Remembers what it observed; one alarm on the way."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.outcomes: list[Outcome] = []

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        self.outcomes.append(outcome)
        return (Alarm("x", outcome.shape, 1.0, 3.0, 64),) if len(self.outcomes) == 2 else ()


class Slow(Drafter):
    """Catches up for 5 seconds and drafts for 2, on a clock of its own."""

    name = "x"

    def __init__(self) -> None:
        self.now = 0.0

    def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        self.now += 5.0

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        self.now += 2.0
        return [Draft((7, 8), (-1, 0), (0.5, 0.5))] * len(keys)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    drafter = Slow()

    class Clock:
        perf_counter = staticmethod(lambda: drafter.now)

    monkeypatch.setattr(speculation_module, "time", Clock)
    return drafter


def test_drafters_on_the_host_are_parts_of_the_tick(slow: Slow) -> None:
    tuner = Recording(CHAIN)
    speculating = Speculating([slow], tuner)
    speculating.propose([Key(0, 0), Key(0, 1)], [[1], [2]], CHAIN)
    speculating.verified(CHAIN, [[7, 8, 9], [4]], TickTimes({VERIFY: 3.0}, 10.0, one_off_s=3.0))  # a capture took 3
    speculating.propose([Key(0, 0)], [[1]], CHAIN)
    speculating.verified(CHAIN, [[7, 5]], TickTimes())
    assert len(tuner.outcomes) == 1  # the newest is looked into when somebody asks
    assert speculating.choose(1) == CHAIN
    first, second = tuner.outcomes
    assert first.times == TickTimes({VERIFY: 3.0, INDEX: 5.0, LOOKUP: 2.0}, 10.0, 3.0)
    assert (first.draft_extend_s, first.one_off_s) == (5.0, 8.0)
    assert second.times.seconds is None
    report = speculating.report()
    assert (report.drafting_s, report.one_off_s) == (4.0, 13.0)
    assert (report.verifies, report.accepted, report.accept_length) == (3, 3, 2.0)
    assert len(report.alarms) == 1
    assert report.tuner is None


def test_what_is_ingested_first_is_told_beside_its_part() -> None:
    """Who must catch up is not asked to draft behind a verification; what was ingested says what it was."""

    class Learned(Drafter):
        name, on_device, left_out, brought, asked = "x", True, 64, 6.25, 0
        version = arrived = 0

        def lag(self, rows: int) -> int:
            return self.left_out

        def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
            self.left_out = 0

        def ingested(self) -> float:
            return self.brought

        def start_trees(self, keys: Sequence[Key], shape: Shape) -> None:
            self.asked += 1

    tuner, learned = Recording(CHAIN), Learned()
    speculating, times = Speculating([learned], tuner), TickTimes({VERIFY: 3.0, INGEST: 2.0}, 6.0)
    speculating.prepare([Key(0, 0)])
    assert learned.asked == 0
    for _ in range(2):
        speculating.propose([Key(0, 0)], [[1]], CHAIN)
        speculating.verified(CHAIN, [[7]], times, 90.0)
    speculating.report()
    told = [(outcome.lag, outcome.ingested, outcome.draft_extend_s) for outcome in tuner.outcomes]
    assert told == [(64, 0.0, 2.0), (0, 6.25, 0.0)]
    assert [outcome.context for outcome in tuner.outcomes] == [90.0, 90.0]
    speculating.prepare([Key(0, 0)])
    assert learned.asked > 0


def test_ticks_are_counted_by_batch_and_shape() -> None:
    tuner = Fixed(CHAIN)
    speculating = Speculating([Drafter()], tuner)
    shapes = iter([CHAIN, CHAIN, OFF, CHAIN])
    tuner.choose = lambda batch, lag=0: next(shapes)  # type: ignore[method-assign]
    assert speculating.choose(0) == OFF  # nobody runs: no tick of anyone's choosing
    speculating.choose(4)
    before = speculating.report()
    for _ in range(3):
        speculating.choose(2)
    report = speculating.report()
    assert report.ticks == {(4, CHAIN): 1, (2, CHAIN): 2, (2, OFF): 1}
    assert (report.switches, report.off_share) == (2, 0.25)
    later = report.since(before)
    assert later.ticks == {(2, CHAIN): 2, (2, OFF): 1}
    assert later.switches == 2


def test_a_tuners_books_can_be_read_from_any_point() -> None:
    tuner = Tuner([CHAIN], CostModel(lambda size: size))
    speculating = Speculating([Drafter()], tuner)
    walked = [AcceptResult(1, (RankHits((1,), 1),)), AcceptResult(2, (RankHits((1, 1)),))]
    tuner.observe(Outcome(CHAIN, 2, walked, TickTimes({VERIFY: 2.0}, 2.0)))
    before = speculating.report()
    tuner.observe(Outcome(OFF, 4, (), TickTimes({DECODE: 1.0}, 1.0)))
    tuner.observe(Outcome(CHAIN, 2, walked[:1], TickTimes({VERIFY: 3.0}, 3.0)))
    later = speculating.report().since(before).tuner
    assert later is not None
    assert (later.ticks, later.verifies, later.accepted, later.accept_length, later.seconds) == (2, 1, 1, 2.0, 4.0)
    assert later.ticks_by_shape == {(4, OFF): 1, (2, CHAIN): 1}


def test_an_engine_tells_what_its_speculation_did() -> None:
    engine = EngineCore(
        MODEL, letters(), EngineSettings(rows=8), speculation=Speculating([SuffixDrafting(10_000)], Fixed(SUFFIX))
    )
    engine.submit(requests(6, group=3))
    tokens = sum(len(completion.tokens) for completion in engine.drain())
    report = engine.report().speculation
    assert report is not None
    assert report.verifies == sum(batch * ticks for (batch, _), ticks in report.ticks.items())
    assert report.verifies + report.accepted >= tokens - 6  # the first tick is plain: nobody ran when it was chosen
    assert EngineCore(MODEL, letters()).report().speculation is None


def test_a_tick_with_prefill_in_it_tells_no_time() -> None:
    tuner = Recording(SUFFIX)
    engine = EngineCore(
        MODEL, letters(), EngineSettings(rows=8), speculation=Speculating([SuffixDrafting(10_000)], tuner)
    )
    engine.submit(requests(2, seed=1))
    engine.tick()
    engine.tick()
    engine.submit([Request(Key(9, 9), tuple(range(2, 30)), PARAMS)])
    engine.tick()
    engine.report()  # the last tick is looked into when somebody asks
    alone, with_prefill = tuner.outcomes[-2:]
    assert alone.times.seconds is not None
    assert with_prefill.times.seconds is None
    assert alone.times.parts.keys() == with_prefill.times.parts.keys() == {VERIFY, LOOKUP, INDEX}
    assert with_prefill.batch == 3


def test_the_suffix_drafter_catches_up_before_it_drafts() -> None:
    """Long texts are indexed in `extend`; what one tick can have added is left to `draft`."""
    drafter, key = SuffixDrafting(10_000), Key(0, 0)
    drafter.begin(key, "p", (5, 6, 7, 8), PARAMS)
    completion = [5, 6, 7, 8] * 4
    drafter.extend([key], [completion], SUFFIX)
    assert drafter._indexed[key] == 16
    drafter.extend([key], [[*completion, 5, 6]], SUFFIX)
    assert drafter._indexed[key] == 16
    (draft,) = drafter.draft([key], [[*completion, 5, 6]], SUFFIX)
    assert drafter._indexed[key] == 18
    assert draft.tokens == (7, 8, 5, 6)


def test_a_policy_run_of_every_size_is_timed_on_request() -> None:
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=8))
    seconds = engine.warm_up([1, 4, 8])
    assert set(seconds) == {1, 4, 8}
    assert all(value > 0 for value in seconds.values())


class Told(Fixed):
    """One shape for ever; remembers each request's walk."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.results: list[list[AcceptResult]] = []

    def choose(self, batch: int, lag: int = 0) -> Shape:
        return super().choose(batch) if batch else OFF

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        if not outcome.shape.off:
            self.results.append(list(outcome.results))
        return ()


def test_what_a_drafter_on_the_host_has_yet_to_index_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that it indexes when it is asked is one that was due; then there is nothing left."""
    drafting, indexed, seen = SuffixDrafting(10_000), SuffixIndex.extend, Counter[str]()

    def spy(suffix: SuffixIndex, key: Key, tokens: Sequence[int]) -> None:
        seen["tokens"] += len(tokens)
        indexed(suffix, key, tokens)

    monkeypatch.setattr(SuffixIndex, "extend", spy)
    keys = [Key(0, number) for number in range(7)]
    for key in keys:  # two prompts, of 5 and 6 tokens
        drafting.begin(key, f"{key.request % 2}", list(range(5 + key.request % 2)), SamplingParams())
    completions = [list(range(10 * number, 10 * number + 4 + number)) for number in range(7)]
    for key, completion in zip(keys[:3], completions[:3], strict=True):
        drafting.end(key, completion)
    left = list(zip(keys[3:5], completions[3:5], strict=True))
    finished = sum(map(len, completions[:3]))
    shape, prompts = Shape(("suffix",), 2, 1, 3), 5 + 6
    assert drafting._due(left) == len(completions[3]) + len(completions[4]) + finished + prompts
    assert drafting.host_extend_s(left) == pytest.approx(4e-6 * drafting._due(left))
    due = drafting._due(left)
    drafting.extend(*zip(*left, strict=True), shape)
    assert seen["tokens"] == due - prompts, "prompts are indexed too, when they begin"
    assert drafting._due(left) == 0.0
    completions[3] += [1] * 300
    assert drafting._due(left) == 300
    drafting.extend(*zip(*left, strict=True), shape)
    assert drafting._due(left) == 0
    assert len(drafting._token_s) == 2, "so many were timed"
    assert drafting._due([(keys[5], completions[5])]) == len(completions[5]), (
        "prompt and answers there are indexed already"
    )


def test_no_single_moment_tells_what_indexing_takes() -> None:
    drafting = SuffixDrafting(100_000)
    drafting._token_s.extend([2e-6, 5e-4, 3e-6])  # somebody else had the core once
    drafting.begin(Key(0, 0), "one", [1, 2], SamplingParams())
    assert drafting.host_extend_s([(Key(0, 0), [3] * 98)]) == pytest.approx(100 * 3.5e-6)


def test_the_engine_tells_what_drafters_on_the_host_would_have_to_index() -> None:
    """Every request's prompt, once, and all that was read of their answers."""
    due: list[tuple[int, float]] = []

    class Asking(Told):
        def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
            due.append((outcome.batch, outcome.host_extend_s()))
            return ()

    speculation = Speculating([SuffixDrafting(10_000)], Asking(OFF))
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=8), speculation=speculation)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit([Request(Key(0, number), (3, 4, 5), params, "one") for number in range(4)])
    engine.drain()
    read = [round(seconds / 4e-6) - 3 for batch, seconds in due if batch == 4]
    assert all(later - before == 4 for before, later in pairwise(read[1:-1]))
    assert len(read) >= 18


def test_a_verified_tick_tells_what_is_due() -> None:
    """What the one before wrote: each tick indexes that first."""
    shape_policy = Recording(SUFFIX)
    speculation = Speculating([SuffixDrafting(10_000)], shape_policy)
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=8), speculation=speculation)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.submit([Request(Key(0, number), (3, 4), params, f"{number}") for number in range(4)])
    engine.tick()
    engine.tick()
    speculation.report()
    last = shape_policy.outcomes[-1]
    assert last.shape == SUFFIX
    written = sum(len(engine.written(Key(0, number))) for number in range(4))
    indexed = sum(speculation._drafters["suffix"]._indexed.values())  # type: ignore[attr-defined]
    assert last.host_extend_s() == pytest.approx(4e-6 * (written - indexed)) != 0.0


def test_every_walk_is_told_and_a_few_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are read late, when the next have grown already; rows end meanwhile. Reckoned here at once, row by row."""
    tree, drafts, expected = Shape(("eagle",), 3, 4, 9), list[list[tuple[Draft, ...]]](), list[list[AcceptResult]]()
    told, learned, propose, verified = Told(tree), drafting(rows=12), Speculating.propose, Speculating.verified

    def proposing(spec: Speculating, keys: Sequence[Key], *rest: Any) -> Any:
        proposed = propose(spec, keys, *rest)
        drafts.append([spec._proposed[-1].of(row) for row in range(len(keys))])
        return proposed

    def verifying(spec: Speculating, shape: Shape, emitted: Sequence[Sequence[int]], *rest: Any) -> None:
        spec._lifecycle.flush()
        numbers = [spec._lifecycle.number(key) for key in spec._proposed[0].keys]
        verified(spec, shape, emitted, *rest)
        stride, results = -(-len(emitted) // 8), list[AcceptResult]()
        for row, (tokens, drafted) in enumerate(zip(emitted, drafts.pop(0), strict=True)):
            looked = row % stride == spec._counts.verifies % stride
            rank_hits = tuple(rank_hits_of(draft, tokens, shape) for draft in drafted)
            whole = AcceptResult(len(tokens) - 1, rank_hits, numbers[row])
            results += [whole if looked else AcceptResult(len(tokens) - 1, ())] if tokens else []
        expected.append(results)

    monkeypatch.setattr(Speculating, "propose", proposing)
    monkeypatch.setattr(Speculating, "verified", verifying)
    speculation = Speculating([learned], told)
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=12), speculation=speculation)
    engine._ahead = True
    engine.submit(requests(20, params=[SamplingParams(max_tokens=n) for n in (5, 12, 30)]))
    engine.drain()
    engine.report()  # whatever was not asked for yet
    assert told.results == expected
    found = [walked for results in told.results for walked in results]
    assert any(rank_hits_of.ranks for walked in found for rank_hits_of in walked.rank_hits), (
        "no draft was ever right: this shows little"
    )
    assert len(found) == engine.report().speculation.verifies  # type: ignore[union-attr]


def test_drafts_of_the_host_are_shared_out_among_requests() -> None:
    """The likeliest of all: here the second request repeats itself, the third has nothing to go by."""
    drafting, shape = SuffixDrafting(1000), Shape(("suffix",), 4, 1, 5, 2.0)
    speculation = Speculating([drafting], Fixed(shape))
    completions = [[5, 6, 7, 5, 9, 7, 5], [3, 4] * 8, [1]]
    keys = [Key(0, number) for number in range(3)]
    for key in keys:
        speculation.begin(key, f"p{key.request}", (30, 31), SamplingParams(max_tokens=50))
    drafts = speculation.propose(keys, completions, shape)
    assert drafts is not None
    whole = [len(speculation._proposed[-1].of(row)[0]) for row in range(3)]
    assert sum(whole) > 3 == sum(map(len, drafts)), "two tokens for each of three, the newest ones included"
    assert len(drafts[1]) > len(drafts[0])
    assert not drafts[2]


# ---- alarms


class Listening(Fixed):
    """One shape for ever; raises the alarm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._watch = CollapseWatch("x")

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        alarm = self._watch.see(outcome.shape, outcome.results)
        return (alarm,) if alarm else ()


def test_a_key_that_comes_again_is_heard_again(slow: Slow) -> None:
    """As in a rollout that is repeated: an answer may speak a few times only, but this is another one."""
    speculating = Speculating([slow], Listening(CHAIN))
    for emitted, collapsed in (([7, 8, 9], False), ([7, 8, 9], False), ([4], True)):
        for number in range(60):
            key = Key(0, number)
            speculating.begin(key, "p", (1,), PARAMS)
            for _ in range(9):
                speculating.propose([key], [[1]], CHAIN)
                speculating.verified(CHAIN, [emitted], UNTIMED)
            speculating.end(key, emitted)
        assert bool(speculating.alarms) == collapsed
    speculating._lifecycle.flush()
    assert not speculating._lifecycle._completions


class Hearing(Drafter):
    name = "x"

    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.heard.append(key)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        self.heard.append((key, tuple(completion)))


def test_drafters_hear_who_came_and_went_before_they_are_asked() -> None:
    """And no sooner: hundreds come at once, and the device would wait until all are told."""
    drafter, (one, other) = Hearing(), (Key(0, 1), Key(0, 2))
    speculating = Speculating([drafter], Fixed(CHAIN))
    speculating.begin(one, "p", (1,), PARAMS)
    assert speculating.choose(0).off
    assert drafter.heard == [], "nobody runs yet"
    speculating.choose(1)
    assert drafter.heard == [one]
    speculating.end(one, [5, 6])
    speculating.begin(one, "p", (1,), PARAMS)
    speculating.begin(other, "p", (1,), PARAMS)
    assert len(drafter.heard) == 1
    speculating.propose([one, other], [[], []], CHAIN)
    assert drafter.heard[1:] == [(one, (5, 6)), one, other], "in the order it happened"
    speculating.end(other, [7])
    assert speculating._lifecycle.number(other) is not None
    speculating.verified(CHAIN, [[5], []], UNTIMED)
    assert (speculating._lifecycle.number(one), speculating._lifecycle.number(other)) == (1, None)
    assert drafter.heard[4:] == [(other, (7,))]


def test_answers_that_end_before_anybody_asks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_module, "_MAX_DEFERRED", 10)
    drafter, expected = Hearing(), list[int]()
    roll = LifecycleQueue([drafter], expected.append)
    for number in range(100):
        roll.begin(Key(0, number), "p", (1,), PARAMS)
        roll.end(Key(0, number), [5])
        assert len(roll._deferred) <= 10
    assert len(drafter.heard) > 180
    assert set(expected) == {PARAMS.max_tokens}, "of ticks"


def test_whoever_cannot_hear_keeps_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Hearing()
    roll = LifecycleQueue([drafter], lambda ticks: None)
    for number in range(3):
        roll.begin(Key(0, number), "p", (1,), PARAMS)
    monkeypatch.setattr(Hearing, "begin", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        roll.flush()
    monkeypatch.undo()
    roll.flush()
    assert drafter.heard == [Key(0, 1), Key(0, 2)]


class Alarming(Speculation):
    """Plain decoding that has heard two alarms."""

    alarms = (Alarm("suffix", SUFFIX, 1.1, 3.0, 70), Alarm("suffix", SUFFIX, 1.0, 2.0, 80))


def test_alarms_become_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(policy: Any, config: RunConfig, **named: Any) -> EngineCore:
        return EngineCore(policy.model, policy.tokenizer, config.engine, speculation=Alarming())

    monkeypatch.setattr(tlt.rollout, "build_engine", build)
    config = RunConfig(sampling=SamplingParams(max_tokens=4))
    config = replace(
        config,
        run=replace(config.run, out=str(tmp_path)),
        task=replace(config.task, prompts=2),
        engine=EngineSettings(rows=4),
    )
    tlt.rollout.rollout(config)
    events = [recorded.event for recorded in read_run(tmp_path / "run-rollout").events]
    told = [event for event in events if isinstance(event, AcceptanceCollapsed)]
    assert told == [
        AcceptanceCollapsed(1, "suffix", "suffix 4x1/5", 1.1, 3.0, 70),
        AcceptanceCollapsed(1, "suffix", "suffix 4x1/5", 1.0, 2.0, 80),
    ]
    assert isinstance(events[events.index(told[-1]) + 1], RolloutFinished)


def test_the_engine_tells_the_lengths_of_a_rollout_in_the_order_of_admission() -> None:
    """Requests wait for two rows, the longest expected first; what is submitted while others run is no rollout."""
    told = list[Sequence[int] | None]()

    class Listening(Fixed):
        def rollout_ended(self, lengths: Sequence[int] | None) -> None:
            told.append(lengths)

    settings = EngineSettings(rows=2, kv_gib=0.05, admission="fifo")
    engine = EngineCore(MODEL, letters(), settings, speculation=Speculating([], Listening(OFF)))
    for late in (False, True):
        limits = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in (3, 9, 5, 7)]
        asked = requests(4, params=limits)
        engine.submit(asked[:2] if late else asked)
        engine.tick()
        engine.submit(asked[2:] if late else [])
        engine.drain()
    assert told == [[3, 9, 5, 7], None]
