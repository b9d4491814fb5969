"""Supervised training: a policy learns to write given answers to given prompts.

The loss is the mean cross-entropy over the answers' tokens; prompt tokens do not count. Examples in a packed row do not
attend to each other, so a step equals the same examples one by one. Logits of a whole row never exist at once.
Half-precision weights are updated through float32 masters. Does not know runs, events or configured devices.
"""
# T tokens of a row, N answer tokens, D hidden, V vocabulary

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.config import WarmupSettings
from tlt.errors import TaskError, TltError, shown, shown_names
from tlt.model.attention import PackedLayout
from tlt.model.device import Reading, upload
from tlt.model.transformer import Transformer
from tlt.tasks.files import messages_of
from tlt.tasks.rows import Row, read_rows
from tlt.text import Tokenizer
from tlt.train.logprobs import cross_entropy
from tlt.train.optimizer import MasterAdamW, Schedule, learning_rate
from tlt.train.packing import Example, PackedRow
from tlt.types import Message

_PROMPT_COLUMNS = ("prompt", "question")
_ANSWER_COLUMNS = ("answer", "completion", "response")


# ---- training


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float  # nats per answer token
    tokens: int  # processed, prompts included
    answer_tokens: int  # learned
    grad_norm: float  # before clipping
    learning_rate: float


class SupervisedTrainer:
    """Takes optimizer steps on packed rows. An update has finite loss and gradient norm, or it is not made.

    `steps` prepares and uploads the next batch while the device computes. Reads the device's results once per step.
    """

    def __init__(self, model: Transformer, settings: WarmupSettings) -> None:
        self._model = model
        self._settings = settings
        self._schedule = Schedule(settings.learning_rate, settings.warmup_steps, decay_steps=settings.steps)
        self._optimizer = MasterAdamW(model, weight_decay=settings.weight_decay)
        self.steps_taken = 0

    def step(self, batch: Sequence[PackedRow]) -> StepResult:
        """One update from all rows of the batch together."""
        return self._launch(self._prepare(batch))()

    def steps(self, batches: Iterable[Sequence[PackedRow]]) -> Iterator[StepResult]:
        """One update per batch. Prepares the next batch before it yields a result."""
        stream = map(self._prepare, batches)
        prepared = next(stream, None)
        while prepared is not None:
            result = self._launch(prepared)
            prepared = next(stream, None)
            yield result()

    def _prepare(self, batch: Sequence[PackedRow]) -> "_DeviceBatch":
        answer_tokens = sum(int(np.count_nonzero(row.mask_T.numpy())) for row in batch)
        if answer_tokens == 0:
            raise TltError("a batch holds no answer token to learn from; give every example an answer")
        device = self._model.embed.device
        tokens = sum(len(row.tokens_T) for row in batch)
        return _DeviceBatch([_DeviceRow.of(row, device) for row in batch], tokens, answer_tokens)

    def _launch(self, batch: "_DeviceBatch") -> Callable[[], StepResult]:
        """Starts a step. On a GPU the host is free until it asks for the result."""
        loss = torch.zeros((), device=self._model.embed.device)
        for row in batch.rows:
            row_loss = row.loss_sum(self._model) / batch.answer_tokens
            row_loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.gather()
            loss += row_loss.detach()
        norm = self._optimizer.norm()
        numbers = torch.stack((loss, norm.to(loss.dtype)))
        reading = Reading(numbers)  # before the weights change, so that reading does not wait for the update
        rate = learning_rate(self.steps_taken, self._schedule)
        self._optimizer.step(rate, self._settings.clip, norm, unless=(~numbers.isfinite()).any().float())
        self.steps_taken += 1
        return partial(self._read, reading, batch, rate)

    def _read(self, reading: Reading, batch: "_DeviceBatch", rate: float) -> StepResult:
        loss, grad_norm = reading.values()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.steps_taken -= 1  # the device skipped the update
            raise TltError(
                f"step {self.steps_taken + 1}: loss {loss}, gradient norm {grad_norm}; the weights were not touched, "
                "but learn no more: start again with a lower learning rate, and check the data"
            )
        return StepResult(loss, batch.tokens, batch.answer_tokens, grad_norm, rate)


def answer_loss_sum(model: Transformer, row: PackedRow) -> Tensor:
    """Cross-entropy summed over the row's answer tokens, each predicted from the token before it."""
    return _DeviceRow.of(row, model.embed.device).loss_sum(model)


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    """A packed row on the device."""

    tokens_T: Tensor
    layout: PackedLayout
    before_N: Tensor  # where the token before each answer token stands
    answer_N: Tensor

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> "_DeviceRow":
        # on the host, as reading a size from the GPU would wait for it; numpy, as torch would wake all its threads
        answers_N = np.flatnonzero(row.mask_T.numpy())
        return cls(
            tokens_T=upload(row.tokens_T, device),
            layout=PackedLayout.from_lengths(row.lengths, device),
            before_N=upload(torch.from_numpy(answers_N - 1), device),
            answer_N=upload(torch.from_numpy(row.tokens_T.numpy()[answers_N]), device),
        )

    def loss_sum(self, model: Transformer) -> Tensor:
        hidden_TD = model(self.tokens_T, self.layout).hidden_TD
        return cross_entropy(hidden_TD.index_select(0, self.before_N), model.head_weight, self.answer_N)


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    """A batch on the device."""

    rows: list[_DeviceRow]
    tokens: int
    answer_tokens: int


# ---- data


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the answer to learn."""

    content: str | tuple[Message, ...]
    answer: str
    origin: str  # file:line, for messages


def read_pairs(path: Path | str) -> list[Pair]:
    """The pairs of a file, in any format that prompts have.

    Columns: `messages` (a chat whose last turn is the answer), or `prompt` or `question` with `answer`, `completion` or
    `response`; a prompt may be a list of messages too. Anything else is an error that names the row.
    """
    pairs = list(map(_pair, read_rows(Path(path))))
    if not pairs:
        raise TaskError(f"{path}: holds no rows; expected a prompt and an answer per row")
    return pairs


def encode_pair(pair: Pair, tokenizer: Tokenizer, longest: int) -> Example:
    """The pair as tokens, with the EOS token after the answer. More than `longest` tokens is an error."""
    prompt = tokenizer.encode_prompt(pair.content)
    if not prompt:
        raise TaskError(f"{pair.origin}: the prompt has no tokens; give it some text")
    tokens = (*prompt, *tokenizer.encode_text(pair.answer), tokenizer.eos_id)
    if len(tokens) > longest:
        raise TaskError(
            f"{pair.origin}: prompt and answer have {len(tokens)} tokens but {longest} fit; "
            "shorten or leave out the line, or raise warmup.tokens_per_batch if the policy's context allows"
        )
    return Example(tokens, answer_start=len(prompt))


def endless(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """The examples in epochs without end. Each epoch's order is a function of the seed."""
    epoch = 0
    while True:
        order = list(range(len(examples)))
        random.Random(f"supervised/{seed}/{epoch}").shuffle(order)
        yield from (examples[index] for index in order)
        epoch += 1


def batches(examples: Iterable[Example], tokens_per_batch: int) -> Iterator[list[Example]]:
    """Cuts a stream into batches of at most `tokens_per_batch` tokens, in order."""
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        if batch and tokens + len(example.tokens) > tokens_per_batch:
            yield batch
            batch, tokens = [], 0
        batch.append(example)
        tokens += len(example.tokens)
    if batch:
        yield batch


def _pair(row: Row) -> Pair:
    columns, origin = row.columns, row.origin
    if "messages" in columns:
        return _chat_pair(columns["messages"], origin)
    prompt = columns[_column(columns, _PROMPT_COLUMNS, origin)]
    answer = columns[_column(columns, _ANSWER_COLUMNS, origin)]
    content = prompt if isinstance(prompt, str) else messages_of(prompt, origin)
    if not isinstance(answer, str):
        raise TaskError(f"{origin}: the answer is {shown(answer)}; expected text")
    return Pair(content, answer, origin)


def _column(record: Mapping[str, Any], names: Sequence[str], origin: str) -> str:
    found = [name for name in names if name in record]
    if len(found) != 1:
        raise TaskError(
            f"{origin}: columns are {shown_names(record)}; expected exactly one of {', '.join(names)}, or `messages`"
        )
    return found[0]


def _chat_pair(value: Any, origin: str) -> Pair:
    messages = messages_of(value, origin)
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise TaskError(f"{origin}: expected at least two messages, the last one the assistant's: it is the answer")
    return Pair(messages[:-1], messages[-1].content, origin)
