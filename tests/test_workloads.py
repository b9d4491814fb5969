"""The benchmark of speculation: fixed prompts that never overlap, honest figures, and every part runs end to end."""

import json
import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median, pstdev
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest

import tlt

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import measuring
import never
import preparing
import recording
import reinforcement
import scoring
import speculation
import staging
import tail
import workloads
from workloads import WORKLOADS

from tlt.bench.variants import PLAIN, TUNER, Variant, VariantRollout
from tlt.config import ModelSettings, RunConfig, RunSettings, TaskSettings, WarmupSettings
from tlt.engine.engine import EngineCore
from tlt.engine.graphs import PoolReport
from tlt.engine.request import Request
from tlt.errors import ConfigError, TaskError
from tlt.policy import open_policy
from tlt.spec.costs import DRAFT, EXTEND, POLICY
from tlt.spec.record import read_record
from tlt.spec.shape import OFF, Shape
from tlt.tasks.files import FileTask
from tlt.tasks.steps import StepsTask
from tlt.text import Tokenizer
from tlt.types import Completion, Key, Prompt, SamplingParams, Timing
from tlt.warmup import warmup

STEPS = WORKLOADS["c"].steps
CHAIN = Shape(("eagle",), 4, 1, 5)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    return preparing.stand_in(tmp_path_factory.mktemp("stand_in"))


def questions(path: Path, count: int, start: int = 0) -> Path:
    lines = [
        json.dumps({"question": f"What is {n} and 1?", "answer": f"It is {n}+1.\n#### {n + 1}"})
        for n in range(start, start + count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def text_of(prompt: Prompt) -> str:
    return prompt.content[-1].content if not isinstance(prompt.content, str) else prompt.content


# ---- the workloads


def test_what_is_measured_stays_the_same(tmp_path: Path) -> None:
    file = questions(tmp_path / "test.jsonl", 50)
    for workload, count in ((WORKLOADS["a"], 9), (WORKLOADS["c"], 4)):
        once, again = (workloads.measured_prompts(workload, file, count) for _ in range(2))
        assert once == again
        assert len({prompt.id for prompt in once}) == count
    first = workloads.measured_prompts(WORKLOADS["c"], None, 32)[0]
    assert text_of(first) == FIRST, "the fixed seed has moved: earlier figures no longer compare"


FIRST = (
    "Start with 3 and do 3 steps, taking these in turn: subtract 13, subtract 10, add the number of the step. "
    "Count modulo 100."
)


def test_prompts_to_measure_are_not_those_to_learn_from(tmp_path: Path, stand_in: str) -> None:
    measured = {text_of(prompt) for prompt in workloads.measured_prompts(WORKLOADS["c"], None, 32)}
    assert STEPS is not None
    for seed in (workloads.TUNE_SEED, workloads.DRAFT_SEED):
        assert not measured & {text_of(prompt) for prompt in StepsTask(STEPS, seed=seed).sample(0, 2000)}
    file = questions(tmp_path / "all.jsonl", 40)
    held = workloads.measured_prompts(WORKLOADS["a"], file, 10)
    given = workloads.drafting(WORKLOADS["a"], RunConfig(), file, held, tmp_path)
    asked = [json.loads(line)["question"] for line in Path(given).read_text().splitlines()]
    assert len(asked) == 30
    assert not set(asked) & {text_of(prompt) for prompt in held}


def test_a_drafter_learns_from_no_question_that_the_policy_was_tuned_on(tmp_path: Path, stand_in: str) -> None:
    tokenizer, data = Tokenizer.load(stand_in), questions(tmp_path / "train.jsonl", 90)
    given = workloads.drafting(WORKLOADS["b"], RunConfig(), data, [], tmp_path)
    drafted = {json.loads(line)["question"] for line in Path(given).read_text().splitlines()}
    examples = workloads.tuning_examples(WORKLOADS["b"], Path(stand_in), data, 2048, processes=0)
    once = [next(examples) for _ in range(90 - len(drafted))]
    tuned = {tokenizer.decode(example.tokens[: example.answer_start]) for example in once}
    assert len(tuned) + len(drafted) == 90
    assert 15 < len(drafted) < 45
    assert not [question for question in drafted if any(question in text for text in tuned)]


def test_the_measured_steps_are_those_of_the_whole_distribution() -> None:
    """In log steps: as wide as the task's own, and centred where it is."""
    assert STEPS is not None
    few = [math.log(p.extra["problem"].steps) for p in workloads.measured_prompts(WORKLOADS["c"], None, 32)]
    many = [math.log(p.extra["problem"].steps) for p in StepsTask(STEPS, seed=1).sample(0, 4000)]
    assert median(few) == pytest.approx(median(many), abs=0.1)
    assert pstdev(few) == pytest.approx(pstdev(many), abs=0.06)
    assert pstdev(few) > 1.0


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="--prompts is None; expected a JSONL file"):
        workloads.measured_prompts(WORKLOADS["b"], None, 4)


def test_examples_are_chats_that_end(tmp_path: Path, stand_in: str) -> None:
    tokenizer = Tokenizer.load(stand_in)
    data = questions(tmp_path / "train.jsonl", 5)
    for name in ("b", "c"):
        workload = workloads.quick(WORKLOADS[name])
        examples = workloads.tuning_examples(workload, Path(stand_in), data, 2048, processes=0)
        for example in islice(examples, 7):
            prompt, answer = example.tokens[: example.answer_start], example.tokens[example.answer_start :]
            assert prompt[-1] == 2, "the mark of the assistant's turn"
            assert answer[-1] == tokenizer.eos_id
            assert ("####" if name == "b" else "\n") in tokenizer.decode(answer)


@pytest.mark.slow  # a process that imports torch
def test_processes_write_the_same_examples(stand_in: str) -> None:
    workload = workloads.quick(WORKLOADS["c"])
    here, there = (workloads.tuning_examples(workload, Path(stand_in), None, 2048, processes=count) for count in (0, 1))
    assert list(islice(here, 150)) == list(islice(there, 150))
    there.close()  # type: ignore[attr-defined]


def test_warm_up_on_the_steps_task(tmp_path: Path, stand_in: str) -> None:
    """`tlt warmup MODEL steps`."""
    assert STEPS is not None
    config = RunConfig(
        run=RunSettings(out=str(tmp_path)),
        model=ModelSettings(path=stand_in, device="cpu"),
        warmup=WarmupSettings(steps=2, tokens_per_batch=1024),
    )
    config = replace(config, task=replace(config.task, steps=replace(STEPS, max_steps=5)))
    warmup(config, "steps")
    assert (tmp_path / "run-warmup" / "policy" / "config.json").is_file()


# ---- figures


def written(lengths: list[int], tick_s: float) -> VariantRollout:
    """Plain decoding at a fixed pace."""
    completions = tuple(
        Completion(Key(0, i), (1,), (2,) * n, "", (), (), "eos", 0, Timing(0.0, n * tick_s))
        for i, n in enumerate(lengths)
    )
    return VariantRollout(Variant(PLAIN), completions, max(lengths) * tick_s, 0.0, max(lengths), 0.0, None)


def test_plain_ticks_are_told_from_the_end() -> None:
    plain = written([5, 10, 20, 40, 80], tick_s=0.01)
    assert recording.plain_tick_s(plain, 2) == pytest.approx(0.01)
    assert recording.plain_tick_s(plain, 5) == pytest.approx(0.01)


def test_speed_and_accept_length_of_small_batches() -> None:
    """Ticks twice as long that bring three tokens per request: S = 1.5, AL = 3, S/AL = 0.5."""
    plain = written([5, 10, 20, 40, 80], tick_s=0.01)
    ticks = [recording.Tick(2, CHAIN, 6, 0.02, 0.001)] * 10
    ticks += [recording.Tick(9, CHAIN, 9, 1.0, 0.0), recording.Tick(1, CHAIN, 5, None, 0.0)]  # large; with prefill
    found = recording.small_batch(plain, {"x": ticks}, most=4)["x"]
    assert found["ticks"] == 10
    assert found["speedup"] == pytest.approx(1.5)
    assert found["accept_length"] == pytest.approx(3.0)
    assert found["speedup_per_accept"] == pytest.approx(0.5)
    assert found["once_ms"] == pytest.approx(10.0)


def test_switching_on_is_told_from_the_ticks_before_it() -> None:
    off, on = recording.Tick(3, OFF, 3, 0.01, 0.0), recording.Tick(3, CHAIN, 4, 0.02, 0.004)
    found = recording.switching({"x": [on, on, off, off, on, on, off, replace(on, one_off_s=0.008)], "never": [off]})
    assert found["x"]["times"] == 2
    assert found["x"]["mean_ms"] == pytest.approx(6.0)
    assert found["x"]["largest_ms"] == pytest.approx(8.0)
    assert "never" not in found


def test_what_ticks_took_stands_beside_what_was_foreseen() -> None:
    class Foresees:
        def expected(self, shape: Shape, batch: int) -> tuple[float, float]:
            return 3.0, 0.001 * batch

    ticks = [
        recording.Tick(batch, CHAIN, 2 * batch, seconds, 0.0) for batch, seconds in ((3, 0.02), (4, 0.04), (4, None))
    ]
    (found,) = recording.tick_costs(ticks, Foresees())
    assert (found["requests"], found["batch"], found["ticks"], found["shape"]) == ("≤ 4", 4, 2, str(CHAIN))
    assert found["tick_ms"] == pytest.approx(30.0)
    assert found["foreseen_ms"] == pytest.approx(4.0)
    assert (found["accept_length"], found["foreseen_length"]) == (pytest.approx(2.0), 3.0)


def test_divergence_counts_the_first_token_that_turns() -> None:
    one = written([4, 4], 0.1).completions
    other = (one[0], replace(one[1], tokens=(2, 9, 9)))
    found = staging.divergence(one, other)
    assert (found["identical"], found["tokens_compared"]) == (1, 4 + 2)
    assert found["per_1000_tokens"] == pytest.approx(1000 / 6)


# ---- all of it, small


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, stand_in: str) -> Path:
    directory = tmp_path_factory.mktemp("work")
    arguments = ["prepare", "--workload", "c", "--work", str(directory), "--model", stand_in, "--quick"]
    assert speculation.main([*arguments, "--model.device", "cpu"]) == 0
    return directory


def run(part: str, work: Path, *more: str) -> dict[str, Any]:
    file = work / "results.json"
    arguments = [part, "--workload", "c", "--work", str(work), "--quick", "--json", str(file), *more]
    small = ["--model.device=cpu", "--engine.rows=8", "--engine.kv_gib=0.02", "--spec.depths=2", "--spec.widths=2"]
    assert speculation.main([*arguments, *small, "--spec.verifies=4"]) == 0
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def test_what_is_prepared_is_kept(work: Path, stand_in: str) -> None:
    record = json.loads((work / "c" / "prepare.json").read_text())
    assert record["policy"] == str(work / "c" / "policy")
    assert record["tuning"]["tokens"] > 0
    assert record["drafting"]["settings"]["steps"] == 3
    measured = record["drafting"]["measured"]
    assert measured["places"] > 0
    for way in ("greedy", "β = 1", "β fitted"):
        for reached in (measured[way]["before"], measured[way]["after"]):
            assert 0 <= reached["first_hit"] <= 1
            assert len(reached["lengths"]) == len(measured["widths"]) == 3
            assert all(length >= 1 for length in reached["lengths"])
    assert json.loads((work / "prepare-c.json").read_text())["drafting"]["measured"].keys() == measured.keys()
    before = (work / "c" / "drafter" / "model.safetensors").stat().st_mtime_ns
    arguments = ["prepare", "--workload", "c", "--work", str(work), "--model", stand_in, "--quick"]
    assert speculation.main(arguments) == 0
    assert (work / "c" / "drafter" / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((work / "c" / "prepare.json").read_text()) == record


def test_a_rollout_is_measured_in_every_way(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("measure", work, "--shape", "double", "--rollouts", "1", "--same-lengths")
    assert (work / "c" / "drafter-double" / "config.json").is_file()
    small, wide = (read_record(work / "c" / name) for name in ("drafter", "drafter-double"))
    assert small == wide is not None, "widened, it names what it named"
    names = [record["variant"] for record in found["runs"]]
    tuners = ["tuner, first", "tuner", "tuner, warm, first", "tuner, warm"]
    assert names == ["plain", *tuners, "plain", "BEG-MAB", "eagle 2x2/4", "off"]
    assert all(one["identical_share"] == 1.0 for one in found["divergence"].values())
    assert found["answers"]["answers"] == 4
    assert found["answers"]["nats_per_token"] > 0
    assert {"sigma_log_length", "median", "p90", "p99", "max", "cap", "at_cap", "right"} <= set(found["answers"])
    assert found["verdict"]["all_identical"] is True
    assert None not in found["verdict"].values()
    check_what_a_simulation_needs(found)
    assert found["small_batch"]["eagle 2x2/4"]["accept_length"] >= 1
    by_length = found["accept_length_by_context"]["eagle 2x2/4"]
    assert by_length["shape"] == "eagle 2x2/4"
    told = {record["variant"]: record for record in found["speculation"]}["eagle 2x2/4"]
    assert by_length["< 128"]["verifies"] == told["verifies"]
    assert set(found["shapes"]["off"]) == {"≤ 4"}
    assert found["same_lengths"]["tokens"] == found["answers"]["tokens"]
    (more,) = found["rollouts"]["runs"]
    alike = more["plain, same lengths s"] / more["tuner, warm s"]
    assert found["rollouts"]["speedup at the same lengths"] == pytest.approx(alike, rel=1e-4)
    assert sum(record["ticks"] for record in found["costs"]) > 0
    assert "S/AL ≤ 8" in capsys.readouterr().out


def check_what_a_simulation_needs(found: dict[str, Any]) -> None:
    """What runs cost, as the tuners were told, and how long the answers to each prompt became."""
    roles = {cost["role"] for cost in found["measured_costs"]}
    assert {POLICY, EXTEND, DRAFT} <= roles
    assert all(cost["size"] >= 1 and cost["seconds"] > 0 for cost in found["measured_costs"] if cost["role"] == POLICY)
    lengths = found["lengths"]
    assert [row["prompt"] for row in lengths] == [0, 1]
    assert {len(row["tokens"]) for row in lengths} == {2}
    assert sum(sum(row["tokens"]) for row in lengths) == found["answers"]["tokens"]
    tokens = sum(row["prompt_tokens"] for row in lengths) / 2
    assert tokens == pytest.approx(found["answers"]["prompt_tokens_mean"], rel=1e-5)


@pytest.mark.slow
def test_a_verdict_needs_plain_decoding_and_a_tuner(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that was spent before the bandit's turn takes nothing from the others."""
    write_all = measuring.write_all

    def a_few(*given: Any) -> list[VariantRollout]:
        return [done for done in write_all(*given) if done.variant.name in (PLAIN, TUNER)]

    monkeypatch.setattr(measuring, "write_all", a_few)
    verdict = run("measure", work)["verdict"]
    assert verdict["best_fixed"] == PLAIN
    assert verdict["tuner_regret"] == pytest.approx(verdict["tuner_over_plain"])
    names = ("warm_tuner_regret", "bandit_regret", "off_over_plain")
    assert [verdict[name] for name in names] == [None] * 3


def test_fallbacks_of_graphs_are_kept() -> None:
    row = recording.pool_row(PoolReport(7, 1 << 30, 0.5, replays=100, eager=4, first=3))
    assert row == {"graphs": 7, "gib": 1.0, "capture_s": 0.5, "replays": 100, "eager": 4, "first": 3}


def test_the_tail_is_drawn(work: Path, tmp_path: Path) -> None:
    run("measure", work, "--budget", "0")
    picture = tmp_path / "tail.svg"
    assert tail.main([str(work / "results.json"), str(picture)]) == 0
    drawn = ElementTree.parse(picture).getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert any("plain decoding" in (text.text or "") for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
    assert tail.still_running([2.0, 1.0]) == [(0.0, 2.0), (1.0, 1.0), (2.0, 0.0)]
    with pytest.raises(SystemExit):
        tail.main([str(work / "results.json"), str(picture), "--ways", "eagle"])


def test_a_spent_budget_ends_it(work: Path) -> None:
    found = run("measure", work, "--budget", "0")
    assert [record["variant"] for record in found["runs"] if "skipped" not in record] == ["plain"]
    assert found["answers"]["tokens"] > 0


def test_greedy_and_shared_drafts_are_compared_at_equal_shape(work: Path) -> None:
    found = run("drafts", work, "--trees", "2x2/4")["accept_length"]["eagle 2x2/4"]
    assert list(found) == ["greedy", "β = 1", "β fitted"]
    assert [one["beta"] for one in found.values()][:2] == ["inf", 1.0]
    assert len({one["tokens"] for one in found.values()}) == 1, "drafts changed what was written"


def test_cases_in_which_speculation_might_lose(work: Path) -> None:
    found = run("never", work, "--cases", "useless,short")["never_slower"]
    assert list(found) == ["useless", "short"]
    for case in found.values():
        assert case["identical_share"] == 1.0
        assert case["tuner"] > 0
        assert {len(spans) for spans in case["seconds"].values()} == {1}
        assert case["errors"]["tuner"] is None, "one turn has no error to tell"


def test_everybody_is_first_in_turn() -> None:
    class Stage:
        order: ClassVar[list[str]] = []

        def write(self, variant: Variant) -> VariantRollout:
            self.order.append(variant.name)
            return written([1], 1.0)

    runs = never._in_turns(Stage(), repeats=1, least_s=2.5)
    names = list(runs)
    assert Stage.order[1:] == [*names, *names[1:], names[0], names[2], *names[:2]]
    assert {len(done) for done in runs.values()} == {3}
    assert len(never._in_turns(Stage(), repeats=4, least_s=2.5)[PLAIN]) == 6, "everybody as often"
    assert len(never._in_turns(Stage(), repeats=1, least_s=0.0)[PLAIN]) == 1


def test_plain_decoding_against_itself(work: Path) -> None:
    found = run("fidelity", work)["plain_against_plain"]
    assert found["batches"] == [2, 1]
    assert found["identical"] == found["requests"] == 1


def test_what_was_written_is_a_sample_of_the_policy(work: Path) -> None:
    """And an answer that always names the likeliest token is not."""
    found = run("score", work, "--trees", "2x2/4", "--groups", "4")
    assert found["tokens"] > 0
    assert found["written"]["verifies"] > 0
    assert all(abs(z) < 5 for z in found["z"].values()), found["z"]
    policy = open_policy(replace(RunConfig().model, path=str(work / "c" / "policy"), device="cpu"))
    engine = EngineCore(policy.model, policy.tokenizer, replace(RunConfig().engine, kv_gib=0.02, rows=8))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.submit([Request(Key(0, number), (5, 6, 7 + number), greedy) for number in range(8)])
    assert scoring.score(policy.model, engine.drain())["rank 1 to 1"] > 5


@pytest.mark.slow
def test_steps_of_learning_are_compared_in_a_shape(work: Path) -> None:
    file = work / "reinforcement.json"
    small = ["--model.device=cpu", "--engine.kv_gib=0.02", "--spec.depths=2", "--spec.widths=2", "--spec.verifies=4"]
    arguments = ["--workload", "c", "--work", str(work), "--shape", "double", "--quick", "--json", str(file)]
    assert reinforcement.main([*arguments, *small]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["subject"]["model"] == str(work / "c" / "policy-double")
    assert content["subject"]["seed"] == reinforcement.SEED
    sections = content["sections"]
    assert list(sections) == ["plain", "totals", "adaptive", "frozen"]
    assert [(total["variant"], total["steps"]) for total in sections["totals"]["records"]] == [
        ("plain", 3),
        ("adaptive", 3),
        ("frozen", 3),
    ]
    assert all(record["identical"] == 1.0 for name in ("adaptive", "frozen") for record in sections[name]["records"])


def test_gsm8k_is_asked_as_a_chat_and_judged_by_its_numbers(tmp_path: Path) -> None:
    file = questions(tmp_path / "train.jsonl", 8)
    task = FileTask(reinforcement.task_of(TaskSettings(), WORKLOADS["b"], file), seed=1)
    prompt = task.sample(0, 1)[0]
    assert text_of(prompt).startswith("What is")
    with task.judge:
        assert task.reward(prompt, replace(ANSWER, text=f"So.\n#### {prompt.reference}")) == 1.0
        assert task.reward(prompt, replace(ANSWER, text="#### 77")) == 0.0
    with pytest.raises(ConfigError, match="needs --prompts"):
        reinforcement.task_of(TaskSettings(), WORKLOADS["b"], None)


ANSWER = Completion(Key(0, 0), (1,), (2,), "", (0.0,), (0.0,), "eos", 0, Timing(0.0, 0.0))


def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speculation.main(["measure", "--workload", "c", "--work", str(tmp_path)]) == 2
    assert "run `speculation.py prepare` first" in capsys.readouterr().err
