"""Builds draft trees with a learned drafter, on its device, in place and in static shapes.

`roots` drafts the first level, `expand` one more level along the likeliest paths, `prune` writes the likeliest nodes of
all levels into the trees that the policy verifies. Each does the same work at every depth and in every tick, so one
captured graph of each suffices. A path's score only falls with depth, so the likeliest nodes form a tree. Reads nothing
back to the host; does not know requests or graphs.
"""
# R rows, w width, L nodes of a tree, D hidden, v draft tokens, N = R · w nodes of a level

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import growth, pruning
from tlt.kernels.draft_tree.growth import Growing
from tlt.kernels.draft_tree.pruning import Pruned, VerifyBudget
from tlt.kernels.linear.reference import Matrix
from tlt.model.device import Reading
from tlt.model.linear import rows_of
from tlt.spec.candidates import DrawKeys, candidates
from tlt.spec.eagle import Eagle
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.spec.tree import Trees
from tlt.spec.window import Ring
from tlt.types import Key


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of drafting: the drafter, its keys and values, its newest state of each row, the policy's tensors."""

    drafter: Eagle
    ring: Ring
    g_RD: Tensor
    embed_VD: Tensor
    head: Matrix  # of the draft tokens

    def first(self, rows: int) -> "DraftInputs":
        return DraftInputs(self.drafter, self.ring.first(rows), self.g_RD[:rows], self.embed_VD, self.head)


class TreeBuilder:
    """The unfinished trees of all rows, for one width. Graphs hold these tensors: never rebind."""

    def __init__(self, inputs: DraftInputs, width: int, deepest: int) -> None:
        drafter, (rows, hidden), device = inputs.drafter, inputs.g_RD.shape, inputs.g_RD.device
        self._inputs = inputs
        self.width = width
        self.grown = Growing.empty(rows, width, max(deepest, 2), hidden, inputs.g_RD.dtype, device)
        self.root_logits_Rv = torch.zeros((rows, drafter.config.draft_vocab), dtype=inputs.g_RD.dtype, device=device)
        self._nodes = drafter.new_nodes(rows, width * max(deepest, 2))  # their keys and values
        # a candidate's position is one after its root, and two after the entry of the node it follows
        self._after_root, self._after_entry = (torch.full((), more, device=device) for more in (1, 2))
        self._packed = torch.zeros(3 * self.grown.token_RL.numel(), dtype=torch.int32, device=device)

    def roots(self, rows: int, draws: DrawKeys, beta: Tensor) -> None:
        """Starts trees for the first rows. `draws` are the keys of the roots, their newest tokens."""
        inputs = self._inputs.first(rows)
        logits_Rv = inputs.drafter.logits(inputs.g_RD, inputs.head)
        self.root_logits_Rv[:rows] = logits_Rv
        named = candidates(logits_Rv, draws, beta, self.width, inputs.drafter.token_of_draft_v, ahead=self._after_root)
        start_trees = dispatch(growth.start_trees, inputs.g_RD.is_cuda)
        start_trees(self.grown.first(rows), named.token_Nk, named.score_Nk, inputs.g_RD, draws.position_N)

    def expand(self, rows: int, draws: DrawKeys, beta: Tensor) -> None:
        """Adds a level: the `width` likeliest successors of all nodes of the newest level. `draws`: as in `roots`."""
        inputs, grown = self._inputs.first(rows), self.grown.first(rows)
        entry_Rw = grown.entry_R[:, None].expand(-1, self.width)
        g = inputs.drafter.step(
            *(inputs.ring, self._nodes.first(rows), grown.token_Rw, grown.state_RwD),
            *(entry_Rw, grown.slot_Rw, grown.seen_RwL, inputs.embed_VD),
        )
        logits_Nv = inputs.drafter.logits(g, inputs.head)
        keys = replace(draws, position_N=grown.entry_R)
        named = candidates(
            *(logits_Nv, keys, beta, self.width, inputs.drafter.token_of_draft_v),
            repeat=self.width,
            ahead=self._after_entry,
        )
        g_RwD = rows_of(g).view(grown.state_RwD.shape)
        dispatch(growth.expand, logits_Nv.is_cuda)(grown, named.token_Nk, named.score_Nk, g_RwD, pdl=True)

    def prune(self, rows: int, depth: int, ready_R: Tensor, trees: Trees, shared: VerifyBudget | None = None) -> None:
        """Writes the likeliest nodes of the first `depth` levels into `trees`; with `shared`, over all rows together.

        Rows that are not ready get no draft.
        """
        out = Pruned(*trees.first(rows).parts)
        grown = self.grown.first(rows)
        nodes = (grown.token_RL, grown.parent_RL, grown.score_RL)
        dispatch(pruning.prune, ready_R.is_cuda)(*nodes, ready_R[:rows], self.width, depth, out, shared)

    def pack(self, rows: int, depth: int, ready_R: Tensor) -> None:
        """Writes the unpruned trees where `packed` reads them."""
        packed_R3L, grown = self.packed(rows, depth), self.grown.first(rows)
        nodes = packed_R3L.shape[2]
        packed_R3L[:, 0] = grown.token_RL[:, :nodes]
        packed_R3L[:, 1] = torch.where(ready_R[:rows, None], grown.parent_RL[:, :nodes], NOT_READY)
        packed_R3L[:, 2] = grown.score_RL[:, :nodes].view(torch.int32)

    def packed(self, rows: int, depth: int) -> Tensor:
        """int32 [R, 3, L], for the host: tokens, parents, bits of scores."""
        nodes = self.width * depth
        return self._packed[: rows * 3 * nodes].view(rows, 3, nodes)


NOT_READY = -2  # first parent of a row that cannot be drafted for yet


@dataclass(slots=True)
class BuiltTrees:
    shape: Shape
    tick: int  # before which it was built
    row_of: Mapping[Key, int]  # rows when it was built
    packed_R3L: Reading  # int32: tokens, parents, bits of scores
    cleared: set[Key] = field(default_factory=set)  # requests that were preempted and re-entered: no draft

    def draft(self, key: Key) -> Draft:
        row = self.row_of.get(key)
        if row is None or key in self.cleared:
            return EMPTY
        packed_3L = self.packed_R3L.on_host().numpy()[row]
        tokens, parents, _ = packed_3L.tolist()
        if parents[0] == NOT_READY:
            return EMPTY
        chances = np.exp(packed_3L[2].view(np.float32))
        return Draft(tuple(tokens), tuple(parents), tuple(chances.tolist()))
