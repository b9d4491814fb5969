"""A task from a file: prompts and references from its rows, in the common column layouts.

The prompts of a step are a function of (file, seed, step, count). Each epoch has its own order, and step s begins at
position s · count, so a resumed run needs its step number only. A prompt's id is its row's id. A row with an unexpected
layout is an error that names the row. Knows columns and text; does not know file formats or tokens.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tlt.config import TaskSettings
from tlt.errors import TaskError, shown, shown_names
from tlt.shipped import example_file
from tlt.tasks.math import MARKER, gsm8k_reference
from tlt.tasks.rewards import COMPARING
from tlt.tasks.rows import Row, read_rows
from tlt.tasks.several import judge_with
from tlt.types import Completion, Message, Prompt, SamplingParams

PROMPT_COLUMNS = ("prompt", "question")
REFERENCE_COLUMNS = ("ground_truth", "answer", "label")


class FileTask:
    """The rows of a file as prompts, judged by the configured reward."""

    def __init__(
        self,
        settings: TaskSettings,
        *,
        seed: int = 0,
        max_tokens: int = SamplingParams().max_tokens,
        knob: str = "task.path",
    ) -> None:
        """`max_tokens`: limit of a completion, which some rewards look at; `knob`: the setting that named the file."""
        rows = list(read_rows(example_file(settings.path), knob))
        if not rows:
            raise TaskError(f"{knob} {settings.path}: holds no rows; expected at least one prompt")
        self.prompts = _prompts(rows, settings)
        columns = frozenset.intersection(*(frozenset(p.extra) for p in self.prompts))
        self.judge = judge_with(settings, max_tokens, columns)
        self._seed = seed

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        return [self._at(position) for position in range(step * count, (step + 1) * count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return self.judge.judge([(prompt, completion)])[0].reward

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        return self.prompts[_order(len(self.prompts), self._seed, epoch)[place]]


@lru_cache(maxsize=4)  # called once per prompt, mostly for the same epoch
def _order(rows: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(rows))
    random.Random(f"files/{seed}/{epoch}").shuffle(order)
    return order


# ---- prompts


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns of prompt and reference. Read from the first row; every other row must match."""

    prompt: str
    reference: str | None
    is_verl: bool  # the reference is {style, ground_truth}
    is_gsm8k: bool  # the reference ends in `#### 42`


def _prompts(rows: Sequence[Row], settings: TaskSettings) -> list[Prompt]:
    layout = _layout(rows[0], settings)
    return [_prompt(row, layout, settings) for row in rows]


def _layout(row: Row, settings: TaskSettings) -> _Layout:
    prompt = settings.prompt_column or _one_of(PROMPT_COLUMNS, row, "task.prompt_column")
    if prompt is None:
        raise TaskError(
            f"{row.origin}: its columns are {_names(row)}; expected {' or '.join(PROMPT_COLUMNS)}, "
            "or the one that task.prompt_column names"
        )
    if not settings.reference_column and isinstance(row.columns.get("reward_model"), Mapping):
        return _Layout(prompt, "reward_model", is_verl=True, is_gsm8k=False)
    reference = settings.reference_column or _one_of(REFERENCE_COLUMNS, row, "task.reference_column")
    value = row.columns.get(reference) if reference else None
    is_gsm8k = (prompt, reference) == ("question", "answer") and isinstance(value, str) and MARKER in value
    return _Layout(prompt, reference, is_verl=False, is_gsm8k=is_gsm8k)


def _one_of(names: Sequence[str], row: Row, knob: str) -> str | None:
    found = [name for name in names if name in row.columns]
    if len(found) > 1:
        raise TaskError(f"{row.origin}: has the columns {' and '.join(found)}; say which one with {knob}")
    return found[0] if found else None


def _prompt(row: Row, layout: _Layout, settings: TaskSettings) -> Prompt:
    content = _content(_column(row, layout.prompt), row.origin, settings)
    reference = _reference(row, layout)
    comparing = [name for name in settings.rewards or (settings.reward,) if name in COMPARING]
    if reference is None and comparing:
        raise TaskError(
            f"{row.origin}: has no reference, which the reward {comparing[0]} compares with; its columns are "
            f"{_names(row)}; expected {', '.join(REFERENCE_COLUMNS)} or reward_model: set task.reference_column"
        )
    extra = {name: value for name, value in row.columns.items() if name != layout.prompt}
    return Prompt(row.id, content, reference, extra)


def _content(prompt: Any, origin: str, settings: TaskSettings) -> str | tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        text = settings.template.replace("{prompt}", prompt) if settings.template else prompt
        if not settings.chat and settings.system:
            raise TaskError(f"{origin}: is a plain prompt, and task.system is for chats; set task.chat = true")
        return _with_system((Message("user", text),), settings.system) if settings.chat else text
    return _with_system(messages_of(prompt, origin), settings.system)


def _with_system(chat: tuple[Message, ...], system: str) -> tuple[Message, ...]:
    if not system or chat[0].role == "system":
        return chat
    return (Message("system", system), *chat)


def messages_of(value: Any, origin: str) -> tuple[Message, ...]:
    """Checks a column's value and converts it to chat messages."""
    if not isinstance(value, list) or not value:
        raise TaskError(
            f"{origin}: the prompt is {shown(value)}; expected text, or a list of messages {{role, content}}"
        )
    for item in value:
        if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("role", "content")):
            raise TaskError(f"{origin}: a message is {shown(item)}; expected an object with text `role` and `content`")
    return tuple(Message(item["role"], item["content"]) for item in value)


def _reference(row: Row, layout: _Layout) -> Any:
    if layout.reference is None:
        return None
    value = _column(row, layout.reference)
    if layout.is_verl:
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise TaskError(f"{row.origin}: reward_model is {shown(value)}; expected an object with `ground_truth`")
        return value["ground_truth"]
    if layout.is_gsm8k:
        result = gsm8k_reference(value) if isinstance(value, str) else None
        if result is None:
            raise TaskError(f"{row.origin}: the answer is {shown(value)}; expected GSM8K's form, text with `#### 42`")
        return result
    return value


def _column(row: Row, name: str) -> Any:
    if name not in row.columns:
        raise TaskError(f"{row.origin}: its columns are {_names(row)}; expected {name}")
    return row.columns[name]


def _names(row: Row) -> str:
    return shown_names(row.columns)
