"""What training takes and keeps, and what that leaves for keys and values: figures worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny import policy
from tests.training import LEARNED, small
from tlt.config import GrpoSettings, RunConfig, TrainSettings
from tlt.engine.memory import GIB, gib_beside_training
from tlt.fleet import Worker
from tlt.train.optimizer import MasterAdamW, bytes_to_come
from tlt.train.policy import PolicyTrainer

# A block of the policy in tests.tiny has matrices of 64 × 32, 32 × 32, 96 × 32 and 32 × 48 and two norms of 32; there
# are two blocks, an embedding and a head of 40 × 32 and a norm of 32.
WEIGHTS = 2 * (2048 + 1024 + 3072 + 1536 + 64) + 2 * 1280 + 32
ADAPTERS_OF_RANK_2 = 2 * 2 * ((64 + 32) + (32 + 32) + (96 + 32) + (32 + 48))


@pytest.mark.parametrize(
    ("dtype", "each", "with_masters"),
    [(torch.bfloat16, 4 + 4 + 4 + 2, 18), (torch.float32, 4 + 4 + 4, 12), (torch.float64, 8 + 8 + 8, 24)],
)
def test_moments_and_gradients(dtype: torch.dtype, each: int, with_masters: int) -> None:
    seven_billion = torch.empty(7_000_000_000, dtype=dtype, device="meta")
    assert bytes_to_come([seven_billion]) == each * 7_000_000_000
    assert bytes_to_come([seven_billion], masters=True) == with_masters * 7_000_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_optimizer_takes_what_was_said(dtype: torch.dtype) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 5), (7,)))
    optimizer = MasterAdamW(model, weight_decay=0.0)
    for weight in model:
        weight.grad = torch.ones_like(weight)
    own = [weight.grad for weight in model]
    optimizer.gather()
    held = {id(tensor): tensor for tensor in [*own, *optimizer.gradients()]}
    optimizer.update(1e-3, 1.0)
    for state in optimizer.state()["adam"]["state"].values():
        held |= {id(state[name]): state[name] for name in ("exp_avg", "exp_avg_sq")}
    assert optimizer.bytes_to_come == sum(tensor.numel() * tensor.element_size() for tensor in held.values())


@pytest.mark.parametrize(
    ("rank", "dtype", "expected"),
    [
        (0, torch.bfloat16, 14 * WEIGHTS),
        (0, torch.float32, 12 * WEIGHTS),
        (2, torch.bfloat16, 12 * ADAPTERS_OF_RANK_2),  # adapters are float32 whatever the policy is
        (2, torch.float32, 12 * ADAPTERS_OF_RANK_2),
    ],
)
def test_only_what_is_trained_counts(rank: int, dtype: torch.dtype, expected: int) -> None:
    assert PolicyTrainer(policy(dtype), TrainSettings(lora_rank=rank), GrpoSettings()).bytes_to_come == expected


def test_keys_and_values_get_a_part_of_what_training_leaves() -> None:
    """Seven billion weights in bfloat16, on GPUs where 100 GB are free once weights and masters are there."""
    gb, weights = 10**9, 7 * 10**9
    adapters = 80_000_000
    assert gib_beside_training(100 * gb, 14 * weights) == pytest.approx(0.4 * 2 * gb / GIB)
    assert gib_beside_training(100 * gb, 14 * weights // 4) == pytest.approx(0.4 * 75.5 * gb / GIB)  # four workers
    assert gib_beside_training(100 * gb, 12 * adapters) == pytest.approx(0.4 * 99.04 * gb / GIB)
    assert gib_beside_training(50 * gb, 14 * weights) == 0.5  # it does not fit: a little all the same


def test_a_drafter_that_learns_counts_too(tmp_path: Path) -> None:
    config: RunConfig = small(tmp_path, *LEARNED, "--model.dtype=float32", "--train.lora_rank=1")
    worker = Worker(config)
    assert worker.drafts_with is not None
    drafter = sum(weight.numel() for weight in worker.drafts_with.parameters())
    alone = worker.trainer.bytes_to_come
    assert worker._bytes_to_come == alone + (4 + 4 + 12) * drafter  # two copies; moments and gradient of one of them
    frozen = replace(config, drafting=replace(config.drafting, frozen=True))
    worker.config = frozen
    assert worker._bytes_to_come == alone
