"""The benchmark of recipes: its runs are what the recipes say, its figures follow from their events."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tlt

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import learning

from tlt.recipe import load_config
from tlt.watch.events import Evaluated


def evaluated(step: int, reward: float, error: float) -> Evaluated:
    return Evaluated(
        step=step,
        name="test",
        prompts=9,
        answers=9,
        mean_reward=reward,
        reward_error=error,
        pass_at=((1, reward),),
        length_mean=1.0,
        truncated=0.0,
        seconds=1.0,
    )


@pytest.mark.parametrize(("after", "rose"), [(0.5, True), (0.49, False), (0.2, False)])
def test_accuracy_rose_beyond_two_standard_errors(after: float, rose: bool) -> None:
    """Of the difference: 0.05 from 0.03 and 0.04."""
    found = learning.gain([evaluated(0, 0.4, 0.03), evaluated(20, 0.0, 0.0), evaluated(60, after, 0.02)])
    assert found["standard_error"] == pytest.approx(0.0360555)
    assert (found["before"], found["after"]) == (0.4, after)
    found = learning.gain([evaluated(0, 0.4 - 1e-9, 0.03), evaluated(60, after, 0.04)])
    assert found["standard_error"] == pytest.approx(0.05)
    assert found["rose"] == rose


def test_its_runs_are_the_shipped_recipes_on_the_files_named(tmp_path: Path) -> None:
    options = learning.read(["--model", "M", "--train", "a.jsonl", "--test", "b.jsonl", "--work", str(tmp_path)])
    for variant in learning.VARIANTS:
        config = load_config(variant.recipe, learning.flags_of(variant, options, ["--sampling.max_tokens=512"]))
        shipped = load_config(variant.recipe)
        assert (config.grpo, config.task.prompts, config.task.group) == (shipped.grpo, 64, 8)
        assert (config.run.steps, config.eval.every, config.eval.prompts, config.eval.temperature) == (60, 20, 256, 0)
        assert (config.model.path, config.task.path, config.eval.paths) == ("M", "a.jsonl", ("b.jsonl",))
        assert config.sampling.max_tokens == 512
        assert (config.train.lora_rank == 32) == (variant.name == "lora")
        assert (config.grpo.dynamic_sampling > 0) == (variant.name == "dapo")


def test_record_and_picture_tell_what_the_runs_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--quick", "--work", str(tmp_path), "--steps", "2", "--budget", "0"]
    small = ["--task.prompts=2", "--task.group=2", "--sampling.max_tokens=8", "--eval.prompts=8"]
    options = learning.read(command)
    run = tlt.train(load_config("grpo", learning.flags_of(learning.VARIANTS[0], options, small)))
    assert learning.main([*command, *small]) == 0
    out = capsys.readouterr().out
    record: dict[str, Any] = json.loads((tmp_path / "results/learning.json").read_text())
    (found,) = record["variants"].values()
    told = [event.event for event in run.events if isinstance(event.event, Evaluated)]
    assert [(one["step"], one["mean_reward"]) for one in found["evaluations"]] == [
        (e.step, e.mean_reward) for e in told
    ]
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert f"GRPO: 2 of 2 steps; accuracy {told[0].mean_reward:.1%} ± " in out
    assert "There is more to do" in out
    checkpoints = tmp_path / "grpo/checkpoints"
    assert [path.name for path in (checkpoints / "step_2").iterdir() if path.is_dir()] == ["policy"]
    assert (tmp_path / "results/grpo/report.html").is_file()
    picture = ElementTree.parse(tmp_path / "results/learning.svg")
    dots = picture.iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(dots)) == len(told) == 2
