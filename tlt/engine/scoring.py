"""Scores given texts: log-probabilities of their tokens, and the likeliest tokens of every position.

One forward over packed texts, without KV cache or sampling. Always holds: scores are log-probabilities of the policy at
temperature 1 without filters, independent of the engine's state. Knows no requests.
"""
# N positions of all texts, C positions of a chunk, V vocabulary, K likeliest

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from tlt.model.slices import forward_packed
from tlt.model.transformer import Transformer
from tlt.train.logprobs import most_logits


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one text: of all tokens but the first, which has no context."""

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]  # (token, log-probability) of the likeliest, likeliest first


def score(model: Transformer, texts: Sequence[Sequence[int]], top: int = 0) -> list[Scores]:
    """Scores of each text. The caller bounds the number of tokens per call and disables gradients."""
    lengths = [len(text) for text in texts]
    if not lengths:
        return []
    device = model.embed.device
    token_N = torch.tensor([token for text in texts for token in text], device=device)
    hidden_ND = forward_packed(model, token_N, lengths).hidden_TD
    next_N1 = token_N.roll(-1)[:, None]
    top = min(top, model.config.vocab)
    rows = max(1, most_logits(device) // model.config.vocab)
    logprobs, tokens, values = list[float](), list[list[int]](), list[list[float]]()
    for start in range(0, len(token_N), rows):
        logprob_CV = model.logits(hidden_ND[start : start + rows]).log_softmax(-1)
        logprobs += logprob_CV.gather(1, next_N1[start : start + rows])[:, 0].tolist()
        if top:
            best_CK = logprob_CV.topk(top)
            values += best_CK.values.tolist()
            tokens += best_CK.indices.tolist()
    pairs = [tuple(zip(*row, strict=True)) for row in zip(tokens, values, strict=True)]
    spans = list(pairwise(accumulate(lengths, initial=0)))
    return [Scores(tuple(logprobs[start : stop - 1]), tuple(pairs[start : stop - 1])) for start, stop in spans]
