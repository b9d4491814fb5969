"""The optimizer's state in host memory: the same steps, bit by bit, and states that either way of training reads."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests import tiny
from tests.test_policy import FREE, ONE_STEP, experiences
from tlt.config import RunConfig, TrainSettings
from tlt.errors import ConfigError
from tlt.memory_plan import Sizes, memory_plan
from tlt.train.offload import OffloadedAdamW
from tlt.train.optimizer import MasterAdamW
from tlt.train.policy import PolicyTrainer

SHAPES = ((6, 4), (7,), (3, 5), (40, 2), (1,))


def model(dtype: torch.dtype, device: str = "cpu") -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES)


def take_steps(optimizer: MasterAdamW, weights: nn.ParameterList, seed: int) -> list[float]:
    """Two updates of two passes each; the second one leaves a weight without a gradient."""
    generator, norms = torch.Generator().manual_seed(seed), []
    for update in range(2):
        for _ in range(2):
            for index, weight in enumerate(weights):
                if index or not update:
                    drawn = torch.randn(weight.shape, generator=generator)
                    weight.grad = drawn.to(weight.device, weight.dtype)
            optimizer.gather()
        optimizer.gradients()
        norms.append(optimizer.update(1e-2, 1.0).item())
    return norms


@pytest.mark.parametrize("bucket", [1, 30, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_steps_are_the_same_bit_by_bit(dtype: torch.dtype, bucket: int) -> None:
    ours, theirs = model(dtype), model(dtype)
    offloaded = OffloadedAdamW(ours, weight_decay=0.1, bucket=bucket)
    plain = MasterAdamW(theirs, weight_decay=0.1)
    assert take_steps(offloaded, ours, 1) == take_steps(plain, theirs, 1)
    for weight, expected in zip(ours, theirs, strict=True):
        assert torch.equal(weight, expected)
        assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kinds", [(OffloadedAdamW, MasterAdamW), (MasterAdamW, OffloadedAdamW)])
def test_either_goes_on_from_the_others_state(kinds: tuple[type[MasterAdamW], ...], dtype: torch.dtype) -> None:
    first, second = kinds
    ours = model(dtype)
    saving = first(ours, weight_decay=0.1)
    take_steps(saving, ours, 1)
    weights, state = copy.deepcopy(ours), copy.deepcopy(saving.state())
    going_on = second(weights, weight_decay=0.1)
    going_on.restore(state)
    assert take_steps(going_on, weights, 2) == take_steps(saving, ours, 2)
    for weight, expected in zip(weights, ours, strict=True):
        assert torch.equal(weight, expected)


def test_an_update_that_is_not_to_be_made_is_not_made() -> None:
    weights = model(torch.bfloat16)
    optimizer, before = OffloadedAdamW(weights, weight_decay=0.0), copy.deepcopy(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.gather()
    optimizer.step(1e-2, 1.0, optimizer.norm(), unless=torch.tensor(1.0))
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_a_policy_learns_the_same() -> None:
    policies = [tiny.policy(torch.float64) for _ in range(2)]
    trainers = [
        PolicyTrainer(model, replace(ONE_STEP, offload=offload), FREE)
        for model, offload in zip(policies, (True, False), strict=True)
    ]
    given = experiences(policies[0])
    norms = [[trainer.update(given).grad_norm for _ in range(2)] for trainer in trainers]
    assert norms[0] == norms[1]
    for ours, theirs in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_plan_has_no_masters_and_no_moments_on_the_gpu() -> None:
    sizes = Sizes(tiny.policy().config, 2, 10**9)
    plan = memory_plan(RunConfig(train=TrainSettings(offload=True)), sizes)
    assert [part.name for part in plan.kept] == ["policy"]
    assert memory_plan(RunConfig(), sizes).phases == plan.phases


def test_adapters_are_not_offloaded() -> None:
    with pytest.raises(ConfigError, match="adapters take little memory"):
        TrainSettings(offload=True, lora_rank=4)


@pytest.mark.gpu
def test_on_a_gpu_steps_are_the_same_up_to_rounding() -> None:
    ours, theirs = model(torch.bfloat16, "cuda"), model(torch.bfloat16, "cuda")
    offloaded = OffloadedAdamW(ours, weight_decay=0.1, bucket=30)
    assert all(master.device.type == "cpu" for master in offloaded._masters)
    norms = take_steps(offloaded, ours, 1)
    assert norms == pytest.approx(take_steps(MasterAdamW(theirs, weight_decay=0.1), theirs, 1), rel=1e-3)
    for weight, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, expected, rtol=2**-7, atol=1e-6)
