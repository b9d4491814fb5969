"""The engine under stress: a tick in flight, pages that hold garbage, contexts that are full, policies that change.

A GPU computes a tick while the host reads the one before. Here the same order of events is had by setting `_ahead` on a
CPU: a launched tick is computed at once, as in stream order, and read one tick later.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.test_engine import EXPECTED, MODEL, kv_gib, one_by_one, one_by_one_from, requests
from tests.test_speculation import Scripted, at_random, changing, fixed, oracle, tokens_of
from tests.tiny import EOS, VOCAB, letters, policy
from tlt.config import EngineSettings, RunConfig, RunSettings, TaskSettings
from tlt.engine.admission import FirstComeFirst
from tlt.engine.engine import EngineCore
from tlt.engine.pages import PageAllocator
from tlt.engine.request import Request, RequestState
from tlt.engine.scheduler import Scheduler
from tlt.errors import RequestError
from tlt.model.config import ModelConfig
from tlt.model.rope import BEYOND
from tlt.model.transformer import Transformer
from tlt.policy import Policy
from tlt.spec.costs import TickTimes
from tlt.spec.shape import MOST_NODES, OFF, Draft, Shape
from tlt.spec.suffix import SuffixDrafting
from tlt.types import Completion, Key, SamplingParams

CONTEXT = 64
CHAIN = Shape(("x",), 4, 1, 5)


def engine_of(*, ahead: bool = True, speculation: Scripted | None = None, **knobs: object) -> EngineCore:
    engine = EngineCore(MODEL, letters(), EngineSettings(**knobs), speculation=speculation)
    engine._ahead = ahead
    return engine


def completions(completions: Sequence[Completion]) -> dict[Key, list[int]]:
    return tokens_of({completion.key: completion for completion in completions})


# ---- a tick in flight


@pytest.mark.parametrize("shapes", ["off", "chain", "changing"])
@pytest.mark.parametrize(
    ("rows", "page_size", "pages", "prefill"), [(12, 16, 17, 512), (5, 4, 80, 7), (12, 1, 900, 64)]
)
def test_a_tick_in_flight_changes_no_token(rows: int, page_size: int, pages: int, prefill: int, shapes: str) -> None:
    choose = {"off": fixed(OFF), "chain": fixed(CHAIN), "changing": changing(rows)}[shapes]
    engine = engine_of(
        speculation=Scripted(oracle(EXPECTED, miss=0.3), choose),
        rows=rows,
        page_size=page_size,
        kv_gib=kv_gib(pages + MOST_NODES // page_size, page_size),
        prefill_tokens=prefill,
    )
    engine.submit(requests(12, group=3))
    assert completions(engine.drain()) == EXPECTED
    assert engine.report().pages.used == 0


def test_what_is_computed_beyond_an_end_is_dropped() -> None:
    engine = engine_of(rows=12)
    engine.submit(requests(12, group=3))
    assert completions(engine.drain()) == EXPECTED
    ended_early = sum(tokens[-1] == EOS for tokens in EXPECTED.values())
    assert engine.report().dropped == ended_early > 0


def test_a_failure_in_flight_ends_its_request_alone() -> None:
    model = policy()
    with torch.no_grad():
        model.embed[7] = float("nan")
    fine = [r for r in requests(8) if 7 not in r.prompt and 7 not in one_by_one(r, model)[0][:-1]]
    sick = [Request(Key(5, 1000 + i), (3, 7, 4), SamplingParams(max_tokens=9)) for i in range(2)]
    engine = EngineCore(model, letters())
    engine._ahead = True
    engine.submit([sick[0], *fine[:3], sick[1]])
    done: list[Completion] = []
    while not engine.idle:
        done += engine.tick()
    assert completions(done) == {r.key: one_by_one(r, model)[0] for r in fine[:3]}
    with pytest.raises(RequestError, match=r"request 1000: .* request 1001: "):
        engine.drain()
    engine.submit(fine[:1])
    assert completions(engine.drain()) == {fine[0].key: one_by_one(fine[0], model)[0]}


def test_a_last_token_in_flight_is_written_again_by_a_new_policy() -> None:
    """Whatever a completion says of its policy version holds for its last token."""
    model, other = policy(seed=0), policy(seed=1)
    engine = EngineCore(model, letters())
    engine._ahead = True
    request = replace(requests(1)[0], params=SamplingParams(max_tokens=3, ignore_eos=True))
    engine.submit([request])
    while len(engine.written(request.key)) < 2:
        engine.tick()
    assert engine._unread_tick is not None, "the third token has been launched"
    before = engine.written(request.key)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    engine.load_policy(1)
    (completion,) = engine.drain()
    assert completion.policy_version == 1
    assert list(completion.tokens) == [*before, *one_by_one_from(request, before, other)]
    assert engine.report().dropped == 1


def test_nobody_drafts_for_a_batch_that_has_just_ended() -> None:
    """All that ran when the shape was chosen ended in the tick in flight; those that wait are still being prefilled."""
    batches: list[int] = []

    class Watching(Scripted):
        def verified(
            self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float | None, one_off_s: float = 0.0
        ) -> None:
            batches.append(len(emitted))

    speculation = Watching(at_random(0), lambda running: CHAIN if running and next(ticks) % 2 else OFF)
    ticks = iter(range(10**6))
    engine = engine_of(speculation=speculation, rows=1, prefill_tokens=2)
    batch = [replace(r, params=replace(r.params, max_tokens=2 + 7 * (i % 2))) for i, r in enumerate(requests(6))]
    engine.submit(batch)
    assert completions(engine.drain()) == {r.key: one_by_one(r)[0] for r in batch}
    assert batches
    assert 0 not in batches


# ---- any history


def full_context_policy() -> Transformer:
    config = ModelConfig.from_hf({**MODEL.config.source, "max_position_embeddings": CONTEXT})
    model = Transformer(config, dtype=torch.float64)
    model.load_state_dict(MODEL.state_dict())
    return model


SHORT = full_context_policy()


def crowd() -> list[Request]:
    """Prompts of every length around a page's, settings of every kind; many fill the context to its last position."""
    dice = random.Random(3)
    made = []
    for length in (1, 1, 2, 15, 16, 17, 33, CONTEXT - 1):
        prompt = tuple(dice.randrange(2, VOCAB) for _ in range(length))
        for params in (
            SamplingParams(max_tokens=CONTEXT - length, ignore_eos=True),
            SamplingParams(max_tokens=min(9, CONTEXT - length), temperature=0.0),
            SamplingParams(max_tokens=CONTEXT - length, top_k=5, stop=(chr(ord("A") + dice.randrange(VOCAB)),)),
        ):
            made.append(Request(Key(2, len(made)), prompt, params, dice.choice(("", f"p{length}"))))
    return made


CROWD = crowd()


def plainly(request: Request) -> tuple[int, ...]:
    engine = EngineCore(SHORT, letters(), EngineSettings(rows=1))
    engine.submit([request])
    return engine.drain()[0].tokens


@cache
def crowd_expected() -> dict[Key, list[int]]:
    return {request.key: list(plainly(request)) for request in CROWD}


def test_the_crowd_is_answered_alone_as_by_hand() -> None:
    for request in CROWD:
        if not request.params.stop and not request.params.ignore_eos:
            assert crowd_expected()[request.key] == one_by_one(request, SHORT)[0]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_same_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and keys come again, pages run out, shapes and policy versions change, pages start as garbage."""
    dice = random.Random(seed)
    page_size, ahead, speculates = dice.choice((1, 4, 16)), seed % 2 == 0, seed % 3 > 0
    longer = {key: [*tokens, *[5] * 8] for key, tokens in crowd_expected().items()}
    guess = oracle(longer, miss=0.2, seed=seed) if dice.random() < 0.7 else at_random(seed)
    fits_one = -(-(CONTEXT + MOST_NODES * speculates) // page_size) + 1
    knobs = EngineSettings(
        rows=dice.choice((1, 3, 8, 24)),
        page_size=page_size,
        kv_gib=kv_gib(fits_one + dice.choice((0, 3, 40)), page_size),
        prefill_tokens=dice.choice((1, 7, 512)),
        admission=dice.choice(("fifo", "longest")),
    )
    engine = EngineCore(SHORT, letters(), knobs, speculation=Scripted(guess, changing(seed)) if speculates else None)
    engine._ahead = ahead
    cache, take = engine._runner._cache, PageAllocator.take

    def take_garbage(self: PageAllocator, count: int) -> list[int]:
        pages = take(self, count)
        cache.k[:, pages] = cache.v[:, pages] = float("nan")
        return pages

    monkeypatch.setattr(PageAllocator, "take", take_garbage)
    coming = dice.sample(CROWD, 12)
    coming += coming[:4]  # their keys come again
    asked, done = Counter(request.key for request in coming), []
    while coming or not engine.idle:
        if coming and coming[0].key not in engine._in_flight and (engine.idle or dice.random() < 0.5):
            engine.submit([coming.pop(0)])
        if dice.random() < 0.03:
            engine.load_policy(engine.version + 1)  # of the same weights: tokens stay
        done += engine.tick()
    assert Counter(completion.key for completion in done) == asked
    for completion in done:
        assert list(completion.tokens) == crowd_expected()[completion.key]
    scheduler = engine._scheduler
    assert not scheduler._awaited_prefixes
    assert not scheduler._filtered
    assert engine.report().pages.used == 0


def test_a_resumed_request_shares_its_prompt_only_once_that_is_computed() -> None:
    """The prompt may be on the shelf half-way: dropped under pressure, and begun again for another of the group."""
    scheduler = Scheduler(PageAllocator(20), page_size=2, max_rows=2, prefill_tokens=5, admission=FirstComeFirst())
    first, second = (Request(Key(0, i), tuple(range(10)), SamplingParams(max_tokens=9)) for i in range(2))
    scheduler.submit(RequestState(first, order=0, submitted_s=0.0))
    resumed = RequestState(second, order=1, submitted_s=0.0, tokens=[5, 6, 7])
    assert not scheduler.plan().reqs
    assert scheduler._shared_start(resumed) == []
    assert len(scheduler.plan().reqs) == 1
    assert len(scheduler._shared_start(resumed)) == 4  # full pages of the nine tokens before the prompt's last


def test_rotary_tables_reach_as_far_as_trees_do() -> None:
    assert BEYOND >= MOST_NODES


@pytest.mark.parametrize("ahead", [False, True])
def test_speculation_leaves_a_single_row_its_whole_context(ahead: bool) -> None:
    request = next(r for r in CROWD if len(r.prompt) == 15 and r.params.ignore_eos)
    speculation = Scripted(oracle(crowd_expected()), fixed(Shape(("x",), 20, 4, MOST_NODES)))
    engine = EngineCore(SHORT, letters(), EngineSettings(rows=1), speculation=speculation)
    engine._ahead = ahead
    engine.submit([request])
    assert completions(engine.drain()) == {request.key: crowd_expected()[request.key]}


# ---- callers' mistakes and other people's exceptions


@pytest.mark.parametrize("prompt", [[3, 4, 5], "ABC", (3, 4.0), (3, "A"), None])
def test_a_prompt_that_is_no_tuple_of_tokens_is_refused_whole(prompt: object) -> None:
    engine = engine_of(ahead=False)
    good = requests(1)[0]
    with pytest.raises(RequestError, match=r"request 9: the prompt is a .*; expected a tuple of integers"):
        engine.submit([good, Request(Key(5, 9), prompt, good.params)])  # type: ignore[arg-type]
    assert engine.idle
    engine.submit([good])
    assert completions(engine.drain()) == {good.key: one_by_one(good)[0]}


def test_an_engine_whose_tick_was_cut_short_says_so() -> None:
    """Half a tick's changes are made: going on would give tokens that no policy wrote."""

    def broken(key: Key, written: Sequence[int], shape: Shape) -> Draft:
        raise ZeroDivisionError

    engine = engine_of(speculation=Scripted(broken, fixed(CHAIN)), rows=4)
    engine.submit(requests(4))
    with pytest.raises(ZeroDivisionError):
        engine.drain()
    with pytest.raises(RuntimeError, match=r"cut an earlier tick short.* build a new engine"):
        engine.drain()


def test_time_between_two_rollouts_is_no_ticks_time() -> None:
    class Told(Scripted):
        ticks = 0

        def decoded(self, running: int, times: TickTimes, context: float = 0.0) -> None:
            self.ticks += times.seconds is not None

    speculation = Told(oracle({}), fixed(OFF))
    engine = engine_of(ahead=False, speculation=speculation)
    for number in range(3):  # a prompt of one token is not prefilled, and its one tick has none before it
        engine.submit([Request(Key(0, number), (3,), SamplingParams(max_tokens=1))])
        engine.drain()
    assert speculation.ticks == 0


# ---- what the model-free drafter remembers


def test_finished_answers_that_nobody_asks_about_are_forgotten() -> None:
    memory = 200
    drafting = SuffixDrafting(memory)
    for number in range(60):
        key = Key(0, number)
        drafting.begin(key, f"p{number // 20}" if number < 40 else f"p{number}", (3, 4), SamplingParams())
        drafting.end(key, tuple(range(8)))
        held = sum(len(prompt) + len(completion) for kept in drafting._finished.values() for prompt, completion in kept)
        assert held == drafting._kept_tokens <= memory
    assert "p59" in drafting._finished
    assert "p0" not in drafting._finished


def test_a_key_may_come_again_under_another_prompt() -> None:
    drafting, shape, first = SuffixDrafting(1000), Shape(("suffix",), 2, 1, 3), Key(0, 0)
    drafting.begin(first, "a", (3, 4, 5), SamplingParams())
    drafting.end(first, (6, 7, 8))
    drafting.begin(first, "b", (9, 10), SamplingParams())
    later = Key(0, 1)
    drafting.begin(later, "a", (3, 4, 5), SamplingParams())
    keys, written = [first, later], [[11], [6, 7]]
    drafting.extend(keys, written, shape)
    assert drafting.draft(keys, written, shape)[1].tokens[0] == 8, "what the first answer to the prompt went on with"


# ---- the doors


def test_a_rollout_of_few_answers_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tlt.rollout import rollout

    rollout(
        RunConfig(
            run=RunSettings(out=str(tmp_path)),
            task=TaskSettings(prompts=3, group=1),
            sampling=SamplingParams(max_tokens=6),
            engine=EngineSettings(rows=4, kv_gib=0.01),
        )
    )
    assert "3 of 3 answers written again" in capsys.readouterr().out


def test_generating_from_a_sick_policy_names_the_sickness(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt import generate

    model = policy(torch.float32)
    with torch.no_grad():
        model.norm.fill_(float("nan"))
    monkeypatch.setattr(generate, "open_policy", lambda settings: Policy(model, letters(), Path()))
    with pytest.raises(RequestError, match="request 0: the policy's logits at position 2 are NaN"):
        generate.generate(RunConfig(), "AB", raw=True)


def test_what_the_others_were_answered_rides_on_the_error() -> None:
    model = policy()
    with torch.no_grad():
        model.embed[7] = float("nan")
    engine = EngineCore(model, letters())
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.submit([Request(Key(1, 0), (3, 4), params), Request(Key(1, 1), (3, 7), params)])
    with pytest.raises(RequestError, match=r"request 1: .* 1 other requests were completed") as caught:
        engine.drain()
    assert [completion.key.request for completion in caught.value.completions] == [0]
