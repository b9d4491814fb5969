"""The learned drafter in the engine: states reach it in place, its drafts help, and the tokens never change.

A GPU verifies the next trees before the host has read the tokens of the last ones. Here the same order of events is had
by setting `_ahead` on a CPU's engine.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tlt.spec.candidates as candidates_module
from tests.launches import Launches
from tests.test_engine import MODEL, kv_gib, requests
from tests.test_speculation import tokens_of
from tests.tiny import letters
from tlt.config import EngineSettings
from tlt.engine import runner
from tlt.engine.engine import EngineCore
from tlt.engine.output import InFlightTick
from tlt.engine.request import Request
from tlt.engine.runner import Runner
from tlt.engine.scheduler import Chunk, Plan
from tlt.errors import RequestError
from tlt.kernels import compiling
from tlt.kernels.batch_state import reference as state_kernels
from tlt.model.attention import PackedLayout
from tlt.spec import backlog
from tlt.spec import learned as learned_module
from tlt.spec import speculation as speculation_module
from tlt.spec.align import align
from tlt.spec.candidates import BetaCalibrator, Roots, beta_hits, candidates
from tlt.spec.costs import VERIFY, TickTimes
from tlt.spec.drafter import Segment, StartedTrees
from tlt.spec.eagle import Eagle, EagleConfig, gather_taps
from tlt.spec.learned import LearnedDrafting
from tlt.spec.shape import MOST_NODES, OFF, Draft, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy
from tlt.spec.speculation import Speculating
from tlt.spec.suffix import SuffixDrafting
from tlt.spec.tree import Trees
from tlt.types import Completion, Key, SamplingParams

PARAMS = [SamplingParams(max_tokens=40), SamplingParams(temperature=0.0, max_tokens=30)]


def drafting(window: int = 16, rows: int = 16) -> LearnedDrafting:
    """A drafter that has learned nothing."""
    drafter = Eagle(EagleConfig.of_policy(MODEL.config, window=window), dtype=torch.float64)
    drafter.init_weights(3)
    return LearnedDrafting(drafter, MODEL, rows)


class Always(ShapePolicy):
    """One shape for ever, or whatever a function says."""

    def __init__(self, choose) -> None:  # type: ignore[no-untyped-def]
        self._choose = choose

    def choose(self, batch: int, lag: int = 0) -> Shape:
        return self._choose(batch)


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["read at once", "read late"])


def engine_with(  # type: ignore[no-untyped-def]
    learned: LearnedDrafting, choose, ahead: bool = False, suffix: bool = False, **knobs: object
) -> EngineCore:
    drafters = [learned, SuffixDrafting(10_000)] if suffix else [learned]
    speculation = Speculating(drafters, Always(choose))
    engine = EngineCore(MODEL, letters(), EngineSettings(**knobs), speculation=speculation)
    engine._ahead = ahead
    return engine


def shape_of(depth: int, width: int, verify: int) -> Shape:
    return Shape(("eagle",), depth, width, verify)


def plain(batch: Sequence[Request]) -> dict[Key, list[int]]:
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=16))
    engine.submit(batch)
    return tokens_of({completion.key: completion for completion in engine.drain()})


@AHEAD
@pytest.mark.parametrize("kind", ["chain", "tree", "now and then"])
def test_tokens_stay_whatever_an_untrained_drafter_names(kind: str, ahead: bool) -> None:
    batch = requests(8, group=2)  # each with its own temperature and filters
    ticks = iter(range(10**6))
    choose = {
        "chain": lambda batch: shape_of(3, 1, 4),
        "tree": lambda batch: shape_of(4, 3, 9),
        "now and then": lambda batch: shape_of(4, 2, 7) if next(ticks) % 5 < 2 and batch else Shape(),
    }[kind]
    engine = engine_with(drafting(), lambda batch: choose(batch) if batch else Shape(), ahead, rows=8)
    engine.submit(batch)
    assert tokens_of({completion.key: completion for completion in engine.drain()}) == plain(batch)


@AHEAD
def test_tokens_stay_under_preemption(ahead: bool) -> None:
    batch = requests(8, group=2, params=[SamplingParams(max_tokens=40, ignore_eos=True)])
    engine = engine_with(
        drafting(), lambda batch: shape_of(3, 2, 5) if batch else Shape(), ahead, rows=8, kv_gib=kv_gib(16, 16)
    )
    engine.submit(batch)
    done = {completion.key: completion for completion in engine.drain()}
    assert tokens_of(done) == plain(batch)
    assert sum(completion.timing.preemptions for completion in done.values()) > 0


@torch.no_grad()
def test_sharpness_is_fitted_to_what_roots_were_named_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits, keys and noise that it looks at name the very tokens that were drafted, and the tokens it is told of
    are those that were drawn there."""
    monkeypatch.setattr(BetaCalibrator, "observe", lambda *_: None)  # the same β throughout
    learned = drafting(window=64)
    engine = engine_with(learned, lambda batch: shape_of(2, 1, 3) if batch else Shape(), rows=4)
    sharpening, drafted, seen = learned._beta_probe, list[list[int]](), list[tuple[Roots, list[int], list[int]]]()
    root, look = sharpening.root, sharpening.look

    def note_root(*given: Any) -> None:
        drafted.append(learned._builders[1].grown.token_RL[:4, 0].tolist())
        root(*given)

    def note_look(token_N: Tensor, token_of_draft_v: Tensor | None) -> None:
        assert sharpening.roots is not None
        seen.append((sharpening.roots, drafted[-1], token_N.tolist()))
        look(token_N, token_of_draft_v)

    sharpening.root, sharpening.look = note_root, note_look  # type: ignore[method-assign]
    sharpening.wants_roots = lambda: True  # type: ignore[method-assign]
    engine.submit(requests(4, params=[SamplingParams(max_tokens=40, ignore_eos=True)]))
    texts = {one.key.request: (*one.prompt_tokens, *one.tokens) for one in engine.drain()}
    ready = 0
    for roots, firsts, drawn in seen:
        named = candidates(roots.logits_Nv, roots.draws, learned.beta, 1).token_Nk[:, 0].tolist()
        keys = zip(roots.draws.request_N.tolist(), roots.draws.position_N.tolist(), strict=True)
        for row, (request, position) in enumerate(keys):
            assert texts[request][position] == drawn[row]
            if roots.ready_N[row]:
                ready += 1
                assert named[row] == firsts[row]
    assert ready > 20


@torch.no_grad()
def test_drafts_come_from_the_right_states_after_any_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it names in the engine equals what the packed form of the drafter names from the whole text."""
    monkeypatch.setattr(BetaCalibrator, "observe", lambda *_: None)  # the same β throughout
    learned = drafting(window=64)
    batch = requests(4, params=[SamplingParams(max_tokens=40, ignore_eos=True)])
    ticks = iter(range(10**6))
    engine = engine_with(
        learned, lambda batch: shape_of(2, 2, 5) if batch and next(ticks) % 7 in (3, 4, 5) else Shape(), rows=4
    )
    seen: list[tuple[Key, tuple[int, ...], Draft]] = []
    original = learned.start_trees

    def spy(keys: Sequence[Key], shape: Shape) -> StartedTrees:
        started_trees = original(keys, shape)
        if shape_now:  # the trees of this tick, not those of the next
            seen.extend((key, engine.written(key), started_trees.draft(key)) for key in keys)
            shape_now.clear()
        return started_trees

    shape_now: list[bool] = []
    proposing = engine._speculation.propose

    def propose(keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> Sequence[Draft] | None:
        shape_now.append(True)
        return proposing(keys, completions, shape)

    learned.start_trees = spy  # type: ignore[method-assign]
    engine._speculation.propose = propose  # type: ignore[method-assign]
    engine.submit(batch)
    engine.drain()
    prompts = {request.key: request.prompt for request in batch}
    checked = 0
    for key, completion, draft in seen:
        if not len(draft):
            continue
        assert draft.tokens[0] == first_named(learned, key, prompts[key], completion)
        checked += 1
    assert checked > 10


def first_named(learned: LearnedDrafting, key: Key, prompt: tuple[int, ...], completion: tuple[int, ...]) -> int:
    from tlt.spec.candidates import DrawKeys, candidates

    drafter = learned.drafter
    text = torch.tensor([*prompt, *completion])
    states = gather_taps(MODEL(text, PackedLayout.from_lengths([len(text)]), taps=drafter.config.taps).taps)
    first = 0  # the prompt's states are kept too
    aligned = align(text[first:], torch.ones(len(text) - first, dtype=torch.bool), [len(text) - first])
    shifted = type(aligned)(aligned.next_T, aligned.learn_T, aligned.index_T, aligned.lengths)
    g_TD = rotated_forward(drafter, shifted, states[first:], first)
    logits = drafter.logits(g_TD[-2:-1], MODEL.head_weight)
    keys = DrawKeys(*(torch.tensor([value]) for value in (key.seed, key.request, len(text))), torch.tensor([1.0]))
    return int(candidates(logits, keys, learned.beta, 1).token_Nk)


def rotated_forward(drafter: Eagle, aligned, states, first: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The packed forward; rotary attention depends on distances alone, so positions may start anywhere."""
    return drafter.unroll(aligned, states, MODEL.embed, 1)[0]


def first_tokens(draft: Draft) -> set[int]:
    return {token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0}


@AHEAD
@pytest.mark.parametrize("kind", ["both", "changing"])
def test_suffix_and_learned_branches_share_a_tree(kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one tree; or another set of drafters every tick, off included."""
    learned, dice = drafting(), random.Random(4)
    batch = requests(12, group=3)
    both = Shape(("eagle", "suffix"), 4, 2, 9)
    shapes = {"both": [both], "changing": [both, Shape(), shape_of(3, 2, 6), Shape(("suffix",), 5, 2, 8)]}[kind]
    choose = lambda batch: dice.choice(shapes) if batch else Shape()
    engine = engine_with(learned, choose, ahead, suffix=True, rows=6)
    joined, shared = speculation_module._joined, 0

    def look(parts: Sequence[Draft], budget: int) -> Draft:
        nonlocal shared
        tree = joined(parts, budget)
        if len(parts) == 2:
            one, other, kept = map(first_tokens, (*parts, tree))
            shared += bool(kept & (one - other)) and bool(kept & (other - one))
        return tree

    monkeypatch.setattr(speculation_module, "_joined", look)
    engine.submit(batch)
    assert tokens_of({completion.key: completion for completion in engine.drain()}) == plain(batch)
    report = engine.report().speculation
    assert report is not None
    assert {shape for _, shape in report.ticks} >= set(shapes)
    assert shared > 20, "trees that hold what one of them alone named, of each"


def test_lookups_are_made_while_the_device_grows_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is grown is launched first and read last; what is looked up comes in between."""
    learned, calls = drafting(), list[str]()
    for owner, name in ((LearnedDrafting, "start_trees"), (LearnedDrafting, "draft"), (SuffixDrafting, "draft")):
        work, called = getattr(owner, name), f"{owner.name} {name}"

        def noted(self: Any, *given: Any, work: Any = work, called: str = called) -> Any:
            calls.append(called)
            return work(self, *given)

        monkeypatch.setattr(owner, name, noted)
    both = Shape(("eagle", "suffix"), 4, 2, 9)
    engine = engine_with(learned, lambda batch: both if batch else Shape(), False, suffix=True, rows=6)
    engine.submit(requests(6))
    engine.drain()
    asked = [number for number, call in enumerate(calls) if call == "suffix draft"]
    assert len(asked) > 5
    for number in asked:
        assert calls[number - 1] == "eagle start_trees"
        assert calls[number + 1] == "eagle draft"


def test_switching_on_and_off_computes_nothing_of_the_policys_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's cache is as good after plain ticks as before, and so are the states it kept for the drafter."""
    computed: list[int] = []
    prefill = Runner._prefill

    def counting(runner: Runner, chunks: Sequence[Chunk]) -> None:
        computed.append(sum(len(chunk.tokens) for chunk in chunks))
        prefill(runner, chunks)

    monkeypatch.setattr(Runner, "_prefill", counting)
    ticks = iter(range(10**6))
    engine = engine_with(
        drafting(), lambda batch: shape_of(3, 2, 5) if batch and next(ticks) // 3 % 2 else Shape(), rows=4
    )
    batch = requests(8, group=2, params=[SamplingParams(max_tokens=40, ignore_eos=True)])
    engine.submit(batch)
    engine.drain()
    report = engine.report().speculation
    assert report is not None
    assert report.switches > 4
    assert sum(computed) == sum(len(request.prompt) - 1 for request in batch[::2]), "each group's prompt, once"


@AHEAD
@pytest.mark.parametrize(("share", "rows"), [(1.5, 12), (2.0, 12), (3.0, 12), (0.0, 5), (2.0, 5)])
def test_what_rows_take_in_fits_where_it_need_not_be_room_for_all(
    share: float, rows: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that shares what is verified writes no more than that, and of those who come in while others draft only
    their own prompts are to be taken in: less room for it, and the same drafts."""
    hot = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=100.0) for n in (12, 30)]  # then drafts come true
    batch = requests(12, group=3, seed=4, params=hot)
    found, extend_segment = [], LearnedDrafting._extend_segment
    for room in (True, False):
        if not room:
            monkeypatch.setattr(backlog, "MEAN_SIZES", ())
            monkeypatch.setattr(backlog, "PROMPT_MEAN_SIZES", ())
        sizes: set[float] = set()

        def seen(learned: LearnedDrafting, rows: int, most: int, room: float, *rest: str, sizes=sizes) -> Any:  # type: ignore[no-untyped-def]
            sizes.add(room - most)
            return extend_segment(learned, rows, most, room, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(LearnedDrafting, "_extend_segment", seen)
            engine = engine_with(drafting(), lambda running: replace(shape_of(4, 2, 8), share=share), ahead, rows=rows)
            engine.submit(batch)
            done = engine.drain()
        report = engine.report().speculation
        assert report is not None
        found.append((tokens_of({one.key: one for one in done}), report.verifies, report.accepted))
        assert (min(sizes) < 0) == room
    assert found[0] == found[1]
    assert found[0][2] > 0.3 * found[0][1]


def test_idle_trees_of_every_size_are_verified_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are graphs, so that whatever compiles does so then; and nothing is left of it."""
    forward, seen = Runner._forward_trees, set[tuple[int, int, bool]]()

    def spy(one: Runner, trees: Trees, tokens: int, steps: int, filtered: bool) -> Any:
        rows, nodes = trees.token_RQ.shape
        assert tokens in (rows * nodes, math.ceil(1.5 * rows))
        assert steps == min(4, nodes)
        seen.add((rows, nodes, tokens < rows * nodes))
        return forward(one, trees, tokens, steps, filtered)

    engine, read = engine_with(drafting(), lambda running: shape_of(3, 2, 5), rows=12), set[tuple[int, int]]()
    decoded = set[tuple[int, bool]]()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_forward_trees", spy)
        engine._runner.compile(9, 4)
        assert not seen, "a CPU compiles nothing"
        patch.setattr(compiling, "compile_ahead", lambda work: work())
        patch.setitem(runner._DEAREST, "cpu", 100)  # tokens: beyond it, requests only share
        patch.setattr(engine._runner, "_pool", object())  # then sizes are padded
        patch.setattr(Runner, "read", lambda runner, sent, longest: read.add((len(sent.starts) - 1, longest)))
        patch.setattr(Runner, "_sent", lambda runner, packed: packed)
        patch.setattr(Runner, "_forward", lambda runner, rows, filtered: decoded.add((rows, filtered)))
        engine._runner.compile(9, 4, filtered=True)
    assert decoded == {(rows, filtered) for rows in engine._runner._sizes for filtered in (False, True)}
    longest = engine._runner._model.config.max_positions
    one = [(1, tokens) for tokens in (20, 70, 100, 180, min(1500, longest))]
    assert read == {*one, (8, 100), (20, 20), (40, 20)}, "few and many, short and long"
    trees = {(rows, nodes) for rows in (12, 8, 4, 1) for nodes in (2, 4, 8, 16)}  # 9 are laid out as 16
    alone = {(rows, nodes, rows * nodes > 100) for rows, nodes in trees}
    sharing = {(rows, 2, True) for rows in (12, 8, 4)} | {(rows, 4, True) for rows in (12, 8, 4, 1)}
    assert seen == alone | sharing, "and where requests share"
    batch = requests(12, group=3, seed=4)
    engine.submit(batch)
    assert tokens_of({one.key: one for one in engine.drain()}) == plain(batch)


def test_what_newcomers_brought_is_told_when_it_was_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than a pass takes in, while others draft: so many positions of each row, on average, and once."""
    extend_rows, told = LearnedDrafting._extend_rows, list[tuple[float, bool]]()

    def look(learned: LearnedDrafting, count: int) -> None:
        late = learned._backlog.needs_passes(count)
        extend_rows(learned, count)
        taken = learned.ingested()
        assert learned.ingested() == 0.0
        told.append((taken * count, late))

    monkeypatch.setattr(LearnedDrafting, "_extend_rows", look)
    engine = engine_with(drafting(window=128), lambda running: shape_of(2, 1, 3), rows=16)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.submit([Request(Key(0, i), (5, 6, 7 + i), params, f"short {i}") for i in range(15)])
    for _ in range(5):
        engine.tick()
    prompt = tuple(3 + i % 17 for i in range(90))
    engine.submit([Request(Key(1, 0), prompt, params, "long")])
    before = len(told)
    engine.drain()
    brought = [positions for positions, late in told[before:] if not late]
    assert brought == pytest.approx([89.0]), "all but the newest token"
    learned = drafting()
    learned._ingested = learned._ticks, 3.0
    learned._ticks += 1  # a tick went by in which nobody asked: all for whom it was taken in had ended
    assert learned.ingested() == 0.0


def test_a_row_that_there_was_no_room_for_has_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts would follow from an older token: they cost what the others share, and never come true."""
    batch = requests(10, group=2, seed=3, params=[SamplingParams(max_tokens=40, ignore_eos=True)])
    extend_segment, build_trees, left = LearnedDrafting._extend_segment, LearnedDrafting._build_trees, 0

    def half(learned: LearnedDrafting, rows: int, most: int, room: float, *rest: str) -> Any:
        return extend_segment(learned, rows, most, room / 4, *rest)

    def look(learned: LearnedDrafting, keys: Sequence[Key], shape: Shape) -> Any:
        nonlocal left
        grown = build_trees(learned, keys, shape)
        lag = learned._memory.taken_R[: len(keys)] < learned._rows.position_R[: len(keys)]
        assert not (learned._memory.ready_R[: len(keys)] & lag).any()
        assert [not grown.draft(key).tokens for key in keys] == (~learned._memory.ready_R[: len(keys)]).tolist()
        left += int(lag.sum())
        return grown

    monkeypatch.setattr(LearnedDrafting, "_extend_segment", half)
    monkeypatch.setattr(LearnedDrafting, "_build_trees", look)
    engine = engine_with(drafting(), lambda running: replace(shape_of(4, 2, 8), share=2.0), rows=10)
    engine.submit(batch)
    assert tokens_of({one.key: one for one in engine.drain()}) == plain(batch)
    assert left > 20, "there was room for all: this shows nothing"


def test_idle_rows_take_nothing_of_what_the_others_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with graphs, whose batches are padded: rows that requests have left still look ready."""
    monkeypatch.setattr(Runner, "padded", lambda runner, rows: 16)
    build_trees, idle = LearnedDrafting._build_trees, 0

    def look(learned: LearnedDrafting, keys: Sequence[Key], shape: Shape) -> Any:
        nonlocal idle
        grown = build_trees(learned, keys, shape)
        sizes = learned._runner.trees(shape.verify).size_R[:16].tolist()
        assert sum(sizes[: len(keys)]) <= shape.tokens(16) - 16
        assert not any(sizes[len(keys) :])
        idle += int(learned._memory.ready_R[len(keys) : 16].sum())
        return grown

    monkeypatch.setattr(LearnedDrafting, "_build_trees", look)
    batch = requests(16, seed=5, params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 17, 40)])
    engine = engine_with(drafting(), lambda running: replace(shape_of(3, 2, 7), share=2.0), rows=16)
    engine.submit(batch)
    assert tokens_of({one.key: one for one in engine.drain()}) == plain(batch)
    assert idle > 20, "no idle row looked ready: this shows nothing"


def test_trees_grown_ahead_move_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    move, moved = LearnedDrafting._move, 0

    def look(learned: LearnedDrafting, moves: Sequence[tuple[int, int]]) -> None:
        nonlocal moved
        started_trees = learned._started_trees
        if started_trees is None or started_trees.tick != learned._ticks:
            return move(learned, moves)
        trees = learned._runner.trees(started_trees.shape.verify)
        expected = [part.clone() for part in trees.parts]
        for source, target in moves:
            for part in expected:
                part[target] = part[source].clone()
        move(learned, moves)
        assert all(torch.equal(part, wanted) for part, wanted in zip(trees.parts, expected, strict=True))
        moved += len(moves)
        return None

    monkeypatch.setattr(LearnedDrafting, "_move", look)
    batch = requests(12, seed=6, params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 17, 23, 40)])
    engine = engine_with(drafting(), lambda running: shape_of(3, 2, 6), True, rows=12)
    engine.submit(batch)
    assert tokens_of({one.key: one for one in engine.drain()}) == plain(batch)
    assert moved > 2


def test_the_policy_is_not_touched() -> None:
    before = [parameter.clone() for parameter in MODEL.parameters()]
    engine = engine_with(drafting(), lambda batch: shape_of(3, 2, 6) if batch else Shape(), rows=4)
    engine.submit(requests(4, params=PARAMS))
    engine.drain()
    assert all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))


@AHEAD
def test_a_new_version_is_loaded_in_the_middle_and_changes_no_token(ahead: bool) -> None:
    learned, other = drafting(), drafting().drafter
    other.init_weights(9)
    policy_before = [parameter.clone() for parameter in MODEL.parameters()]
    batch = requests(6, params=PARAMS)
    engine = engine_with(learned, lambda batch: shape_of(3, 2, 6) if batch else Shape(), ahead, rows=6)
    engine.submit(batch)
    done = [completion for _ in range(8) for completion in engine.tick()]
    engine.load_drafter(dict(other.named_parameters()), version=1)
    done += engine.drain()
    assert tokens_of({completion.key: completion for completion in done}) == plain(batch)
    assert learned.version == 1
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), learned.drafter.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(policy_before, MODEL.parameters(), strict=True))
    everything = dict(other.named_parameters())
    with pytest.raises(ValueError, match="no such tensor"):
        learned.load({**everything, "nonsense": torch.zeros(1)}, version=2)
    with pytest.raises(ValueError, match="missing"):
        learned.load({"fc": everything["fc"]}, version=2)
    assert learned.version == 1


@pytest.mark.parametrize(
    ("poisoned", "depth", "nodes", "ahead"), [(0, 3, 4, False), (7, 6, 5, True), (20, 3, 4, False), (20, 3, 4, True)]
)
def test_a_request_without_a_distribution_fails_alone(poisoned: int, depth: int, nodes: int, ahead: bool) -> None:
    """Its nonsense reaches the drafter's rows before anybody has read that it failed, and a draft may name the very
    token that the policy cannot go on from: those fail that fail plainly, and nobody else's tokens change."""
    batch = requests(20, params=[SamplingParams(max_tokens=20, ignore_eos=True)], seed=1)
    shape = shape_of(depth, 4, nodes)
    with torch.no_grad():
        healthy = MODEL.embed[poisoned].clone()
        MODEL.embed[poisoned] = float("nan")
    try:
        plainly = answers_and_failures(EngineCore(MODEL, letters(), EngineSettings(rows=4)), batch)
        drafted = engine_with(drafting(), lambda batch: shape if batch else Shape(), ahead, rows=4)
        assert answers_and_failures(drafted, batch) == plainly
    finally:
        with torch.no_grad():
            MODEL.embed[poisoned] = healthy
    completions, failures = plainly
    assert failures, "nobody drew the token: this shows nothing"
    assert len(completions) + len(failures) == len(batch)


def answers_and_failures(
    engine: EngineCore, batch: Sequence[Request]
) -> tuple[dict[Key, list[int]], set[tuple[str, ...]]]:
    """What was answered, and (request, position) of what failed."""
    engine.submit(batch)
    done: dict[Key, list[int]] = {}
    while not engine.idle:
        done.update((one.key, list(one.tokens)) for one in engine.tick())
    try:
        engine.drain()
    except RequestError as error:
        return done, set(re.findall(r"request (\d+): .*?position (\d+)", str(error)))
    return done, set()


@pytest.mark.parametrize("seed", [1])
def test_reading_late_changes_no_token_whatever_happens_meanwhile(seed: int) -> None:
    """Shapes and drafters change every tick, pages run out, requests come while others are in flight and end anywhere
    in a walk, some at the end of the context; the policy's tensors are declared new in between."""
    dice = random.Random(seed)
    room = MODEL.config.max_positions
    batch = requests(14, group=2, seed=seed, params=[SamplingParams(max_tokens=n) for n in (1, 2, 5, 17, 40)])
    long = (batch[-1].prompt * room)[: room - 100]
    until_full = SamplingParams(max_tokens=100, ignore_eos=True)
    batch[-1] = replace(batch[-1], prompt=long, params=until_full)  # its drafts reach beyond the last position
    learned = [shape_of(*numbers) for numbers in ((1, 1, 2), (3, 1, 4), (4, 3, 9), (7, 2, 12))]
    shared = [replace(shape, share=share) for shape, share in zip(learned, (1.5, 2.0, 3.0, 3.5), strict=True)]
    shapes = [*learned, *shared, Shape(), Shape(("suffix",), 5, 2, 8, 3.0), Shape(("eagle", "suffix"), 4, 2, 9, 2.0)]
    pages = -(-(room + MOST_NODES) // 16) + dice.randint(2, 12)
    engine = engine_with(
        drafting(),
        lambda running: dice.choice(shapes) if running else Shape(),
        ahead=True,
        suffix=True,
        rows=dice.choice((3, 6, 16)),
        kv_gib=kv_gib(pages, 16),
    )
    done: dict[Key, Completion] = {}
    waiting = list(batch)
    late = 0
    while waiting or not engine.idle:
        if waiting and dice.random() < 0.3:
            count = dice.randint(1, 4)
            engine.submit(waiting[:count])
            del waiting[:count]
        if dice.random() < 0.02:
            engine.load_policy(engine.version + 1)
        done.update((one.key, one) for one in engine.tick())
        late += engine._unread_tick is not None and not engine._unread_tick.shape.off
    assert tokens_of(done) == plain(batch)
    assert late > 5, "hardly any tick was read late: this shows nothing"
    assert engine.report().pages.used == 0


class Told(Always):
    """Keeps what it is told."""

    def __init__(self, choose) -> None:  # type: ignore[no-untyped-def]
        super().__init__(choose)
        self.outcomes: list[Outcome] = []

    def observe(self, outcome: Outcome) -> tuple[()]:
        self.outcomes.append(outcome)
        return ()


def test_a_request_that_was_preempted_and_is_back_at_once_has_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was grown for it stands elsewhere in its answer: its tree is cleared, and the host must not think otherwise,
    or the tuner learns from tokens that nobody verified."""
    dice, back = random.Random(1), 0
    shapes = [shape_of(*numbers) for numbers in ((3, 1, 4), (4, 3, 9), (7, 2, 12))]
    engine = engine_with(
        *(drafting(), lambda running: dice.choice(shapes) if running else Shape(), True),
        rows=6,
        page_size=4,
        kv_gib=kv_gib(68, 4),
    )
    launch = Runner.launch

    def look(runner: Runner, plan: Plan, drafts: Sequence[Draft] | None = None, *how: Any) -> InFlightTick:
        nonlocal back
        if plan.nodes > 1:
            proposed = engine._speculation._proposed[-1]
            trees = [bool(depth_Q.any()) for depth_Q in runner.trees(plan.nodes).depth_RQ[: len(plan.reqs)]]
            assert [bool(proposed.of(row)[0].tokens) for row in range(len(plan.reqs))] == trees
            back += sum(plan.reqs[entry.row].state.preemptions > 0 and not trees[entry.row] for entry in plan.entries)
        return launch(runner, plan, drafts, *how)

    monkeypatch.setattr(Runner, "launch", look)
    engine.submit(
        requests(10, group=2, seed=1, params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in (17, 40, 60)])
    )
    engine.drain()
    assert back, "nobody came back at once: this shows nothing"


def told_engine(learned: LearnedDrafting) -> tuple[EngineCore, Told]:
    told = Told(lambda running: shape_of(3, 2, 5) if running else Shape())
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=4), speculation=Speculating([learned], told))
    engine._ahead = True
    return engine, told


def test_a_capture_is_told_once_and_a_prefill_is_no_ticks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = told_engine(drafting())
    captured, tick, prepare = 0.0, 0, engine._speculation.prepare
    monkeypatch.setattr(Runner, "capture_s", property(lambda runner: captured))

    def capturing(keys: Sequence[Key]) -> None:
        nonlocal captured
        captured += tick == 7
        prepare(keys)

    monkeypatch.setattr(engine._speculation, "prepare", capturing)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.submit(requests(2, params=[params], seed=1))
    for tick in range(15):
        if tick == 10:
            engine.submit(requests(1, params=[params], seed=2))
        engine.tick()
    drafted = [outcome for outcome in told.outcomes if not outcome.shape.off]
    assert [place for place, outcome in enumerate(drafted) if outcome.times.seconds is None] == [9]
    assert [outcome.times.one_off_s for outcome in drafted] == [float(place == 7) for place in range(len(drafted))]
    assert all(VERIFY in outcome.times.parts for outcome in drafted)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_caught_up_says_how_many_positions(ahead: bool) -> None:
    """Plain ticks, then drafts: what is taken in is told of the tick that did, whatever was chosen meanwhile."""
    learned = drafting(window=16)
    engine, told = told_engine(learned)
    engine._ahead = ahead
    engine.submit(requests(2, params=[SamplingParams(max_tokens=60, ignore_eos=True)], seed=1))
    for _ in range(6):
        engine.tick()
    learned._backlog.add_written(30, 30.0)  # as in so many plain ticks
    lag = learned.lag(2)
    for _ in range(4):
        engine.tick()
    assert lag > 0
    assert [outcome.lag for outcome in told.outcomes if outcome.lag][-1] == lag
    assert all(outcome.lag == 0 or outcome.draft_extend_s > 0 for outcome in told.outcomes)


def test_what_the_last_drafter_reached_is_not_told_of_the_next() -> None:
    learned, other = drafting(), drafting().drafter
    engine, told = told_engine(learned)
    engine.submit(requests(2, params=[SamplingParams(max_tokens=60, ignore_eos=True)], seed=1))
    for _ in range(6):
        engine.tick()
    before = len(told.outcomes)
    engine.load_drafter(dict(other.named_parameters()), version=1)
    for _ in range(6):
        engine.tick()
    fresh = told.outcomes[before:]
    assert fresh[0].results, "what was learned before the change is told in time"
    assert [bool(outcome.results) for outcome in fresh[1:]] == [False, *[True] * (len(fresh) - 2)]


def test_every_state_of_a_prompt_stands_beside_the_token_drawn_from_it() -> None:
    """Groups that enter together share a prompt's states; some prompts are longer than the window, some end alike."""
    prompts = [(3, 4, 5), (3, 4, 6), tuple(range(2, 24)), (7, 8)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    batch = [Request(Key(1, 2 * n + one), prompt, params) for n, prompt in enumerate(prompts) for one in range(2)]
    learned = drafting()
    engine = engine_with(learned, lambda running: Shape(), rows=8)
    engine.submit(batch)
    engine.tick()
    states, window = packed_states(prompts), learned._window
    for row, request in enumerate(batch):
        prompt = request.prompt
        for position in range(max(0, len(prompt) - window), len(prompt) - 1):  # the first token has taken a place
            assert learned._memory.tokens_RW[row, position % window] == prompt[position + 1]
            kept = learned._memory.states_RWF[row, position % window]
            torch.testing.assert_close(kept, states[prompt][position], rtol=1e-9, atol=1e-9)


def test_keeping_states_is_one_launch_in_any_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed around it: those who stay off pay for it in every tick."""
    kept: list[object] = []
    monkeypatch.setattr(state_kernels, "keep_states", lambda *given, pdl: kept.append(given))  # one launch on a GPU
    found, state_sink = [], engine_with(drafting(), lambda _: Shape(), rows=4)
    for engine in (EngineCore(MODEL, letters(), EngineSettings(rows=4)), state_sink):
        runner = engine._runner
        kept.clear()
        with torch.no_grad(), Launches() as launches:
            runner._forward(4, filtered=False)
            plain = launches.taken()
            runner._forward_trees(runner.trees(5).first(4), 20, 3, filtered=False)
            found.append((plain, launches.taken(), len(kept)))
    without, with_keeper = found
    assert min(without[0].total(), without[1].total()) > 20, "they are counted"
    assert with_keeper == (*without[:2], 2)


def packed_states(prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
    """By a forward of each prompt alone."""
    taps = EagleConfig.of_policy(MODEL.config, window=16).taps
    found = {}
    for prompt in prompts:
        with torch.no_grad():
            out = MODEL(torch.tensor(prompt), PackedLayout.from_lengths([len(prompt)]), taps)
        found[prompt] = gather_taps(out.taps)
    return found


def test_a_tuner_is_told_who_came_and_how_much_may_come() -> None:
    """Positions of the prompts, once each, also by plain ticks; and the ticks that are left, once nobody waits."""
    ticks = iter(range(10**6))
    told = Told(lambda running: shape_of(3, 2, 5) if running and next(ticks) % 3 else Shape())
    learned = drafting(window=64)
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=4), speculation=Speculating([learned], told))
    batch = requests(8, params=[SamplingParams(max_tokens=30, ignore_eos=True)], seed=1)
    engine.submit(batch)
    left = []
    while not engine.idle:
        engine.tick()
        left.append(told.outcomes[-1].remaining_ticks() if told.outcomes else math.inf)
    assert sum(outcome.arrived for outcome in told.outcomes) == sum(len(request.prompt) - 1 for request in batch)
    assert left[0] == math.inf, "half of them wait"
    some = [ticks for ticks in left if ticks < math.inf]
    assert some == sorted(some, reverse=True)
    assert some[0] <= 30
    assert some[-1] == 0


def test_compiling_leaves_nothing_behind() -> None:
    """All that drafts need was gone through before the first request came, in every size and width, and they are what
    they would have been."""
    batch = requests(6, group=2, params=[SamplingParams(max_tokens=30, ignore_eos=True, temperature=100.0)])
    shapes = [shape_of(2, 1, 3), replace(shape_of(4, 2, 8), share=2.0), shape_of(3, 3, 9), Shape(("suffix",), 3, 1, 4)]
    found = []
    for compiled in (False, True):
        learned, ticks = drafting(), iter(range(10**6))
        engine = engine_with(learned, lambda n, ticks=ticks: shapes[next(ticks) % 3] if n else Shape(), rows=16)
        if compiled:
            gone_through = compiled_parts(learned, shapes)
            pruned = {("prune", 1, 2, 3, 0.0, 16), ("prune", 3, 3, 9, 0.0, 16)}
            assert {part for part in gone_through if part[0] == "prune"} == pruned | {
                ("prune", 2, 4, 8, 2.0, rows) for rows in (16, 8, 4, 2, 1)
            }
            assert gone_through - pruned >= {
                (role, width, rows) for role in ("roots", "expand") for width in (1, 2, 3) for rows in range(1, 17)
            }
            assert {part[-1] for part in gone_through if part[0] == "extend"} == set(range(1, 17))
            assert ("look", 1) in gone_through
            assert learned._beta_probe.roots is None, "and nothing comes of it"
            assert learned._beta_probe._pending is None
        engine.submit(batch)
        tokens = tokens_of({one.key: one for one in engine.drain()})
        report = engine.report().speculation
        assert report is not None
        found.append((tokens, report.verifies, report.accepted))
    assert found[0] == found[1]
    assert found[0][0] == plain(batch)


def compiled_parts(learned: LearnedDrafting, shapes: list[Shape]) -> set[tuple[Any, ...]]:
    """Role and rows of all that `compile` ran."""
    ran: set[tuple[Any, ...]] = set()

    def noted(role: Any, rows: int, work: Any, exactly: bool = False, timed_as: str = "") -> Segment:
        return Segment(role, rows, lambda rows: (ran.add((*role, rows)), work(rows))[1], exactly, timed_as)

    def looked(logits_Nv: Tensor, *given: Any, **more: Any) -> Tensor:
        ran.add(("look", len(logits_Nv)))
        return beta_hits(logits_Nv, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_module, "Segment", noted)
        patch.setattr(candidates_module, "beta_hits", looked)
        patch.setattr(compiling, "compile_ahead", lambda work: work())
        learned.compile(shapes)
    return ran


def test_what_a_shape_needs_once_is_not_charged_to_the_one_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are captured when it is launched, behind a verification that nobody has read by then."""
    baseline, other = shape_of(3, 1, 4), shape_of(2, 1, 3)
    launch, told = Runner.launch, list[tuple[Shape, float]]()
    captured, chosen = [0.0], iter(range(10**6))

    def launching(one: Runner, plan: Any, drafts: Any = None, shape: Shape = OFF, *rest: Any) -> Any:
        captured[0] += shape == other
        return launch(one, plan, drafts, shape, *rest)

    def verified(one: Speculating, shape: Shape, emitted: Any, times: TickTimes, context: float = 0.0) -> None:
        told.append((shape, times.one_off_s))
        verifying(one, shape, emitted, times, context)

    verifying = Speculating.verified
    monkeypatch.setattr(Runner, "launch", launching)
    monkeypatch.setattr(Runner, "capture_s", property(lambda one: captured[0]))
    monkeypatch.setattr(Speculating, "verified", verified)
    engine = engine_with(
        drafting(), lambda batch: (other if next(chosen) % 6 == 5 else baseline) if batch else OFF, True, rows=6
    )
    engine.submit(requests(6, params=(SamplingParams(max_tokens=40, ignore_eos=True),)))
    engine.drain()
    assert {shape for shape, _ in told} == {baseline, other}
    assert {(shape, one_off_s) for shape, one_off_s in told} == {(baseline, 0.0), (other, 1.0)}
