"""Which graph serves a run: a larger one, none, or its own; and whatever serves, the tokens are plain decoding's."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clocks import Clock
from tests.test_engine import requests
from tests.test_learned import AHEAD, drafting, engine_with, plain, shape_of
from tests.test_speculation import tokens_of
from tlt.config import EngineSettings, RunConfig, SpecSettings
from tlt.engine import engine as engine_module
from tlt.engine import graphs
from tlt.engine import runner as runner_module
from tlt.engine import timer as timer_module
from tlt.engine.build import build_engine, make_ready, shape_policy_of
from tlt.engine.engine import EngineCore
from tlt.engine.graphs import CapturePolicy, GraphPool, Key, Waste, buckets
from tlt.engine.request import Request
from tlt.engine.runner import Runner
from tlt.model.transformer import Transformer
from tlt.policy import open_policy
from tlt.spec import speculation as speculation_module
from tlt.spec.costs import DRAFT, EXTEND, POLICY, Measured
from tlt.spec.drafter import Segment
from tlt.spec.eagle import Eagle
from tlt.spec.eagle_files import Origin, open_drafter, save_drafter
from tlt.spec.record import DraftRecord, write_record
from tlt.spec.shape import Shape
from tlt.tasks.choose import task_of
from tlt.types import Key as RequestKey
from tlt.types import SamplingParams

CAPTURE_S = 0.04


def serves(thrift: CapturePolicy, size: int, runs: int, waste: Waste | None = None) -> list[int]:
    return [thrift.serve("verify", size, CAPTURE_S, waste) for _ in range(runs)]


def by_row(size: int) -> Waste:
    """A tenth of a millisecond for every idle row."""
    return lambda larger: 1e-4 * (larger - size)


def test_the_first_runs_do_without_a_graph_and_then_one_is_captured() -> None:
    thrift = CapturePolicy()
    first = serves(thrift, 8, 6, by_row(8))
    assert first == [0, 0, 8, 8, 8, 8], "it asks for the capture until there is one"
    thrift.captured("verify", 8)
    assert serves(thrift, 8, 100, by_row(8)) == [8] * 100


def test_a_larger_graph_serves_until_what_it_wastes_is_worth_a_capture() -> None:
    thrift = CapturePolicy()
    thrift.captured("verify", 64)
    served = serves(thrift, 48, 200, by_row(48))
    at = served.index(48)
    assert set(served[:at]) == {64}
    assert set(served[at:]) == {48}
    assert at * 1e-4 * (64 - 48) == pytest.approx(CAPTURE_S, rel=0.1)
    assert serves(CapturePolicy(), 48, 3, by_row(48))[0] == 0, "there is none to serve"


def test_where_nothing_is_wasted_no_graph_is_captured() -> None:
    """Reading the weights takes as long as ever: so few rows more cost nothing."""
    thrift = CapturePolicy()
    thrift.captured("verify", 16)
    assert serves(thrift, 9, 10_000, lambda larger: 0.0) == [16] * 10_000


def test_the_smallest_that_holds_it_serves_unless_none_at_all_wastes_less() -> None:
    """Without a graph the host launches kernel after kernel: 16 ms of a capture's 40."""
    thrift = CapturePolicy()
    for size in (512, 256, 64, 128):
        thrift.captured("verify", size)
    asked = (100, 60, 65, 33, 5, 257, 513)
    assert [serves(thrift, size, 1, by_row(size))[0] for size in asked] == [128, 64, 128, 64, 64, 0, 0]
    few = CapturePolicy()
    few.captured("verify", 256)
    asked = (97, 95, 5)
    assert [serves(few, size, 1, by_row(size))[0] for size in asked] == [256, 0, 0]
    assert thrift.serve("roots", 100, CAPTURE_S, by_row(100)) == 0, "another role's graph does other work"


def test_what_must_be_exactly_its_size_waits_for_its_own() -> None:
    thrift = CapturePolicy()
    thrift.captured("verify", 64)
    assert serves(thrift, 48, 3) == [0, 0, 48]


class HostPool(GraphPool[Any]):
    """Graphs without a GPU: a captured function is called again. It counts how runs were served."""

    def __init__(self, live: Callable[[], int]) -> None:
        super().__init__(torch.device("cpu"))
        self.functions: dict[Key, Callable[[], Any]] = {}
        self.how: Counter[str] = Counter()
        self._live = live

    def has(self, key: Key) -> bool:
        return key in self.functions

    def capture(self, key: Key, function: Callable[[], Any]) -> None:
        assert self._live() == 0, "a capture may run the work: no row must be live"
        function()
        self.functions[key] = function
        self._capture_policy.captured(*key)
        self.how["captured"] += 1

    def serve(self, key: Key, waste: Waste | None) -> Key | None:
        served = super().serve(key, waste)
        if served and served[1] > key[1]:
            name, *variant = key[0]  # type: ignore[misc]
            assert name != "prune" or not variant[-1], "more would share than there is room for"
            self.how["larger"] += 1
        self.how["bare"] += served is None
        return served

    def run_first(self, key: Key, function: Callable[[], Any]) -> Any:
        assert key[0][0] != "decode", "plain ticks have their graphs"  # type: ignore[index]
        return super().run_first(key, function)

    def seconds(self, key: Key) -> float:
        return 1e-4 * (1 + key[1] / 64)

    def replay(self, key: Key) -> Any:
        self.how["replayed"] += 1
        return self.functions[key]()


def shapes(seed: int, running: int, *, shared: bool) -> Shape:
    drawn = random.Random(f"{seed}")
    if not running or drawn.random() < 0.2:
        return Shape()
    if shared:
        return Shape(("eagle",), 3, 2, 7, drawn.choice([2.0, 3.0, 4.0]))
    return shape_of(*drawn.choice([(3, 1, 4), (4, 3, 9), (2, 2, 5)]))


def pooled(batch: Sequence[Any], ahead: bool, shared: bool) -> tuple[Any, HostPool]:
    ticks = iter(range(10**6))
    engine: Any = engine_with(
        *(drafting(rows=24), lambda running: shapes(next(ticks) // 9, running, shared=shared), ahead), rows=24
    )
    rows = engine._runner._rows
    engine._runner._pool = pool = HostPool(lambda: rows._known_count)
    engine.submit(batch)
    return engine, pool


@AHEAD
@pytest.mark.parametrize("shared", [False, True], ids=["each its tree", "shared"])
def test_tokens_stay_whichever_graph_serves(ahead: bool, shared: bool) -> None:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (20, 30, 40, 60, 80, 100)]
    batch = requests(24, group=2, seed=5, params=params)
    engine, pool = pooled(batch, ahead, shared)
    assert tokens_of({completion.key: completion for completion in engine.drain()}) == plain(batch)
    assert min(pool.how[how] for how in ("captured", "larger", "bare")) > 3, pool.how


def test_drafts_are_as_good_whichever_graph_serves() -> None:
    """Nothing that a bare run, a larger graph or a capture leaves behind disturbs the next part of the work."""
    hot = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=100.0) for n in (40, 60, 90, 130)]
    batch = requests(12, group=2, seed=4, params=hot)
    found = []
    for with_pool in (False, True):
        engine, pool = pooled(batch, True, False)
        if not with_pool:
            engine._runner._pool = None
        engine.drain()
        report = engine.report().speculation
        found.append((report.verifies, report.accepted))
    assert found[0] == found[1]
    assert found[0][1] > 0.3 * found[0][0], "drafts never come true: this shows nothing"
    assert pool.how["bare"] > 3


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_nobody_waits_for_graphs_that_were_made_ready(share: float) -> None:
    """Whoever knows which shape will be used has them captured: ticks of so many requests, or of a few less, find all
    they need."""
    shape = replace(shape_of(3, 2, 7), share=share)
    engine: Any = engine_with(drafting(rows=24), lambda running: shape if running else Shape(), True, rows=24)
    rows = engine._runner._rows
    engine._runner._pool = pool = HostPool(lambda: rows._known_count)
    engine.ready(shape, 8)
    ready = pool.how["captured"]
    assert ready == 5, "verifying, taking in, the first level, the next ones, pruning"
    batch = requests(8, params=[SamplingParams(max_tokens=40, ignore_eos=True)], seed=3)
    engine.submit(batch)
    engine.tick()
    engine.tick()  # takes the prompts in
    pool.how.clear()
    for _ in range(6):
        engine.tick()
    assert pool.how["captured"] == pool.how["bare"] == 0
    assert tokens_of({completion.key: completion for completion in engine.drain()}) == plain(batch)


@pytest.mark.parametrize("rows", [12, 20, 24])
def test_what_is_made_ready_fits_the_engine(rows: int) -> None:
    """Its rows may be no size that is padded to."""
    shape = replace(shape_of(3, 2, 7), share=2.0)
    engine: Any = engine_with(drafting(rows=rows), lambda running: shape if running else Shape(), True, rows=rows)
    held = engine._runner._rows
    engine._runner._pool = pool = HostPool(lambda: held._known_count)
    tuner = shape_policy_of(SpecSettings(drafter="eagle", path="new", depths=(1, 3, 7)), rows, on_gpu=True)
    tuner.load_costs([Measured(POLICY, 1, 0.004), Measured(POLICY, 4096, 0.04)])
    tuner.load_costs([Measured(EXTEND, 4096, 0.0002), Measured(DRAFT, 4096, 0.0002)])
    tuner.load_prior("eagle", [[0.9]] * 8)
    make_ready(engine, tuner, RunConfig(engine=EngineSettings(rows=rows)))
    assert max(size for _, size in pool.functions) == rows
    assert {size for (name, *_), size in pool.functions if name == "verify"} == set(buckets(rows))  # type: ignore[misc]


@pytest.mark.parametrize("filtered", [False, True])
def test_whoever_compiles_has_the_graphs_that_decode(filtered: bool) -> None:
    engine: Any = engine_with(drafting(rows=12), lambda running: Shape(), True, rows=12)
    rows = engine._runner._rows
    engine._runner._pool = pool = HostPool(lambda: rows._known_count)
    engine.compile(filtered=filtered)
    assert set(pool.functions) == {(("decode", filtered), size) for size in buckets(12)}


def test_a_drafters_work_is_not_done_in_a_graph_far_too_large() -> None:
    """What it wastes there is not small, and nobody has measured it."""
    engine: Any = engine_with(drafting(rows=24), lambda running: Shape(), True, rows=24)
    rows = engine._runner._rows
    engine._runner._pool = HostPool(lambda: rows._known_count)
    done: list[int] = []
    engine._runner.ready([Segment("level", 16, done.append)])
    done.clear()
    for asked in (8, 4):
        engine._runner.run_segments([Segment("level", asked, done.append)])
    assert done == [16, 4]


def test_the_first_runs_are_counted_and_take_part_in_what_captures_cost() -> None:
    pool: GraphPool[int] = GraphPool(torch.device("cpu"))
    assert pool.run_first(("verify", 4), lambda: 7) == 7
    report = pool.report()
    assert (report.first, report.eager, report.graphs) == (1, 0, 0)
    assert report.capture_s > 0.0
    assert report.stalls == ()


def test_many_small_graphs_do_not_make_a_large_one_seem_cheap() -> None:
    """A drafter's takes 2 ms and a policy's 40: served by a larger one, a verification that wastes 1 ms waits for its
    own for forty ticks, and a drafter's work for two."""
    pool: GraphPool[None] = GraphPool(torch.device("cpu"))
    pool._captures_s = {"verify": [0.03, 0.04, 0.05, 0.9], "roots": [0.002] * 50}
    assert pool.report().usual_capture_s == 0.04, "and whoever waited for a compiler does not count"
    pool._capture_policy.captured(("verify", 8), 64)
    pool._capture_policy.captured(("roots", 1), 64)
    for role, runs in ((("verify", 8), 40), (("roots", 1), 2)):
        served = [pool.serve((role, 48), lambda larger: 0.001 * (larger > 48)) for _ in range(60)]
        assert served.index((role, 48)) == pytest.approx(runs, abs=1)


def test_what_compiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.05, 1.0, 1.7, 2.0, 2.08])
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(clock))
    pool: GraphPool[None] = GraphPool(torch.device("cpu"))
    for role in ("quick", "compiles", "quick"):
        pool.run_first((role, 4), lambda: None)
    assert pool.report().stalls == ((("compiles", 4), pytest.approx(0.7)),)
    assert pool.capture_s == pytest.approx(0.83)
    assert pool.report().spent == {"quick": pytest.approx(0.13), "compiles": pytest.approx(0.7)}


def test_an_engine_is_built_made_ready_and_writes_what_plain_decoding_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, from the record on: rollouts in waves, in shapes that a tuner chooses, shared ones among them. A
    pass of the policy takes 5 ms there, one of the drafter half of it."""
    clock = Clock()
    clock.used_by(monkeypatch, engine_module, timer_module, graphs, runner_module, speculation_module)
    for owner, name, seconds in ((Transformer, "forward", 5e-3), (Eagle, "extend", 2.5e-3), (Eagle, "step", 2.5e-3)):
        clock.passes_in(monkeypatch, owner, name, seconds)
    start = Runner.__init__

    def with_pool(runner: Any, *given: Any, **named: Any) -> None:
        start(runner, *given, **named)
        runner._pool = HostPool(lambda: runner._rows._known_count)

    new = SpecSettings(drafter="both", path="new", depths=(1, 3), verifies=(2, 4, 8))
    config = RunConfig(engine=EngineSettings(rows=12), spec=new, sampling=SamplingParams(max_tokens=60))
    policy, task = open_policy(config.model), task_of(config)
    save_drafter(open_drafter(policy, config), tmp_path, policy.model.head_weight, Origin("tiny", ()))
    write_record(DraftRecord(((0.97, 0.01),) * 8, 1000, 1.0), tmp_path)
    config = replace(config, spec=replace(new, path=str(tmp_path)))
    plainly = EngineCore(policy.model, policy.tokenizer, config.engine)
    monkeypatch.setattr(Runner, "__init__", with_pool)
    tuner = shape_policy_of(config.spec, config.engine.rows, on_gpu=True)
    engine: Any = build_engine(policy, config, tuner)
    pool = engine._runner._pool
    assert {"verify", "extend", "roots", "prune"} <= {role[0] for role, _ in pool.functions}
    assert {size for role, size in pool.functions if role == ("decode", False)} == set(buckets(12))
    for seed in range(2):
        batch = [
            Request(RequestKey(seed, 4 * i + j), tuple(policy.tokenizer.encode_prompt(prompt.content)), config.sampling)
            for i, prompt in enumerate(task.sample(seed, 8))
            for j in range(4)
        ]
        found = []
        for one in (plainly, engine):
            one.submit(batch)
            found.append(tokens_of({completion.key: completion for completion in one.drain()}))
        assert found[0] == found[1]
    report = engine.report().speculation
    assert report.verifies > 100, "it was used, though it is worth nothing: the record said otherwise"
    assert pool.how["replayed"] > pool.how["bare"] > 0
