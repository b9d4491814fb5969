"""Whether what was written is a sample of the policy: a score test over every token of many answers.

For a feature f of a token, Σ f(x) − E_p[f] over all places, divided by the root of its variance, is a standard normal
if every token x was drawn from the p at its place. Features: −log p, and whether the token's rank is 1, 2, 3–4, 5–8 or
beyond. p comes from a packed forward of the finished texts, which knows nothing of how they were written.
"""
# N places, V vocabulary

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.train.packing import Example, pack
from tlt.types import Completion

_ROW = 8192  # tokens of a forward
_LOGITS = 2**27  # at once
_RANKS = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 1 << 30))


@dataclass(slots=True)
class _ScoreSums:
    difference: float = 0.0
    variance: float = 0.0

    @property
    def z(self) -> float:
        return self.difference / max(self.variance, 1e-30) ** 0.5


@torch.no_grad()
def score(model: Transformer, completions: Sequence[Completion], temperature: float = 1.0) -> dict[str, float]:
    """z of every feature, the policy taken at this temperature; tokens that decided nothing add nothing."""
    sums: dict[str, _ScoreSums] = {}
    for logits_NV, token_N in _places(model, completions):
        logp_NV = (logits_NV.double() / temperature).log_softmax(-1)
        p_NV = logp_NV.exp()
        drawn_N1 = token_N[:, None]
        rank_NV = logp_NV.argsort(-1, descending=True).argsort(-1)
        features: dict[str, Tensor] = {"-log p": -logp_NV.clamp_min(-700.0)}
        for low, high in _RANKS:
            features[f"rank {low + 1} to {min(high, p_NV.shape[1])}"] = ((rank_NV >= low) & (rank_NV < high)).double()
        for name, feature_NV in features.items():
            mean_N = (p_NV * feature_NV).sum(-1)
            variance_N = (p_NV * feature_NV**2).sum(-1) - mean_N**2
            found = sums.setdefault(name, _ScoreSums())
            found.difference += float((feature_NV.gather(1, drawn_N1)[:, 0] - mean_N).sum())
            found.variance += float(variance_N.clamp_min(0.0).sum())
    return {name: found.z for name, found in sums.items()}


def _places(model: Transformer, completions: Sequence[Completion]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and drawn tokens, some places at a time."""
    examples = [Example(done.prompt_tokens + done.tokens, len(done.prompt_tokens)) for done in completions]
    room = max(_ROW, *(len(example.tokens) for example in examples))
    device = model.embed.device
    at_once = max(1, _LOGITS // model.config.vocab // 8)  # in double, and a few of them
    for row in pack(examples, room):
        tokens_T = row.tokens_T.to(device)
        hidden_TD = model(tokens_T, PackedLayout.from_lengths(row.lengths, device)).hidden_TD
        place_N = row.mask_T.nonzero()[:, 0].to(device)
        for chunk_N in place_N.split(at_once):
            yield model.logits(hidden_TD[chunk_N - 1]), tokens_T[chunk_N]
