"""Accept lengths of a drafter on given completions of the policy, measured without the engine.

The drafter is unrolled along each completion from every position at once, with the true tokens and its own states as
input. At each depth, the rank of the policy's token among the drafter's candidates shows whether a tree of width k
contains it. Candidates use the noise of the completion's own keys. Nothing is sampled and nothing is trained.
"""
# T packed positions, N tokens to name, S depths, C sequences, v draft vocabulary, B values of β, r ranks

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.config import DraftSettings
from tlt.kernels.sampling.candidates import perturbed
from tlt.model.device import upload
from tlt.spec.align import Targets
from tlt.spec.candidates import BETAS, GREEDY, BetaCalibrator, DrawKeys, draft_ids, keyed_noise
from tlt.spec.eagle import Eagle
from tlt.train.drafter import DrafterBatch
from tlt.train.logprobs import most_logits

DEPTH = 8
WIDTHS = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class KeyedBatch:
    """A batch of completions and their sampling keys. Sequences start at position 0."""

    batch: DrafterBatch
    seed_C: Tensor  # int64, as the sampler holds them
    request_C: Tensor  # int64
    temperature_C: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Reach:
    """First-token hit rate and accept lengths for one weight β of the noise."""

    first_hit: float  # fraction of first draft tokens that equal the policy's
    lengths: tuple[float, ...]  # accept length per width of WIDTHS


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    greedy: Reach  # without noise
    shared: Reach  # with the sampler's noise, β = 1
    fitted: Reach  # with the β of most hits
    beta: float  # the β of `fitted`
    tokens: int  # target tokens at depth 1
    ranks: tuple[tuple[float, ...], ...]  # with `beta`: see `_Followed`


class _Followed:
    """p_d(r): frequency with which candidate r is the policy's token at depth d, over positions whose earlier tokens
    are all in the widest tree. The tuner observes the same walks and uses the same p_d(r).

    A depth that no position reaches gets the values of the previous depth.
    """

    def __init__(self, depth: int) -> None:
        self._widest = max(WIDTHS)
        self._named_BSr = torch.zeros((len(BETAS), depth, self._widest), dtype=torch.float64)
        self._followed_BS = torch.zeros((len(BETAS), depth), dtype=torch.float64)

    def see(self, rank_BST: Tensor) -> None:
        among_BST = (rank_BST >= 0) & (rank_BST < self._widest)
        came_BST = torch.ones_like(among_BST)
        came_BST[:, 1:] = among_BST.cumprod(dim=1)[:, :-1].bool()
        self._followed_BS += (came_BST & (rank_BST >= 0)).sum(2)
        for rank in range(self._widest):
            self._named_BSr[:, :, rank] += (came_BST & (rank_BST == rank)).sum(2)

    def ranks(self, beta: float) -> tuple[tuple[float, ...], ...]:
        place = BETAS.index(beta)
        rows: list[tuple[float, ...]] = []
        for named_r, followed in zip(self._named_BSr[place], self._followed_BS[place].tolist(), strict=True):
            rows.append(rows[-1] if rows and not followed else tuple((named_r / max(1.0, followed)).tolist()))
        return tuple(rows)


@torch.no_grad()
def accept_length(
    model: Eagle, held: Iterable[KeyedBatch], head_VD: Tensor, embed_VD: Tensor, depth: int = DEPTH
) -> DrafterAcceptance:
    """Pooled over all batches. A position counts at a depth if the completion is long enough."""
    head_vD = model.head_rows(head_VD).detach()
    hits = torch.zeros((len(BETAS), len(WIDTHS), depth), dtype=torch.float64)
    first_hits = torch.zeros(len(BETAS), dtype=torch.float64)
    reached = torch.zeros(depth, dtype=torch.float64)
    beta_calibrator, followed = BetaCalibrator(), _Followed(depth)
    for drawn in held:
        targets = drawn.batch.aligned.targets(depth)
        rank_BSN = _ranks(model, drawn, targets, head_vD, embed_VD)
        rank_BST = _by_start(rank_BSN, targets, len(drawn.batch.aligned.next_T))
        exists_ST = rank_BST[0] >= 0
        reached += exists_ST.sum(1)
        for place, width in enumerate(WIDTHS):
            within_BST = (rank_BST >= 0) & (rank_BST < width)
            hits[:, place] += within_BST.cumprod(dim=1).sum(2)
        first_hits += (rank_BST[:, 0] == 0).sum(1)
        followed.see(rank_BST)
        beta_calibrator.observe((rank_BST == 0).sum((1, 2)).tolist(), int(exists_ST.sum()))
    survival = hits / reached.clamp(min=1)
    reaches = [
        Reach(float(first_hits[b] / reached[0]), tuple(1 + survival[b, w].sum().item() for w in range(len(WIDTHS))))
        for b in range(len(BETAS))
    ]
    greedy, shared, fitted = (reaches[BETAS.index(beta)] for beta in (GREEDY, 1.0, beta_calibrator.beta))
    return DrafterAcceptance(
        greedy, shared, fitted, beta_calibrator.beta, int(reached[0]), followed.ranks(beta_calibrator.beta)
    )


def _ranks(model: Eagle, drawn: KeyedBatch, targets: Targets, head_vD: Tensor, embed_VD: Tensor) -> Tensor:
    """[B, S, N] on the host: rank of the policy's token among the drafter's candidates; −1 where there is no target."""
    aligned, device = drawn.batch.aligned, drawn.batch.features_TF.device
    depth, count = targets.entry_SN.shape
    states = torch.stack(model.unroll(aligned, drawn.batch.features_TF, embed_VD, depth))
    column_N, known_N = draft_ids(aligned.next_T[targets.state_N].to(device), model.token_of_draft_v)
    keys = _keys(drawn, targets.state_N)
    missed = torch.iinfo(torch.int32).max
    rank_BSN = torch.empty((len(BETAS), depth, count), dtype=torch.int32, device=device)
    tokens = max(1, most_logits(device) // (len(head_vD) * 4))
    for start in range(0, count, tokens):
        chunk = slice(start, start + tokens)
        part = DrawKeys(*(x[chunk].to(device) for x in keys))
        noise_Cv = keyed_noise(part, len(head_vD), model.token_of_draft_v)
        lower_Cv = torch.arange(len(head_vD), device=device) < column_N[chunk, None]
        for step in range(depth):
            logits_Cv = model.logits(states[step][targets.entry_SN[step, chunk].to(device)], head_vD)
            for place, beta in enumerate(BETAS):
                total_Cv = perturbed(logits_Cv, noise_Cv, part.temperature_N, beta)
                true_C1 = total_Cv.gather(1, column_N[chunk, None])
                # ties go to the lower id; a NaN is no hit
                rank_C = (~torch.where(lower_Cv, total_Cv < true_C1, total_Cv <= true_C1)).sum(-1)
                rank_BSN[place, step, chunk] = torch.where(known_N[chunk], rank_C, missed).int()
    return rank_BSN.cpu().masked_fill(~targets.reached_SN, -1)


def _keys(drawn: KeyedBatch, state_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seed, request, position and temperature of each target token, on the host."""
    aligned = drawn.batch.aligned
    sequence_T = torch.repeat_interleave(torch.arange(len(aligned.lengths)), torch.tensor(aligned.lengths))
    sequence_N = sequence_T[state_N]
    position_N = aligned.index_T[state_N] + 1
    return drawn.seed_C[sequence_N], drawn.request_C[sequence_N], position_N, drawn.temperature_C[sequence_N]


def _by_start(rank_BSN: Tensor, targets: Targets, length: int) -> Tensor:
    """[B, S, T]: the same ranks by the position a draft starts from; −1 where there is no target."""
    rank_BST = torch.full((*rank_BSN.shape[:2], length), -1, dtype=rank_BSN.dtype)
    for step in range(rank_BSN.shape[1]):
        reached_N = targets.reached_SN[step]
        rank_BST[:, step, targets.entry_SN[step, reached_N]] = rank_BSN[:, step, reached_N]
    return rank_BST


# ---- what to expect, without noise


@dataclass(frozen=True, slots=True)
class Expected:
    """Estimates of a drafter's quality without noise, independent of the sampling temperature."""

    loss: float  # as in training, over all draft steps
    accept_length: float  # of a chain, if each token is accepted with probability 1 − TV
    tokens: int  # target tokens at depth 1


@torch.no_grad()
def expected(
    model: Eagle, batches: Sequence[DrafterBatch], head_VD: Tensor, embed_VD: Tensor, settings: DraftSettings
) -> Expected:
    """Pooled over all batches, to the depth that training unrolls. Waits for the device once, at the end."""
    depth, device = settings.unroll, head_VD.device
    survived_S, reached_S, loss_S = (torch.zeros(depth, dtype=torch.float64, device=device) for _ in range(3))
    for batch in batches:
        targets = batch.aligned.targets(depth)
        if not len(targets.state_N):
            continue
        reached_SN, entry_SN = upload(targets.reached_SN, device), upload(targets.entry_SN, device)
        overlap_SN, entropy_SN = _closeness(model, batch, targets, head_VD, embed_VD)
        # by the position a draft starts from; a depth without a target adds 0, and so do the depths after it
        overlap_ST = overlap_SN.new_zeros((depth, len(batch.aligned.next_T)))
        overlap_ST.scatter_add_(1, entry_SN, overlap_SN * reached_SN)
        survived_S += overlap_ST.cumprod(0).sum(1)
        reached_S += reached_SN.sum(1)
        share = settings.total_variation
        loss_S += (((1 - share) * entropy_SN + share * (1 - overlap_SN)) * reached_SN).sum(1)
    survived, reached, loss = torch.stack((survived_S, reached_S, loss_S)).cpu()
    weight = settings.decay ** torch.arange(depth, dtype=torch.float64)
    mean_loss = (loss * weight).sum() / (reached * weight).sum().clamp(min=1)
    return Expected(float(mean_loss), 1 + float((survived / reached.clamp(min=1)).sum()), int(reached[0]))


def _closeness(
    model: Eagle, batch: DrafterBatch, targets: Targets, head_VD: Tensor, embed_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ min(p, q) and −Σ p log q of every token and draft step, [S, N] each. Tokens outside the draft vocabulary count
    as rejected."""
    device, head_vD = head_VD.device, model.head_rows(head_VD).detach()
    wide = torch.promote_types(head_VD.dtype, torch.float32)
    hidden_ND = batch.hidden_TD.index_select(0, upload(targets.state_N, device))
    entry_SN = upload(targets.entry_SN, device)
    states = model.unroll(batch.aligned, batch.features_TF, embed_VD, len(entry_SN))
    overlap_SN, entropy_SN = (torch.empty(entry_SN.shape, dtype=wide, device=device) for _ in range(2))
    tokens = max(1, most_logits(device) // (len(head_VD) * 3))
    for start in range(0, len(hidden_ND), tokens):
        chunk = slice(start, start + tokens)
        p_Cv = torch.softmax(hidden_ND[chunk] @ head_VD.detach().T, dim=-1, dtype=wide)
        if model.token_of_draft_v is not None:
            p_Cv = p_Cv.index_select(1, model.token_of_draft_v)
        for step, state_TD in enumerate(states):
            logits_Cv = model.logits(state_TD.index_select(0, entry_SN[step, chunk]), head_vD)
            logq_Cv = torch.log_softmax(logits_Cv, dim=-1, dtype=wide)
            entropy_SN[step, chunk] = -torch.linalg.vecdot(p_Cv, logq_Cv)
            overlap_SN[step, chunk] = torch.minimum(p_Cv, logq_Cv.exp_()).sum(-1)
    return overlap_SN, entropy_SN
