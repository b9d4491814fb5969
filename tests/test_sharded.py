"""The policy in shards: two workers with a part of the weights each learn what one with all of them learns."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.tiny import policy
from tlt.config import RunConfig, TrainSettings
from tlt.errors import ConfigError
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

CONFIG = RunConfig(train=TrainSettings(learning_rate=1e-2, row_tokens=24, minibatches=2))
STEPS = 3


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


def whole_policy() -> Any:
    return policy(torch.float64, sharpness=1.0)


def learn_in_shards(rank: int, size: int, rendezvous: Path, results: Path) -> None:
    """What runs in each of the processes."""
    from torch.distributed.device_mesh import init_device_mesh

    from tlt.train.sharded import ShardedTrainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)

    def add_up(tensors: Any) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def trainer(model: Any) -> ShardedTrainer:
        mesh = init_device_mesh("cpu", (size,))
        return ShardedTrainer(model, CONFIG, mesh, reference=None, add_up=add_up)

    model = whole_policy()
    first = trainer(model)
    norms = [first.update(share(0, rank)).grad_norm]
    held = sum(p.to_local().numel() for p in first._model.parameters())
    first.publish()
    state = first.state()
    second = trainer(model)  # a worker that comes later: the weights are published, the rest is in the state
    second.restore(state)
    norms += [second.update(share(step, rank)).grad_norm for step in range(1, STEPS)]
    second.publish()
    if rank == 0:
        torch.save({"weights": model.state_dict(), "norms": norms, "held": held, "state": second.state()}, results)
    else:
        second.state()  # all make every call
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("sharded")
    context = multiprocessing.get_context("forkserver")  # which imports torch once for both
    context.set_forkserver_preload(["tests.test_sharded", "tlt.train.sharded", "torch._dynamo"])
    arguments = [(rank, 2, directory / "meet", directory / "results.pt") for rank in range(2)]
    processes = [context.Process(target=learn_in_shards, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return torch.load(directory / "results.pt", weights_only=False)


def test_shards_learn_what_the_whole_learns(in_shards: dict[str, Any]) -> None:
    model = whole_policy()
    trainer = PolicyTrainer(model, CONFIG.train, CONFIG.grpo)
    # in the order of the minibatches that the two shares make up
    norms = []
    for step in range(STEPS):
        mine, theirs = share(step, 0), share(step, 1)
        merged = [e for i in range(3) for e in (mine[2 * i : 2 * i + 2] + theirs[2 * i : 2 * i + 2])]
        norms.append(trainer.update(merged).grad_norm)
    assert in_shards["norms"] == pytest.approx(norms, rel=1e-9)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(in_shards["weights"][name], weight, rtol=1e-9, atol=1e-12)


def test_a_worker_holds_half_of_the_weights(in_shards: dict[str, Any]) -> None:
    weights = sum(parameter.numel() for parameter in whole_policy().parameters())
    assert in_shards["held"] == pytest.approx(weights / 2, rel=0.05)


def test_what_is_saved_is_whole(in_shards: dict[str, Any]) -> None:
    """A trainer without shards goes on from it."""
    trainer = PolicyTrainer(whole_policy(), CONFIG.train, CONFIG.grpo)
    trainer.restore(in_shards["state"])
    assert trainer.steps_taken == STEPS


def test_adapters_are_refused() -> None:
    from tlt.train.sharded import ShardedTrainer

    config = replace(CONFIG, train=replace(CONFIG.train, lora_rank=2))
    with pytest.raises(ConfigError, match=r"lora_rank is 2 and cluster\.shard"):
        ShardedTrainer(whole_policy(), config, None, reference=None, add_up=lambda tensors: None)  # type: ignore[arg-type]
