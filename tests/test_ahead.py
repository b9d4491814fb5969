"""Written-ahead text as drafts: whatever it is, the rollout is that of plain decoding; and it is verified in chunks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.test_engine import EXPECTED, MODEL, kv_gib, requests
from tests.test_learned import drafting, first_named, shape_of
from tests.tiny import EOS, VOCAB, letters
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import RequestError
from tlt.spec.ahead import ChunkPolicy, Prices, TurnRate, emitted
from tlt.spec.costs import DECODE, POLICY, CostModel, Measured, TickTimes
from tlt.spec.shape import AHEAD, MOST_NODES, OFF, Draft, Shape, shown
from tlt.spec.shape_policy import Fixed, Outcome
from tlt.spec.speculation import Speculating
from tlt.spec.suffix import SuffixDrafting
from tlt.spec.tree import Trees
from tlt.spec.tuner import Tuner
from tlt.types import Completion, Key, SamplingParams

Written = Callable[[Key], Sequence[int]]
LONG = [SamplingParams(max_tokens=200, ignore_eos=True), SamplingParams(temperature=1.4, max_tokens=150)]


def given(batch: Sequence[Request], written: Written) -> list[Request]:
    return [replace(request, draft_tokens=tuple(written(request.key))) for request in batch]


def plain(batch: Sequence[Request], **knobs: object) -> dict[Key, Completion]:
    engine = EngineCore(MODEL, letters(), EngineSettings(**knobs))
    engine.submit(batch)
    return {completion.key: completion for completion in engine.drain()}


class Free(Fixed):
    """A shape policy that takes a tick to last as long however many tokens it verifies: chunks are the longest."""

    def prices(self, batch: int) -> Prices:  # type: ignore[override]
        return Prices(lambda shape: 1.0, 0.0, lambda shape, gain: True)


def engine_of(speculation: Speculating | None = None, **knobs: object) -> EngineCore:
    return EngineCore(MODEL, letters(), EngineSettings(**knobs), speculation=speculation or Speculating([], Free(OFF)))


def finished(engine: EngineCore, batch: Sequence[Request]) -> dict[Key, Completion]:
    engine.submit(batch)
    done = {completion.key: completion for completion in engine.drain()}
    assert engine.report().pages.used == 0
    return done


def turned(text: Sequence[int], rate: float, dice: random.Random) -> list[int]:
    return [token if dice.random() >= rate else dice.randrange(VOCAB) for token in text]


def same(ours: dict[Key, Completion], theirs: dict[Key, Completion]) -> bool:
    """Tokens to the last; log-probabilities up to the order of sums in float64."""
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        other = theirs[key]
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.policy_logprobs == pytest.approx(other.policy_logprobs, abs=1e-5)
    return True


def ahead_ticks(engine: EngineCore) -> int:
    spent = engine.report().speculation
    assert spent is not None
    return sum(count for (_, shape), count in spent.ticks.items() if shape.drafters == (AHEAD,))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("kind", ["own", "some turned", "half", "random", "ends", "other request's"])
def test_no_written_ahead_text_changes_a_token(kind: str, short: bool) -> None:
    dice, batch = random.Random(kind), requests(12, group=3)
    texts: dict[str, Written] = {
        "own": lambda key: EXPECTED[key],
        "some turned": lambda key: turned(EXPECTED[key], 0.05, dice),
        "half": lambda key: EXPECTED[key][: len(EXPECTED[key]) // 2],
        "random": lambda key: [*EXPECTED[key][:3], *(dice.randrange(VOCAB) for _ in range(dice.randrange(90)))],
        "ends": lambda key: [*EXPECTED[key][:3], *[EOS] * 20],
        "other request's": lambda key: [*EXPECTED[key][:3], *EXPECTED[Key(key.seed, (key.request + 1) % 12)]],
    }  # three right tokens, as the tick in which a request enters is plain
    engine = engine_of(Speculating([], Fixed(OFF)) if short else None, rows=16)
    done = finished(engine, given(batch, texts[kind]))
    assert same(done, plain(batch, rows=16))
    assert {key: list(one.tokens) for key, one in done.items()} == EXPECTED
    assert ahead_ticks(engine) > 0


def test_accepted_text_is_verified_in_chunks_and_marked() -> None:
    """The first tick of a request is plain; then chunks emit all but the policy's own last token of each."""
    batch = requests(6, group=2, params=LONG)
    expected = plain(batch, rows=8)
    engine = engine_of(rows=8)
    done = finished(engine, given(batch, lambda key: expected[key].tokens))
    assert same(done, expected)
    assert max(len(one.tokens) for one in expected.values()) == 200
    assert engine.report().ticks <= 4 + 200 // MOST_NODES
    report = engine.report().speculation
    assert report is not None
    drafted = sum(one.drafted.count(2) for one in done.values())
    assert drafted <= report.accepted_by[AHEAD] <= drafted + len(batch)  # one may lie behind the end
    assert not any(one.drafted.count(1) for one in done.values())
    assert drafted > 0.9 * sum(len(one.tokens) for one in done.values())
    assert report.verifies == report.accepted == 0  # they say nothing about a drafter
    assert report.ahead_turned == 0


@pytest.mark.parametrize(("rows", "page_size", "pages"), [(1, 16, 60), (12, 2, 170), (12, 16, 17)])
def test_nor_do_pages_rows_and_preemption(rows: int, page_size: int, pages: int) -> None:
    dice, batch = random.Random(1), requests(12, group=3)
    kv = kv_gib(pages + 128 // page_size, page_size)
    engine = engine_of(rows=rows, page_size=page_size, kv_gib=kv)
    done = finished(engine, given(batch, lambda key: turned(EXPECTED[key], 0.02, dice)))
    assert {key: list(one.tokens) for key, one in done.items()} == EXPECTED
    assert ahead_ticks(engine) > 0
    if pages == 17:
        assert sum(completion.timing.preemptions for completion in done.values()) > 0


def test_ends_inside_a_chunk_cut_exactly() -> None:
    """Text that goes on behind the end token, the stop text and the length limit."""
    batch = requests(8, params=[SamplingParams(max_tokens=13), SamplingParams(max_tokens=40)])
    expected = plain(batch, rows=8)
    longer = {key: [*one.tokens, *[5] * 30] for key, one in expected.items()}
    done = finished(engine_of(rows=8), given(batch, longer.__getitem__))
    assert same(done, expected)
    assert {one.finish_reason for one in done.values()} == {"eos", "length"}
    request = max(batch, key=lambda request: len(expected[request.key].tokens))
    text = expected[request.key].text
    stopping = replace(request, params=SamplingParams(max_tokens=40, stop=(text[6:8],)))
    cut = finished(engine_of(rows=8), given([stopping], longer.__getitem__))[request.key]
    assert (cut.finish_reason, cut.text) == ("stop", text[: text.index(text[6:8]) + 2])
    assert len(cut.logprobs) == len(cut.policy_logprobs) == len(cut.drafted) == len(cut.tokens)


def test_requests_enter_and_leave_between_chunks() -> None:
    """Requests come one after the other, some without text; one is taken back in the middle of its text."""
    batch = requests(10, params=LONG, seed=9)
    expected = plain(batch, rows=16)
    dice, engine, done = random.Random(2), engine_of(rows=4), dict[Key, Completion]()
    waiting = given(batch, lambda key: turned(expected[key].tokens, 0.01, dice) if key.request % 3 else ())
    while waiting or not engine.idle:
        if waiting:
            engine.submit([waiting.pop()])
        done.update((completion.key, completion) for completion in engine.tick())
        if len(waiting) == 4 and batch[-1].key not in done:
            done[batch[-1].key] = engine.abort(batch[-1].key)
    aborted = done.pop(batch[-1].key)
    assert aborted.tokens == expected.pop(batch[-1].key).tokens[: len(aborted.tokens)]
    assert same(done, expected)
    assert engine.report().pages.used == 0


@torch.no_grad()
def test_the_cache_and_the_hidden_states_are_those_of_plain_decoding() -> None:
    batch = requests(4, params=[SamplingParams(max_tokens=300, ignore_eos=True)], seed=3)
    expected, dice = plain(batch, rows=4), random.Random(4)
    texts = {key: turned(one.tokens, 0.03, dice) for key, one in expected.items()}
    caches, seen = list[dict[Key, list[torch.Tensor]]](), list[dict[Key, list[torch.Tensor]]]()
    for asked in (batch, given(batch, texts.__getitem__)):
        hidden: dict[Key, list[torch.Tensor]] = {}

        def keep(features, hidden=hidden) -> None:  # type: ignore[no-untyped-def]
            for row, req in enumerate(features.reqs):
                steps = 1 if features.steps is None else int(features.steps[row])
                hidden.setdefault(req.state.request.key, []).extend(features.hidden[row, :steps].clone())

        engine = EngineCore(
            *(MODEL, letters(), EngineSettings(rows=4, page_size=4)),
            taps=(1,),
            on_features=keep,
            speculation=Speculating([], Free(OFF)),
        )
        engine.submit(asked)
        while min(len(engine.written(request.key)) for request in batch) < 60:
            engine.tick()
        cache, held = engine._runner._cache, {}
        for req in engine._scheduler._reqs:
            request = req.state.request
            slots = torch.tensor([req.pages[p // 4] * 4 + p % 4 for p in range(len(request.prompt) + 59)])
            held[request.key] = [part.flatten(1, 2)[:, slots] for part in (cache.k, cache.v)]
        caches.append(held)
        seen.append(hidden)
    assert ahead_ticks(engine) > 0
    for key, parts in caches[0].items():
        for ours, theirs in zip(parts, caches[1][key], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)
        ours, theirs = (torch.stack(found[key][:60]) for found in seen)
        assert torch.allclose(ours, theirs, atol=1e-8)


@torch.no_grad()
def test_a_learned_drafter_goes_on_from_the_right_states_behind_a_chunk() -> None:
    """Chunks longer than its window, and then its own drafts: they are those of the packed form of the whole text."""
    learned = drafting(window=64)
    batch = requests(4, params=[SamplingParams(max_tokens=160, ignore_eos=True)])
    expected = plain(batch, rows=4)
    speculation = Speculating([learned], Free(shape_of(2, 1, 3)))
    engine = engine_of(speculation, rows=4)
    seen: list[tuple[Key, tuple[int, ...], Draft]] = []
    proposing = speculation.propose

    def propose(keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> Sequence[Draft] | None:
        found = proposing(keys, completions, shape)
        if shape.drafters == ("eagle",):
            trees = learned.start_trees(keys, shape)
            seen.extend((key, engine.written(key), trees.draft(key)) for key in keys)
        return found

    speculation.propose = propose  # type: ignore[method-assign]
    texts = {key: [*one.tokens[:90], (one.tokens[90] + 1) % VOCAB] for key, one in expected.items()}
    assert same(finished(engine, given(batch, texts.__getitem__)), expected)
    assert ahead_ticks(engine) > 0
    prompts = {request.key: request.prompt for request in batch}
    behind = [one for one in seen if len(one[2]) and len(one[1]) < 110]
    for key, completion, draft in behind:
        assert draft.tokens[0] == first_named(learned, key, prompts[key], completion)
    assert len(behind) > 10


def test_behind_its_first_difference_the_text_serves_the_suffix_drafter() -> None:
    """One token turned in the middle: the rest is found again as an earlier completion of the prompt."""
    params = [SamplingParams(max_tokens=160, ignore_eos=True)]
    batch = requests(3, params=params)
    expected = plain(batch, rows=4)
    texts = {key: list(one.tokens) for key, one in expected.items()}
    for text in texts.values():
        text[40] = (text[40] + 1) % VOCAB
    found = {}
    for asked in (batch, given(batch, texts.__getitem__)):
        suffix = Speculating([SuffixDrafting(10_000)], Fixed(Shape(("suffix",), 7, 1, 8)))
        engine = engine_of(suffix, rows=4)
        assert same(finished(engine, asked), expected)
        report = engine.report().speculation
        assert report is not None
        found[asked is batch] = report.accepted_by["suffix"]
    assert found[False] > found[True] + 60


def test_text_outside_the_vocabulary_is_refused() -> None:
    (request,) = requests(1)
    with pytest.raises(RequestError, match="draft_tokens: token 40 is outside"):
        engine_of(rows=4).submit([replace(request, draft_tokens=(3, VOCAB))])


# ---- decisions


def test_the_turn_rate_is_that_of_first_differences() -> None:
    turns, dice = TurnRate(), random.Random(0)
    assert 0.005 < turns.rate < 0.02
    for _ in range(400):
        kept = next(place for place in range(1000) if dice.random() < 0.01 or place == 999)
        turns.see(kept, kept < 999)
    assert turns.rate == pytest.approx(0.01, rel=0.2)
    before = turns.rate
    turns.policy_changed()
    assert turns.rate == pytest.approx(before, rel=0.02)  # a guess still, …
    for _ in range(2000):
        turns.see(100, False)
    assert turns.rate < before / 10  # … that gives way


def test_a_chain_emits_what_survives() -> None:
    assert emitted(0.0, 16) == 16
    assert emitted(1.0, 16) == 1
    assert emitted(0.1, 3) == pytest.approx(1 + 0.9 + 0.81)


def prices(token_s: float, floor_s: float, rate: float | None = None, affords: bool = True) -> Prices:
    """A machine that needs `floor_s` for a tick, and `token_s` for each token where these take longer."""

    def seconds(shape: Shape, batch: int = 8) -> float:
        return max(floor_s, token_s * shape.tokens(batch))

    return Prices(seconds, 1.0 / seconds(OFF) if rate is None else rate, lambda shape, gain: affords)


def with_rate(turn_rate: float) -> ChunkPolicy:
    policy = ChunkPolicy(8192)
    policy.turns.see(int(1e6 * (1 - turn_rate)), False)
    for _ in range(int(1e6 * turn_rate)):
        policy.turns.see(0, True)
    return policy


def test_chunks_are_as_long_as_pays() -> None:
    """As long as the tokens of a tick cost nothing beside the weights, and shorter where few of them survive."""
    chosen = {}
    for floor_s, rate in ((1e-2, 0.001), (2e-3, 0.001), (2e-3, 0.3)):
        shape = with_rate(rate).choose(8, [500] * 8, prices(1e-5, floor_s))
        chosen[floor_s, rate] = shape.verify if shape else 0
    assert chosen == {(1e-2, 0.001): 128, (2e-3, 0.001): 32, (2e-3, 0.3): 16}


def test_chunks_are_off_where_each_token_costs_as_much_as_decoding_it() -> None:
    """On a CPU a chunk wins only what a tick costs beside its tokens."""
    cpu = prices(token_s=1e-3, floor_s=0.0)
    assert with_rate(0.2).choose(8, [500] * 8, cpu) is None
    assert with_rate(0.2).choose(8, [500] * 8, prices(token_s=1e-3, floor_s=0.1)) is not None


def test_one_request_with_text_among_many_does_not_stop_their_drafts() -> None:
    gpu = prices(token_s=1e-5, floor_s=1e-2)
    few, all_have = [100], [100] * 8
    fast = replace(gpu, rate=3.0 * gpu.rate)  # the batch writes three tokens per tick without it
    assert with_rate(0.2).choose(8, few, fast) is None
    assert with_rate(0.2).choose(8, all_have, fast) is not None
    assert with_rate(0.2).choose(8, few, gpu) is not None


def test_no_chunk_that_the_budget_does_not_afford() -> None:
    assert with_rate(0.001).choose(8, [500] * 8, prices(1e-5, 1e-2, affords=False)) is None


def test_a_chunk_has_room_for_its_chains_and_for_no_more_than_the_engine_has() -> None:
    policy = with_rate(0.001)
    for batch in range(1, 200):
        left = [(7 * row) % 140 + 1 for row in range(batch // 2 + 1)]
        shape = policy.choose(batch, left, None)
        assert shape is not None
        needed = batch + sum(min(tokens, shape.verify - 1) for tokens in left)
        assert needed <= shape.tokens(batch) <= 1.3 * needed + 8
        assert shape.tokens(batch) <= batch * shape.verify
        assert shown(shape).share == 0.0
    small = ChunkPolicy(64)
    shape = small.choose(32, [500] * 32, None)
    assert shape is not None
    assert shape.tokens(32) <= 64
    assert small.choose(65, [500] * 32, None) is None


def test_the_tuner_prices_chunks_and_books_what_they_save() -> None:
    costs = CostModel(lambda rows: rows)
    tuner = Tuner([OFF], costs)
    assert tuner.prices(8) is None  # nothing was measured
    tuner.load_costs([Measured(POLICY, 1, 0.010), Measured(POLICY, 8, 0.010), Measured(POLICY, 1024, 0.02)])
    for _ in range(400):
        assert tuner.choose(8).off
        tuner.observe(Outcome(OFF, 8, times=TickTimes({DECODE: 0.01}, 0.01)))
    known = tuner.prices(8)
    assert known is not None
    assert known.rate == pytest.approx(100.0, rel=0.01)
    chunk = ChunkPolicy(8192).choose(8, [200] * 8, known)
    assert chunk is not None
    before = tuner.budget.saved_s
    results = engine_results(8, chunk.depth)
    tuner.observe(Outcome(chunk, 8, results, TickTimes({"verify": 0.02}, 0.02)))
    assert tuner.budget.saved_s - before == pytest.approx(0.01 * (chunk.depth + 1) - 0.02, rel=0.05)
    assert tuner.choose(8).off  # and goes on as before


def engine_results(rows: int, accepted: int):  # type: ignore[no-untyped-def]
    from tlt.spec.acceptance import AcceptResult

    return [AcceptResult(accepted, ())] * rows


def test_chunks_are_packed_like_any_tree() -> None:
    """Long chains are packed by another way: the same tensors."""
    draft = Draft(tuple(range(2, 2 + 100)), tuple(range(-1, 99)), (0.5,) * 100)
    branched = Draft((*draft.tokens, 7), (*draft.parents, 0), (0.5,) * 101)
    chain, tree = Trees.empty(2, MOST_NODES, "cpu"), Trees.empty(2, MOST_NODES, "cpu")
    chain.fill([draft, Draft()])
    tree.fill([branched, Draft()])
    assert chain.size_R.tolist() == [100, 0]
    for ours, theirs in zip(chain.parts[:4], tree.parts[:4], strict=True):
        assert torch.equal(ours[:, :101], theirs[:, :101])
        assert torch.equal(ours[1], theirs[1])
