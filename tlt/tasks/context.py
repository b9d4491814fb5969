"""Prompts that are too long for the policy's context, or for `task.prompt_tokens`: refused, left out or cut, before any
model work."""

from collections.abc import Sequence
from dataclasses import dataclass

from tlt.config import RunConfig, TaskSettings
from tlt.errors import ConfigError, TaskError
from tlt.tasks.files import FileTask
from tlt.tasks.task import Task
from tlt.text import Tokenizer
from tlt.types import Prompt

_PER_MESSAGE = 32  # upper bound of the chat template's tokens per message


@dataclass(frozen=True, slots=True)
class FittingPrompts:
    """Prompts as they are asked."""

    prompts: tuple[Prompt, ...]
    tokenizer: Tokenizer  # which cuts prompts, if they are to be cut
    long: int  # so many were too long
    limit: int  # tokens of a prompt


def fit_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, settings: TaskSettings, context: int, max_tokens: int
) -> FittingPrompts:
    """What `task.long_prompts` makes of the prompts. TaskError if it refuses one, or leaves none."""
    room = context - max_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_tokens is {max_tokens}, and the policy's context {context}: no prompt fits before such an "
            "completion; lower sampling.max_tokens"
        )
    limit = min(room, settings.prompt_tokens or room)
    sizes = _long_prompts(prompts, tokenizer, limit)
    if not sizes or settings.long_prompts == "truncate":
        cut = tokenizer.cutting(limit) if settings.long_prompts == "truncate" else tokenizer
        return FittingPrompts(tuple(prompts), cut, len(sizes), limit)
    if settings.long_prompts == "refuse":
        raise _too_long(prompts, sizes, limit, context, max_tokens)
    kept = tuple(prompt for prompt in prompts if prompt.id not in sizes)
    if not kept:
        raise TaskError(f"all {len(prompts)} prompts have more than {limit} tokens, so that none is left to be asked")
    return FittingPrompts(kept, tokenizer, len(sizes), limit)


def fit_task(task: Task, tokenizer: Tokenizer, config: RunConfig, context: int) -> FittingPrompts:
    """Of a file's task, whose prompts that are left out are asked no more. Other tasks' are known when they are asked:
    they can be cut."""
    known = task.prompts if isinstance(task, FileTask) else []
    if config.task.long_prompts == "filter" and not known:
        raise ConfigError(
            'task.long_prompts is "filter", and the prompts of this task are not known before they are asked; expected '
            '"truncate" or "refuse"'
        )
    fitted = fit_prompts(known, tokenizer, config.task, context, config.sampling.max_tokens)
    if isinstance(task, FileTask):
        task.prompts = list(fitted.prompts)
    return fitted


def refuse_long_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int, max_tokens: int) -> None:
    """Raises TaskError if a prompt plus `max_tokens` exceeds `context`."""
    fit_prompts(prompts, tokenizer, TaskSettings(), context, max_tokens)


def _long_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, limit: int) -> dict[str, int]:
    """Id → tokens of the prompts with more than `limit` tokens.

    A prompt has at most one token per byte plus the chat template's tokens. Only prompts above that bound are encoded.
    """
    template = max(_PER_MESSAGE, len(tokenizer.encode_prompt(prompts[0].content))) if prompts else 0
    suspects = [prompt for prompt in prompts if _most_tokens(prompt, template) > limit]
    sizes = {prompt.id: len(tokenizer.encode_prompt(prompt.content)) for prompt in suspects}
    return {name: size for name, size in sizes.items() if size > limit}


def _too_long(prompts: Sequence[Prompt], sizes: dict[str, int], limit: int, context: int, max_tokens: int) -> TaskError:
    worst = max(sizes, key=lambda name: sizes[name])
    if limit < context - max_tokens:
        why = f"task.prompt_tokens allows {limit}"
    else:
        why = f"with sampling.max_tokens {max_tokens} that is more than the policy's context of {context}"
    return TaskError(
        f"the prompt {worst} has {sizes[worst]} tokens; {why}; {len(sizes)} of {len(prompts)} prompts are too long; "
        'leave them out with task.long_prompts = "filter", cut them with "truncate", or lower sampling.max_tokens'
    )


def _most_tokens(prompt: Prompt, template: int) -> int:
    messages = [prompt.content] if isinstance(prompt.content, str) else [one.content for one in prompt.content]
    return template + sum(len(message.encode()) + _PER_MESSAGE for message in messages)
