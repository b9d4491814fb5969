"""Expanding draft trees level by level, in torch: what a CPU runs, and the reference of `growth_triton`.

Owns the bookkeeping between two levels: of all successors named for the newest level the likeliest paths become the
next level. Always holds: shapes do not depend on what a tensor holds, so one CUDA graph serves every level; rows are
independent. Knows scores and slots; knows nothing of drafters, vocabularies or noise.
"""
# R rows, w nodes of a level, E levels at most, L = w · E nodes of a tree, c = w · w successors of a level, D hidden

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Growing:
    """Every row's tree while it grows, and its newest level. Graphs hold these tensors: never rebind."""

    token_RL: Tensor  # int64; node n of level e is column e · w + n
    parent_RL: Tensor  # int64, column of the parent; −1: the root
    score_RL: Tensor  # float32, log-probability of the whole path
    token_Rw: Tensor  # the newest level
    score_Rw: Tensor
    state_RwD: Tensor  # the hidden state each of its nodes was named from
    seen_RwL: Tensor  # bool: its ancestors' columns and its own
    slot_Rw: Tensor  # int64: its columns
    entry_R: Tensor  # int64: where its nodes stand: one before their tokens' positions
    level_R: Tensor  # int64: of the nodes that come next

    @classmethod
    def empty(
        cls, rows: int, width: int, levels: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> "Growing":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        nodes = width * levels
        return cls(
            *(zeros(rows, nodes), zeros(rows, nodes) - 1, zeros(rows, nodes, dtype=torch.float32)),
            *(zeros(rows, width), zeros(rows, width, dtype=torch.float32), zeros(rows, width, hidden, dtype=dtype)),
            *(zeros(rows, width, nodes, dtype=torch.bool), zeros(rows, width), zeros(rows), zeros(rows) + 1),
        )

    @property
    def levels(self) -> int:
        return self.token_RL.shape[1] // self.token_Rw.shape[1]

    def first(self, rows: int) -> "Growing":
        """Views of the first rows."""
        return Growing(*(getattr(self, name)[:rows] for name in self.__slots__))


def start_trees(
    trees: Growing, token_Rw: Tensor, score_Rw: Tensor, state_RD: Tensor, position_R: Tensor, *, pdl: bool = False
) -> None:
    """The first level: successors of each row's root, named from its state; `position` is the root's."""
    trees.state_RwD.copy_(state_RD[:, None].expand_as(trees.state_RwD))
    trees.seen_RwL.zero_()
    trees.level_R.zero_()
    trees.entry_R.copy_(position_R - 1)
    _grown(trees, token_Rw, torch.full_like(token_Rw, -1), score_Rw)


def expand(trees: Growing, token_Nk: Tensor, score_Nk: Tensor, state_RwD: Tensor, *, pdl: bool = False) -> None:
    """One level more: the w likeliest of the newest level's successors, w of each, named from `state`.

    Of equal scores the kernel takes the first. The last level of a full tree is replaced.
    """
    rows, width = trees.token_Rw.shape
    total_Rc = (trees.score_Rw[:, :, None] + score_Nk.view(rows, width, width)).flatten(1)
    best = total_Rc.topk(width, dim=1)
    above_Rw = best.indices // width
    trees.state_RwD.copy_(state_RwD.gather(1, above_Rw[:, :, None].expand_as(state_RwD)))
    trees.seen_RwL.copy_(trees.seen_RwL.gather(1, above_Rw[:, :, None].expand_as(trees.seen_RwL)))
    token_Rw = token_Nk.view(rows, -1).gather(1, best.indices)
    _grown(trees, token_Rw, above_Rw + (trees.level_R[:, None] - 1) * width, best.values)


def _grown(trees: Growing, token_Rw: Tensor, parent_Rw: Tensor, score_Rw: Tensor) -> None:
    width = token_Rw.shape[1]
    place_w = torch.arange(width, device=token_Rw.device)
    column_Rw = trees.level_R[:, None] * width + place_w
    trees.token_RL.scatter_(1, column_Rw, token_Rw)
    trees.parent_RL.scatter_(1, column_Rw, parent_Rw)
    trees.score_RL.scatter_(1, column_Rw, score_Rw)
    trees.token_Rw.copy_(token_Rw)
    trees.score_Rw.copy_(score_Rw)
    next_R = (trees.level_R + 1).clamp(max=max(trees.levels - 1, 1))
    trees.slot_Rw.copy_((next_R[:, None] - 1) * width + place_w)
    trees.seen_RwL.scatter_(2, trees.slot_Rw[:, :, None], True)
    trees.entry_R.add_(next_R - trees.level_R)
    trees.level_R.copy_(next_R)
