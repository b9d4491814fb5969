"""Checks the engine's results: its log-probabilities against the trainer's, its tokens in batches of another size."""
# T tokens, V vocabulary

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.bench.lab import Lab
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.replay import Difference
from tlt.types import Completion

_TOKENS_PER_FORWARD = 8192
_LOGITS_AT_ONCE = 2048  # rows of V numbers in float32


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The engine's log-probabilities of its own tokens against a teacher-forced packed forward."""

    forward: str  # "training" or "rollout": which kernels the packed forward ran with
    tokens: int
    mean_difference: float  # absolute, in nats
    p99_difference: float
    largest_difference: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Identity:
    """The same requests in two engines that differ in the size of the batch."""

    rows: int
    other_rows: int
    requests: int
    identical: int
    tokens: int  # up to and including the first that differs
    divergences: int
    per_token: float
    temperature: float
    cap: int


def logprobs(lab: Lab) -> Iterator[LogProbs]:
    completions = lab.natural_once(lab.scale.naturals[0], lab.scale.fidelity_cap).completions
    lab.release()
    with torch.no_grad():
        yield _compare(lab, completions, "rollout")
    if lab.on_gpu:  # on a CPU both run the same code
        with _as_in_training(lab.model):
            yield _compare(lab, completions, "training")


def identity(lab: Lab) -> Iterator[Identity]:
    count, cap = lab.scale.naturals[0], lab.scale.fidelity_cap
    other_rows = max(1, count // 4)
    one = lab.natural_once(count, cap).completions
    other = lab.natural(lab.engine(other_rows), count, cap).completions
    lab.release()
    found = Difference.of((a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    yield Identity(
        rows=count,
        other_rows=other_rows,
        requests=count,
        identical=count - found.differing,
        tokens=found.tokens,
        divergences=found.differing,
        per_token=found.differing / found.tokens,
        temperature=lab.temperature,
        cap=cap,
    )


def _compare(lab: Lab, completions: Sequence[Completion], forward: str) -> LogProbs:
    differences = [_differences(lab.model, group) for group in _groups(completions)]
    gap = torch.cat(differences)
    return LogProbs(
        forward=forward,
        tokens=len(gap),
        mean_difference=float(gap.mean()),
        p99_difference=float(gap.sort().values[int(0.99 * (len(gap) - 1))]),
        largest_difference=float(gap.max()),
        temperature=lab.temperature,
    )


def _groups(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    """Groups completions so that each group fits one forward."""
    group: list[Completion] = []
    size = 0
    for completion in completions:
        length = len(completion.prompt_tokens) + len(completion.tokens)
        if group and size + length > _TOKENS_PER_FORWARD:
            yield group
            group, size = [], 0
        group.append(completion)
        size += length
    yield group


def _differences(model: Transformer, group: Sequence[Completion]) -> Tensor:
    texts = [[*completion.prompt_tokens, *completion.tokens] for completion in group]
    row = torch.tensor([token for text in texts for token in text], device=model.embed.device)
    layout = PackedLayout.from_lengths([len(text) for text in texts], model.embed.device)
    hidden_TD = model(row, layout).hidden_TD
    places, start = [], 0
    for completion, text in zip(group, texts, strict=True):
        first = start + len(completion.prompt_tokens)
        places.append(torch.arange(first, start + len(text)))
        start += len(text)
    place_T = torch.cat(places).to(row.device)
    engine_T = torch.tensor([value for completion in group for value in completion.policy_logprobs])
    return (_chosen(model, hidden_TD[place_T - 1], row[place_T]).cpu() - engine_T).abs()


def _chosen(model: Transformer, hidden_TD: Tensor, token_T: Tensor) -> Tensor:
    parts = []
    for start in range(0, len(token_T), _LOGITS_AT_ONCE):
        logits_TV = model.logits(hidden_TD[start : start + _LOGITS_AT_ONCE]).float()
        token_T1 = token_T[start : start + _LOGITS_AT_ONCE, None]
        parts.append(logits_TV.log_softmax(-1).gather(1, token_T1).squeeze(1))
    return torch.cat(parts)


@contextmanager
def _as_in_training(model: Transformer) -> Iterator[None]:
    """Runs the training code path, which needs gradients to be recorded, without keeping tensors for backward."""
    model.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        model.requires_grad_(True)
