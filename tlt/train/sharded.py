"""The sharded policy trainer (FSDP2): each worker holds a shard of the weights and of Adam's moments.

Always holds: N workers compute the numbers of one worker, up to the rounding of sums. The engine's weights are a
separate copy that changes only in `publish`, which gathers the shards: the whole policy, or a slice of it where several
workers form an engine; then no worker ever holds the whole policy. Weights and state to be saved are this worker's
shards: no worker holds the whole of the optimizer's state. All workers make every call together, and as many passes as
the worker with the most rows.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.model.slices import writer
from tlt.model.transformer import Transformer
from tlt.model.weights import check_headers, places, read_tensors
from tlt.train.policy import PolicyTrainer, SumOverWorkers
from tlt.train.restore import checked_tensors

dist: Any = torch.distributed  # without types that all versions of torch know
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_AT_ONCE = 2**27  # bytes of weights that are gathered together


class ShardedTrainer(PolicyTrainer):
    """Trains shards of the policy that `engine` has whole, or a slice of. `publish` writes what was trained there."""

    def __init__(
        self,
        engine: Transformer,
        config: RunConfig,
        mesh: DeviceMesh,
        *,
        reference: Transformer | None,
        add_up: SumOverWorkers,
        source: Path | None = None,
    ) -> None:
        """`source`: the policy's directory, from which shards are read where the engine has only a slice."""
        if config.train.lora_rank:
            raise ConfigError(
                f"train.lora_rank is {config.train.lora_rank} and cluster.shard is on; adapters are small: learn them "
                "with cluster.shard = false"
            )
        if config.train.offload:
            raise ConfigError(
                "train.offload and cluster.shard are on; expected one of them: shards take less memory too"
            )
        self._engine, self._mesh, self._add_up = engine, mesh, add_up
        super().__init__(
            sharded(engine, mesh) if source is None else read_sharded(engine, mesh, source),
            config.train,
            config.grpo,
            reference=reference,
            sampling=config.sampling,
            sum_over_workers=self._sum_plain,
            passes=self._most_passes,
        )

    def _sum_plain(self, tensors: Sequence[Tensor]) -> None:
        """Sums plain tensors only: FSDP has already summed the gradients of shards."""
        self._add_up([tensor for tensor in tensors if not isinstance(tensor, DTensor)])

    def _most_passes(self, own: int) -> int:
        passes = torch.zeros(self._mesh.size(), dtype=torch.int64, device=self._engine.embed.device)
        passes[self._mesh.get_rank()] = own
        self._add_up([passes])
        return int(passes.max())

    @torch.no_grad()
    def publish(self) -> int:
        """Writes the trained weights into the engine's copy, or its slice of them. Returns the bytes gathered."""
        write, named = writer(self._engine), list(self._model.named_parameters())
        shards = [parameter for _, parameter in named]
        gather(shards, self._mesh, lambda index, whole: write(named[index][0], whole))
        return sum(parameter.nbytes for parameter in shards)

    def weights(self) -> dict[str, Tensor]:
        """This worker's shards of the weights, by the model's own names."""
        return {name: shards.detach() for name, shards in self._model.named_parameters()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, which consists of this worker's shards. The weights are cut from the engine's copy."""
        if self._engine.parallel.size == 1:
            for shards, whole in zip(self._model.parameters(), self._engine.parameters(), strict=True):
                shards.copy_(distribute_tensor(whole.detach(), self._mesh, [Shard(0)], src_data_rank=None))
        super().restore(state)

    def restore_weights(self, policy: Transformer, directory: Path) -> None:
        if self._engine.parallel.size == 1:
            super().restore_weights(policy, directory)
        else:
            read_shards(self._model, checked_tensors(policy, directory), self._mesh)
            self.publish()


def sharded(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """A sharded copy; its layers are gathered when they are computed. Gradients are summed over workers in float32."""
    return _divided(copy.deepcopy(model).requires_grad_(True), mesh)


def read_sharded(engine: Transformer, mesh: DeviceMesh, source: Path) -> Transformer:
    """Shards of the policy in a directory, in the dtype and on the device of an engine's slice of it. No more than one
    tensor of the policy is whole at a time."""
    check_headers(engine.config, source)
    with torch.device("meta"):
        shards = Transformer(engine.config, dtype=engine.embed.dtype, device="meta")
    shards = _divided(shards, mesh)
    shards.to_empty(device=engine.embed.device)
    shards.cos_PR, shards.sin_PR = engine.cos_PR, engine.sin_PR
    read_shards(shards, read_tensors(source), mesh)
    return shards


@torch.no_grad()
def read_shards(shards: Transformer, tensors: Iterable[tuple[str, Tensor]], mesh: DeviceMesh) -> None:
    """Copies of each tensor, by its name at Hugging Face, the rows that lie in this worker's shards."""
    ours, found = dict(shards.named_parameters()), places(shards.config)
    for name, tensor in tensors:
        if name not in found:
            continue  # a second copy of the embedding, or what every reader computes afresh
        place, parameter = found[name], ours[found[name].parameter]
        assert isinstance(parameter, DTensor)
        local, first = parameter.to_local(), mesh.get_local_rank() * -(-parameter.shape[0] // mesh.size())
        begin, end = max(first, place.start), min(first + len(local), place.start + len(tensor))
        if begin < end:
            local[begin - first : end - first].copy_(tensor[begin - place.start : end - place.start])


def _divided(shards: Transformer, mesh: DeviceMesh) -> Transformer:
    precision = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(shards.embed.dtype, torch.float32))
    for module in (*shards.blocks, shards):
        # the root module is not resharded after the forward pass: the head is read later
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=module is not shards)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, the default with a factor in float32
    return shards


def gather_into(
    wholes: Sequence[Tensor], sharded: Sequence[Tensor], mesh: DeviceMesh, *, at_once: int = _AT_ONCE
) -> None:
    """Every worker's shards become whole tensors."""
    gather(sharded, mesh, lambda index, values: wholes[index].copy_(values), at_once=at_once)


@torch.no_grad()
def gather(
    sharded: Sequence[Tensor], mesh: DeviceMesh, write: Callable[[int, Tensor], object], *, at_once: int = _AT_ONCE
) -> None:
    """Hands every tensor out whole, by its number, on the device of its shards. While a bucket of about `at_once` bytes
    is written to where it belongs, the next one is gathered."""
    pending: _Bucket | None = None
    for numbered in _buckets(sharded, at_once):
        bucket = _Bucket(numbered, mesh)
        if pending:
            pending.hand_out(write)
        pending = bucket
    if pending:
        pending.hand_out(write)


class _Bucket:
    """Shards that are gathered together. A worker with fewer rows of a tensor than the first one sends padding."""

    def __init__(self, numbered: Sequence[tuple[int, DTensor]], mesh: DeviceMesh) -> None:
        workers = mesh.size()
        self._shapes = [(index, shards.shape) for index, shards in numbered]
        self._sizes = [-(-shape[0] // workers) * shape[1:].numel() for _, shape in self._shapes]  # of the first worker
        own = numbered[0][1].to_local().new_zeros(sum(self._sizes))
        for part, (_, shards) in zip(torch.split(own, self._sizes), numbered, strict=True):
            local = shards.to_local()
            part[: local.numel()] = local.reshape(-1)
        gathered = own.new_empty(workers * len(own))
        self._work = _all_gather(gathered, own, group=mesh.get_group(), async_op=True)
        self._all = gathered.view(workers, len(own))

    def hand_out(self, write: Callable[[int, Tensor], object]) -> None:
        self._work.wait()
        for (index, shape), parts in zip(self._shapes, torch.split(self._all, self._sizes, dim=1), strict=True):
            write(index, parts.reshape(-1)[: shape.numel()].view(shape))


def _buckets(sharded: Sequence[Tensor], at_once: int) -> Iterator[list[tuple[int, DTensor]]]:
    bucket: list[tuple[int, DTensor]] = []
    size = 0
    for index, shards in enumerate(sharded):
        assert isinstance(shards, DTensor), "every parameter is sharded"
        if bucket and size + shards.nbytes > at_once:
            yield bucket
            bucket, size = [], 0
        bucket.append((index, shards))
        size += shards.nbytes
    if bucket:
        yield bucket
