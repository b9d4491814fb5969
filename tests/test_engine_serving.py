"""What a server asks of the engine beyond completions: aborts, scores, stop tokens, shared keys and going on."""

import random
from dataclasses import replace

import pytest
import torch

from tests.test_engine import MODEL, kv_gib, one_by_one, requests
from tests.tiny import EOS, VOCAB, letters
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import RequestError
from tlt.model.attention import PackedLayout
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Fixed
from tlt.spec.speculation import Speculating
from tlt.spec.suffix import SuffixDrafting
from tlt.types import Completion, Key, SamplingParams

PLAIN = {request.key: one_by_one(request)[0] for request in requests(8, group=2)}


def engine_of(*, drafts: bool = False, ahead: bool = False, **knobs: object) -> EngineCore:
    """`ahead`: a tick is launched before the one before is read, as on a GPU."""
    shape = Shape(drafters=("suffix",), depth=3, width=2, verify=4)
    speculation = Speculating([SuffixDrafting(100_000)], Fixed(shape), deepest=3, widest=4) if drafts else None
    engine = EngineCore(MODEL, letters(), EngineSettings(**{"rows": 4, **knobs}), speculation=speculation)
    engine._ahead = ahead
    return engine


def nothing_is_held(engine: EngineCore) -> bool:
    return engine.idle and engine.report().pages.used == 0


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_moment_free_everything_and_change_nobody(drafts: bool, seed: int) -> None:
    """Waiting, half prefilled, preempted, running, with the last token in flight: whoever is left is answered alike."""
    dice = random.Random(seed)
    engine = engine_of(drafts=drafts, ahead=seed < 3, prefill_tokens=16, kv_gib=kv_gib(14 + 8 * drafts, 16))
    engine.submit(requests(8, group=2))
    alive, done = set(PLAIN), dict[Key, Completion]()
    while not engine.idle:
        if dice.random() < 0.2 and len(alive) > 3:
            key = dice.choice(sorted(alive))
            aborted = engine.abort(key)
            alive.remove(key)
            assert aborted.finish_reason == "abort"
            assert list(aborted.tokens) == PLAIN[key][: len(aborted.tokens)]
        for completion in engine.tick() if not engine.idle else ():
            done[completion.key] = completion
            alive.discard(completion.key)
    assert len(done) < 8
    assert {key: list(completion.tokens) for key, completion in done.items()} == {key: PLAIN[key] for key in done}
    assert nothing_is_held(engine)


def test_a_request_that_is_not_in_flight_cannot_be_aborted() -> None:
    with pytest.raises(RequestError, match="not in flight"):
        engine_of().abort(Key(0, 0))


def test_stop_tokens_end_an_answer_at_their_first_place() -> None:
    request = next(request for request in requests(8) if len(set(one_by_one(request)[0][:-1])) > 3)
    plain = one_by_one(request)[0]
    stop = plain[len(plain) // 2]
    engine = engine_of(drafts=True)
    engine.submit([replace(request, params=replace(request.params, stop_token_ids=(stop, VOCAB - 1)))])
    (completion,) = engine.drain()
    first = next(index for index, token in enumerate(plain) if token in (stop, VOCAB - 1))
    assert list(completion.tokens) == plain[: first + 1]
    assert completion.finish_reason == "stop"


def test_min_p_is_the_same_drafted_or_not() -> None:
    params = (SamplingParams(temperature=1.5, min_p=0.1, max_tokens=30),)
    batch = requests(6, params=params)
    unfiltered = replace(params[0], min_p=0.0)
    assert any(one_by_one(request)[0] != one_by_one(replace(request, params=unfiltered))[0] for request in batch)
    for drafts in (False, True):
        engine = engine_of(drafts=drafts)
        engine.submit(batch)
        for completion in engine.drain():
            assert list(completion.tokens) == one_by_one(batch[completion.key.request])[0]


def test_requests_in_flight_together_may_draw_with_one_key() -> None:
    request = requests(1)[0]
    engine = engine_of()
    engine.submit([replace(request, key=Key(9, number), noise=request.key) for number in range(3)])
    assert {completion.tokens for completion in engine.drain()} == {tuple(one_by_one(request)[0])}


@torch.no_grad()
def test_scores_are_the_policys_own_while_others_run() -> None:
    engine = engine_of(drafts=True)
    engine.submit(requests(4))
    engine.tick()
    texts = [(*request.prompt, EOS) for request in requests(5, seed=3)] + [(7,)]
    scores = engine.score(texts, top=3)
    for text, found in zip(texts, scores, strict=True):
        logits = MODEL.logits(MODEL(torch.tensor(text), PackedLayout.from_lengths([len(text)])).hidden_TD)
        expected = logits.log_softmax(-1)[:-1]
        own = expected.gather(1, torch.tensor(text[1:], dtype=torch.int64)[:, None])[:, 0]
        assert found.logprobs == pytest.approx(own.tolist(), abs=1e-9)
        assert [[token for token, _ in row] for row in found.top] == expected.topk(3).indices.tolist()
        assert [row[0][1] for row in found.top] == pytest.approx(expected.amax(-1).tolist(), abs=1e-9)
    assert {completion.key: list(completion.tokens) for completion in engine.drain()} == {
        request.key: one_by_one(request)[0] for request in requests(4)
    }
    for wrong in ((), (VOCAB,), tuple([3] * 513)):
        with pytest.raises(RequestError):
            engine.score([wrong])


def turn(engine: EngineCore, request: Request) -> Completion:
    engine.submit([request])
    (completion,) = engine.drain()
    return completion


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("limit", [40, 23])
def test_a_conversation_goes_on_with_its_pages_key_and_positions(drafts: bool, limit: int) -> None:
    """Three turns with words of others between them: only what is new is computed, and the tokens are those of plain
    decoding of the whole text."""
    params = SamplingParams(temperature=1.0, max_tokens=limit, ignore_eos=True)
    engine, text = engine_of(drafts=drafts, ahead=limit == 40, page_size=4), requests(1)[0].prompt
    fresh = engine_of(page_size=4)
    for number in range(3):
        request = Request(Key(5, 0), text, params, keep=True)
        pieces: list[tuple[int, int]] = []
        prepare = engine._runner.prepare
        engine._runner.prepare = lambda plan, pieces=pieces, prepare=prepare: (  # type: ignore[method-assign,misc]
            pieces.extend((chunk.start, len(chunk.tokens)) for chunk in plan.chunks),
            prepare(plan),
        )
        completion = turn(engine, request)
        engine._runner.prepare = prepare  # type: ignore[method-assign]
        again = turn(fresh, replace(request, keep=False))
        assert completion.tokens == again.tokens
        assert completion.logprobs == pytest.approx(again.logprobs, abs=1e-9)
        if number:
            assert sum(count for _, count in pieces) < 4 + 9, "more than the words of others was computed again"
        text = text + completion.tokens + tuple(range(5, 14))
    assert nothing_is_held(engine)


def test_kept_pages_are_given_up_under_pressure_and_when_the_policy_changes() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = engine_of(ahead=True, kv_gib=kv_gib(24, 16))
    batch = [replace(request, keep=True, params=params) for request in requests(12)]
    engine.submit(batch)
    assert len(engine.drain()) == 12
    pages = engine.report().pages
    assert pages.used == 0
    assert pages.cached > 0
    engine.load_policy(1)
    assert engine.report().pages.cached == 0
    engine.submit(batch[:4])
    while not any(req.left <= 1 for req in engine._scheduler._reqs):
        engine.tick()
    engine.load_policy(2)  # with answers nearly complete
    assert len(engine.drain()) == 4
    assert nothing_is_held(engine)
