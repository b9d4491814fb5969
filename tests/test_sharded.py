"""The policy in shards: two workers with a part of the weights each learn what one with all of them learns.

In every dtype: the processes of a pair take the same steps in float64 and float32, and run the optimizer on bfloat16
shards without a matmul. Steps in bfloat16 run in processes of their own, as some CPUs end a process at its first
bfloat16 matmul.
"""

import multiprocessing
import multiprocessing.context
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from tests.tiny import policy
from tlt.config import RunConfig, TrainSettings
from tlt.errors import CheckpointError, ConfigError
from tlt.model.weights import hf_tensors, read_tensors
from tlt.policy import TINY_POLICY
from tlt.train.host_copy import HostCopy
from tlt.train.optimizer import MasterAdamW
from tlt.train.policy import PolicyTrainer
from tlt.train.policy_files import OPTIMIZER, POLICY, WholePolicyFiles, merge_policy
from tlt.train.restore import restore_policy
from tlt.train.shard_files import ShardFiles
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

CONFIG = RunConfig(train=TrainSettings(learning_rate=1e-2, row_tokens=24, minibatches=2))
STEPS = 3
BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}  # some CPUs name AMX, which ends a process there
Work = Callable[[int, int, Path], dict[Any, Any]]  # rank, workers, directory
WIDE = (torch.float64, torch.float32)
# How far two workers may be from one. Norms: relative. Weights: relative to the distance they were moved in all steps.
# In bfloat16 activations have 8 bits, and a row's gradients depend on the rows beside it that far (measured: 0.4 % of
# norms, 2.7 % of distances); there the float32 masters are compared, and the weights are the masters, rounded.
NORM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.01}
WEIGHT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}


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


def whole_policy(dtype: torch.dtype = torch.float64) -> Any:
    return policy(dtype, sharpness=1.0)


def share_of(step: int, rank: int, size: int) -> list[Experience]:
    """Of one, two or three workers, which together have the same minibatches."""
    ends = {1: (0, 8), 2: (0, 6, 8), 3: (0, 4, 6, 8)}[size]
    return experiences(step)[ends[rank] : ends[rank + 1]]


class Sharded:
    """One of the workers, and how it is saved."""

    def __init__(self, model: Any, mesh: Any, group: Any) -> None:
        from tlt.train.policy_files import ShardedPolicyFiles
        from tlt.train.sharded import ShardedTrainer

        def add_up(tensors: Any) -> None:
            for tensor in tensors:
                dist.all_reduce(tensor)

        self.model, self.rank, self.size = model, mesh.get_rank(), mesh.size()
        self.trainer = ShardedTrainer(model, CONFIG, mesh, reference=None, add_up=add_up)
        self.files = ShardedPolicyFiles(mesh, group)
        self.host = HostCopy()
        self.copied = self.host.begin({})

    def learn(self, step: int) -> float:
        share = share_of(step, self.rank, self.size)
        return self.trainer.update(share, before_change=self.copied.result).grad_norm

    def restore(self, directory: Path) -> None:
        restore_policy(self.model, directory / POLICY)
        self.trainer.restore(self.files.read_state(directory, self.model.embed.device))

    def snapshot(self) -> Callable[[Path], None]:
        self.copied = copied = self.host.begin({POLICY: self.trainer.weights(), OPTIMIZER: self.trainer.state()})
        return lambda directory: self.files.write(copied.result(), self.model.config, TINY_POLICY, directory)


def meet(size: int) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (size,)), dist.new_group(backend="gloo")


def learn_in_shards(dtype: torch.dtype, rank: int, size: int, directory: Path) -> dict[str, Any]:
    """A step, which is saved while the next are taken; and another worker that goes on from there."""
    first = Sharded(whole_policy(dtype), *meet(size))
    norms = [first.learn(0)]
    held = sum(p.to_local().numel() for p in first.trainer._model.parameters())
    directory.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as background:
        writing = background.submit(first.snapshot(), directory)
        undisturbed = [first.learn(step) for step in range(1, STEPS)]
        writing.result()
    dist.barrier()
    if rank == 0:
        merge_policy(directory)
    dist.barrier()
    second = Sharded(whole_policy(dtype), *meet(size))
    second.restore(directory)
    norms += [second.learn(step) for step in range(1, STEPS)]
    assert norms[1:] == undisturbed
    second.trainer.publish()
    return {"weights": second.model.state_dict(), "norms": norms, "held": held, "masters": masters_of(second.trainer)}


def masters_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """The float32 masters of weights in half precision. With shards, all workers call it."""
    masters = trainer.state()["optimizer"]["masters"]
    return [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().clone() for tensor in masters]


def go_on_in_shards(dtype: torch.dtype, rank: int, size: int, directory: Path) -> dict[str, Any]:
    """The steps after the first, from a checkpoint that others have written."""
    worker = Sharded(whole_policy(dtype), *meet(size))
    worker.restore(directory)
    norms = [worker.learn(step) for step in range(1, STEPS)]
    worker.trainer.publish()
    return {"weights": worker.model.state_dict(), "norms": norms}


def go_on_alone(dtype: torch.dtype, directory: Path) -> dict[str, Any]:
    model = whole_policy(dtype)
    restore_policy(model, directory / POLICY)
    trainer = PolicyTrainer(model, CONFIG.train, CONFIG.grpo)
    trainer.restore(WholePolicyFiles().read_state(directory, torch.device("cpu")))
    assert trainer.steps_taken == 1
    norms = [trainer.update(in_one_order(step)).grad_norm for step in range(1, STEPS)]
    return {"weights": model.state_dict(), "norms": norms}


def in_one_order(step: int) -> list[Experience]:
    """The experiences of a step in the order of the minibatches that the workers' shares make up."""
    mine, theirs = share_of(step, 0, 2), share_of(step, 1, 2)
    return [e for i in range(3) for e in (mine[2 * i : 2 * i + 2] + theirs[2 * i : 2 * i + 2])]


def learn_alone(dtype: torch.dtype, directory: Path | None = None) -> dict[str, Any]:
    """`directory`: where the first step is saved."""
    model = whole_policy(dtype)
    trainer = PolicyTrainer(model, CONFIG.train, CONFIG.grpo)
    norms = []
    for step in range(STEPS):
        norms.append(trainer.update(in_one_order(step)).grad_norm)
        if directory and step == 0:
            live = {POLICY: trainer.weights(), OPTIMIZER: trainer.state()}
            WholePolicyFiles().write(live, model.config, TINY_POLICY, directory)
    return {"weights": model.state_dict(), "norms": norms, "masters": masters_of(trainer)}


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
    return {"weights": full, "norms": norms}


def bfloat16_steps_in_shards(size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    return bfloat16_steps(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))


def in_a_group(rank: int, size: int, work: Work, directory: Path) -> None:
    """What runs in each of the processes."""
    os.environ.update(BFLOAT16)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=size)
    found = work(rank, size, directory)
    if rank == 0:
        torch.save(found, directory / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def learn_in_each(dtypes: tuple[torch.dtype, ...], rank: int, size: int, directory: Path) -> dict[Any, Any]:
    return {dtype: learn_in_shards(dtype, rank, size, directory / str(dtype)) for dtype in dtypes}


def learn_in_wide_types(rank: int, size: int, directory: Path) -> dict[Any, Any]:
    found = learn_in_each(WIDE, rank, size, directory)
    return {**found, "optimizer": bfloat16_steps_in_shards(size)}


def learn_in_bfloat16(rank: int, size: int, directory: Path) -> dict[Any, Any]:
    return learn_in_each((torch.bfloat16,), rank, size, directory)


def go_on_in_each(rank: int, size: int, directory: Path) -> dict[Any, Any]:
    """From each of the checkpoints that the directory names."""
    checkpoints = (directory / "checkpoints").read_text().splitlines()
    return {checkpoint: go_on_in_shards(torch.float64, rank, size, Path(checkpoint)) for checkpoint in checkpoints}


def gather_in_buckets(rank: int, size: int, directory: Path) -> dict[Any, Any]:
    """Weights of uneven shards in buckets of every size; and those of a policy that was not trained yet."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from tlt.train.sharded import gather_into

    mesh, _ = meet(size)
    expected = [
        torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((7, 3), (1,), (4, 2), (5,))
    ]
    sharded = [distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for whole in expected]
    gathered = []
    for at_once in (1, 60, 10**6):
        found = [torch.zeros_like(whole) for whole in expected]
        gather_into(found, sharded, mesh, at_once=at_once)
        gathered.append(found)
    worker = Sharded(whole_policy(), mesh, None)
    before = {name: weight.clone() for name, weight in worker.model.state_dict().items()}
    for weight in worker.model.parameters():
        weight.data.zero_()
    told = worker.trainer.publish()
    return {
        "expected": expected,
        "gathered": gathered,
        "before": before,
        "after": worker.model.state_dict(),
        "bytes": told,
    }


def in_one(dtype: torch.dtype, directory: Path) -> None:
    os.environ.update(BFLOAT16)
    torch.set_num_threads(1)
    torch.save(learn_alone(dtype), directory / "alone.pt")


def processes() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")  # which imports torch once for all
    context.set_forkserver_preload(["tests.test_sharded", "tlt.train.sharded", "torch._dynamo"])
    return context


def run_group(size: int, work: Work, directory: Path) -> dict[Any, Any]:
    group = [processes().Process(target=in_a_group, args=(rank, size, work, directory)) for rank in range(size)]
    for process in group:
        process.start()
    for process in group:
        process.join(300)
        assert process.exitcode == 0
    found: dict[Any, Any] = torch.load(directory / "results.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def in_shards(directory: Path) -> dict[Any, Any]:
    return run_group(2, learn_in_wide_types, directory)


def same_within_tolerance(ours: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype) -> None:
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=NORM_TOLERANCE[dtype])
    names = [name for name, _ in whole_policy(dtype).named_parameters()]
    wide = [dict(zip(names, run.get("masters") or run["weights"].values(), strict=True)) for run in (ours, theirs)]
    for name, start in whole_policy(dtype).named_parameters():
        weight, expected = (run[name].double() for run in wide)
        assert torch.equal(ours["weights"][name], wide[0][name].to(dtype)), "the masters, rounded"
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
    same_within_tolerance(run_group(2, learn_in_bfloat16, tmp_path)[torch.bfloat16], alone, torch.bfloat16)


def test_the_optimizer_takes_the_same_steps_on_shards_in_bfloat16(in_shards: dict[Any, Any]) -> None:
    ours, whole = in_shards["optimizer"], bfloat16_steps(lambda tensor: tensor)
    assert ours["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    for weight, expected in zip(ours["weights"], whole["weights"], strict=True):
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, expected, rtol=2**-7, atol=0.0)  # one unit in the last place


@pytest.mark.parametrize("size", [2, 3])
def test_every_engine_gets_the_whole_policy(tmp_path: Path, size: int) -> None:
    found = run_group(size, gather_in_buckets, tmp_path)
    for gathered in found["gathered"]:
        torch.testing.assert_close(gathered, found["expected"], rtol=0.0, atol=0.0)
    torch.testing.assert_close(found["after"], found["before"], rtol=0.0, atol=0.0)
    assert found["bytes"] == sum(weight.nbytes for weight in whole_policy().parameters())


def test_a_worker_holds_half_of_the_weights(in_shards: dict[Any, Any]) -> None:
    weights = sum(parameter.numel() for parameter in whole_policy().parameters())
    for dtype in WIDE:
        assert in_shards[dtype]["held"] == weights // 2


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_one_worker_goes_on_from_what_two_saved(in_shards: dict[Any, Any], directory: Path, dtype: torch.dtype) -> None:
    ours, theirs = go_on_alone(dtype, directory / str(dtype)), learn_alone(dtype)
    same_within_tolerance(ours, {**theirs, "norms": theirs["norms"][1:]}, dtype)


def test_three_workers_go_on_from_what_two_or_one_saved(
    in_shards: dict[Any, Any], directory: Path, tmp_path: Path
) -> None:
    alone = learn_alone(torch.float64, tmp_path / "alone")
    saved = [str(directory / "torch.float64"), str(tmp_path / "alone")]
    (tmp_path / "checkpoints").write_text("\n".join(saved))
    found = run_group(3, go_on_in_each, tmp_path)
    for checkpoint in saved:
        same_within_tolerance(found[checkpoint], {**alone, "norms": alone["norms"][1:]}, torch.float64)


def test_every_worker_writes_its_own_half(in_shards: dict[Any, Any], directory: Path) -> None:
    """No file, and so nobody, has the whole of more than a number; the policy is a directory like any other."""
    saved = directory / "torch.float64"
    files = sorted((saved / OPTIMIZER).glob("*.safetensors"))
    assert len(files) == 2
    whole = ShardFiles(saved / OPTIMIZER)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it cannot be iterated over
                shape = opened.get_slice(key).get_shape()
                assert not shape or shape[0] * 2 == whole[key].shape[0]
    assert sorted(entry.name for entry in saved.iterdir()) == [OPTIMIZER, POLICY]
    names = {name for name, _ in read_tensors(saved / POLICY)}
    assert names == set(hf_tensors(whole_policy()))


def test_a_part_that_is_missing_is_told(in_shards: dict[Any, Any], directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory / "torch.float64", tmp_path / "damaged")
    for file in sorted((tmp_path / "damaged" / OPTIMIZER).glob("*.safetensors"))[:1]:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks a part of tensor .*; resume from another checkpoint"):
        WholePolicyFiles().read_state(tmp_path / "damaged", torch.device("cpu"))


def test_adapters_are_refused() -> None:
    from tlt.train.sharded import ShardedTrainer

    config = replace(CONFIG, train=replace(CONFIG.train, lora_rank=2))
    with pytest.raises(ConfigError, match=r"lora_rank is 2 and cluster\.shard"):
        ShardedTrainer(whole_policy(), config, None, reference=None, add_up=lambda tensors: None)  # type: ignore[arg-type]


def on_a_gpu(directory: Path) -> None:
    """One worker with NCCL: its shards are copied to the host, written while it goes on, and read back."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{directory}/meet", rank=0, world_size=1)
    mesh, group = init_device_mesh("cuda", (1,)), dist.new_group(backend="gloo")
    (directory / "saved").mkdir()
    first = Sharded(whole_policy(torch.float32).cuda(), mesh, group)
    first.learn(0)
    write = first.snapshot()
    norms = [first.learn(step) for step in range(1, STEPS)]
    write(directory / "saved")
    merge_policy(directory / "saved")
    second = Sharded(whole_policy(torch.float32).cuda(), mesh, group)
    second.restore(directory / "saved")
    torch.testing.assert_close([second.learn(step) for step in range(1, STEPS)], norms, rtol=1e-3, atol=0.0)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_shards_on_a_gpu_are_saved_and_restored(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=on_a_gpu, args=(tmp_path,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
