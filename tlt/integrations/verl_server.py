"""One rollout server of verl: tlt's HTTP server, and the calls that verl makes to it as an object.

Always holds: a completion is a function of the seed, the version of the weights, its prompt and how many equal prompts
came before it under this version: verl's request ids are random, and do not count. Imports neither verl nor ray.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.model.weights import copy_some
from tlt.serve.app import build_app
from tlt.serve.async_engine import AsyncEngine
from tlt.serve.messages import ServeRequest
from tlt.serve.options import ServeOptions
from tlt.serve.served_policy import ServedPolicy
from tlt.serve.server import listen
from tlt.types import Key, SamplingParams

_REFUSED = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "kv_transfer_params")


class VerlServer:
    def __init__(self, config: RunConfig, prompt_length: int, response_length: int) -> None:
        self._config = config
        self._lengths = prompt_length, response_length
        self._version = 0
        self._alike: Counter[tuple[int, ...]] = Counter()  # prompts of this version

    async def start(self, host: str) -> str:
        """Opens the policy and listens; HOST:PORT."""
        import uvicorn

        options = ServeOptions(host=host, port=0, logprobs="processed")
        listening = listen(options)
        self._served = await asyncio.to_thread(ServedPolicy, self._config)
        app = build_app(self._served, options, self._ended)
        self._http = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._serving = asyncio.create_task(self._http.serve([listening]))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
        self._engine: AsyncEngine = app.state.server.engine
        return "{}:{}".format(*listening.getsockname()[:2])

    def _ended(self, why: str) -> None:
        self._http.should_exit = True

    async def stop(self) -> None:
        self._http.should_exit = True
        await self._serving

    async def generate(self, prompt: Sequence[int], params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """The fields of verl's TokenOutput."""
        for name in _REFUSED:
            if more.get(name):
                raise ConfigError(f"{name} is not supported: the policy reads text alone")
        tokens = tuple(prompt)
        request = ServeRequest(0, tokens, self._sampling(len(tokens), params), self._key(tokens))
        async with self._engine.generation([request]) as generation:
            (part,) = [part async for part in generation]
        completion = part.completion
        assert completion is not None
        return {
            "token_ids": list(completion.tokens),
            "log_probs": list(completion.logprobs) if params.get("logprobs") else None,
            "stop_reason": "aborted" if completion.finish_reason == "abort" else "completed",
            "num_preempted": completion.timing.preemptions,
            "extra_fields": {"global_steps": completion.policy_version},
        }

    def _sampling(self, read: int, params: Mapping[str, Any]) -> SamplingParams:
        if params.get("repetition_penalty") not in (None, 1, 1.0):
            raise ConfigError("rollout.repetition_penalty is not supported; set it to 1.0")
        usual = min(self._lengths[1], sum(self._lengths) - read)
        wanted = params.get("max_tokens") or params.get("max_new_tokens") or usual
        return SamplingParams(
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=max(0, params.get("top_k", 0)),
            min_p=params.get("min_p", 0.0),
            max_tokens=max(1, min(wanted, self._served.context - read)),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
            ignore_eos=bool(params.get("ignore_eos", False)),
        )

    def _key(self, prompt: tuple[int, ...]) -> Key:
        place = self._alike[prompt]
        self._alike[prompt] += 1
        named = repr((self._version, place, prompt)).encode()
        return Key(self._config.run.seed, int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big"))

    # ---- weights and memory

    async def update(self, tensors: Mapping[str, Tensor], version: int | None, last: bool) -> None:
        """Some of the policy's weights; with the last of them their version."""
        if not last:
            await self._engine.when_idle(partial(copy_some, self._served.model, tensors))
            return
        change = partial(self._served.update_weights, partial(copy_some, tensors=tensors), version)
        self._version = await self._engine.update(change)
        self._alike.clear()

    async def set_version(self, version: int) -> None:
        if version != self._version:
            await self.update({}, version, last=True)

    async def sleep(self) -> None:
        await self._engine.when_idle(self._served.sleep)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Weights alone are copied into host memory during sleep; the engine is rebuilt with its KV cache."""
        if tags is None or "kv_cache" in tags:
            await self._engine.call(self._served.wake)

    async def clear_kv_cache(self) -> None:
        await self._engine.call(self._served.drop_prefixes)

    async def abort_all(self) -> int:
        """Aborts all requests and pauses. Returns their number."""
        count = self._engine.in_flight
        await self._engine.pause("abort")
        return count

    async def resume(self) -> None:
        await self._engine.resume()
