"""The drafter's candidates: the tokens it proposes after a node, and the calibration of its confidence (draft β).

The policy's token is the argmax of `logits/T + G`, with keyed noise G that can be computed beforehand. A drafter
proposes the top of `β·q_logits/T + G` with the same G: β = 1 for a calibrated drafter, larger for one that is too flat,
and β = ∞ leaves the noise out (greedy drafts). At temperature 0 there is no noise. Every verified node shows which β
would have hit: `BetaCalibrator` counts and chooses. Candidates change only the speed, never the policy's tokens.
"""
# N nodes to name successors of, k candidates each, v draft vocabulary, B values of β

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.sampling import candidates as kernels
from tlt.kernels.sampling.candidates import perturbed
from tlt.model.device import Reading

GREEDY = math.inf  # the β of drafts without noise
BETAS = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, GREEDY)
_MOST_IN_ONE_LAUNCH = 8  # candidates per node that the GPU kernel can return


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """Key and temperature of each node's draw, on the device of the logits."""

    seed_N: Tensor  # int64
    request_N: Tensor  # int64
    position_N: Tensor  # int64, of the token to be proposed, minus `ahead`
    temperature_N: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Candidates:
    token_Nk: Tensor  # int64, ids of the policy's vocabulary, the likeliest first
    score_Nk: Tensor  # float32, estimated log-probability that the policy draws it, given the noise


def keyed_noise(keys: DrawKeys, vocab: int, token_of_draft_v: Tensor | None = None) -> Tensor:
    """The sampler's noise for every draft token, float32 [N, v]."""
    return kernels.keyed_noise((keys.seed_N, keys.request_N, keys.position_N), vocab, token_of_draft_v)


def candidates(
    logits_Nv: Tensor,
    keys: DrawKeys,
    beta: Tensor | float,
    k: int,
    token_of_draft_v: Tensor | None = None,
    *,
    repeat: int = 1,
    ahead: Tensor | None = None,
) -> Candidates:
    """The k likeliest successors of each node. `beta` as a tensor may change between replays of a captured graph.

    If `repeat` consecutive nodes share a key, `keys` holds each key once; `ahead` (int64, one for all keys or for each)
    is added to positions.
    """
    key = (keys.seed_N, keys.request_N, keys.position_N)
    arguments = (logits_Nv, key, keys.temperature_N, beta, k, token_of_draft_v)
    in_triton = logits_Nv.is_cuda and logits_Nv.dtype != torch.float64 and k <= _MOST_IN_ONE_LAUNCH
    return Candidates(*dispatch(kernels.name, in_triton)(*arguments, repeat=repeat, ahead=ahead, pdl=True))


def beta_hits(
    logits_Nv: Tensor,
    keys: DrawKeys,
    drawn_N: Tensor,
    betas: Sequence[float] = BETAS,
    token_of_draft_v: Tensor | None = None,
    k: int = 1,
) -> Tensor:
    """[N, B] bool: whether the token drawn by the policy would have been among the first k candidates, for each β."""
    noise_Nv = keyed_noise(keys, logits_Nv.shape[1], token_of_draft_v)
    column_N, known_N = draft_ids(drawn_N, token_of_draft_v)
    hits = []
    for beta in betas:
        total_Nv = perturbed(logits_Nv, noise_Nv, keys.temperature_N, beta)
        better_N = (total_Nv > total_Nv.gather(1, column_N[:, None])).sum(-1)
        hits.append((better_N < k) & known_N)
    return torch.stack(hits, dim=1)


def draft_ids(token_N: Tensor, token_of_draft_v: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft ids of policy tokens, and which of them have one (the others get an arbitrary id)."""
    if token_of_draft_v is None:
        return token_N, torch.ones_like(token_N, dtype=torch.bool)
    column_N = torch.searchsorted(token_of_draft_v, token_N).clamp(max=len(token_of_draft_v) - 1)
    return column_N, token_of_draft_v[column_N] == token_N


class BetaCalibrator:
    """The β that would have hit most often recently. Greedy and 1 are among the choices, so it ends no worse than they.

    Pure counting: `observe` takes, per β of `BETAS`, how many of the verified nodes it would have hit.
    """

    def __init__(self, memory: float = 20_000.0) -> None:
        self._memory = memory  # nodes after which an observation counts for 1/e of a new one
        self._hits = [0.0] * len(BETAS)
        self._best = BETAS.index(1.0)

    @property
    def beta(self) -> float:
        return BETAS[self._best]

    def observe(self, hits: Sequence[int], nodes: int) -> None:
        """At equal counts the β in use stays."""
        fade = math.exp(-nodes / self._memory)
        self._hits = [fade * old + new for old, new in zip(self._hits, hits, strict=True)]
        leader = max(range(len(BETAS)), key=self._hits.__getitem__)
        if self._hits[leader] > self._hits[self._best]:
            self._best = leader


MOST_ROWS = 16  # sampled per probe
_EVERY = 16  # drafts between two probes


@dataclass(frozen=True, slots=True)
class Roots:
    """The logits and keys from which the first rows' roots were drafted, and before which tick."""

    logits_Nv: Tensor
    draws: DrawKeys
    ready_N: Tensor
    tick: int


class BetaProbe:
    """Measures in every 16th draft which β would have proposed the tokens drawn at the roots, without waiting."""

    def __init__(self) -> None:
        self.beta_calibrator = BetaCalibrator()
        self.roots: Roots | None = None
        self._drafts = 0
        self._pending: Reading | None = None

    def forget(self) -> None:
        """Drops the recorded roots, after rows have moved."""
        self.roots = None

    def wants_roots(self) -> bool:
        self._drafts += 1
        return self._drafts % _EVERY == 1 and self._pending is None

    def root(self, logits_Rv: Tensor, draws: DrawKeys, ready_R: Tensor, tick: int) -> None:
        """Records the roots. `draws`: keys of the tokens before those that the roots propose."""
        rows = len(draws.seed_N)
        parts = (draws.seed_N.clone(), draws.request_N.clone(), draws.position_N + 1, draws.temperature_N.clone())
        self.roots = Roots(logits_Rv[:rows].clone(), DrawKeys(*parts), ready_R[:rows].clone(), tick)  # rows change

    def look(self, token_N: Tensor, token_of_draft_v: Tensor | None) -> None:
        self._pending = Reading(self._counted(token_N, token_of_draft_v))

    def run_idle(self, logits_Rv: Tensor, draws: DrawKeys, ready_R: Tensor, token_of_draft_v: Tensor | None) -> None:
        """Launches the kernels once without effect, so that they are compiled."""
        self.root(logits_Rv, draws, ready_R, 0)
        self._counted(torch.zeros_like(draws.seed_N), token_of_draft_v)

    def _counted(self, token_N: Tensor, token_of_draft_v: Tensor | None) -> Tensor:
        """[B + 1]: hits of each β, then the number of nodes."""
        roots, self.roots = self.roots, None
        assert roots is not None
        hits_NB = beta_hits(roots.logits_Nv, roots.draws, token_N, token_of_draft_v=token_of_draft_v)
        hits_B = (hits_NB & roots.ready_N[:, None]).sum(0)
        return torch.cat((hits_B, roots.ready_N.sum()[None]))

    def read(self) -> None:
        if self._pending is not None and self._pending.arrived:
            *hits, nodes = self._pending.on_host().tolist()
            self.beta_calibrator.observe(hits, nodes)
            self._pending = None
