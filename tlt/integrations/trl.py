"""Rollouts for TRL's `GRPOTrainer`: its completions are written by a tlt engine, in the trainer's process.

    trainer = GRPOTrainer(..., rollout_func=rollout_func())

What always holds: completions are written with the weights that the trainer has at that step; they depend on its seed,
the step and their place in it alone. On one device and in one dtype trainer and engine hold the same tensors; else,
and with adapters, weights are copied when the step has changed. Imports neither trl nor peft.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlt.config import RunConfig
from tlt.engine.memory import gib_of_what_is_free
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.library import overrides_of
from tlt.model.config import ModelConfig
from tlt.model.device import free_bytes
from tlt.model.transformer import Transformer
from tlt.model.weights import load_tensors, places
from tlt.multi_turn import MultiTurn, Replies
from tlt.policy import Policy
from tlt.recipe import load_config
from tlt.serve.served_policy import ServedPolicy
from tlt.text import Tokenizer
from tlt.types import Completion, Key, Prompt, SamplingParams

Reply = Callable[[Any, str], Sequence[int] | str | None]
"""(prompt, text of the last turn) → the reply, as tokens or text; None: the completion is complete."""

_STEP_BITS, _PROCESS_BITS = 40, 28  # of a request's number: step, process, place in the step


def rollout_func(
    config: RunConfig | None = None, *, reply: Reply | None = None, draft_share: float = 0.1, **knobs: Any
) -> "TrlRollouts":
    """What `GRPOTrainer(rollout_func=…)` takes.

    `config`, or `knobs` as `tlt.Engine.open` has them (`rows=128`, `spec={"drafter": "both", "path": "new"}`), set up
    the engine; sampling is the trainer's. The suffix drafter is on by default. A drafter that learns does so after a
    rollout, for at most `draft_share` of its time. `reply` makes completions of several turns.
    """
    usual = {"spec.drafter": "suffix"} if config is None else {}
    chosen = load_config(config, overrides={**usual, **dict(overrides_of(knobs))})
    return TrlRollouts(chosen, reply, draft_share)


class TrlRollouts:
    """The `rollout_func` of a trainer: called with one prompt per completion."""

    def __init__(self, config: RunConfig, reply: Reply | None, draft_share: float) -> None:
        self._config, self._reply, self._draft_share = config, reply, draft_share
        self._served: ServedPolicy | None = None
        self._shares = False  # trainer and engine hold the same tensors
        self._step = -1
        self._requests = 0  # so far in this step
        # prompts with completions of this step, whose next turn may follow
        self._known: list[tuple[tuple[int, ...], Key]] = []

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        served = self._ready(trainer)
        tokens = trainer._tokenize_prompts(prompts)[0]
        params = _sampling(trainer)
        requests = [_request(served, self._next_key(trainer), tuple(ids), params) for ids in tokens]
        replies = self._replies(served, requests, prompts)
        started = time.perf_counter()
        completions = _completed(served, requests, replies)
        served.learn(until=lambda: True, seconds=self._draft_share * (time.perf_counter() - started))
        self._known += [((*found.prompt_tokens, *found.tokens), found.key) for found in completions]
        columns: dict[str, list[Any]] = {
            "prompt_ids": [list(found.prompt_tokens) for found in completions],
            "completion_ids": [list(found.tokens) for found in completions],
            "logprobs": [list(found.logprobs) for found in completions],
        }
        return {**columns, "env_mask": [list(found.loss_mask) for found in completions]} if replies else columns

    def report(self) -> Any:
        """What the engine has done so far; None before the first rollout."""
        return self._served.report().engine if self._served else None

    # ---- turns

    def _replies(self, served: ServedPolicy, requests: Sequence[Request], prompts: Sequence[Any]) -> Replies | None:
        reply, tokenizer = self._reply, served.tokenizer
        if reply is None:
            return None

        def reply_to(prompt: Prompt, completion: Completion) -> str | Sequence[int] | None:
            last_turn = completion.tokens[completion.loss_mask.rfind(0) + 1 :]
            return reply(prompt.reference, tokenizer.decode(last_turn))

        pairs = zip(requests, prompts, strict=True)
        named = {request.key: Prompt(str(place), "", prompt) for place, (request, prompt) in enumerate(pairs)}
        return Replies(reply_to, tokenizer, named)

    def turn(
        self, trainer: Any, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Replaces the trainer's own generation of the turns after a tool call."""
        served, params = self._ready(trainer), _sampling(trainer)
        prompts = [tuple(ids) for ids in prompt_ids]
        requests = [_request(served, self._key_of(trainer, prompt), prompt, params) for prompt in prompts]
        completions = _completed(served, requests, None)
        self._known += [((*found.prompt_tokens, *found.tokens), found.key) for found in completions]
        return [list(found.tokens) for found in completions], [list(found.logprobs) for found in completions]

    def _key_of(self, trainer: Any, prompt: tuple[int, ...]) -> Key:
        """The key of the completion that this prompt continues. Each completion is continued once."""
        for place, (text, key) in enumerate(self._known):
            if prompt[: len(text)] == text:
                del self._known[place]
                return key
        return self._next_key(trainer)

    def _next_key(self, trainer: Any) -> Key:
        number = self._step << _STEP_BITS | trainer.accelerator.process_index << _PROCESS_BITS | self._requests
        self._requests += 1
        return Key(trainer.args.seed, number)

    # ---- weights

    def _ready(self, trainer: Any) -> ServedPolicy:
        """The engine, with the trainer's weights."""
        step = int(trainer.state.global_step)
        if self._served is None:
            self._served = self._open(trainer)
        elif step != self._step:
            self._served.update_weights(lambda model: self._copy(trainer, model), step)
        if step != self._step:
            self._step, self._requests, self._known = step, 0, []
        return self._served

    def _open(self, trainer: Any) -> ServedPolicy:
        _check(trainer)
        source = _unwrapped(trainer)
        first = next(source.parameters())
        dtype = first.dtype if self._config.model.dtype == "auto" else getattr(torch, self._config.model.dtype)
        model = Transformer(ModelConfig.from_hf(source.config.to_dict()), dtype=dtype, device=first.device)
        model.requires_grad_(False)
        load_tensors(model, merged_tensors(source), origin="the trainer's model")
        self._shares = share_tensors(source, model)
        policy = Policy(model, _tokenizer(trainer, model), Path(str(source.config._name_or_path)))
        if trainer.tools:
            trainer._generate_single_turn = lambda *args, **kwargs: self.turn(trainer, *args, **kwargs)
        return ServedPolicy(_with_room(self._config, model, trainer), policy)

    def _copy(self, trainer: Any, model: Transformer) -> None:
        if not self._shares:
            load_tensors(model, merged_tensors(_unwrapped(trainer)), origin="the trainer's model")


def _request(served: ServedPolicy, key: Key, prompt: tuple[int, ...], params: SamplingParams) -> Request:
    fitting = replace(params, max_tokens=min(params.max_tokens, served.context - len(prompt)))
    return Request(key, prompt, fitting, str(hash(prompt)), keep=True)


def _completed(served: ServedPolicy, requests: Sequence[Request], replies: Replies | None) -> list[Completion]:
    """The completions of the requests, in their order."""
    done: dict[Key, Completion] = {}
    with MultiTurn(requests, replies) as turns:
        served.submit(requests)
        while served.busy or turns.waiting:
            for turn in served.tick() if served.busy else ():
                turns.hand_in(turn)
            for failure in served.take_failures().values():
                raise ConfigError(failure)
            complete, further = turns.take(0.0 if served.busy else None)
            served.submit(further)
            done.update((found.key, found) for found in complete)
    return [done[request.key] for request in requests]


# ---- the trainer's side


def _check(trainer: Any) -> None:
    """Refuses what would make the weights or the distribution others than the trainer believes."""
    accelerator = trainer.accelerator
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError("tlt.integrations.trl needs whole weights in each process; turn FSDP and DeepSpeed off")
    if trainer.args.repetition_penalty not in (None, 1.0) or trainer.args.generation_kwargs:
        raise ConfigError("repetition_penalty and generation_kwargs are not supported; leave them out")
    if accelerator.process_index >= 1 << (_STEP_BITS - _PROCESS_BITS):
        raise ConfigError(f"process {accelerator.process_index} is beyond the keys' room")


def _sampling(trainer: Any) -> SamplingParams:
    args = trainer.args
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=max(0, args.top_k or 0),
        min_p=args.min_p or 0.0,
        max_tokens=args.max_completion_length,
    )


def _tokenizer(trainer: Any, model: Transformer) -> Tokenizer:
    inner = trainer._tokenizer
    declared = getattr(_unwrapped(trainer).generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    return Tokenizer(inner, frozenset({inner.eos_token_id, *ids}), model.config.vocab)


def _with_room(config: RunConfig, model: Transformer, trainer: Any) -> RunConfig:
    """On a GPU the KV cache takes a share of the free memory, unless `engine.kv_gib` sets its size."""
    if config.engine.kv_gib or not model.embed.is_cuda:
        return config
    free = free_bytes(model.embed.device)
    return replace(config, engine=replace(config.engine, kv_gib=gib_of_what_is_free(free)))


def _unwrapped(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a transformers model under their usual names, with peft's adapters merged."""
    adapted = {_plain(name) + ".weight": module for name, module in model.named_modules() if _is_adapted(module)}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        name = _plain(name)
        module: Any = adapted.get(name)
        if module is not None:
            tensor = tensor + sum(module.get_delta_weight(each) for each in module.active_adapters)
        yield name, tensor


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")


def _plain(name: str) -> str:
    name = name.removeprefix("module.").removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def share_tensors(source: nn.Module, model: Transformer) -> bool:
    """Makes the parameters of a transformers model views of ours, which hold the same values, if device and dtype are
    the same and there are no adapters. An optimizer that changes parameters in place then changes both."""
    theirs, ours = dict(source.named_parameters()), dict(model.named_parameters())
    wanted: Mapping[str, Any] = places(model.config)
    fits = all(
        name in wanted and tensor.dtype == model.embed.dtype and tensor.device == model.embed.device
        for name, tensor in theirs.items()
    )
    if not fits or any(_is_adapted(module) for module in source.modules()):
        return False
    for name, tensor in theirs.items():
        tensor.data = wanted[name].of(ours).detach()
    return True
