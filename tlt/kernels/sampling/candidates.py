"""The k likeliest successors a drafter names, in torch: what a CPU runs, and the reference of `candidates_triton`.

Ranks by `logits/T + G/β`, G the sampler's own keyed noise (`tlt.spec.candidates` says why), and scores with the softmax
of `β·logits/T + G`. Always holds: β = ∞ and temperature 0 leave the noise out. Knows rows and keys, no trees.
"""
# N nodes to name successors of, in groups of `repeat` with one key; k candidates each; v draft vocabulary

import math

import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.sampling import noise
from tlt.kernels.sampling.reference import GREEDY_BELOW

Key = tuple[Tensor, Tensor, Tensor]  # seed, request, position of the token to be named: int64, one per row


def keyed_noise(key: Key, vocab: int, token_of_draft_v: Tensor | None = None) -> Tensor:
    """The sampler's noise for every draft token, float32 [rows, v]."""
    rows = len(key[0])
    in_triton = key[0].is_cuda
    if token_of_draft_v is None:
        if not in_triton:
            return noise.gumbel(*key, vocab)
        token_of_draft_v = torch.arange(vocab, device=key[0].device)
    return dispatch(noise.gumbel_at, in_triton)(*key, token_of_draft_v.expand(rows, -1))


def perturbed(logits_Nv: Tensor, noise_Nv: Tensor, temperature_N: Tensor, beta: Tensor | float) -> Tensor:
    """`logits/T + G/β`: ranks as `β·logits/T + G` does, and β = ∞ is just a weight of 0."""
    greedy_N1 = (temperature_N < GREEDY_BELOW)[:, None]
    inverse_N1 = temperature_N[:, None].reciprocal().masked_fill(greedy_N1, 1.0)
    scaled_Nv = (logits_Nv if logits_Nv.dtype == torch.float64 else logits_Nv.float()) * inverse_N1
    return noise_Nv * ((1.0 / beta) * ~greedy_N1) + scaled_Nv


def name(
    logits_Nv: Tensor,
    key: Key,
    temperature: Tensor,
    beta: Tensor | float,
    k: int,
    token_of_draft_v: Tensor | None = None,
    *,
    repeat: int = 1,
    ahead: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Policy ids, int64 [N, k], the likeliest first, and their scores, float32: the kernel names equals by lower id.

    Nodes n·repeat … + repeat − 1 are drawn with key n, its position + `ahead` (int64, one for all keys or for each).
    """
    seed, request, position = key if ahead is None else (key[0], key[1], key[2] + ahead)
    parts = (seed, request, position, temperature)
    seed_N, request_N, position_N, temperature_N = (part.repeat_interleave(repeat) for part in parts)
    noise_Nv = keyed_noise((seed_N, request_N, position_N), logits_Nv.shape[1], token_of_draft_v)
    total_Nv = perturbed(logits_Nv, noise_Nv, temperature_N, beta)
    best = total_Nv.topk(k, dim=-1)
    # greedy drafts have no scale of their own
    sharpness = torch.where(beta.isinf(), 1.0, beta) if isinstance(beta, Tensor) else 1.0 if beta == math.inf else beta
    score_Nk = best.values * sharpness - (total_Nv * sharpness).logsumexp(-1, keepdim=True)
    token_Nk = best.indices if token_of_draft_v is None else token_of_draft_v[best.indices]
    return token_Nk, score_Nk.float()
