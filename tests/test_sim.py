"""The simulator: it counts the ticks that an engine takes, answers everything once, and its time is the book's."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_engine import MODEL, kv_gib
from tests.tiny import letters
from tlt.cli import main
from tlt.config import EngineSettings, RunConfig, SamplingParams, SpecSettings
from tlt.engine.build import shape_policy_of, shapes_of
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.sim.book import CostBook, read_book, write_book
from tlt.sim.fleet import SimFleet, Simulated
from tlt.sim.trace import Trace, TracedPrompt, draw_trace, trace_of
from tlt.sim.world import World, grown
from tlt.spec.acceptance import Acceptance
from tlt.spec.costs import CATCH_UP, DRAFT, EXTEND, POLICY, CostModel, Measured
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed, ShapePolicy
from tlt.spec.tuner import Tuner
from tlt.types import Key

PAGE = 16
CHAIN = Shape(("eagle",), 3, 1, 4)
RANKS = ((0.7, 0.1, 0.05), (0.65, 0.12, 0.05), (0.6, 0.1, 0.08))


def book(**changes: Any) -> CostBook:
    """Of a GPU on which a run costs 5 ms and 10 µs a token, a level of drafts 0.1 ms."""
    measured = [Measured(POLICY, size, 5e-3 + 1e-5 * size) for size in (1, 8, 64, 256, 1024)]
    measured += [Measured(role, size, 1e-4) for role in (EXTEND, DRAFT) for size in (1, 256)]
    measured += [Measured(CATCH_UP, 1, 1e-7), Measured(CATCH_UP, 256, 1e-6)]
    plain = CostBook(
        *("a test", "nobody", True, 32, 4000, PAGE, tuple(measured)),
        context_s=0.0,
        padded=False,
        prefill_s=0.0,
        plain_tick_s=0.0,
        off_tick_s=0.0,
        verify_tick_s=0.0,
        window=64,
        ranks=RANKS,
    )
    return replace(plain, **changes)


def long_tail(prompts: int = 6, group: int = 4, seed: int = 0) -> Trace:
    luck = random.Random(seed)
    drawn = [[min(60, 1 + int(luck.lognormvariate(2.3, 0.9))) for _ in range(group)] for _ in range(prompts)]
    return Trace(tuple(TracedPrompt(tuple(lengths), 5 + number) for number, lengths in enumerate(drawn)), 60, "a test")


def fleet(
    trace: Trace,
    costs: CostBook,
    workers: int = 1,
    shape_policy: Callable[[], ShapePolicy | None] = lambda: None,
    shapes: tuple[Shape, ...] = (CHAIN,),
    **engine: Any,
) -> SimFleet:
    settings = EngineSettings(rows=costs.rows, page_size=costs.page_size, **engine)
    return SimFleet(trace, workers, lambda number: World(costs, shapes, int, number), settings, shape_policy, 15)


def check_answers(found: Simulated, trace: Trace) -> None:
    assert len(found.finished_s) == len(trace.lengths)
    assert found.tokens == sum(trace.lengths)
    assert found.seconds == found.finished_s[-1]
    for writing_s, drafting_s in zip(found.writing_s, found.drafting_s, strict=True):
        assert writing_s + drafting_s <= found.seconds + 1e-9


# ---- ticks


@pytest.mark.parametrize("admission", ["longest", "fifo"])
@pytest.mark.parametrize(("rows", "pages"), [(24, 400), (7, 400), (3, 60), (24, 19)])
def test_plain_ticks_are_the_engines(admission: str, rows: int, pages: int) -> None:
    """The same scheduler: requests that wait, that enter together, and that lose their pages take as many ticks."""
    knobs = {"rows": rows, "page_size": PAGE, "prefill_tokens": 16, "admission": admission}
    engine = EngineCore(MODEL, letters(), EngineSettings(kv_gib=kv_gib(pages, PAGE), **knobs))
    prompts = [tuple(2 + (number + place) % 20 for place in range(5 + number)) for number in range(6)]
    asked = [Request(Key(3, n), prompts[n // 4], SamplingParams(max_tokens=60), f"p{n // 4}") for n in range(24)]
    engine.submit(asked)
    lengths = {done.key.request: len(done.tokens) for done in engine.drain()}
    report = engine.report()
    groups = [tuple(lengths[4 * number + completion] for completion in range(4)) for number in range(6)]
    trace = Trace(tuple(TracedPrompt(group, 5 + number) for number, group in enumerate(groups)), 60, "a test")
    found = fleet(
        trace, book(rows=rows, pages=report.pages.free + report.pages.cached), admission=admission, prefill_tokens=16
    ).rollout()
    check_answers(found, trace)
    assert len(set(lengths.values())) > 8
    assert found.ticks == report.ticks
    assert (report.preemptions > 0) == (pages == 19)


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_drafts_that_are_always_right_take_a_tick_for_depth_plus_one_tokens(depth: int) -> None:
    trace, shape = long_tail(), Shape(("eagle",), depth, 1, depth + 1)
    sure = fleet(trace, book(ranks=((1.0,),)), shape_policy=lambda: Fixed(shape), shapes=(shape,)).rollout()
    wrong = fleet(trace, book(ranks=((0.0,),)), shape_policy=lambda: Fixed(shape), shapes=(shape,)).rollout()
    plain = fleet(trace, book()).rollout()
    longest = max(trace.lengths)
    assert plain.ticks == wrong.ticks == longest
    assert sure.ticks in (math.ceil(longest / (depth + 1)), math.ceil((longest - 1) / (depth + 1)) + 1)
    assert wrong.accept_length == 1.0
    for found in (sure, wrong, plain):
        check_answers(found, trace)


@pytest.mark.parametrize(
    "shape", [CHAIN, Shape(("eagle",), 3, 3, 6), Shape(("eagle",), 2, 2, 7), Shape(("eagle",), 7, 2, 12)]
)
def test_as_much_is_accepted_as_the_table_says(shape: Shape) -> None:
    world, rule = World(book(), (shape,), int, seed=1), Acceptance((shape,), horizon=1e9)
    rule.load_prior("eagle", RANKS, 1e9)
    results = world.results(shape, range(20000))
    assert 1 + sum(walked.accepted for walked in results) / len(results) == pytest.approx(rule.length(shape), abs=0.03)
    told = Acceptance((shape,), horizon=1e9)
    for _ in range(40):
        told.see(shape, world.results(shape, range(32)))
    assert told.length(shape) == pytest.approx(rule.length(shape), rel=0.06), "a tuner learns it from the walks"


def test_trees_hold_the_likeliest_nodes() -> None:
    assert grown([(0.9, 0.05), (0.8, 0.1)], Shape(("eagle",), 2, 2, 4)) == {(), (1,), (1, 1), (1, 2)}
    assert grown([(0.5, 0.4), (0.5, 0.4)], Shape(("eagle",), 2, 2, 4)) == {(), (1,), (2,), (1, 1)}
    assert grown([(0.9, 0.05)], Shape(("eagle",), 1, 1, 4)) == {(), (1,)}


# ---- time


def test_time_is_what_the_book_says() -> None:
    """A request alone, token by token: runs, what is beside them, its prompt, and what it looks back on."""
    trace = Trace((TracedPrompt((10,), 6),), 60, "a test")
    costs = book(context_s=1e-4, prefill_s=3e-3, plain_tick_s=2e-3, off_tick_s=1.0)
    seconds = fleet(trace, costs).rollout().seconds
    looked_back = sum(range(6, 16))
    assert seconds == pytest.approx(5 * 3e-3 + 10 * (5e-3 + 1e-5 + 2e-3) + 1e-4 * looked_back)


def test_a_drafter_catches_up_once() -> None:
    """Its prompt, with the first draft; what is written after that is part of every tick."""
    trace = Trace((TracedPrompt((41,), 60),), 60, "a test")
    late = tuple(Measured(cost.role, cost.size, 1e-3) if cost.role == CATCH_UP else cost for cost in book().measured)
    ranks = ((1.0,),)
    dear, free = (
        fleet(trace, book(measured=measured, ranks=ranks), shape_policy=lambda: Fixed(CHAIN)).rollout().seconds
        for measured in (late, tuple(cost for cost in late if cost.role != CATCH_UP))
    )
    assert 59 * 1e-3 * 0.9 < dear - free < 9 * 64 * 1e-3, "of one window at most, by its safe guess of live rows"
    plain = fleet(trace, book(measured=late)).rollout().seconds
    assert plain == fleet(trace, book()).rollout().seconds, "who never drafts never catches up"


def test_a_tree_reads_its_context_once_on_a_gpu_and_by_every_node_on_a_cpu() -> None:
    for gpu, times in ((True, 1), (False, 4)):
        world = World(book(gpu=gpu, context_s=1e-3), (CHAIN,), int, 0)
        bare = World(book(gpu=gpu), (CHAIN,), int, 0)
        difference = world.tick_s(CHAIN, [10, 30], may_draft=True) - bare.tick_s(CHAIN, [10, 30], may_draft=True)
        assert difference == pytest.approx(1e-3 * 40 * times)
    padded = World(book(padded=True, context_s=1e-3), (CHAIN,), int, 0).tick_s(Shape(), [10, 30], may_draft=True)
    assert padded - World(book(), (CHAIN,), int, 0).tick_s(Shape(), [1, 1], may_draft=True) == pytest.approx(0.06)


# ---- fleets


@pytest.mark.parametrize("drafts", [False, True])
def test_more_workers_are_never_slower_and_train_while_they_wait(drafts: bool) -> None:
    trace, before = long_tail(prompts=16), math.inf
    for workers in (1, 2, 4, 8):
        shape_policy = (lambda: Fixed(CHAIN)) if drafts else (lambda: None)
        found = fleet(trace, book(rows=8), workers, shape_policy).rollout()
        check_answers(found, trace)
        assert found.seconds <= before * (1.15 if drafts else 1.0)  # guesses are a matter of luck
        before = found.seconds
        if workers > 1:
            spent = [sum(pair) for pair in zip(found.writing_s, found.drafting_s, strict=True)]
            assert spent == pytest.approx([found.seconds] * workers), "from the last answer on, and to the very end"
            assert max(found.drafting_s) > 0
            assert 0 < found.idle_share < 1
    assert before < fleet(trace, book(rows=8), 1).rollout().seconds / 2


def test_a_tuner_in_the_simulator_pays_where_drafts_are_good_and_costs_nothing_where_they_are_not() -> None:
    trace = Trace(
        tuple(TracedPrompt((length,) * 4, 20) for length in (30, 50, 80, 120, 200, 400, 700, 1200)), 1500, "a test"
    )
    spec = SpecSettings(drafter="eagle", path="new")
    shapes = shapes_of(spec)
    plain = fleet(trace, book()).rollout().seconds
    took = {}
    for name, ranks in (("good", ((0.95, 0.02, 0.01),)), ("useless", ((0.02, 0.01, 0.01),))):
        costs = book(ranks=ranks)

        def tuner(costs: CostBook = costs) -> ShapePolicy:
            chosen = shape_policy_of(spec, costs.rows, costs.measured, on_gpu=True)
            chosen.load_prior("eagle", costs.ranks)
            return chosen

        run = fleet(trace, costs, 1, tuner, shapes)
        took[name] = [run.rollout().seconds for _ in range(2)][-1]
    assert took["good"] < plain / 3
    assert took["useless"] < 1.01 * plain


def test_rollouts_follow_each_other_and_repeat() -> None:
    one, two = (fleet(long_tail(), book(), 2, lambda: Fixed(CHAIN)) for _ in range(2))
    first = [one.rollout() for _ in range(2)]
    assert first == [two.rollout() for _ in range(2)]
    for found in first:
        check_answers(found, long_tail())


def test_an_answer_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 193 tokens of key-value cache, the book's holds 144"):
        fleet(Trace((TracedPrompt((60,), 5),), 60, "a test"), book(pages=10))


# ---- books


def test_a_book_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_book(book(), tmp_path / "deep" / "book.json")
    assert read_book(tmp_path / "deep" / "book.json") == book()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rows": 0}, "rows is 0; expected at least 1"),
        ({"context_s": -1}, "context_s is -1; expected a number ≥ 0"),
        ({"gpu": 1}, "gpu is 1; expected true or false"),
        ({"measured": [["draft", 1, 0.1]]}, "nothing of the role 'policy' was measured"),
        ({"measured": [["policy", 0, 0.1]]}, "a size is 0; expected at least 1"),
        ({"measured": [["policy", 1]]}, "expected [role, size, seconds]"),
        ({"measured": [["policy", 1, "long"]]}, "seconds is 'long'; expected a number ≥ 0"),
        ({"ranks": [[0.9, 0.2]]}, "ranks at depth 1 add up to 1.1"),
        ({"ranks": 3}, "ranks is 3; expected a list"),
        ({"more": 1}, "missing or too many: ['more']"),
    ],
)
def test_a_strange_book_is_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    file = tmp_path / "book.json"
    write_book(book(), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        read_book(file)
    assert complaint in str(error.value)
    assert str(file) in str(error.value)


def test_no_book_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        read_book(tmp_path / "book.json")
    (tmp_path / "book.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not valid JSON .*expected a book of costs"):
        read_book(tmp_path / "book.json")


# ---- traces


def test_lengths_are_drawn_as_asked_for() -> None:
    config = RunConfig()
    config = replace(config, task=replace(config.task, prompts=200, group=8))
    trace = draw_trace("median=300,sigma=1.1,cap=4000,prompt=77", config)
    logs = [math.log(length) for length in trace.lengths if length < 4000]
    assert len(trace.lengths) == 1600
    assert max(trace.lengths) == 4000
    assert math.exp(sorted(logs)[len(logs) // 2]) == pytest.approx(300, rel=0.15)
    assert math.dist(logs, [math.log(300)] * len(logs)) / math.sqrt(len(logs)) == pytest.approx(1.1, rel=0.1)
    assert {asked.prompt_tokens for asked in trace.asked} == {77}
    groups = [[math.log(length) for length in asked.lengths] for asked in trace.asked]
    means = [sum(group) / 8 for group in groups]
    assert math.dist(means, [sum(means) / 200] * 200) / math.sqrt(200) > 0.6, "answers to a prompt are alike"
    assert trace == draw_trace("median=300,sigma=1.1,cap=4000,prompt=77", config)


@pytest.mark.parametrize(
    "wanted", ["median=300,sigma=1", "median=300", "median=-1,sigma=1", "median=x,sigma=1", "median=3,sigma=1,most=4"]
)
def test_strange_distributions_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        trace_of(wanted, RunConfig())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("[1]", "expected an object"), ("{", "not valid JSON"), ('{"prompt": 1, "tokens": 0}', "expected a whole number")],
)
def test_strange_lines_are_refused(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": "a", "tokens": 3}\n' + line + "\n")
    with pytest.raises(ConfigError, match=complaint) as error:
        trace_of(str(file), RunConfig())
    assert "line 2" in str(error.value)


def test_a_file_and_a_missing_one(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [("a", 3), ("b", 5), ("a", 7)]
    file.write_text("".join(json.dumps({"prompt": name, "tokens": n, "prompt_tokens": 9}) + "\n" for name, n in rows))
    assert trace_of(str(file), RunConfig()).asked == (TracedPrompt((3, 7), 9), TracedPrompt((5,), 9))
    file.write_text('{"prompt": "a", "tokens": 4000}\n')
    assert trace_of(str(file), RunConfig()).cap == 4000, "nothing is cut, whatever answers may have here"
    with pytest.raises(ConfigError, match="is not there"):
        trace_of(str(tmp_path / "none.jsonl"), RunConfig())
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        trace_of(str(file), RunConfig())


# ---- the verb


@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_a_run_is_foreseen_from_its_own_lengths(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny policy, measured here: what the run took is told beside what was foreseen; the book says the same."""
    monkeypatch.chdir(tmp_path)
    flags = ["--task.prompts=4", "--task.group=2", "--sampling.max_tokens=24", "--engine.rows=8", "--run.name=run"]
    more = ["--run.steps=1"] if verb == "train" else []
    (tmp_path / "r.toml").write_text('[model]\npath = "tiny"\n')
    assert main([verb, "r.toml", *flags, *more]) == 0
    capsys.readouterr()
    simulate = [
        "--lengths",
        "runs/run" if verb == "train" else "runs/run-rollout",
        "--workers",
        "1,2",
        *flags,
        "--engine.prefill_tokens=8",
    ]
    assert main(["simulate", "tiny", "--save", "book.json", "--json", "found.json", *simulate]) == 0
    said = capsys.readouterr().out
    assert "8 answers to 4 prompts" in said
    assert "That rollout took" in said
    assert ("Steps, if their other" in said) == (verb == "train")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measured"]["rollout_s"] > 0
    assert [one["workers"] for one in found["foreseen"]] == [1, 2]
    assert found["foreseen"][0]["plain"]["seconds"] == pytest.approx(found["measured"]["foreseen_s"])
    assert main(["simulate", "book.json", "--json", "found.json", *simulate]) == 2
    assert "--json found.json is there already, and nothing is written over" in capsys.readouterr().err
    assert main(["simulate", "book.json", "--json", "again.json", *simulate]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["foreseen"] == found["foreseen"]


def test_what_cannot_be_foreseen_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--lengths", "median=10,sigma=1,cap=20"]
    assert main(["simulate", "tiny"]) == 2
    assert "needs --lengths" in capsys.readouterr().err
    assert main(["simulate", "tiny", *drawn, "--workers", "two"]) == 2
    assert "--workers is 'two'" in capsys.readouterr().err
    assert main(["simulate", "tiny", *drawn, "--spec.drafter", "suffix"]) == 2
    assert "depends on the text" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "none.json"), *drawn]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main(["simulate", "book.json", *drawn, "--save", "other.json"]) == 2
    assert "was measured before" in capsys.readouterr().err
    assert main(["simulate", "tiny", *drawn, "--rollouts", "2,9"]) == 2
    assert "expected one whole number" in capsys.readouterr().err
    assert main(["simulate", "tiny", *drawn, "--workers", "²"]) == 2
    assert "--workers is" in capsys.readouterr().err
    assert main(["simulate", "tiny", *drawn, "--spec.drafter", "eagle", "--spec.path", "new"]) == 2
    assert "nobody has measured what the policy accepts" in capsys.readouterr().err


def test_a_book_with_a_drafter_foresees_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_book(book(pages=40000), tmp_path / "book.json")
    drawn = ["--lengths", "median=80,sigma=1,cap=600", "--task.prompts=8", "--task.group=4", "--workers=1"]
    file = tmp_path / "found.json"
    assert main(["simulate", str(tmp_path / "book.json"), *drawn, "--rollouts", "2", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    (one,) = json.loads(file.read_text())["foreseen"]
    assert one["plain"]["seconds"] > 1.5 * one["drafted"]["seconds"]
    assert one["drafted"]["accept_length"] > 1.5
    assert f"{one['plain']['seconds'] / one['drafted']['seconds']:.2f} ×" in said
    shapes = Counter(shape for _, shape, _ in one["drafted"]["shapes"])
    assert any(shape.startswith("eagle") for shape in shapes)
    assert asdict(read_book(tmp_path / "book.json"))["rows"] == 32


# ---- writing ahead


def writing_ahead(turn_rate: float | None, workers: int = 4, rollouts: int = 3) -> list[Simulated]:
    """Of workers that draft nothing, on a GPU with short ticks, and completions that differ much in length."""
    luck = random.Random(0)
    groups = [tuple(min(600, 1 + int(luck.lognormvariate(4.0, 1.0))) for _ in range(4)) for _ in range(16)]
    trace = Trace(tuple(TracedPrompt(lengths, 20) for lengths in groups), 600, "a test")
    costs = book(rows=16, ranks=())
    settings = EngineSettings(rows=costs.rows, page_size=costs.page_size)

    def tuner() -> Tuner:
        made = Tuner([OFF], CostModel(int, context_read_once=True))
        made.load_costs(costs.measured)
        return made

    simulated = SimFleet(trace, workers, lambda number: World(costs, (), int, number), settings, tuner, 0, turn_rate)
    found = [simulated.rollout() for _ in range(rollouts)]
    for one in found:
        check_answers(one, trace)
    return found


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_text_that_the_policy_still_writes_shortens_the_next_rollout(workers: int) -> None:
    usual = writing_ahead(None, workers)
    ahead = writing_ahead(0.001, workers)
    assert ahead[0].seconds == usual[0].seconds  # nothing was written before it
    assert [one.written_ahead > 0 for one in ahead] == [True] * 3
    assert all(one.ahead > 0.1 * one.tokens for one in ahead[1:])
    assert sum(one.seconds for one in ahead[1:]) < 0.98 * sum(one.seconds for one in usual[1:])


@pytest.mark.parametrize("turn_rate", [0.03, 0.3, 1.0])
def test_text_of_little_use_makes_no_rollout_slower(turn_rate: float) -> None:
    usual = writing_ahead(None)
    ahead = writing_ahead(turn_rate)
    assert sum(one.seconds for one in ahead) <= 1.01 * sum(one.seconds for one in usual)
    if turn_rate == 1.0:
        assert not any(one.ahead for one in ahead)
