"""Checks that every prompt leaves room for a completion in the policy's context, before any model work."""

from collections.abc import Sequence

from tlt.errors import TaskError
from tlt.text import Tokenizer
from tlt.types import Prompt

_PER_MESSAGE = 32  # upper bound of the chat template's tokens per message


def refuse_long_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int, max_tokens: int) -> None:
    """Raises TaskError if a prompt plus `max_tokens` exceeds `context`.

    A prompt has at most one token per byte plus the chat template's tokens. Only prompts above that bound are encoded.
    """
    template = max(_PER_MESSAGE, len(tokenizer.encode_prompt(prompts[0].content)))
    long = [prompt for prompt in prompts if _most_tokens(prompt, template) + max_tokens > context]
    sizes = {prompt.id: len(tokenizer.encode_prompt(prompt.content)) for prompt in long}
    worst = max(sizes, key=lambda name: sizes[name], default="")
    if worst and sizes[worst] + max_tokens > context:
        count = sum(size + max_tokens > context for size in sizes.values())
        raise TaskError(
            f"the prompt {worst} has {sizes[worst]} tokens; with sampling.max_tokens {max_tokens} that is more than "
            f"the policy's context of {context}; {count} of {len(prompts)} prompts are too long; shorten or remove "
            "them, or lower sampling.max_tokens"
        )


def _most_tokens(prompt: Prompt, template: int) -> int:
    messages = [prompt.content] if isinstance(prompt.content, str) else [one.content for one in prompt.content]
    return template + sum(len(message.encode()) + _PER_MESSAGE for message in messages)
