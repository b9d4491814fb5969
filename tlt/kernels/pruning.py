"""Pruning what a drafter grew to the trees that the policy verifies, in torch; `pruning_triton` is held equal to it.

The nodes of a growth lie level by level, `width` to a level. The likeliest of them stay, in that order, so that parents
come before children; a node's score never exceeds its parent's, and a small cost per level breaks ties for the parent.
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


def prune(
    token_RL: Tensor, parent_RL: Tensor, score_RL: Tensor, ready_R: Tensor, width: int, depth: int, out: Pruned
) -> None:
    """The likeliest nodes of the first `depth` levels (parents: index among the L, −1 the root). Rows that are not
    ready get no node. The root's token is left as it is."""
    rows, grown = len(ready_R), width * depth
    kept = min(out.token_RQ.shape[1] - 1, grown)
    level_L = torch.arange(grown, device=ready_R.device) // width
    score_RL = score_RL[:, :grown] - LEVEL_COST * level_L
    order_RL = score_RL.sort(dim=1, descending=True, stable=True).indices
    node_Rk = order_RL[:, :kept].sort(dim=1).values
    place_RL = node_Rk.new_full((rows, grown), -1)  # whose parent is gone (scores that are none) hangs on nothing
    place_RL.scatter_(1, node_Rk, torch.arange(1, kept + 1, device=ready_R.device).expand(rows, -1))
    parent_Rk = parent_RL.gather(1, node_Rk)
    moved_Rk = torch.where(parent_Rk < 0, 0, place_RL.gather(1, parent_Rk.clamp(min=0)))
    ready_R1 = ready_R[:, None]
    out.token_RQ[:, 1 : kept + 1] = token_RL.gather(1, node_Rk)
    out.parent_RQ[:] = -1
    out.parent_RQ[:, 1 : kept + 1] = moved_Rk.masked_fill(~ready_R1, -1)
    out.depth_RQ[:] = 0
    out.depth_RQ[:, 1 : kept + 1] = (level_L[node_Rk] + 1) * ready_R1
    out.mask_RQW[:] = lines_of_sight(out.parent_RQ, depth)


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
