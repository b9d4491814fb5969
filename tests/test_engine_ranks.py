"""An engine of several ranks writes the tokens of an engine of one: plainly, speculating, filtered and preempted."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import together
from tests.test_engine import kv_gib, requests
from tests.test_learned import Always
from tests.test_speculation import tokens_of
from tests.tiny import letters, policy
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.follower import Follower
from tlt.engine.graphs import GraphPool
from tlt.engine.graphs import Key as GraphKey
from tlt.engine.request import Request
from tlt.errors import RankLost
from tlt.model.parallel import Ranks
from tlt.model.slices import refresh, slice_of
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.learned import LearnedDrafting
from tlt.spec.shape import Shape
from tlt.spec.speculation import Speculating, Speculation
from tlt.spec.suffix import SuffixDrafting
from tlt.types import Completion, Key, SamplingParams

MODEL = policy(kv_heads=4)
PARAMS = [
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=10),
    SamplingParams(temperature=0.6, top_k=5, max_tokens=12),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.01, max_tokens=14),
]
SHAPES = {
    "off": [Shape()],
    "suffix": [Shape(("suffix",), 4, 2, 7)],
    "eagle": [Shape(("eagle",), 3, 2, 5), Shape(("eagle",), 2, 1, 3), Shape()],
    "both": [Shape(("eagle", "suffix"), 3, 2, 7), Shape(("eagle", "suffix"), 3, 2, 7), Shape(("suffix",), 4, 2, 7)],
}
Done = dict[Key, Completion]


def speculation_of(kind: str, model: Any, rows: int) -> Speculation | None:
    if kind == "off":
        return None
    drafter, dice = Eagle(EagleConfig.of_policy(MODEL.config, window=16), dtype=torch.float64), random.Random(1)
    drafter.init_weights(3)
    drafters = [LearnedDrafting(drafter, model, rows)] if kind != "suffix" else []
    shapes = SHAPES[kind]
    choose = Always(lambda batch: dice.choice(shapes) if batch else Shape())
    return Speculating([*drafters, SuffixDrafting(10_000)], choose, deepest=4, widest=9)


def settings_of(**knobs: Any) -> EngineSettings:
    return EngineSettings(**({"rows": 6, "kv_gib": kv_gib(200, 16, MODEL)} | knobs))


def written(engine: EngineCore, batch: Sequence[Request]) -> Done:
    engine.submit(batch)
    return {completion.key: completion for completion in engine.drain()}


class HostGraphs(GraphPool[Any]):
    """Graphs without a GPU: what was recorded is computed when it is replayed, without being announced again."""

    def __init__(self, runner: Any) -> None:
        super().__init__(torch.device("cpu"), runner._announce_replay)
        self._runner, self._recorded_work = runner, dict[GraphKey, Callable[[], Any]]()
        self.names: list[str] = []

    def has(self, key: GraphKey) -> bool:
        return key in self._recorded_work

    def capture(self, key: GraphKey, function: Callable[[], Any], *, settled: bool = False) -> None:
        if not settled:
            function()
        self.recording = True
        function()
        self.recording = False
        self._recorded_work[key] = function
        self._capture_policy.captured(*key)

    def seconds(self, key: GraphKey) -> float:
        return 1e-4

    def replay(self, key: GraphKey) -> Any:
        assert key in self._recorded_work, "what was not recorded cannot be replayed"
        self._on_replay(key)
        name = key[0][0]  # type: ignore[index]
        self.names.append(name)
        return self._runner.run(*key) if name in ("decode", "verify") else self._recorded_work[key]()


def by_ranks(
    size: int, settings: EngineSettings, kind: str, lead: Callable[[EngineCore], Done], *, graphs: bool = False
) -> Done:
    pools = []

    def with_graphs(runner: Any) -> None:
        if graphs:
            runner._pool = HostGraphs(runner)
            pools.append(runner._pool)

    def work(ranks: Ranks) -> Done:
        part = slice_of(MODEL, ranks)
        if ranks.rank:
            follower = Follower(part, ranks, settings, nodes=9)
            with_graphs(follower._runner)
            follower.follow()
            return {}
        engine = EngineCore(part, letters(), settings, speculation=speculation_of(kind, part, settings.rows))
        with_graphs(engine._runner)
        engine.compile(filtered=True)
        try:
            return lead(engine)
        finally:
            engine.rest()

    done = together(size, work)[0]
    policy_replays = {sum(name in ("decode", "verify") for name in pool.names) for pool in pools}
    assert not graphs or (len(policy_replays) == 1 and policy_replays.pop() > 5)
    return done


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in SHAPES), ("eagle", 4)])
def test_ranks_write_the_tokens_of_one(kind: str, size: int) -> None:
    batch = requests(8, group=2, params=PARAMS)
    expected = written(EngineCore(MODEL, letters(), settings_of()), batch)
    ticks: list[Any] = []

    def lead(engine: EngineCore) -> Done:
        done = written(engine, batch)
        report = engine.report().speculation
        ticks.extend(report.ticks if report else [])
        return done

    found = by_ranks(size, settings_of(), kind, lead)
    assert tokens_of(found) == tokens_of(expected)
    for key, completion in found.items():
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-6)
        assert completion.policy_logprobs == pytest.approx(expected[key].policy_logprobs, abs=1e-6)
    assert kind == "off" or {shape for _, shape in ticks} >= set(SHAPES[kind])


def test_a_pool_tells_of_a_replay_before_it() -> None:
    told: list[Any] = []
    pool: GraphPool[str] = GraphPool(torch.device("cpu"), told.append)
    graph: Any = SimpleNamespace(replay=lambda: told.append("replayed"))
    pool._graphs[("decode", False), 4] = graph, "result"
    assert pool.replay((("decode", False), 4)) == "result"
    assert told == [(("decode", False), 4), "replayed"]


@pytest.mark.parametrize("kind", ["off", "eagle"])
def test_followers_record_and_replay_the_graphs_that_the_leader_does(kind: str) -> None:
    batch = requests(8, group=2, params=PARAMS)
    expected = written(EngineCore(MODEL, letters(), settings_of()), batch)
    found = by_ranks(2, settings_of(), kind, lambda engine: written(engine, batch), graphs=True)
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize("kind", ["off", "eagle"])
def test_ranks_write_the_same_under_preemption(kind: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)  # that all requests together have no pages for
    batch = [Request(Key(5, index), (2 + index, 9, 4), params, str(index)) for index in range(8)]
    expected = written(EngineCore(MODEL, letters(), settings_of()), batch)
    half = kv_gib(14, 16, MODEL) / 2  # a rank has half of the heads
    found = by_ranks(2, settings_of(kv_gib=half, rows=8), kind, lambda engine: written(engine, batch))
    assert tokens_of(found) == tokens_of(expected)
    assert sum(completion.timing.preemptions for completion in found.values()) > 0


def test_ranks_go_on_with_another_policy() -> None:
    """Two rollouts; between them every rank takes its slice of the new weights."""
    batch = requests(4, params=[SamplingParams(max_tokens=8)])
    old, new = policy(kv_heads=4), policy(kv_heads=4, seed=1)

    def work(ranks: Ranks) -> tuple[Done, Done]:
        whole = policy(kv_heads=4)
        part = slice_of(whole, ranks)
        follower = Follower(part, ranks, settings_of()) if ranks.rank else None
        engine = EngineCore(part, letters(), settings_of()) if not follower else None
        found = []
        for _ in range(2):
            if follower:
                follower.follow()
            else:
                assert engine
                found.append(written(engine, batch))
                engine.rest()
            for mine, other in zip(whole.parameters(), new.parameters(), strict=True):
                mine.copy_(other)
            refresh(part, whole.named_parameters())
            if engine:
                engine.load_policy(1)
        return (found[0], found[1]) if found else ({}, {})

    first, second = together(2, work)[0]
    assert tokens_of(first) == tokens_of(written(EngineCore(old, letters(), settings_of()), batch))
    assert tokens_of(second) == tokens_of(written(EngineCore(new, letters(), settings_of()), batch))


def test_a_rank_that_is_gone_is_named() -> None:
    batch = requests(4, params=[SamplingParams(max_tokens=400, ignore_eos=True)])

    def work(ranks: Ranks) -> str:
        part = slice_of(MODEL, ranks)
        if ranks.rank:
            Follower(part, ranks, settings_of())
            ranks.next_command()  # it hears of one run, and its connections are closed, as when a process dies
            vars(ranks).clear()
            return ""
        engine = EngineCore(part, letters(), settings_of())
        engine.submit(batch)
        with pytest.raises(RankLost, match="another rank of this engine was lost"):
            engine.drain()
        return "raised"

    assert together(2, work)[0] == "raised"


def test_ranks_score_texts_together() -> None:
    texts = [(3, 9, 4, 30), (7, 8), (2,) * 11]
    expected = EngineCore(MODEL, letters(), settings_of()).score(texts, top=3)

    def lead(engine: EngineCore) -> Done:
        for found, one in zip(engine.score(texts, top=3), expected, strict=True):
            assert found.logprobs == pytest.approx(one.logprobs, rel=1e-12)
            assert [[token for token, _ in top] for top in found.top] == [[token for token, _ in t] for t in one.top]
        return {}

    by_ranks(2, settings_of(), "off", lead)
