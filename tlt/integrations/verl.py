"""verl's rollouts by tlt: `actor_rollout_ref.rollout.name=tlt`. Importing this module registers it with verl.

A replica starts one server, an actor on its worker's node and device; an adapter beside the trainer sends it weights
through Ray's object store. One device per replica: tensor parallelism is refused.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tlt.errors import ConfigError
from tlt.integrations.verl_server import VerlServer
from tlt.recipe import load_config

NAME = "tlt"
_CHUNK_BYTES = 2**29  # of weights in one message


class TltServerActor:
    """The methods by which verl calls a server."""

    def __init__(self, config: Any, model_config: Any, hybrid: bool, devices: str) -> None:
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._frees = hybrid and bool(config.free_cache_engine)
        knobs = {
            "model.path": str(model_config.local_path or model_config.path),
            "model.dtype": str(config.dtype) if torch.cuda.is_available() else "auto",
            "engine.rows": min(int(config.max_num_seqs), 1024),
            "engine.kv_gib": _kv_gib(float(config.gpu_memory_utilization)),
            "spec.drafter": "suffix",
            "run.seed": int(config.seed),
        }
        given = dict((config.engine_kwargs or {}).get(NAME) or {})  # knobs of tlt, as in `tlt config`
        self._server = VerlServer(
            load_config(overrides={**knobs, **given}), int(config.prompt_length), int(config.response_length)
        )

    async def launch_server(self) -> str:
        return await self._server.start(ray.util.get_node_ip_address() if torch.cuda.is_available() else "127.0.0.1")

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> TokenOutput:
        found = await self._server.generate([int(token) for token in prompt_ids], sampling_params, **more)
        return TokenOutput(**found)

    async def update_weights(self, tensors: dict[str, Tensor], version: int | None, last: bool) -> None:
        await self._server.update(tensors, version, last)

    async def set_global_steps(self, global_steps: int) -> None:
        await self._server.set_version(global_steps)

    async def sleep(self) -> None:
        if self._frees:
            await self._server.sleep()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._server.wake_up(tags)

    async def clear_kv_cache(self) -> None:
        await self._server.clear_kv_cache()

    async def release_kv_cache(self) -> None:
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        await self._server.wake_up()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        return {"aborted_count": await self._server.abort_all(), "request_ids": []}

    async def resume_generation(self) -> None:
        await self._server.resume()

    async def start_profile(self, **_: Any) -> None:
        """There is no profiler to start."""

    async def stop_profile(self) -> None:
        """There is no profiler to stop."""


class TltReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ConfigError(
                f"rollout.name=tlt serves a policy on one device, and {self.world_size} were asked for; set "
                "tensor_model_parallel_size and data_parallel_size to 1"
            )
        node, devices = await self.workers[0].__ray_call__.remote(_where)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(TltServerActor)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
                name=f"{NAME}_server_{kind}{self.replica_rank}_0{self.name_suffix}",
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.rollout_mode == RolloutMode.HYBRID, devices)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.launch_server.remote()


class TltAdapter(BaseRollout):  # type: ignore[misc]
    """Beside a trainer's rank: sends its weights to the server of its replica."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, *_: Any, **__: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._replica = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._handle: Any = None

    @property
    def _server(self) -> Any:
        """Started after the trainer."""
        if self._handle is None:
            self._handle = ray.get_actor(f"{NAME}_server_{self._replica}_0")
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self._server.sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **more: Any
    ) -> None:
        if wire_format != "named_tensors" or more.get("peft_config"):
            raise ConfigError("rollout.name=tlt takes whole weights; merge adapters, and leave delta transfer off")
        async for chunk in _chunks(weights):
            await self._server.update_weights.remote(chunk, None, False)
        await self._server.update_weights.remote({}, global_steps, True)


async def _chunks(weights: Any) -> AsyncIterator[dict[str, Tensor]]:
    chunk, size = dict[str, Tensor](), 0
    async for name, tensor in _each(weights):
        chunk[name] = tensor.detach().cpu()
        size += tensor.nbytes
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


async def _each(weights: AsyncIterator[tuple[str, Tensor]] | Iterable[tuple[str, Tensor]]) -> AsyncIterator[Any]:
    if isinstance(weights, AsyncIterator):
        async for pair in weights:
            yield pair
        return
    for pair in weights:
        yield pair
        await asyncio.sleep(0)


def _where(_: Any) -> tuple[str, str]:
    """In a worker: its node, and the device it was given ("" without one)."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", [])[:1])


def _kv_gib(utilization: float) -> float:
    """verl's share of the whole device, less what is taken already; 0 on a CPU: tlt's own choice."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(max(1.0, (utilization * total - (total - free)) / 2**30))


RolloutReplicaRegistry.register(NAME, lambda: TltReplica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.TltAdapter"
