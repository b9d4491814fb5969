"""The training bench in turns: both variants are complete in the record, orders alternate, and ratios add up."""

import json
from pathlib import Path
from typing import Any

import pytest

import tlt.bench.turns
import tlt.fleet
from tests.clocks import Clock
from tests.training import LEARNED, small
from tlt.bench import training, turns
from tlt.bench.options import TrainOptions, TrainScale
from tlt.bench.training import PLAIN
from tlt.bench.turns import TLT, bench_turns, kv_gib_of_each
from tlt.cli import main
from tlt.config import RunConfig
from tlt.drafting.planner import TrainingPlanner
from tlt.engine.memory import GIB, LEAST_GIB, SHARE_OF_FREE
from tlt.errors import ConfigError, TltError
from tlt.fleet import Worker
from tlt.loop import Loop, Step
from tlt.spec.budget import CostKind

SCALE = {"groups": 2, "group_size": 2, "cap": 12}


def tiny(out: Path, *flags: str) -> RunConfig:
    return small(out, *LEARNED, *flags)


def sections_of(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())["sections"])


def test_two_pairs_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "turns.json"
    bench_turns(tiny(tmp_path), TrainOptions(json=file, steps=2, snapshot=True, **SCALE))
    content = json.loads(file.read_text())
    assert content["scale"] == {"steps": 2, "prompts": 2, "group": 2, "cap": 12}
    assert content["settings"]["spec.path"] == "new"  # nothing was trained beforehand
    assert content["settings"]["run.steps"] == 100  # that many are planned
    sections = content["sections"]
    assert not any("error" in section for section in sections.values())
    steps, pairs, totals = (sections[name]["records"] for name in ("steps", "pairs", "totals"))
    assert [(record["step"], record["variant"]) for record in steps] == [(1, PLAIN), (1, TLT), (2, TLT), (2, PLAIN)]
    assert [pair["first"] for pair in pairs] == [PLAIN, TLT]
    assert [record["phase"] for record in sections["start"]["records"]] == ["warm-up", PLAIN, TLT]
    plain, tlt = ([record for record in steps if record["variant"] == name] for name in (PLAIN, TLT))
    for one, other in zip(plain, tlt, strict=True):  # float64: both learn the same from the same answers
        assert all(one[name] == other[name] for name in ("mean_reward", "loss", "tokens", "truncated", "length_p90"))
        assert (one["identical"], other["identical"], other["common"]) == (None, 1.0, 1.0)
        assert not any(one["spent"].values())
        assert other["spent"].keys() == {kind.value for kind in CostKind}
        assert one["step_s"] >= one["rollout_s"] + one["update_s"] > 0.0
    told = capsys.readouterr().out
    plain_s, tlt_s = (sum(record["step_s"] for record in records) for records in (plain, tlt))
    starts_s = [record["seconds"] for record in sections["start"]["records"]]
    cumulative = [plain[0]["step_s"] / tlt[0]["step_s"], plain_s / tlt_s]
    assert [pair["speedup"] for pair in pairs] == pytest.approx(cumulative)
    assert totals[1]["speedup"] == pytest.approx(cumulative[1])
    assert totals[1]["lowest_speedup"] == pairs[1]["lowest_speedup"] == pytest.approx(min(cumulative))
    assert totals[1]["speedup_with_start"] == pytest.approx((starts_s[1] + plain_s) / (starts_s[2] + tlt_s))
    assert all(f"so far whole step {one:.3f} ×" in told for one in cumulative)
    assert f"{totals[1]['rollout_speedup']:.3f} ×" in told
    assert [total["variant"] for total in totals] == [PLAIN, TLT]
    assert all(total["answers"] == 8 and total["snapshot_s"] > 0.0 for total in totals)


def test_the_budget_ends_after_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), tmp_path / "turns.json"
    clock.used_by(monkeypatch, training, turns)
    clock.passes_in(monkeypatch, Loop, "step", 10.0)
    bench_turns(tiny(tmp_path), TrainOptions(json=file, budget_s=1.0, **SCALE))
    assert [(pair["step"], pair["plain_s"], pair["tlt_s"]) for pair in sections_of(file)["pairs"]["records"]] == [
        (1, 10.0, 10.0)
    ]
    assert len(sections_of(file)["steps"]["records"]) == 2


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_a_bench_cut_short_keeps_whole_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    step_of, asked = Loop.step, 0

    def step(self: Loop, taken: int) -> Step:
        nonlocal asked
        asked += 1
        if asked == 5:  # one in the warm-up, two in the first pair, one in the second
            raise ending
        return step_of(self, taken)

    monkeypatch.setattr(Loop, "step", step)
    file = tmp_path / "turns.json"
    with pytest.raises(KeyboardInterrupt if isinstance(ending, KeyboardInterrupt) else TltError):
        bench_turns(tiny(tmp_path), TrainOptions(json=file, steps=3, **SCALE))
    sections = sections_of(file)
    assert [len(sections[name]["records"]) for name in ("steps", "pairs", "totals")] == [2, 1, 2]
    assert ("error" in sections["pairs"]) == isinstance(ending, RuntimeError)


def test_the_turns_of_others_are_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates alone take time, 10 s each: between two rollouts of a variant lies one of its own and some of others."""
    clock, told = Clock(), list[float]()
    clock.used_by(monkeypatch, training, turns, tlt.fleet)
    clock.passes_in(monkeypatch, Worker, "update", 10.0)
    rolled_out = TrainingPlanner.rolled_out
    monkeypatch.setattr(
        TrainingPlanner,
        "rolled_out",
        lambda self, *given, **named: (told.append(given[2]), rolled_out(self, *given, **named)),
    )
    bench_turns(tiny(tmp_path), TrainOptions(steps=3, **SCALE))
    assert told == pytest.approx([0.0, 10.0, 10.0], abs=1.0)  # waiting for a verdict passes a moment by this clock, too


def test_both_share_a_gpu() -> None:
    free = 100 * GIB
    assert kv_gib_of_each(free, 10 * GIB) == pytest.approx(SHARE_OF_FREE * 90 / 2)
    assert kv_gib_of_each(free, 30 * GIB) == pytest.approx(15 / 2)  # two that train hold 60, and 25 are for activations
    assert kv_gib_of_each(free, 60 * GIB) == LEAST_GIB


def test_the_scale_is_the_recipes(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=7")
    assert TrainOptions().recipe_scale(config) == TrainScale(steps=7, prompts=4, group=4, cap=40)
    assert TrainOptions(steps=3, cap=9).recipe_scale(config) == TrainScale(steps=3, prompts=4, group=4, cap=9)
    with pytest.raises(ConfigError, match=r"--steps is 8, and the run ends after run\.steps, 7"):
        TrainOptions(steps=8).recipe_scale(config)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], "spec.drafter is none"), ([*LEARNED, "--cluster.workers=2"], "cluster.workers is 2")],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, flags: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        bench_turns(small(tmp_path, *flags), TrainOptions())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[RunConfig, TrainOptions]] = []
    monkeypatch.setattr(tlt.bench.turns, "bench_turns", lambda config, options: asked.append((config, options)))
    recipe = str(Path(tlt.__file__).parents[1] / "recipes" / "gsm8k_1gpu.toml")
    more = ["--task", "math.jsonl", "--task.reward", "math", "--steps", "40", "--budget", "600", "--snapshot"]
    assert main(["bench", "train", "some/model", "--recipe", recipe, *more]) == 0
    assert main(["bench", "train", "--recipe", recipe]) == 0
    (config, options), (unchanged, _) = asked
    assert (config.model.path, config.task.name, config.task.path) == ("some/model", "files", "math.jsonl")
    assert (config.task.reward, config.run.steps, options.steps, options.budget_s) == ("math", 200, 40, 600.0)
    assert options.snapshot
    assert unchanged.model.path == "path/to/your/model"
    assert main(["bench", "train"]) != 0
    assert "tlt bench train needs a MODEL" in capsys.readouterr().err
