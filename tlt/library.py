"""tlt from Python: a run trained from a recipe's path, and an engine opened from a policy's path.

These do with values what the command line does with flags. Completions come back in the order of their prompts. The
same policy, seed, prompts and settings give the same completions. Knows nothing of how a run or a tick works.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from tlt.config import RunConfig
from tlt.engine import engine as core
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.errors import ConfigError, RequestError, shown
from tlt.model.transformer import Transformer
from tlt.policy import Policy, open_policy
from tlt.recipe import knobs, load_config, nearest_key
from tlt.tasks.files import messages_of
from tlt.tasks.task import Task
from tlt.text import Tokenizer
from tlt.types import Completion, Key, Message, Prompt, SamplingParams
from tlt.watch.events import Run

if TYPE_CHECKING:
    from tlt.cluster.ray_fleet import RayFleet
    from tlt.reinforce import OpenFleet

Asked = str | Prompt | Sequence[int] | Sequence[Message | Mapping[str, str]]  # one prompt

# ---- training


def train(
    recipe: str | Path | RunConfig,
    task: Task | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    eval_task: Task | None = None,
    resume: bool = False,
    resume_from: str = "",
    open_fleet: "OpenFleet | None" = None,
) -> Run:
    """Trains the policy that `recipe` names, a TOML file's path or a configuration, and returns the run.

    `task` asks and judges instead of the configured one, and `eval_task` where held-out prompts are evaluated and
    `eval.paths` names none. `overrides` maps dotted keys to values, `{"run.steps": 3}`.
    `resume` goes on from the run's newest checkpoint that is whole, or begins where there is none yet; `resume_from`
    names another, as in "step_20". `open_fleet` starts the workers; None starts those that the recipe's `cluster`
    section asks for.
    """
    from tlt.reinforce import train as train_with

    config = load_config(recipe, overrides=overrides)
    workers = open_fleet or fleet_of(config)
    return train_with(config, task, eval_task=eval_task, resume=resume, resume_from=resume_from, open_fleet=workers)


def fleet_of(config: RunConfig) -> "OpenFleet":
    """One worker in this process, or several on Ray."""
    if config.cluster.workers == 1 and not config.cluster.address:
        from tlt.fleet import LocalFleet

        return LocalFleet
    return ray_fleet(config)


def ray_fleet(config: RunConfig) -> "type[RayFleet]":
    try:
        from tlt.cluster.ray_fleet import RayFleet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"cluster.workers is {config.cluster.workers} and cluster.address {config.cluster.address!r}, which needs "
            "Ray: pip install 'tlt-rl[ray]', or leave both out for one worker"
        ) from None
    return RayFleet


# ---- the engine


class Engine:
    """A policy that answers prompts: `Engine.open("tiny").generate("1+2=")`. A context manager, which closes it."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.config = config
        self._policy: Policy | None = policy
        self._core: core.EngineCore | None = build_engine(policy, config)
        self._asked = 0  # requests so far under the seed of the configuration

    @classmethod
    def open(cls, policy: str | Path | RunConfig = "tiny", **settings: Any) -> Self:
        """The policy in a Hugging Face directory, the one shipped with tlt ("tiny"), or a configuration's.

        `settings` are sections, `spec={"drafter": "suffix"}`, or knobs of `model`, `engine`, `spec`, `sampling` and the
        seed by their last name, `drafter="suffix"`.
        """
        overrides = dict(overrides_of(settings))
        if not isinstance(policy, RunConfig):
            overrides["model.path"] = policy
        config = load_config(policy if isinstance(policy, RunConfig) else None, overrides=overrides)
        return cls(open_policy(config.model), config)

    def generate(
        self,
        prompts: Asked | Iterable[Asked],
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        seed: int | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """One completion per prompt, in the order of the prompts.

        A prompt is a text, a list of token ids, a list of messages {role, content} or a `Prompt`; `prompts` is one of
        them or several. `chat` asks texts as a user's messages in the policy's chat template. `params` replace the
        configuration's `sampling`, and keywords (`temperature=0.5`) single settings of it. Every call draws anew; with
        a `seed`, the same call gives the same completions.
        """
        engine, tokenizer = self._opened()
        params = params or self.config.sampling
        if sampling:
            params = load_config(RunConfig(sampling=params), overrides={"sampling": sampling}).sampling
        asked = [_tokens(prompt, f"prompt {index}", tokenizer, chat) for index, prompt in enumerate(_each(prompts))]
        first = self._asked if seed is None else 0
        keys = [Key(self.config.run.seed if seed is None else seed, first + index) for index in range(len(asked))]
        requests = zip(keys, asked, strict=True)
        engine.submit(Request(key, tokens, params, prompt_id=str(hash(tokens))) for key, tokens in requests)
        self._asked += len(asked) if seed is None else 0
        done = {completion.key: completion for completion in engine.drain()}
        return [done[key] for key in keys]

    @property
    def model(self) -> Transformer:
        """The policy itself, a torch module. The engine reads these very tensors: train them in place."""
        self._opened()
        assert self._policy is not None
        return self._policy.model

    def weights_changed(self) -> None:
        """Call after an update of `model`: keys and values computed with the old weights are dropped."""
        engine, _ = self._opened()
        engine.load_policy(engine.version + 1)

    def report(self) -> core.EngineReport:
        """What the engine has done so far: ticks, tokens, pages, and how speculation went."""
        return self._opened()[0].report()

    def close(self) -> None:
        """Frees the policy's weights and the key-value cache."""
        on_gpu = self._policy is not None and self._policy.model.embed.is_cuda
        self._policy = self._core = None
        gc.collect()  # engine and drafters refer to each other
        if on_gpu:
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        path, drafter = self.config.model.path, self.config.spec.drafter
        if self._policy is None:
            return f"Engine({path!r}, closed)"
        weights = self._policy.model.embed
        return f"Engine({path!r}, {str(weights.dtype).removeprefix('torch.')} on {weights.device}, drafter {drafter})"

    def _opened(self) -> tuple[core.EngineCore, Tokenizer]:
        if self._core is None or self._policy is None:
            raise RequestError("the engine is closed; open another with tlt.Engine.open")
        return self._core, self._policy.tokenizer


_SECTIONS = ("model", "engine", "spec", "sampling", "draft", "run")  # that an engine reads


def overrides_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings by sections or dotted keys. A knob's last name is enough where only one of these sections has it."""
    short: dict[str, list[str]] = {}
    for key in (knob.key for knob in knobs()):
        if key.partition(".")[0] in ("model", "engine", "spec", "sampling") or key == "run.seed":
            short.setdefault(key.partition(".")[2], []).append(key)
    for name, value in settings.items():
        if name.partition(".")[0] in _SECTIONS:
            yield name, value
        elif len(keys := short.get(name, [])) == 1:
            yield keys[0], value
        else:
            near = nearest_key(name)
            hint = f"did you mean one of {', '.join(keys)}?" if keys else f"did you mean {near}?" if near else ""
            expected = f"expected a section ({', '.join(_SECTIONS)}) or a knob of one"
            raise ConfigError(f"Engine.open: unknown setting {name}; {hint or expected}")


def _each(prompts: Any) -> list[Any]:
    """One prompt, or several."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    items = _items(prompts, "prompts", "text, token ids, messages {role, content}, or a list of these")
    return [items] if _are_tokens(items) or _are_messages(items) else items


def _tokens(prompt: Any, name: str, tokenizer: Tokenizer, chat: bool) -> tuple[int, ...]:
    if isinstance(prompt, Prompt):
        prompt = prompt.content
    if isinstance(prompt, str):
        return tuple(tokenizer.encode_prompt((Message("user", prompt),) if chat else prompt))
    expected = "text, token ids or messages {role, content}"
    items = _items(prompt, name, expected)
    if _are_tokens(items):
        return tuple(map(int, items))
    if _are_messages(items):
        records = [{"role": i.role, "content": i.content} if isinstance(i, Message) else i for i in items]
        return tuple(tokenizer.encode_prompt(messages_of(records, name)))
    raise RequestError(f"{name} is {shown(prompt)}; expected {expected}")


def _items(value: Any, name: str, expected: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes):
        raise RequestError(f"{name} is {shown(value)}; expected {expected}")
    return list(value)


def _are_tokens(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, Integral) for item in items)


def _are_messages(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, Message | Mapping) for item in items)
