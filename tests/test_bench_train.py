"""The training bench: every variant learns the same from the same answers, and what it reports adds up."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training import small
from tlt.bench import train, training
from tlt.bench.options import FULL_TRAIN, QUICK_TRAIN, TrainOptions, TrainScale, read_fleet_options, read_train_options
from tlt.bench.train import ADAPTIVE, FROZEN, SUFFIX, bench_train
from tlt.bench.training import PLAIN
from tlt.errors import ConfigError
from tlt.loop import Loop, Step

DRAFT = ["--draft.steps=4", "--draft.answers=8", "--draft.held_out=2", "--draft.tokens_per_batch=256"]


def words(**given: Any) -> Namespace:
    absent = (
        "shape",
        "prompts",
        "json",
        "commit",
        "batches",
        "cap",
        "budget",
        "sections",
        "groups",
        "group_size",
        "variants",
        "recipe",
    )
    switches = dict.fromkeys(("raw", "quick", "full", "peers", "no_peers", "snapshot"), False)
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
        ({"snapshot": True}, "--snapshot is not for tlt bench train without a recipe"),
        ({"recipe": "r.toml", "variants": "plain"}, "--variants is not for tlt bench train with a recipe"),
        ({"recipe": "r.toml", "full": True}, "--full is not for tlt bench train with a recipe"),
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
    names = [PLAIN, ADAPTIVE, FROZEN, SUFFIX]
    assert list(sections) == [PLAIN, "totals", ADAPTIVE, FROZEN, SUFFIX]
    steps = [record for name in names for record in sections[name]["records"]]
    totals = sections["totals"]["records"]
    assert [(record["variant"], record["step"]) for record in steps] == [
        (name, step) for name in names for step in (1, 2)
    ]
    for step in (1, 2):
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
    for step in (1, 2):  # the first answers are the first policy's own, up to the rounding of what the engine tells
        assert len({round(r["moved"], 9) for r in steps if r["step"] == step}) == 1
    assert steps[0]["moved"] == pytest.approx(0.0, abs=1e-6)
    assert abs(steps[1]["moved"]) > 1e-4
    assert all((record["reach"] is None) == (record["variant"] in (PLAIN, SUFFIX)) for record in steps)
    frozen = sections[FROZEN]["records"]
    assert all(record["reach"] == record["left_alone"] > 1.0 for record in frozen)
    adaptive = [record["left_alone"] for record in sections[ADAPTIVE]["records"]]
    assert adaptive == pytest.approx([record["left_alone"] for record in frozen])


def test_without_a_learned_drafter(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    options = TrainOptions(json=file, steps=1, groups=2, group_size=2, cap=8)
    bench_train(small(tmp_path, "--spec.drafter=suffix"), options)
    sections = json.loads(file.read_text())["sections"]
    assert [record["variant"] for record in sections["totals"]["records"]] == [PLAIN, SUFFIX]


def test_a_spent_budget_begins_no_step_and_totals_compare_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only steps turn: each takes 10 s, and of 45 s plain decoding leaves half."""
    now = 0.0
    step_of = Loop.step

    def step(self: Loop, number: int) -> Step:
        nonlocal now
        now += 10.0
        return step_of(self, number)

    monkeypatch.setattr(Loop, "step", step)
    for module in (train, training):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    file = tmp_path / "train.json"
    options = TrainOptions(json=file, variants=(PLAIN, SUFFIX), budget_s=45.0, steps=9, groups=2, group_size=2, cap=8)
    bench_train(small(tmp_path, "--spec.drafter=suffix"), options)
    sections = json.loads(file.read_text())["sections"]
    assert [len(sections[name]["records"]) for name in (PLAIN, SUFFIX)] == [3, 2]
    plain, suffix = sections["totals"]["records"]
    assert (plain["steps"], suffix["steps"]) == (3, 2)
    assert suffix["speedup"] == suffix["later_speedup"] == 1.0  # of the first two steps


def test_a_variant_that_is_not_there_is_told() -> None:
    assert read_train_options(words(variants="suffix,plain", budget="30")).variants == (PLAIN, SUFFIX)
    with pytest.raises(ConfigError, match="there is no variant 'static'"):
        read_train_options(words(variants="static"))
    with pytest.raises(ConfigError, match="--variants is not for tlt bench fleet"):
        read_fleet_options(words(what="fleet", variants="plain"))
