"""The training bench: every variant learns the same from the same answers, and what it reports adds up."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.training import small
from tlt.bench.options import FULL_TRAIN, QUICK_TRAIN, TrainOptions, TrainScale, read_train_options
from tlt.bench.train import ADAPTIVE, FROZEN, PLAIN, SUFFIX, bench_train
from tlt.errors import ConfigError

DRAFT = ["--draft.steps=4", "--draft.answers=8", "--draft.held_out=2", "--draft.tokens_per_batch=256"]


def words(**given: Any) -> Namespace:
    absent = ("shape", "prompts", "json", "commit", "batches", "cap", "budget", "sections", "groups", "group_size")
    switches = dict.fromkeys(("raw", "quick", "full", "peers", "no_peers"), False)
    return Namespace(**{"what": "train", "repeats": None, "steps": None, **dict.fromkeys(absent), **switches, **given})


def test_the_scale_follows_the_device_unless_told() -> None:
    assert read_train_options(words()).scale(on_gpu=False) == QUICK_TRAIN
    assert read_train_options(words()).scale(on_gpu=True) == FULL_TRAIN
    given = read_train_options(words(quick=True, steps="2", groups="3", group_size="5", cap="77"))
    assert given.scale(on_gpu=True) == TrainScale(steps=2, prompts=3, group=5, cap=77)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"repeats": "2"}, "--repeats is not for tlt bench train"),
        ({"prompts": "x.jsonl"}, "--prompts is not for"),
        ({"steps": "none"}, "--steps is 'none'"),
    ],
)
def test_what_it_does_not_know_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_train_options(words(**given))


def test_all_variants_learn_the_same(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    bench_train(
        small(tmp_path, *DRAFT, "--engine.rows=12"), TrainOptions(json=file, steps=2, groups=3, group_size=4, cap=24)
    )
    sections = json.loads(file.read_text())["sections"]
    assert not any("error" in section for section in sections.values())
    steps, totals = (sections[name]["records"] for name in ("steps", "totals"))
    names = [PLAIN, SUFFIX, FROZEN, ADAPTIVE]
    assert [(record["variant"], record["step"]) for record in steps] == [
        (name, step) for name in names for step in (0, 1)
    ]
    for step in (0, 1):
        told = [(r["mean_reward"], r["loss"], r["tokens"]) for r in steps if r["step"] == step]
        assert told[0] == told[1] == told[2] == told[3]
    assert [record["identical"] for record in steps] == [None, None, *[1.0] * 6]
    assert [record["common"] for record in steps] == [None, None, *[1.0] * 6]
    assert [total["variant"] for total in totals] == names
    for total in totals:
        own = [record for record in steps if record["variant"] == total["variant"]]
        assert total["seconds"] == pytest.approx(sum(record["step_s"] for record in own))
        assert total["rollout_s"] + total["update_s"] + total["drafting_s"] <= total["seconds"]
    assert totals[0]["speedup"] == totals[0]["rollout_speedup"] == 1.0
    assert all(record["drafter_version"] is None for record in steps if record["variant"] != ADAPTIVE)


def test_without_a_learned_drafter(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    options = TrainOptions(json=file, steps=1, groups=2, group_size=2, cap=8)
    bench_train(small(tmp_path, "--spec.drafter=suffix"), options)
    records = json.loads(file.read_text())["sections"]["steps"]["records"]
    assert [record["variant"] for record in records] == [PLAIN, SUFFIX]
