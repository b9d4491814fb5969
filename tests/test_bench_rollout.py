"""The rollout bench: every variant writes the same tokens, and what it reports adds up. No time is asserted."""

import gc
import io
import json
import re
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tlt.bench.rollout as bench
from tests.tiny import letters, policy
from tlt.bench.options import FULL_ROLLOUT, QUICK_ROLLOUT, RolloutOptions, RolloutScale, read_rollout_options
from tlt.bench.paper import PaperComparison
from tlt.bench.report import _table
from tlt.bench.variants import (
    BANDIT,
    PLAIN,
    STAYS_OFF,
    TUNER,
    WARM,
    Variant,
    VariantRollout,
    VariantRunner,
    fixed_shapes,
    variants,
)
from tlt.cli import main
from tlt.config import EngineSettings, RunConfig, SpecSettings
from tlt.engine.build import shapes_of
from tlt.errors import ConfigError
from tlt.policy import Policy
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin, save_drafter
from tlt.spec.record import DraftRecord
from tlt.spec.shape import OFF, Shape
from tlt.spec.tuner import RECORD_VERIFIES, Tuner
from tlt.types import Completion, Key, SamplingParams, Timing

SPEC = SpecSettings(drafter="suffix", depths=(2, 4), widths=(1, 2), verifies=(3, 5))
CONFIG = RunConfig(spec=SPEC, engine=EngineSettings(rows=8), sampling=SamplingParams(temperature=0.7))
SCALE = RolloutScale(groups=2, group_size=3, cap=40, repeats=1)


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """The bench collects garbage around every rollout, and need not look through what other tests have left."""
    gc.collect()
    gc.freeze()


def words(**given: Any) -> Namespace:
    absent = ("shape", "prompts", "json", "commit", "batches", "cap", "budget", "sections", "groups", "group_size")
    switches = dict.fromkeys(("raw", "quick", "full", "peers", "no_peers"), False)
    return Namespace(**{"what": "rollout", "repeats": None, **dict.fromkeys(absent), **switches, **given})


def written(name: str, seconds: float, finished: list[float], shape: Shape | None = None) -> VariantRollout:
    completions = tuple(
        Completion(Key(0, i), (1,), (2, 3), "", (), (), "eos", 0, Timing(0.0, end)) for i, end in enumerate(finished)
    )
    return VariantRollout(
        Variant(name, shape), completions, seconds, cpu_s=seconds, ticks=10, capture_s=0.0, speculation=None
    )


# ---- options


def test_the_scale_follows_the_device_unless_told() -> None:
    assert read_rollout_options(words()).scale(on_gpu=False) == QUICK_ROLLOUT
    assert read_rollout_options(words()).scale(on_gpu=True) == FULL_ROLLOUT
    given = read_rollout_options(words(quick=True, groups="3", group_size="5", cap="77", repeats="1"))
    assert given.scale(on_gpu=True) == RolloutScale(groups=3, group_size=5, cap=77, repeats=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sections": "step"}, "--sections is not for tlt bench rollout"),
        ({"no_peers": True}, "--no-peers is not for"),
        ({"group_size": "many"}, "--group-size is 'many'"),
        ({"prompts": "none.jsonl"}, "none.jsonl: no such file"),
    ],
)
def test_mistakes_in_options(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_rollout_options(words(**given))


def test_the_command_line_reaches_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench, "bench_rollout", lambda *arguments: seen.extend(arguments))
    assert main(["bench", "rollout", "tiny", "--groups", "3", "--group-size=2", "--spec.depths", "2,3"]) == 0
    config, options = seen
    assert config.spec.depths == (2, 3)
    assert options == RolloutOptions(groups=3, group_size=2)
    assert main(["bench", "engine", "tiny", "--groups", "3"]) == 2


# ---- variants


def test_a_few_fixed_shapes_stand_for_all() -> None:
    assert fixed_shapes(shapes_of(SPEC)) == [Shape(("suffix",), 2, 1, 3), Shape(("suffix",), 4, 1, 5)]
    default = fixed_shapes(shapes_of(SpecSettings(drafter="suffix")))
    named = ["suffix 1x1/2", "suffix 3x1/4", "suffix 7x1/8", "suffix 15x1/16", "suffix 15x2/32"]
    assert [str(shape) for shape in default] == named
    names = [variant.name for variant in variants(SPEC)]
    assert names == [PLAIN, STAYS_OFF, "suffix 2x1/3", "suffix 4x1/5", BANDIT, TUNER, WARM]
    assert str(OFF) == "off"


def stage(scale: RolloutScale = SCALE, config: RunConfig = CONFIG) -> VariantRunner:
    prompts = [(3, 4, 5, 6), (7, 8, 9)]
    return VariantRunner(Policy(policy(sharpness=60.0), letters(), Path()), config, prompts, scale)


def test_a_variant_does_what_its_name_says() -> None:
    here = stage()
    done = {variant.name: here.write(variant) for variant in variants(SPEC)}
    plain = done[PLAIN]
    assert plain.speculation is None
    for name, found in done.items():
        assert [c.tokens for c in found.completions] == [c.tokens for c in plain.completions], name
        assert [c.key for c in found.completions] == [Key(0, number) for number in range(6)]
    off = done[STAYS_OFF].speculation
    assert off is not None
    assert (off.off_share, off.verifies, off.switches) == (1.0, 0, 0)
    assert done[STAYS_OFF].ticks == plain.ticks
    fixed = done["suffix 4x1/5"].speculation
    assert fixed is not None
    assert {shape for _, shape in fixed.ticks} == {Shape(("suffix",), 4, 1, 5)}
    assert fixed.accept_length > 1.2, "the test must accept drafts to mean anything"
    assert done["suffix 4x1/5"].ticks < plain.ticks


def test_every_tuner_knows_its_drafters_record_once(tmp_path: Path) -> None:
    model = policy(sharpness=60.0)
    drafter = Eagle(EagleConfig.of_policy(model.config, window=16), dtype=model.embed.dtype)
    drafter.init_weights(0)
    record = DraftRecord(((0.8, 0.1),), places=100, temperature=1.0)
    save_drafter(drafter, tmp_path, model.head_weight, Origin("tiny", ()), record=record)
    here = stage(config=replace(CONFIG, spec=replace(SPEC, drafter="eagle", path=str(tmp_path))))
    for shape_policy in (here.warm, here.shape_policy(Variant(TUNER)), here.shape_policy(Variant(TUNER))):
        assert isinstance(shape_policy, Tuner)
        assert shape_policy.expected(Shape(("eagle",), 2, 1, 3), 1)[0] == pytest.approx(1 + 0.8 + 0.64, rel=0.02)
        assert shape_policy._acceptance.evidence(("eagle",)) == pytest.approx(RECORD_VERIFIES)


def test_a_rollout_finds_nothing_of_the_one_before() -> None:
    """Neither prompts in the cache nor answers in a drafter's memory: the same work again."""
    here, fixed = stage(), variants(SPEC)[3]
    first, second = here.write(fixed), here.write(fixed)
    assert first.speculation is not None
    assert second.speculation is not None
    assert second.ticks == first.ticks
    assert second.speculation.accepted == pytest.approx(first.speculation.accepted, rel=0.1)  # hit rates are learned


def test_answers_as_long_as_asked_for() -> None:
    """Those of another run, token for token as far as both go; and garbage is collected again."""
    here, lengths = stage(), [5, 9, 13, 17, 21, 25]
    natural, cut = here.write(Variant(PLAIN)), here.write(Variant(PLAIN), lengths)
    assert [len(completion.tokens) for completion in cut.completions] == lengths
    for one, other in zip(natural.completions, cut.completions, strict=True):
        both = min(len(one.tokens), len(other.tokens))
        assert one.tokens[:both] == other.tokens[:both]
    assert gc.isenabled()


def test_the_cap_leaves_room_for_the_prompt() -> None:
    assert stage(replace(SCALE, cap=10**6)).cap == 512 - 4


# ---- arithmetic


def test_the_tail_begins_when_few_are_left() -> None:
    done = written(PLAIN, 10.0, [1.0, 2.0, 9.5, 3.0])
    assert done.tail_s(1) == pytest.approx(6.5)
    assert done.tail_s(2) == pytest.approx(7.5)
    assert done.tail_s(4) == pytest.approx(9.5)
    assert bench._tail_s(written(PLAIN, 1.0, [float(i) for i in range(16)])) == pytest.approx(2.0)
    assert bench._last_s(done) is None
    assert bench._last_s(written(PLAIN, 1.0, [float(i) for i in range(40)])) == pytest.approx(32.0)


def test_a_tail_that_takes_no_time_has_no_speedup() -> None:
    """The last two ended in one tick: whatever the other's tail took, there is nothing to divide by."""
    plain, other = written(PLAIN, 2.0, [1.0, 1.5, 2.0]), written(TUNER, 1.0, [0.5, 1.0, 1.0])
    found = {record.variant: record for record in bench.time([plain, other])}
    assert (found[TUNER].tail_s, found[TUNER].tail_speedup) == (0.0, None)
    assert (found[PLAIN].tail_s, found[PLAIN].tail_speedup) == (0.5, 1.0)
    found = {record.variant: record for record in bench.time([replace(other, variant=plain.variant), plain])}
    assert found[PLAIN].tail_speedup is None
    told = Console(file=io.StringIO(), width=300)
    told.print(_table("time", list(bench.time([plain, other]))))
    assert isinstance(told.file, io.StringIO)
    (line,) = [line for line in told.file.getvalue().splitlines() if TUNER in line]
    assert "–" in line


def test_the_middle_rollout_counts() -> None:
    rollouts = [written(TUNER, seconds, [seconds]) for seconds in (3.0, 1.0, 2.0, 9.0)]
    assert bench._middle(rollouts).seconds == 2.0


def test_regret_is_against_the_best_in_hindsight() -> None:
    shape = Shape(("suffix",), 2, 1, 3)
    spans = {PLAIN: [4.0, 5.0, 4.4], STAYS_OFF: [4.5], str(shape): [3.0], BANDIT: [3.3], TUNER: [2.7], WARM: [2.4]}
    rollouts = [
        written(name, span, [span], shape if name == str(shape) else None)
        for name, all_spans in spans.items()
        for span in all_spans
    ]
    found = bench.verdict(rollouts, off_s=1e-3)
    assert (found.best_fixed, found.best_fixed_s) == (str(shape), 3.0)
    assert found.tuner_regret == pytest.approx(-0.1)
    assert found.warm_tuner_regret == pytest.approx(-0.2)
    assert found.bandit_regret == pytest.approx(0.1)
    assert found.off_over_plain == pytest.approx(4.5 / 4.4 - 1)
    assert found.off_host_share == pytest.approx(1e-3 * 10 / 4.4)
    assert (found.plain_spread, found.plain_drift) == (pytest.approx(0.25), pytest.approx(0.1))
    assert found.all_identical
    few = [done for done in rollouts if done.variant.name in (PLAIN, WARM)]
    told = bench.verdict(few, off_s=1e-3)
    assert (told.best_fixed, told.warm_tuner_regret) == (PLAIN, pytest.approx(2.4 / 4.4 - 1))
    absent = (told.tuner_regret, told.bandit_regret, told.tuner_over_plain, told.off_over_plain)
    assert absent == (None,) * 4, "who did not write has no verdict, and hinders nobody's"
    by_name = {record.variant: record for record in bench.time(rollouts)}
    assert by_name[TUNER].speedup == pytest.approx(4.4 / 2.7)
    assert by_name[TUNER].fastest_speedup == pytest.approx(4.0 / 2.7)


def test_a_token_that_differs_is_told() -> None:
    plain, other = written(PLAIN, 1.0, [1.0, 1.0]), written(TUNER, 1.0, [1.0, 1.0])
    other = replace(other, completions=(other.completions[0], replace(other.completions[1], tokens=(2, 9))))
    found = {record.variant: record for record in bench.speculated([plain, other])}
    assert (found[PLAIN].identical, found[PLAIN].common_tokens) == (2, 4)
    assert (found[TUNER].identical, found[TUNER].common_tokens) == (1, 3)
    others = [written(name, 1.0, [1.0, 1.0]) for name in (STAYS_OFF, BANDIT, WARM)]
    assert not bench.verdict([plain, *others, other], 0.0).all_identical


# ---- all of it


def test_the_whole_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ABCD"}\n{"prompt": "EFG"}\n')
    opened = Policy(policy(torch.float32, sharpness=60.0), letters(), Path())
    monkeypatch.setattr(bench, "open_policy", lambda settings: opened)
    file = tmp_path / "results" / "rollout.json"
    sizes = {"groups": 2, "group_size": 3, "cap": 40, "repeats": 2}
    bench.bench_rollout(
        replace(CONFIG, spec=replace(SPEC, drafter="none")), RolloutOptions(prompts=prompts, json=file, **sizes)
    )
    content = json.loads(file.read_text())
    assert {"machine", "subject", "config", "scale", "sections"} == set(content)
    assert {"device", "torch", "commit", "command", "date"} <= set(content["machine"])
    assert content["scale"] == sizes
    kinds = {
        "costs": bench.ForwardCost,
        "runs": bench.RolloutRun,
        "answers": bench.AnswerStats,
        "time": bench.Time,
        "speculation": bench.Speculated,
        "shapes": bench.Chosen,
        "verdict": bench.SpeculationVerdict,
        "paper": PaperComparison,
    }
    records = {name: section["records"] for name, section in content["sections"].items()}
    assert list(records) == list(kinds)
    for name, kind in kinds.items():
        assert records[name]
        for record in records[name]:
            assert set(record) == {field.name for field in fields(kind)}
    check_the_records(records)


def check_the_records(records: dict[str, list[dict[str, Any]]]) -> None:
    names = [variant.name for variant in variants(SPEC)]
    assert [record["variant"] for record in records["runs"]] == [*names, *names, PLAIN]
    assert [record["variant"] for record in records["time"]] == names
    completions, verdict = records["answers"][0], records["verdict"][0]
    assert verdict["all_identical"] is True
    for record in records["speculation"]:
        assert (record["identical"], record["common_tokens"]) == (6, record["of_tokens"])
        assert record["of_tokens"] == completions["tokens"]
    fixed = records["speculation"][3]
    assert fixed["verifies"] > 0
    assert fixed["off_share"] == 0
    time = {record["variant"]: record for record in records["time"]}
    beside = {record["what"]: record for record in records["paper"]}["speed-up of a rollout"]
    assert (beside["here"], beside["paper"]) == (f"{time[WARM]['speedup']:.2f} ×", "2.44 ×")
    assert fixed["speedup_per_accept"] == pytest.approx(time[fixed["variant"]]["speedup"] / fixed["accept_length"])
    for record in records["shapes"]:
        assert record["variant"] in (BANDIT, TUNER, WARM)
        assert sum(share["share"] for share in record["shapes"]) == pytest.approx(1.0)
