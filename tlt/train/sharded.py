"""The sharded policy trainer (FSDP2): each worker holds a shard of the weights and of Adam's moments.

Always holds: N workers compute the numbers of one worker, up to the rounding of sums. The engine's weights are a
separate, complete copy that changes only in `publish`, which gathers the shards. Weights and state to be saved are this
worker's shards: no worker holds the whole of the optimizer's state. All workers make every call together, and as many
passes as the worker with the most rows.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.model.transformer import Transformer
from tlt.train.policy import PolicyTrainer, SumOverWorkers

dist: Any = torch.distributed  # without types that all versions of torch know
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_AT_ONCE = 2**27  # bytes of weights that are gathered together


class ShardedTrainer(PolicyTrainer):
    """Trains shards of a copy of `whole`. `publish` writes the trained weights into `whole`."""

    def __init__(
        self,
        whole: Transformer,
        config: RunConfig,
        mesh: DeviceMesh,
        *,
        reference: Transformer | None,
        add_up: SumOverWorkers,
    ) -> None:
        if config.train.lora_rank:
            raise ConfigError(
                f"train.lora_rank is {config.train.lora_rank} and cluster.shard is on; adapters are small: learn them "
                "with cluster.shard = false"
            )
        if config.train.offload:
            raise ConfigError(
                "train.offload and cluster.shard are on; expected one of them: shards take less memory too"
            )
        self._whole, self._mesh, self._add_up = whole, mesh, add_up
        super().__init__(
            sharded(whole, mesh),
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
        passes = torch.zeros(self._mesh.size(), dtype=torch.int64, device=self._whole.embed.device)
        passes[self._mesh.get_rank()] = own
        self._add_up([passes])
        return int(passes.max())

    @torch.no_grad()
    def publish(self) -> int:
        """Writes the trained weights into the engine's copy. Returns their bytes."""
        pairs = list(zip(self._model.parameters(), self._whole.parameters(), strict=True))
        gather_into([whole for _, whole in pairs], [shards for shards, _ in pairs], self._mesh)
        return sum(whole.nbytes for _, whole in pairs)

    def weights(self) -> dict[str, Tensor]:
        """This worker's shards of the weights, by the model's own names."""
        return {name: shards.detach() for name, shards in self._model.named_parameters()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, which consists of this worker's shards. The weights are cut from the engine's copy."""
        for shards, whole in zip(self._model.parameters(), self._whole.parameters(), strict=True):
            shards.copy_(distribute_tensor(whole.detach(), self._mesh, [Shard(0)], src_data_rank=None))
        super().restore(state)


def sharded(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """A sharded copy; its layers are gathered when they are computed. Gradients are summed over workers in float32."""
    shards = copy.deepcopy(model).requires_grad_(True)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(model.embed.dtype, torch.float32))
    for module in (*shards.blocks, shards):
        # the root module is not resharded after the forward pass: the head is read later
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=module is not shards)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, the default with a factor in float32
    return shards


@torch.no_grad()
def gather_into(
    wholes: Sequence[Tensor], sharded: Sequence[Tensor], mesh: DeviceMesh, *, at_once: int = _AT_ONCE
) -> None:
    """Every worker's shards become whole tensors, on their device. While a bucket of about `at_once` bytes is copied to
    where it belongs, the next one is gathered."""
    pending: _Bucket | None = None
    for pairs in _buckets(wholes, sharded, at_once):
        bucket = _Bucket(pairs, mesh)
        if pending:
            pending.write()
        pending = bucket
    if pending:
        pending.write()


class _Bucket:
    """Shards that are gathered together. A worker with fewer rows of a tensor than the first one sends padding."""

    def __init__(self, pairs: Sequence[tuple[Tensor, DTensor]], mesh: DeviceMesh) -> None:
        self._wholes, workers = [whole for whole, _ in pairs], mesh.size()
        self._sizes = [-(-len(whole) // workers) * whole[0].numel() for whole in self._wholes]  # of the first worker
        own = pairs[0][1].to_local().new_zeros(sum(self._sizes))
        for part, (_, shards) in zip(torch.split(own, self._sizes), pairs, strict=True):
            local = shards.to_local()
            part[: local.numel()] = local.reshape(-1)
        gathered = own.new_empty(workers * len(own))
        self._work = _all_gather(gathered, own, group=mesh.get_group(), async_op=True)
        self._all = gathered.view(workers, len(own))

    def write(self) -> None:
        self._work.wait()
        for whole, parts in zip(self._wholes, torch.split(self._all, self._sizes, dim=1), strict=True):
            whole.copy_(parts.reshape(-1)[: whole.numel()].view(whole.shape))


def _buckets(
    wholes: Sequence[Tensor], sharded: Sequence[Tensor], at_once: int
) -> Iterator[list[tuple[Tensor, DTensor]]]:
    bucket: list[tuple[Tensor, DTensor]] = []
    size = 0
    for whole, shards in zip(wholes, sharded, strict=True):
        assert isinstance(shards, DTensor), "every parameter is sharded"
        if bucket and size + whole.nbytes > at_once:
            yield bucket
            bucket, size = [], 0
        bucket.append((whole, shards))
        size += whole.nbytes
    if bucket:
        yield bucket
