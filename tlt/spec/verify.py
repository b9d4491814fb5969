"""Verification: the policy's own keyed token at each node decides how far down the tree a request walks.

What always holds: for any tree, a hostile one included, the tokens emitted are those plain decoding would have drawn.
Node by node the policy drew its token as it would have at that place in plain decoding; if a child carries that token,
everything drawn at the child was drawn in the right place too. The walk ends where no child does; the token drawn there
is emitted all the same. No draft probability enters.
"""
# R requests, Q nodes, S steps of a walk (the longest possible: the depth of the deepest tree + 1)

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.spec.tree import Trees


@dataclass(frozen=True, slots=True)
class Walk:
    node_RS: Tensor  # int64, the nodes walked through, the root first; the last one repeats
    steps_R: Tensor  # int64, nodes walked = tokens emitted: 1 + accepted


def walk(trees: Trees, drawn_RQ: Tensor, steps: int) -> Walk:
    """Follows each tree from its root along the tokens drawn by the policy, at most `steps` nodes."""
    rows = torch.arange(drawn_RQ.shape[0], device=drawn_RQ.device)
    node = torch.zeros_like(rows)
    walked = torch.ones_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    nodes = [node]
    for _ in range(steps - 1):
        child_RQ = (trees.parent_RQ == node[:, None]) & (trees.token_RQ == drawn_RQ[rows, node][:, None])
        alive = alive & child_RQ.any(dim=1)
        node = torch.where(alive, child_RQ.int().argmax(dim=1), node)
        walked = walked + alive
        nodes.append(node)
    return Walk(torch.stack(nodes, dim=1), walked)
