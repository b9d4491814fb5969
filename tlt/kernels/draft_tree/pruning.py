"""Pruning what a drafter grew to the trees that the policy verifies, in torch; `pruning_triton` is held equal to it.

The nodes of a growth lie level by level, `width` to a level. The likeliest of them stay, in that order, so that parents
come before children; a node's score never exceeds its parent's, and a small cost per level breaks ties for the parent.
A score that is no number is the worst.
Each row may keep as many as its tree has room for; where rows share, only those among the likeliest of all rows' nodes:
so a tree is as large as its row is predictable. Of equals, and many rows may be quite sure, the first rows' stay. A
batch lasts as long as its last row: those that have less left to write than others may be held back a little
(`Shared.remaining_bias`).
"""
# R rows, L nodes grown, k nodes kept, Q nodes of a tree (the root is 0), W mask words of 32 bits

from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL_COST = 1e-4  # taken off a score per level when nodes are compared
WORD = 32


@dataclass(frozen=True, slots=True)
class Pruned:
    """Where the trees go. Padding hangs on nothing (−1), has depth 0 and sees itself alone."""

    token_RQ: Tensor
    parent_RQ: Tensor
    depth_RQ: Tensor
    mask_RQW: Tensor
    size_R: Tensor  # nodes behind the root


@dataclass(frozen=True, slots=True)
class Shared:
    """What the rows share."""

    nodes: int  # in all of them together, roots left out
    left_R: Tensor  # int64: tokens that each may still write
    remaining_bias: Tensor  # float32, one number: by how much a row with nothing left would be held back, in nats …
    most: float = 0.0  # … and by how much any is


def prune(
    token_RL: Tensor,
    parent_RL: Tensor,
    score_RL: Tensor,
    ready_R: Tensor,
    width: int,
    depth: int,
    out: Pruned,
    shared: Shared | None = None,
) -> None:
    """The likeliest nodes of the first `depth` levels (parents: index among the L, −1 the root), in all rows together
    at most what they share. Rows that are not ready get no node. The root's token is left as it is."""
    rows, grown = len(ready_R), width * depth
    kept = min(out.token_RQ.shape[1] - 1, grown)
    level_L = torch.arange(grown, device=ready_R.device) // width
    score_RL = score_RL[:, :grown] - LEVEL_COST * level_L
    score_RL = score_RL.masked_fill(score_RL.isnan(), -torch.inf)
    order_RL = score_RL.sort(dim=1, descending=True, stable=True).indices
    node_Rk = order_RL[:, :kept].sort(dim=1).values
    stays_Rk = ready_R[:, None].expand(rows, kept)
    if shared is not None:
        unlikely_RL = score_RL.neg().clamp(min=0.0) + handicap(shared, ready_R)[:, None]
        unlikely_RL = unlikely_RL.masked_fill(~ready_R[:, None], torch.inf)
        stays_Rk = stays_Rk & _likeliest(unlikely_RL, shared.nodes).gather(1, node_Rk)
        node_Rk, stays_Rk = _stayers_first(node_Rk, stays_Rk)
    place_RL = node_Rk.new_full((rows, grown), -1)  # whose parent is gone, as it may if scores rise, hangs on nothing
    place_RL.scatter_(1, node_Rk, torch.arange(1, kept + 1, device=ready_R.device).expand(rows, -1))
    parent_Rk = parent_RL.gather(1, node_Rk)
    moved_Rk = torch.where(parent_Rk < 0, 0, place_RL.gather(1, parent_Rk.clamp(min=0)))
    out.token_RQ[:, 1 : kept + 1] = token_RL.gather(1, node_Rk)
    out.parent_RQ[:] = -1
    out.parent_RQ[:, 1 : kept + 1] = moved_Rk.masked_fill(~stays_Rk, -1)
    out.depth_RQ[:] = 0
    out.depth_RQ[:, 1 : kept + 1] = (level_L[node_Rk] + 1) * stays_Rk
    out.mask_RQW[:] = lines_of_sight(out.parent_RQ, depth)
    out.size_R[:] = stays_Rk.sum(dim=1)


def handicap(shared: Shared, ready_R: Tensor) -> Tensor:
    """float32 [R], from 0 on: nothing for the row that has most left of those that are ready."""
    left_R = shared.left_R.clamp(min=0).float() * ready_R
    return (shared.remaining_bias * (1.0 - left_R / left_R.amax().clamp(min=1.0))).clamp(max=shared.most)


def _likeliest(unlikely_RL: Tensor, nodes: int) -> Tensor:
    """bool [R, L]: one of so many of all; of equals the first. What is infinitely unlikely is none."""
    first = unlikely_RL.flatten().sort(stable=True).indices[:nodes]
    chosen_RL = torch.zeros_like(unlikely_RL, dtype=torch.bool)
    chosen_RL.view(-1)[first] = True
    return chosen_RL & unlikely_RL.isfinite()


def _stayers_first(node_Rk: Tensor, stays_Rk: Tensor) -> tuple[Tensor, Tensor]:
    """In the order they have; behind them those who go."""
    order_Rk = (~stays_Rk).int().sort(dim=1, stable=True).indices
    return node_Rk.gather(1, order_Rk), stays_Rk.gather(1, order_Rk)


def lines_of_sight(parent_RQ: Tensor, depth: int) -> Tensor:
    """int32 bits [R, Q, W]: a node sees itself and its ancestors; the root and padding hang on nothing (−1)."""
    rows, nodes = parent_RQ.shape
    device = parent_RQ.device
    see_RQQ = torch.eye(nodes, dtype=torch.bool, device=device).expand(rows, -1, -1)
    hangs_RQ1 = (parent_RQ >= 0)[:, :, None]
    above_RQQ = parent_RQ.clamp(min=0)[:, :, None].expand(-1, -1, nodes)
    for _ in range(depth):
        see_RQQ = see_RQQ | (see_RQQ.gather(1, above_RQQ) & hangs_RQ1)
    words = -(-nodes // WORD)
    padded = torch.nn.functional.pad(see_RQQ, (0, words * WORD - nodes)).view(rows, nodes, words, WORD)
    bit = torch.ones((), dtype=torch.int64, device=device) << torch.arange(WORD, device=device)
    return (padded * bit).sum(-1).to(torch.int32)  # bit 31 wraps to the sign
