"""Supervised training: a policy learns to write given answers to given prompts.

The loss is the mean cross-entropy over the answers' tokens; prompts are read, never learned. Examples share packed rows
and cannot see each other, so a step equals the same examples one by one. Logits of a whole row never exist at once.
Half-precision weights are updated through float32 masters. Knows nothing of runs, events or configured devices.
"""
# T tokens of a row, N answer tokens, D hidden, V vocabulary

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.config import WarmupSettings
from tlt.errors import TaskError, TltError
from tlt.model.attention import PackedLayout
from tlt.model.linear import wide_linear
from tlt.model.transformer import Transformer
from tlt.text import Tokenizer
from tlt.train.packing import Example, PackedRow
from tlt.types import Message

LOGITS_AT_ONCE = 2**27  # elements; in float32 half a gibibyte
FINAL_SHARE = 0.1  # of the peak learning rate, where the cosine ends
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
    """Takes optimizer steps on packed rows. Reads the device's results once per step, at its end."""

    def __init__(self, model: Transformer, settings: WarmupSettings) -> None:
        self._model = model
        self._settings = settings
        self._optimizer = MasterAdamW(model, weight_decay=settings.weight_decay)
        self.steps_taken = 0

    def step(self, batch: Sequence[PackedRow]) -> StepResult:
        """One update from all rows of the batch together."""
        answer_tokens = sum(int(row.mask_T.sum()) for row in batch)
        if answer_tokens == 0:
            raise TltError("a batch holds no answer token to learn from; give every example an answer")
        device = self._model.embed.device
        loss = torch.zeros((), device=device)
        for row in batch:
            row_loss = answer_loss_sum(self._model, row) / answer_tokens
            row_loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.gather()
            loss += row_loss.detach()
        rate = learning_rate(self.steps_taken, self._settings)
        grad_norm = self._optimizer.update(rate, self._settings.clip)
        self.steps_taken += 1
        loss_value, norm_value = torch.stack((loss, grad_norm.to(loss.dtype))).tolist()
        self._refuse_nonfinite(loss_value, norm_value)
        return StepResult(loss_value, sum(len(row.tokens_T) for row in batch), answer_tokens, norm_value, rate)

    def _refuse_nonfinite(self, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TltError(
                f"step {self.steps_taken}: loss {loss}, gradient norm {grad_norm}; the weights are spoilt: "
                "start again with a lower learning rate, and check the data"
            )


def learning_rate(step: int, settings: WarmupSettings) -> float:
    """Rises linearly over the warm-up steps, then falls along a cosine to a tenth of the peak at the last step."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - 1 - settings.warmup_steps))
    share = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share


def answer_loss_sum(model: Transformer, row: PackedRow) -> Tensor:
    """Cross-entropy summed over the row's answer tokens, each predicted from the token before it."""
    device = model.embed.device
    answers_N = row.mask_T.nonzero().squeeze(1)  # on the host: asking a GPU for a size would make it wait
    hidden_TD = model(row.tokens_T.to(device), PackedLayout.from_lengths(row.lengths, device)).hidden_TD
    before_ND = hidden_TD.index_select(0, (answers_N - 1).to(device))
    return chunked_cross_entropy(before_ND, model.head_weight, row.tokens_T[answers_N].to(device))


def chunked_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """−Σ log softmax(hidden · headᵀ)[target], with at most `logits_at_once` logits in memory."""
    rows = max(1, logits_at_once // len(head_VD))
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, head_VD, targets_N, rows)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The forward pass leaves both gradients behind, so that no chunk's logits are kept or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        hidden_grad_ND = torch.empty_like(hidden_ND)
        head_grad_VD = torch.zeros_like(head_VD, dtype=wide)
        for start in range(0, len(hidden_ND), rows):
            chunk = slice(start, start + rows)
            target_C1 = targets_N[chunk, None]
            logprobs_CV = torch.log_softmax(wide_linear(hidden_ND[chunk], head_VD), dim=-1, dtype=wide)
            loss -= logprobs_CV.gather(1, target_C1).sum()
            logit_grad_CV = logprobs_CV.exp_()  # softmax − one-hot, in the logits' own memory
            logit_grad_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1, dtype=wide))
            logit_grad_CV = logit_grad_CV.to(hidden_ND.dtype)
            torch.mm(logit_grad_CV, head_VD, out=hidden_grad_ND[chunk])
            head_grad_VD += logit_grad_CV.T @ hidden_ND[chunk]
        ctx.save_for_backward(hidden_grad_ND, head_grad_VD)
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad_ND, head_grad_VD = ctx.saved_tensors
        scale = grads[0]
        return hidden_grad_ND * scale.to(hidden_grad_ND.dtype), (head_grad_VD * scale).to(ctx.head_dtype), None, None


class MasterAdamW:
    """AdamW in float32 at least: half-precision weights get a master copy, so that small updates are not rounded away.

    Weights in float32 or wider are their own masters. Matrices decay, vectors do not.
    """

    def __init__(
        self, model: torch.nn.Module, *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._masters = [_master_of(weight) for weight in self._weights]
        matrices = [master for master in self._masters if master.dim() > 1]
        vectors = [master for master in self._masters if master.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)

    def gather(self) -> None:
        """Adds the weights' gradients to the masters': summed over rows in half precision they would lose digits."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is weight or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.to(master.dtype)
            else:
                master.grad += weight.grad
            weight.grad = None

    def update(self, rate: float, clip: float) -> Tensor:
        """One step with what was gathered. The gradient's norm before clipping, still on the device."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, clip)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._write_back()
        return norm

    @torch.no_grad()
    def _write_back(self) -> None:
        halves = [(w, m) for w, m in zip(self._weights, self._masters, strict=True) if m is not w]
        if halves:
            torch._foreach_copy_([weight for weight, _ in halves], [master for _, master in halves])


def _master_of(weight: Tensor) -> Tensor:
    if torch.promote_types(weight.dtype, torch.float32) == weight.dtype:
        return weight
    return weight.detach().to(torch.float32).clone().requires_grad_()


# ---- data


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the answer to learn."""

    content: str | tuple[Message, ...]
    answer: str
    origin: str  # where it stands, for messages: file:line


def read_pairs(path: Path | str) -> list[Pair]:
    """The pairs of a JSONL file, one object per line; blank lines are passed over.

    Columns: `messages` (a chat whose last turn is the answer), or `prompt` or `question` with `answer`, `completion` or
    `response`; a prompt may be a list of messages too. Anything else is an error that names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file; expected a JSONL file of prompts and answers") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    lines = enumerate(text.split("\n"), start=1)  # not splitlines: JSON strings may hold other line separators
    pairs = [_parse_pair(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not pairs:
        raise TaskError(f"{path}: holds no lines; expected one JSON object with a prompt and an answer per line")
    return pairs


def encode_pair(pair: Pair, tokenizer: Tokenizer, longest: int) -> Example:
    """The pair as tokens, the end token taught with the answer. More than `longest` tokens is an error."""
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
    """Epoch after epoch, each in its own order, a function of the seed."""
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


def _parse_pair(line: str, origin: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{origin}: is not valid JSON ({error.msg}); expected one object per line") from None
    if not isinstance(record, dict):
        raise TaskError(f"{origin}: is {type(record).__name__}; expected an object with a prompt and an answer")
    if "messages" in record:
        return _chat_pair(record["messages"], origin)
    prompt = record[_column(record, _PROMPT_COLUMNS, origin)]
    answer = record[_column(record, _ANSWER_COLUMNS, origin)]
    content = prompt if isinstance(prompt, str) else _messages(prompt, origin)
    if not isinstance(answer, str):
        raise TaskError(f"{origin}: the answer is {answer!r}; expected text")
    return Pair(content, answer, origin)


def _column(record: Mapping[str, Any], names: Sequence[str], origin: str) -> str:
    found = [name for name in names if name in record]
    if len(found) != 1:
        seen = ", ".join(record) or "none"
        raise TaskError(f"{origin}: columns are {seen}; expected exactly one of {', '.join(names)}, or `messages`")
    return found[0]


def _chat_pair(value: Any, origin: str) -> Pair:
    messages = _messages(value, origin)
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise TaskError(f"{origin}: expected at least two messages, the last one the assistant's: it is the answer")
    return Pair(messages[:-1], messages[-1].content, origin)


def _messages(value: Any, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise TaskError(f"{origin}: the prompt is {value!r}; expected text or a list of messages")
    for item in value:
        texts = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("role", "content"))
        if not texts:
            raise TaskError(f"{origin}: a message is {item!r}; expected an object with text `role` and `content`")
    return tuple(Message(item["role"], item["content"]) for item in value)
