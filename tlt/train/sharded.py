"""The sharded policy trainer (FSDP2): each worker holds a shard of the weights and of Adam's moments.

Always holds: N workers compute the numbers of one worker, up to the rounding of sums. The engine's weights are a
separate, complete copy that changes only in `publish`, which gathers the shards. Weights and state to be saved are this
worker's shards: nobody ever holds the whole of the optimizer's state. All workers make every call together, and as many
passes as the worker with the most rows.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.model.transformer import Transformer
from tlt.train.policy import PolicyTrainer, SumOverWorkers


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
    def publish(self) -> None:
        """Writes the trained weights into the engine's copy."""
        for shards, whole in zip(self._model.parameters(), self._whole.parameters(), strict=True):
            whole.copy_(_gathered(shards))

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


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
