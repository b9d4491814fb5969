"""verl's plug-in against the real verl, and its server alone: what can be run without CUDA.

The parts that need verl are left out where it is not installed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from tests.serving import config_of  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402
from tlt.integrations.verl_server import VerlServer  # noqa: E402
from tlt.model.weights import hf_tensors, load_policy  # noqa: E402
from tlt.policy import TINY_POLICY  # noqa: E402

ROOT = Path(__file__).parents[1]
PROMPT = [1, 5, 14, 6, 16, 7, 19]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 20}


def changed_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = hf_tensors(load_policy(TINY_POLICY))
    return {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


def with_server(work: Callable[[VerlServer, str], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        server = VerlServer(config_of(), prompt_length=32, response_length=24)
        address = await server.start("127.0.0.1")
        try:
            await work(server, address)
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_group_is_drawn_by_version_prompt_and_place_alone() -> None:
    async def work(server: VerlServer, address: str) -> None:
        group = [await server.generate(PROMPT, {**PARAMS, "temperature": 2.0}) for _ in range(3)]
        assert len({tuple(found["token_ids"]) for found in group}) == 3
        assert all(len(found["log_probs"]) == len(found["token_ids"]) for found in group)
        await server.update({}, 1, last=True)
        later = [await server.generate(PROMPT, {**PARAMS, "temperature": 2.0}) for _ in range(3)]
        assert later[0]["token_ids"] != group[0]["token_ids"]
        await server.set_version(0)
        again = await asyncio.gather(*(server.generate(PROMPT, {**PARAMS, "temperature": 2.0}) for _ in range(3)))
        assert sorted(found["token_ids"] for found in again) == sorted(found["token_ids"] for found in group)
        assert {found["extra_fields"]["global_steps"] for found in later} == {1}

    with_server(work)


def test_weights_sleep_and_aborts() -> None:
    async def work(server: VerlServer, address: str) -> None:
        greedy = {**PARAMS, "temperature": 0.0}
        plain = (await server.generate(PROMPT, greedy))["token_ids"]
        await server.sleep()
        tensors = changed_weights()
        for name, tensor in tensors.items():
            await server.update({name: tensor}, None, last=False)
        await server.wake_up(["weights"])
        await server.update({}, 5, last=True)
        await server.wake_up(["kv_cache"])
        found = await server.generate(PROMPT, greedy)
        assert found["token_ids"] != plain
        assert found["extra_fields"]["global_steps"] == 5
        long = asyncio.create_task(server.generate(PROMPT, {**PARAMS, "max_tokens": 1500, "ignore_eos": True}))
        await asyncio.sleep(0)
        await server.clear_kv_cache()
        assert await server.abort_all() == 1
        assert (await long)["stop_reason"] == "aborted"
        await server.resume()
        assert (await server.generate(PROMPT, greedy))["stop_reason"] == "completed"
        for wrong in ({"repetition_penalty": 1.1}, {}):
            with pytest.raises(ConfigError):
                await server.generate(PROMPT, {**PARAMS, **wrong}, image_data=None if wrong else [b""])
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{address}/health")).status_code == 200

    with_server(work)


# ---- with verl


def test_verl_finds_the_plug_in() -> None:
    pytest.importorskip("verl")
    code = (
        "import verl\n"
        "from verl.workers.rollout.replica import get_rollout_replica_class\n"
        "from verl.workers.rollout.base import get_rollout_class\n"
        "from verl.workers.config import RolloutConfig\n"
        "RolloutConfig(name='tlt', tensor_model_parallel_size=1)\n"
        "print(get_rollout_replica_class('tlt').__name__, get_rollout_class('tlt').__name__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "tlt.integrations.verl"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["TltReplica", "TltAdapter"], found.stderr


@pytest.fixture
def local_ray() -> Iterator[Any]:
    pytest.importorskip("verl")
    ray = pytest.importorskip("ray")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield ray
    ray.shutdown()


def test_a_replica_serves_what_its_adapter_sends(local_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch_servers, generate, a weight update through the adapter, sleep and wake, by verl's own classes."""
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

    import tlt.integrations.verl

    class Trainer:
        """A rank of one."""

    config = RolloutConfig(
        name="tlt",
        tensor_model_parallel_size=1,
        prompt_length=32,
        response_length=24,
        max_num_seqs=16,
        engine_kwargs={"tlt": {"engine.kv_gib": 0.05}},
    )
    model = HFModelConfig(path=str(TINY_POLICY), load_tokenizer=False)
    worker = local_ray.remote(Trainer).options(num_cpus=0).remote()
    monkeypatch.setenv("RANK", "0")

    async def run() -> None:
        replica = get_rollout_replica_class("tlt")(0, config, model, gpus_per_node=1)
        replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [worker]
        await replica.launch_servers()
        call = {"request_id": "a", "prompt_ids": PROMPT, "sampling_params": {**PARAMS, "temperature": 0.0}}
        before = await replica.server_handle.generate.remote(**call)
        with tlt.Engine.open("tiny") as engine:
            assert tuple(before.token_ids) == engine.generate([PROMPT], temperature=0.0, max_tokens=20)[0].tokens
        adapter = get_rollout_class("tlt")(config, model, device_mesh=None)
        await adapter.release()
        await adapter.resume(["weights"])
        await adapter.update_weights((pair for pair in changed_weights().items()), global_steps=3)
        await adapter.resume(["kv_cache"])
        after = await replica.server_handle.generate.remote(**call)
        assert after.token_ids != before.token_ids
        assert after.extra_fields["global_steps"] == 3
        await replica.abort_all_requests()
        await replica.resume_generation()
        await replica.clear_kv_cache()
        assert (await replica.server_handle.generate.remote(**call)).token_ids == after.token_ids
        with pytest.raises(ConfigError, match="whole weights"):
            await adapter.update_weights(iter(()), wire_format="delta_flush")

    asyncio.run(run())
