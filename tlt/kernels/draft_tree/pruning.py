"""Pruning expanded draft trees to the nodes that the policy verifies, in torch: the reference of `pruning_triton`.

Expanded nodes are stored level by level, `width` to a level. The likeliest nodes are kept in that order, so that
parents come before children; a node's score never exceeds its parent's, and a small cost per level breaks ties for the
parent. A NaN score is the worst.
Each row keeps at most as many nodes as its tree has room for. With a verify budget that the rows share, only nodes
among the likeliest of all rows are kept, so a tree is as large as its row is predictable; of equal scores the first
rows' nodes are kept. A batch lasts as long as its longest row, so rows with fewer tokens left than others may get a
penalty (`VerifyBudget.remaining_bias`).
"""
# R rows, L nodes grown, k nodes kept, Q nodes of a tree (the root is 0), W mask words of 32 bits

from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL_COST = 1e-4  # taken off a score per level when nodes are compared
WORD = 32


@dataclass(frozen=True, slots=True)
class Pruned:
    """The trees to verify. Padding has no parent (−1), depth 0, and sees itself alone."""

    token_RQ: Tensor
    parent_RQ: Tensor
    depth_RQ: Tensor
    mask_RQW: Tensor
    size_R: Tensor  # nodes behind the root


@dataclass(frozen=True, slots=True)
class VerifyBudget:
    """The nodes that all rows together may have verified, and the bias towards rows with many tokens left."""

    nodes: int  # of all rows together, without roots
    left_R: Tensor  # int64: tokens that each row may still write
    remaining_bias: Tensor  # float32, one number: the penalty in nats of a row with no tokens left
    most: float = 0.0  # the largest penalty in nats


def prune(
    token_RL: Tensor,
    parent_RL: Tensor,
    score_RL: Tensor,
    ready_R: Tensor,
    width: int,
    depth: int,
    out: Pruned,
    shared: VerifyBudget | None = None,
) -> None:
    """The likeliest nodes of the first `depth` levels (parents: index among the L, −1 the root), in all rows together
    at most the verify budget. Rows that are not ready get no node. The root's token is left as it is."""
    rows, grown = len(ready_R), width * depth
    kept = min(out.token_RQ.shape[1] - 1, grown)
    level_L = torch.arange(grown, device=ready_R.device) // width
    score_RL = score_RL[:, :grown] - LEVEL_COST * level_L
    score_RL = score_RL.masked_fill(score_RL.isnan(), -torch.inf)
    order_RL = score_RL.sort(dim=1, descending=True, stable=True).indices
    node_Rk = order_RL[:, :kept].sort(dim=1).values
    stays_Rk = ready_R[:, None].expand(rows, kept)
    if shared is not None:
        unlikely_RL = score_RL.neg().clamp(min=0.0) + penalty(shared, ready_R)[:, None]
        unlikely_RL = unlikely_RL.masked_fill(~ready_R[:, None], torch.inf)
        stays_Rk = stays_Rk & _likeliest(unlikely_RL, shared.nodes).gather(1, node_Rk)
        node_Rk, stays_Rk = _kept_first(node_Rk, stays_Rk)
    place_RL = node_Rk.new_full(
        (rows, grown), -1
    )  # a node whose parent was dropped, as may be if scores rise, has no parent
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


def penalty(shared: VerifyBudget, ready_R: Tensor) -> Tensor:
    """float32 [R] ≥ 0: the penalty of each row; 0 for the ready row with most tokens left."""
    left_R = shared.left_R.clamp(min=0).float() * ready_R
    return (shared.remaining_bias * (1.0 - left_R / left_R.amax().clamp(min=1.0))).clamp(max=shared.most)


def _likeliest(unlikely_RL: Tensor, nodes: int) -> Tensor:
    """bool [R, L]: whether a node is among the `nodes` likeliest of all; of equals the first. Infinite cost: never."""
    first = unlikely_RL.flatten().sort(stable=True).indices[:nodes]
    chosen_RL = torch.zeros_like(unlikely_RL, dtype=torch.bool)
    chosen_RL.view(-1)[first] = True
    return chosen_RL & unlikely_RL.isfinite()


def _kept_first(node_Rk: Tensor, stays_Rk: Tensor) -> tuple[Tensor, Tensor]:
    """Kept nodes in their order, then the dropped ones."""
    order_Rk = (~stays_Rk).int().sort(dim=1, stable=True).indices
    return node_Rk.gather(1, order_Rk), stays_Rk.gather(1, order_Rk)


def lines_of_sight(parent_RQ: Tensor, depth: int) -> Tensor:
    """int32 bits [R, Q, W]: a node sees itself and its ancestors; the root and padding have no parent (−1)."""
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
