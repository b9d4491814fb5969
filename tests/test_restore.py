"""A state that does not fit is an error of one line that names what was found and expected."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny
from tests.test_policy import FREE, ONE_STEP, experiences
from tlt.errors import CheckpointError
from tlt.model.weights import save_policy
from tlt.train.optimizer import MasterAdamW
from tlt.train.policy import PolicyTrainer
from tlt.train.restore import reading, restore_policy

Change = Callable[[dict[str, Any]], object]


def refused(restore: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        restore()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the policy's trainer


@pytest.fixture(scope="module")
def trained() -> tuple[PolicyTrainer, dict[str, Any]]:
    model = tiny.policy(torch.float64)
    trainer = PolicyTrainer(model, ONE_STEP, FREE)
    trainer.update(experiences(model))
    return trainer, copy.deepcopy(trainer.state())


def moments(state: dict[str, Any]) -> Any:
    return state["optimizer"]["adam"]["state"]


CHANGES: dict[str, tuple[Change, str]] = {
    "no optimizer": (lambda s: s.pop("optimizer"), "the trainer's state: optimizer is missing, found steps_taken"),
    "no adam": (lambda s: s["optimizer"].pop("adam"), "the optimizer's state: adam is missing, found masters"),
    "masters": (
        lambda s: s["optimizer"].update(masters=[torch.ones(3)]),
        "float32 copies of the weights: 1 tensors, expected 0 tensors",
    ),
    "a moment's shape": (
        lambda s: moments(s)[0].update(exp_avg=torch.ones(3, dtype=torch.float64)),
        "Adam's moments of embed: exp_avg is float64 [3], expected float64 [40, 32]",
    ),
    "a moment's dtype": (
        lambda s: moments(s)[0].update(exp_avg_sq=moments(s)[0]["exp_avg_sq"].float()),
        "Adam's moments of embed: exp_avg_sq is float32 [40, 32], expected float64 [40, 32]",
    ),
    "no moment": (lambda s: moments(s)[0].pop("exp_avg"), "Adam's moments of embed: exp_avg is missing, found step"),
    "no weight": (lambda s: moments(s).pop(0), "Adam's moments of embed: 0 is missing"),
    "no tensor": (lambda s: moments(s)[0].update(exp_avg=3), "exp_avg is 3, expected a tensor"),
    "no dictionary": (lambda s: s.update(optimizer=[1]), "the optimizer's state is [1]; expected a dictionary"),
    "fewer weights": (
        lambda s: s["optimizer"]["adam"]["param_groups"][0]["params"].pop(),
        "matrices and vectors, expected",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_does_not_fit_is_named(trained: tuple[PolicyTrainer, dict[str, Any]], change: str) -> None:
    trainer, state = trained
    changed = copy.deepcopy(state)
    spoil, told = CHANGES[change]
    spoil(changed)
    before = copy.deepcopy(trainer.state())
    assert told in refused(lambda: trainer.restore(changed))
    for name, value in moments(before)[0].items():
        assert torch.equal(moments(trainer.state())[0][name], value)
    trainer.restore(state)


def test_the_file_and_what_to_do_are_named(trained: tuple[PolicyTrainer, dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError) as caught, reading(Path("run/step_2/optimizer")):
        trained[0].restore({})
    assert str(caught.value).startswith("run/step_2/optimizer does not fit this run: the trainer's state: steps_taken")
    assert "config.toml" in str(caught.value)


def test_adapters_of_another_rank_are_refused() -> None:
    saved = PolicyTrainer(tiny.policy(), replace(ONE_STEP, lora_rank=2), FREE).state()
    other = PolicyTrainer(tiny.policy(), replace(ONE_STEP, lora_rank=3), FREE)
    told = refused(lambda: other.restore(saved))
    assert "the adapters of train.lora_rank 3: a.0 is float64 [2, 32], expected float64 [3, 32]" in told


# ---- half precision: weights with float32 copies beside them


def optimizer(dtype: torch.dtype, decay: float = 0.0) -> tuple[nn.Linear, MasterAdamW]:
    layer = nn.Linear(4, 3, dtype=dtype)
    return layer, MasterAdamW(layer, weight_decay=decay)


def learn(layer: nn.Linear, adam: MasterAdamW) -> None:
    for number, weight in enumerate(layer.parameters(), start=1):
        weight.grad = torch.full_like(weight, 0.01 * number)
    adam.gather()
    adam.update(1e-3, 1.0)


@pytest.mark.parametrize(("saved", "mine"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_state_of_another_dtype_is_refused(saved: torch.dtype, mine: torch.dtype) -> None:
    state = optimizer(saved)[1].state()
    told = refused(lambda: optimizer(mine)[1].restore(state))
    counts = (2, 0) if saved == torch.bfloat16 else (0, 2)
    assert told == f"float32 copies of the weights: {counts[0]} tensors, expected {counts[1]} tensors"


def test_half_precision_goes_on_bit_by_bit() -> None:
    layer, adam = optimizer(torch.bfloat16)
    learn(layer, adam)
    state = copy.deepcopy(adam.state())
    other, again = optimizer(torch.bfloat16)
    again.restore(state)
    for one in ((layer, adam), (other, again)):
        learn(*one)
    masters = [copies.state()["masters"] for copies in (adam, again)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*masters, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True))


def test_the_weight_decay_is_that_of_the_run_that_goes_on() -> None:
    """Unlike the moments it is a setting: a changed one is listed when the run is resumed, and then holds."""
    layer, adam = optimizer(torch.float64, decay=0.0)
    learn(layer, adam)
    decaying = optimizer(torch.float64, decay=0.5)[1]
    decaying.restore(copy.deepcopy(adam.state()))
    assert [group["weight_decay"] for group in decaying.state()["adam"]["param_groups"]] == [0.5, 0.0]


# ---- the policy itself


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_policy(tiny.policy(family="qwen2"), tmp_path)
    told = refused(lambda: restore_policy(tiny.policy(), tmp_path))
    assert told == (
        f"{tmp_path} is another model than model.path: qkv_bias True, where model.path has qkv_bias False; "
        "resume with model.path as it was"
    )


def test_a_policy_of_another_dtype_is_refused_before_it_is_rounded(tmp_path: Path) -> None:
    save_policy(tiny.policy(torch.float32), tmp_path)
    model = tiny.policy(torch.bfloat16, seed=1)
    before = model.embed.clone()
    told = refused(lambda: restore_policy(model, tmp_path))
    assert "is in float32, and this run trains in bfloat16; resume with --model.dtype float32" in told
    assert torch.equal(model.embed, before)
