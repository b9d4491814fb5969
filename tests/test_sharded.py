"""The policy in shards: two workers with a part of the weights each learn what one with all of them learns.

In every dtype: the processes of a pair take the same steps in float64 and float32, and run the optimizer on bfloat16
shards without a matmul. Steps in bfloat16 run in processes of their own, as some CPUs end a process at its first
bfloat16 matmul.
"""

import multiprocessing
import multiprocessing.context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tiny import policy
from tlt.config import RunConfig, TrainSettings
from tlt.errors import ConfigError
from tlt.train.optimizer import MasterAdamW
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

CONFIG = RunConfig(train=TrainSettings(learning_rate=1e-2, row_tokens=24, minibatches=2))
STEPS = 3
WIDE = (torch.float64, torch.float32)
# How far two workers may be from one. Norms: relative. Weights: relative to the distance they were moved in all steps.
NORM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}
WEIGHT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.25}


def experiences(step: int) -> list[Experience]:
    """Answers of unequal length with made-up log-probabilities; the second worker's share needs fewer rows."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for number in range(8):
        length = int(torch.randint(2, 18, (), generator=generator))
        tokens = tuple(torch.randint(2, 40, (length,), generator=generator).tolist())
        logprobs = tuple((-3.6 + 0.1 * torch.randn(length, generator=generator)).tolist())
        completion = Completion(Key(0, number), (3, 4), tokens, "", logprobs, logprobs, "eos", step, Timing(0.0, 0.0))
        found.append(Experience(Rollout(Prompt("p", ""), completion, 0.0), float(number - 3)))
    return found


def share(step: int, rank: int) -> list[Experience]:
    every = experiences(step)
    return every[:6] if rank == 0 else every[6:]


def whole_policy(dtype: torch.dtype = torch.float64) -> Any:
    return policy(dtype, sharpness=1.0)


def learn_in_shards(dtype: torch.dtype, rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from tlt.train.sharded import ShardedTrainer

    def add_up(tensors: Any) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def trainer(model: Any) -> ShardedTrainer:
        mesh = init_device_mesh("cpu", (size,))
        return ShardedTrainer(model, CONFIG, mesh, reference=None, add_up=add_up)

    model = whole_policy(dtype)
    first = trainer(model)
    norms = [first.update(share(0, rank)).grad_norm]
    held = sum(p.to_local().numel() for p in first._model.parameters())
    to_come = first.bytes_to_come
    first.publish()
    state = first.state()
    second = trainer(model)  # a worker that comes later: the weights are published, the rest is in the state
    second.restore(state)
    norms += [second.update(share(step, rank)).grad_norm for step in range(1, STEPS)]
    second.publish()
    return {"weights": model.state_dict(), "norms": norms, "held": held, "to_come": to_come, "state": second.state()}


def learn_alone(dtype: torch.dtype) -> dict[str, Any]:
    model = whole_policy(dtype)
    trainer = PolicyTrainer(model, CONFIG.train, CONFIG.grpo)
    norms = []
    for step in range(STEPS):  # in the order of the minibatches that the two shares make up
        mine, theirs = share(step, 0), share(step, 1)
        merged = [e for i in range(3) for e in (mine[2 * i : 2 * i + 2] + theirs[2 * i : 2 * i + 2])]
        norms.append(trainer.update(merged).grad_norm)
    return {"weights": model.state_dict(), "norms": norms}


def bfloat16_steps(cut: Any) -> dict[str, Any]:
    """Two updates of made-up gradients, two passes each, with the state saved and read back between; no matmul."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16)

    shapes = ((6, 4), (7,))  # seven rows: the parts of two workers are not equal
    model = nn.ParameterList(nn.Parameter(cut(drawn(*shape))) for shape in shapes)
    norms, optimizer = [], MasterAdamW(model, weight_decay=0.1)
    for _ in range(2):
        later = MasterAdamW(model, weight_decay=0.1)
        later.restore(optimizer.state())
        optimizer = later
        for _ in range(2):
            for weight, shape in zip(model, shapes, strict=True):
                weight.grad = cut(drawn(*shape))
            optimizer.gather()
        norms.append(optimizer.update(1e-2, 1.0).item())
    full = [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in model]
    return {"weights": full, "norms": norms, "to_come": optimizer.bytes_to_come}


def bfloat16_steps_in_shards(size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    return bfloat16_steps(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))


def in_a_pair(rank: int, dtypes: tuple[torch.dtype, ...], optimizer: bool, directory: Path) -> None:
    """What runs in each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    found: dict[Any, Any] = {dtype: learn_in_shards(dtype, rank, 2) for dtype in dtypes}
    if optimizer:
        found["optimizer"] = bfloat16_steps_in_shards(2)
    if rank == 0:
        torch.save(found, directory / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_one(dtype: torch.dtype, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.save(learn_alone(dtype), directory / "alone.pt")


def processes() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")  # which imports torch once for all
    context.set_forkserver_preload(["tests.test_sharded", "tlt.train.sharded", "torch._dynamo"])
    return context


def run_pair(dtypes: tuple[torch.dtype, ...], directory: Path, optimizer: bool = False) -> dict[Any, Any]:
    pair = [processes().Process(target=in_a_pair, args=(rank, dtypes, optimizer, directory)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(300)
        assert process.exitcode == 0
    found: dict[Any, Any] = torch.load(directory / "results.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return run_pair(WIDE, tmp_path_factory.mktemp("sharded"), optimizer=True)


def same_within_tolerance(ours: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype) -> None:
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=NORM_TOLERANCE[dtype])
    for name, start in whole_policy(dtype).state_dict().items():
        weight, expected = ours["weights"][name].double(), theirs["weights"][name].double()
        off, moved = (weight - expected).norm().item(), (expected - start.double()).norm().item()
        assert moved > 0, name
        assert off <= WEIGHT_TOLERANCE[dtype] * moved, name


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_shards_learn_what_the_whole_learns(in_shards: dict[Any, Any], dtype: torch.dtype) -> None:
    same_within_tolerance(in_shards[dtype], learn_alone(dtype), dtype)


def test_shards_in_bfloat16_learn_what_the_whole_learns(tmp_path: Path) -> None:
    probe = processes().Process(target=in_one, args=(torch.bfloat16, tmp_path))
    probe.start()
    probe.join(300)
    if probe.exitcode is not None and probe.exitcode < 0:
        pytest.skip(f"a bfloat16 matmul ends the process with signal {-probe.exitcode} on this CPU")
    assert probe.exitcode == 0
    alone = torch.load(tmp_path / "alone.pt", weights_only=False)
    same_within_tolerance(run_pair((torch.bfloat16,), tmp_path)[torch.bfloat16], alone, torch.bfloat16)


def test_the_optimizer_takes_the_same_steps_on_shards_in_bfloat16(in_shards: dict[Any, Any]) -> None:
    ours, whole = in_shards["optimizer"], bfloat16_steps(lambda tensor: tensor)
    assert ours["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    for weight, expected in zip(ours["weights"], whole["weights"], strict=True):
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, expected, rtol=2**-7, atol=0.0)  # one unit in the last place


def test_a_worker_holds_half_of_the_weights(in_shards: dict[Any, Any]) -> None:
    """All have an even number of rows: of moments and gradients (three numbers to a weight), too, a worker has half."""
    weights = sum(parameter.numel() for parameter in whole_policy().parameters())
    for dtype in WIDE:
        assert in_shards[dtype]["held"] == weights // 2
        assert in_shards[dtype]["to_come"] == 3 * dtype.itemsize * weights // 2
    assert in_shards["optimizer"]["to_come"] == 14 * (3 * 4 + 4)  # the first worker's rows of 6 × 4 and 7


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_what_is_saved_is_whole(in_shards: dict[Any, Any], dtype: torch.dtype) -> None:
    """A trainer without shards goes on from it."""
    trainer = PolicyTrainer(whole_policy(dtype), CONFIG.train, CONFIG.grpo)
    trainer.restore(in_shards[dtype]["state"])
    assert trainer.steps_taken == STEPS


def test_adapters_are_refused() -> None:
    from tlt.train.sharded import ShardedTrainer

    config = replace(CONFIG, train=replace(CONFIG.train, lora_rank=2))
    with pytest.raises(ConfigError, match=r"lora_rank is 2 and cluster\.shard"):
        ShardedTrainer(whole_policy(), config, None, reference=None, add_up=lambda tensors: None)  # type: ignore[arg-type]
