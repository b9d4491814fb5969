"""Lossless: whatever drafts and shapes do, the tokens are those of plain decoding."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.test_engine import EXPECTED, MIXED, MODEL, kv_gib, one_by_one, requests
from tests.test_sampler import score_features, score_test
from tests.tiny import EOS, VOCAB, letters, policy
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.attention import PackedLayout
from tlt.spec.costs import TickTimes
from tlt.spec.shape import OFF, Draft, Shape, merge
from tlt.spec.shape_policy import ShapePolicy
from tlt.spec.speculation import Speculating, Speculation
from tlt.spec.suffix import SuffixDrafting
from tlt.types import Completion, Key, SamplingParams

Guess = Callable[[Key, Sequence[int], Shape], Draft]


class Scripted(Speculation):
    """Speculation with any guesser and any sequence of shapes."""

    def __init__(self, guess: Guess, shapes: Callable[[int], Shape]) -> None:
        self._guess = guess
        self._shapes = shapes
        self.verifies = self.emitted = 0

    def choose(self, running: int) -> Shape:
        return self._shapes(running)

    def propose(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [
            merge([self._guess(key, completion, shape)], shape.verify - 1)
            for key, completion in zip(keys, completions, strict=True)
        ]

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], times: TickTimes, context: float = 0.0) -> None:
        self.verifies += len(emitted)
        self.emitted += sum(map(len, emitted))

    @property
    def accept_length(self) -> float:
        return self.emitted / self.verifies


def chain(tokens: Sequence[int]) -> Draft:
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(0.9**i for i in range(len(tokens))))


def oracle(completions: dict[Key, list[int]], miss: float = 0.0, seed: int = 0) -> Guess:
    """Knows the answers; errs now and then, and hangs wrong branches beside the right one."""
    dice = random.Random(seed)

    def guess(key: Key, written: Sequence[int], shape: Shape) -> Draft:
        future = completions[key][len(written) : len(written) + shape.depth]
        future = [token if dice.random() >= miss else dice.randrange(VOCAB) for token in future]
        wrong = [chain([dice.randrange(VOCAB) for _ in range(shape.depth)]) for _ in range(shape.width - 1)]
        return merge([*wrong[:1], chain(future), *wrong[1:]], shape.verify - 1)

    return guess


def at_random(seed: int) -> Guess:
    dice = random.Random(seed)

    def guess(key: Key, written: Sequence[int], shape: Shape) -> Draft:
        size = dice.randrange(shape.verify)
        return Draft(
            tuple(dice.randrange(VOCAB) for _ in range(size)),
            tuple(dice.randrange(-1, node) for node in range(size)),
            (0.5,) * size,
        )

    return guess


def constant(key: Key, written: Sequence[int], shape: Shape) -> Draft:
    return chain([7] * shape.depth)


def always_ends(key: Key, written: Sequence[int], shape: Shape) -> Draft:
    return chain([EOS] * shape.depth)


def stale(completions: dict[Key, list[int]]) -> Guess:
    """Right, but one token behind."""

    def guess(key: Key, written: Sequence[int], shape: Shape) -> Draft:
        return chain(completions[key][max(0, len(written) - 1) : len(written) - 1 + shape.depth])

    return guess


def fixed(shape: Shape) -> Callable[[int], Shape]:
    return lambda running: shape if running else OFF


def changing(seed: int) -> Callable[[int], Shape]:
    """Another shape every tick, off included."""
    dice = random.Random(seed)
    shapes = [
        OFF,
        Shape(("x",), 1, 1, 2),
        Shape(("x",), 3, 1, 4),
        Shape(("x",), 4, 2, 8),
        Shape(("x",), 7, 3, 17),
        Shape(("x",), 2, 3, 33),
        Shape(("x",), 4, 2, 8, 1.5),
        Shape(("x",), 7, 3, 17, 4.0),
    ]
    return lambda running: dice.choice(shapes) if running else OFF


def run(speculation: Scripted | Speculating, batch: Sequence[Request], **knobs: object) -> dict[Key, Completion]:
    engine = EngineCore(MODEL, letters(), EngineSettings(**knobs), speculation=speculation)
    engine.submit(batch)
    done = engine.drain()
    assert len(done) == len(batch)
    page_stats = engine.report().pages
    assert page_stats.used == 0
    return {completion.key: completion for completion in done}


def tokens_of(done: dict[Key, Completion]) -> dict[Key, list[int]]:
    return {key: list(completion.tokens) for key, completion in done.items()}


GUESSERS = {
    "oracle": oracle(EXPECTED),
    "good": oracle(EXPECTED, miss=0.3),
    "random": at_random(1),
    "constant": constant,
    "ends": always_ends,
    "stale": stale(EXPECTED),
}


@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("shapes", ["chain", "tree", "shared", "changing"])
def test_no_drafter_and_no_shape_changes_a_token(guesser: str, shapes: str) -> None:
    choose = {
        "chain": fixed(Shape(("x",), 4, 1, 5)),
        "tree": fixed(Shape(("x",), 5, 3, 16)),
        "shared": fixed(Shape(("x",), 5, 3, 16, 2.5)),
        "changing": changing(3),
    }[shapes]
    assert tokens_of(run(Scripted(GUESSERS[guesser], choose), requests(12, group=3))) == EXPECTED


@pytest.mark.parametrize(("rows", "page_size", "pages"), [(1, 16, 60), (12, 2, 170), (7, 4, 80), (12, 16, 17)])
def test_nor_do_pages_rows_and_preemption(rows: int, page_size: int, pages: int) -> None:
    speculation = Scripted(oracle(EXPECTED, miss=0.3), changing(rows))
    done = run(
        speculation,
        requests(12, group=3),
        rows=rows,
        page_size=page_size,
        kv_gib=kv_gib(pages + 128 // page_size, page_size),
    )
    assert tokens_of(done) == EXPECTED
    if pages == 17:
        assert sum(completion.timing.preemptions for completion in done.values()) > 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_batches_of_any_size(count: int) -> None:
    batch = requests(count, params=[SamplingParams(max_tokens=24), *MIXED[1:]], seed=8)
    plain = EngineCore(MODEL, letters(), EngineSettings(rows=40))
    plain.submit(batch)
    expected = {completion.key: list(completion.tokens) for completion in plain.drain()}
    speculation = Scripted(oracle(expected, miss=0.2), changing(count))
    assert tokens_of(run(speculation, batch, rows=40)) == expected
    assert speculation.accept_length > 1.5, "the test must accept drafts to mean anything"


def test_a_perfect_drafter_is_accepted_whole() -> None:
    speculation = Scripted(oracle(EXPECTED), fixed(Shape(("x",), 4, 1, 5)))
    run(speculation, requests(12, group=3))
    assert speculation.accept_length > 4


def test_ends_inside_an_accepted_block_cut_exactly() -> None:
    """Drafts that run past the end token, the stop text and the length limit."""
    batch = requests(8, params=[SamplingParams(max_tokens=13), SamplingParams(max_tokens=40)])
    plain = {request.key: one_by_one(request)[0] for request in batch}
    longer = {key: [*tokens, *[5] * 8] for key, tokens in plain.items()}
    done = run(Scripted(oracle(longer), fixed(Shape(("x",), 7, 1, 8))), batch)
    assert tokens_of(done) == plain
    assert {completion.finish_reason for completion in done.values()} == {"eos", "length"}
    request = max(batch, key=lambda request: len(plain[request.key]))
    text = letters().decode(plain[request.key])
    stop = text[6:8]
    stopping = Request(request.key, request.prompt, SamplingParams(max_tokens=40, stop=(stop,)), request.prompt_id)
    cut = run(Scripted(oracle(longer), fixed(Shape(("x",), 7, 1, 8))), [stopping])[request.key]
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(stop) + 2]


@torch.no_grad()
def test_log_probs_are_the_trainers_under_every_shape() -> None:
    done = run(Scripted(oracle(EXPECTED, miss=0.3), changing(5)), requests(12, group=3))
    for completion in done.values():
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens])
        logprobs = MODEL.logits(MODEL(text, PackedLayout.from_lengths([len(text)])).hidden_TD).log_softmax(-1)
        first = len(completion.prompt_tokens) - 1
        expected = logprobs[first:-1].gather(1, text[first + 1 :, None]).squeeze(1)
        assert completion.policy_logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@torch.no_grad()
def test_a_rollout_is_drawn_from_the_policy() -> None:
    """Score test: over a whole speculated rollout, what was written is as likely as the policy says, no more, no less.

    The control is a rollout in which one token in ten is a wrong draft that was let pass.
    """
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    batch = [Request(Key(3, number), (2 + number % 30, 5, 9), params, f"p{number}") for number in range(64)]
    plain = EngineCore(MODEL, letters(), EngineSettings(rows=64))
    plain.submit(batch)
    speculation = Scripted(oracle({c.key: list(c.tokens) for c in plain.drain()}, miss=0.3), changing(2))
    probs, tokens = [], []
    for completion in run(speculation, batch, rows=32).values():
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens])
        hidden = MODEL(text, PackedLayout.from_lengths([len(text)])).hidden_TD
        probs.append(MODEL.logits(hidden)[2:-1].softmax(-1))
        tokens.append(text[3:])
    assert speculation.accept_length > 1.5
    probs_TV, token_T = torch.cat(probs), torch.cat(tokens)
    assert 0.3 < float(-(probs_TV * probs_TV.log()).sum(-1).mean()) < 3.0, "neither certain nor blind"

    def worst(token_T: torch.Tensor) -> float:
        features = score_features(probs_TV).values()
        return max(abs(score_test(probs_TV, token_T, feature_TV)) for feature_TV in features)

    assert worst(token_T) < 4.0
    let_pass = torch.rand(len(token_T), generator=torch.Generator().manual_seed(0)) < 0.1
    assert worst(torch.where(let_pass, (token_T + 11) % VOCAB, token_T)) > 6.0


@torch.no_grad()
def test_rejected_branches_leave_no_trace_in_the_cache() -> None:
    """After speculating with wrong drafts, the cache holds what plain decoding puts there, in its place; of several
    requests side by side as of one."""
    shape = fixed(Shape(("x",), 4, 2, 9))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    batch = [Request(Key(5, number), tuple(range(2, 30 - 5 * number)), params) for number in range(4)]
    completions = {request.key: one_by_one_free(request) for request in batch}
    caches: list[dict[Key, list[torch.Tensor]]] = []
    for speculation in (None, Scripted(oracle(completions, miss=0.5, seed=2), shape)):
        engine = EngineCore(MODEL, letters(), EngineSettings(rows=4, page_size=4), speculation=speculation)
        engine.submit(batch)
        while min(len(engine.written(request.key)) for request in batch) < 30:
            engine.tick()
        cache, held = engine._runner._cache, {}
        for req in engine._scheduler._reqs:
            request = req.state.request
            slots = torch.tensor([req.pages[p // 4] * 4 + p % 4 for p in range(len(request.prompt) + 29)])
            held[request.key] = [part.flatten(1, 2)[:, slots] for part in (cache.k, cache.v)]
        caches.append(held)
    plain, speculated = caches
    assert plain.keys() == speculated.keys() == completions.keys()
    for key, parts in plain.items():
        for ours, theirs in zip(parts, speculated[key], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)


def one_by_one_free(request: Request) -> list[int]:
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=1))
    engine.submit([request])
    return list(engine.drain()[0].tokens)


@torch.no_grad()
def test_features_follow_the_walk() -> None:
    seen: dict[Key, list[torch.Tensor]] = {}

    def keep(features: object) -> None:
        for row, req in enumerate(features.reqs):  # type: ignore[attr-defined]
            steps = 1 if features.steps is None else int(features.steps[row])  # type: ignore[attr-defined]
            seen.setdefault(req.state.request.key, []).extend(features.hidden[row, :steps].clone())  # type: ignore[attr-defined]

    speculation = Scripted(oracle(EXPECTED, miss=0.3), changing(9))
    engine = EngineCore(MODEL, letters(), taps=(1,), on_features=keep, speculation=speculation)
    engine.submit(requests(12, group=3))
    for completion in engine.drain():
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens])
        hidden = MODEL(text, PackedLayout.from_lengths([len(text)])).hidden_TD
        first = len(completion.prompt_tokens) - 1
        got = torch.stack(seen[completion.key][: len(completion.tokens)])
        assert torch.allclose(got, hidden[first:-1], atol=1e-8)


def test_the_suffix_drafter_speculates_in_the_engine() -> None:
    """A policy that repeats itself is sped up; the tokens stay."""
    model = policy(sharpness=400.0)  # near-deterministic: it falls into loops
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    batch = [Request(Key(1, i), (3 + i, 4, 5), params, f"p{i // 2}") for i in range(4)]
    plain = EngineCore(model, letters(), EngineSettings(rows=4))
    plain.submit(batch)
    expected = {completion.key: completion.tokens for completion in plain.drain()}

    class Always(ShapePolicy):
        verifies = 0

        def choose(self, batch: int, lag: int = 0) -> Shape:
            return Shape(("suffix",), 6, 1, 7)

        def observe(self, outcome: object) -> tuple[()]:
            Always.verifies += len(outcome.results)  # type: ignore[attr-defined]
            return ()

    engine = EngineCore(
        model, letters(), EngineSettings(rows=4), speculation=Speculating([SuffixDrafting(10_000)], Always())
    )
    engine.submit(batch)
    assert {completion.key: completion.tokens for completion in engine.drain()} == expected
    assert Always.verifies < 0.5 * 4 * 120
