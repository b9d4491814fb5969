"""Whether prompts leave room for an answer in a policy's context, known before anything is computed."""

from collections.abc import Sequence

from tlt.errors import TaskError
from tlt.text import Tokenizer
from tlt.types import Prompt

_PER_MESSAGE = 32  # tokens that a chat template puts around a message, at most


def refuse_long_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int, max_tokens: int) -> None:
    """A prompt that leaves no room for an answer would end the run whenever its turn came: better at once.

    A token is at least a byte of the prompt's or belongs to the chat template, so few prompts need to be encoded.
    """
    template = max(_PER_MESSAGE, len(tokenizer.encode_prompt(prompts[0].content)))
    long = [prompt for prompt in prompts if _most_tokens(prompt, template) + max_tokens > context]
    sizes = {prompt.id: len(tokenizer.encode_prompt(prompt.content)) for prompt in long}
    worst = max(sizes, key=lambda name: sizes[name], default="")
    if worst and sizes[worst] + max_tokens > context:
        count = sum(size + max_tokens > context for size in sizes.values())
        raise TaskError(
            f"the prompt {worst} has {sizes[worst]} tokens; with sampling.max_tokens {max_tokens} that is more than "
            f"the policy's context of {context}, and so it is for {count} of {len(prompts)} prompts; shorten or remove "
            "them, or lower sampling.max_tokens"
        )


def _most_tokens(prompt: Prompt, template: int) -> int:
    messages = [prompt.content] if isinstance(prompt.content, str) else [one.content for one in prompt.content]
    return template + sum(len(message.encode()) + _PER_MESSAGE for message in messages)
