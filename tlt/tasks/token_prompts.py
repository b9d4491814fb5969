"""Prompts as tokens: from a file of prompts, or built-in questions that need no download.

The built-in questions are always the same: word problems for a policy with a chat template, the toy task for others.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from tlt.errors import TaskError
from tlt.tasks.rows import Row, read_rows
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.types import Message

COLUMNS = ("question", "prompt")
_STORIES = (
    "A baker makes {a} trays of {b} rolls each morning and sells {c} of them before noon. How many rolls are left?",
    "Maya reads {a} pages on every weekday and {b} on each day of the weekend. How many pages are that in {c} weeks?",
    "A train has {a} coaches with {b} seats each. If {c} seats are taken, how many are free?",
    "Tom saves {a} dollars a week. He has {b} dollars already and wants a bicycle that costs {c}00 dollars. "
    "After how many weeks can he buy it?",
    "A garden is {a} metres long and {b} metres wide. A fence costs {c} dollars per metre. What does the fence cost?",
    "There are {a} classes of {b} pupils in a school, and {c} pupils are ill today. How many pupils are at school?",
    "A box holds {a} red, {b} blue and {c} green balls. What is the probability that a ball drawn blindly is red?",
    "Ana runs {a} kilometres in {b} minutes. How long does she need for {c} kilometres at the same speed?",
)


def token_prompts(tokenizer: Tokenizer, count: int, file: Path | None, raw: bool) -> list[tuple[int, ...]]:
    """`count` prompts as tokens; a shorter file is repeated from the start."""
    chat = tokenizer.has_chat_template and not raw
    texts = _read(file) if file else _stories(count) if chat else _toy(count)
    contents = [(Message("user", text),) if chat else text for text in texts[:count]]
    encoded = [tuple(tokenizer.encode_prompt(content)) for content in contents]
    return [encoded[index % len(encoded)] for index in range(count)]


def _read(file: Path) -> list[str]:
    texts = list(map(_text_of, read_rows(file)))
    if not texts:
        raise TaskError(f"{file}: holds no prompts; expected rows with a question or prompt column")
    return texts


def _text_of(row: Row) -> str:
    found = [row.columns[name] for name in COLUMNS if name in row.columns]
    if not found or not isinstance(found[0], str):
        raise TaskError(f"{row.origin}: no text under {' or '.join(COLUMNS)}; expected one of these columns")
    return found[0]


def _stories(count: int) -> list[str]:
    texts = []
    for index in range(count):
        draw = random.Random(f"story/{index}")
        a, b, c = (draw.randint(3, 40) for _ in range(3))
        texts.append(_STORIES[index % len(_STORIES)].format(a=a, b=b, c=c))
    return texts


def _toy(count: int) -> Sequence[str]:
    return [str(prompt.content) for prompt in ToyTask(seed=0).sample(0, count)]
