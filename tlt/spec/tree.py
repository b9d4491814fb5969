"""Draft trees as tensors, and the result of walking them with the policy's tokens.

A tree has Q nodes: node 0 is the root, padding nodes are at the end. What always holds: a node attends to itself and
its ancestors only; a padding node attends to itself only, has no parent (−1) and is never reached. The root's token is
the request's newest one, which the device fills in. For any tree, the emitted tokens are those that plain decoding
would have drawn, and after the walk the KV cache holds the accepted nodes' keys and values where plain decoding would
have put them. Draft probabilities are not used: the policy's keyed token at each node decides.
"""
# R requests, Q nodes of a tree, W mask words of 32 bits, S steps of a walk: the depth of the deepest tree + 1

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.spec.shape import Draft

_PADDING = -1
WORD = 32


@dataclass(frozen=True, slots=True)
class Trees:
    token_RQ: Tensor  # int64; column 0 is overwritten by the request's newest token
    parent_RQ: Tensor  # int64, index of the node it follows; −1 for the root and for padding
    depth_RQ: Tensor  # int64, distance from the root
    mask_RQW: Tensor  # int32 bits: the nodes of its tree to which a node attends
    size_R: Tensor  # int64, nodes after the root, without padding

    @classmethod
    def empty(cls, rows: int, nodes: int, device: torch.device | str) -> "Trees":
        """Tensors for trees. Graphs hold these pointers: `fill` them, never rebind."""
        words = -(-nodes // WORD)
        return cls(
            torch.zeros((rows, nodes), dtype=torch.int64, device=device),
            torch.full((rows, nodes), _PADDING, dtype=torch.int64, device=device),
            torch.zeros((rows, nodes), dtype=torch.int64, device=device),
            torch.zeros((rows, nodes, words), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def fill(self, drafts: Sequence[Draft]) -> None:
        """Writes one draft into each of the first rows; nodes beyond a draft's end become padding."""
        packed = torch.from_numpy(_pack(drafts, self.token_RQ.shape[1]))
        if self.token_RQ.is_cuda:
            packed = packed.pin_memory().to(self.token_RQ.device, non_blocking=True)
        rows = len(drafts)
        self.token_RQ[:rows] = packed[0]
        self.parent_RQ[:rows] = packed[1]
        self.depth_RQ[:rows] = packed[2]
        self.size_R[:rows] = (packed[1] != _PADDING).sum(dim=1)
        for word in range(self.mask_RQW.shape[2]):
            self.mask_RQW[:rows, :, word] = packed[3 + word].int()

    def clear(self, row: Tensor) -> None:
        """Removes the drafts of these rows (int64): only padding after the root."""
        self.parent_RQ.index_fill_(0, row, _PADDING)  # unlike `[row] = …`, this does not wait for the device
        self.depth_RQ.index_fill_(0, row, 0)
        self.mask_RQW[row] = own_bits(self.token_RQ.shape[1], row.device)
        self.size_R.index_fill_(0, row, 0)

    def first(self, rows: int) -> "Trees":
        """Views of the first rows."""
        return Trees(*(part[:rows] for part in self.parts))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return self.token_RQ, self.parent_RQ, self.depth_RQ, self.mask_RQW, self.size_R


def own_bits(nodes: int, device: torch.device) -> Tensor:
    """int32 [Q, W]: masks in which every node attends to itself only."""
    node = torch.arange(nodes, device=device)
    words = torch.zeros((nodes, -(-nodes // WORD)), dtype=torch.int64, device=device)
    bit = torch.ones((), dtype=torch.int64, device=device) << (node % WORD)
    return words.scatter(1, (node // WORD)[:, None], bit[:, None]).to(torch.int32)


def _pack(drafts: Sequence[Draft], nodes: int) -> np.ndarray:
    """[3 + words, R, Q]: tokens, parents, depths and mask words (as signed 32-bit values)."""
    words = -(-nodes // WORD)
    packed = np.zeros((3 + words, len(drafts), nodes), dtype=np.int64)
    packed[1] = _PADDING
    for node in range(nodes):
        packed[3 + node // WORD, :, node] = _signed(1 << (node % WORD))
    for row, draft in enumerate(drafts):
        size = len(draft) + 1
        if size > nodes:
            raise ValueError(f"a draft of {len(draft)} nodes and its root do not fit a tree of {nodes}")
        if size > WORD and draft.parents == tuple(range(-1, size - 2)):  # a chunk of text: rows have many nodes
            _pack_chain(packed[:, row], draft.tokens)
            continue
        sees, depth = [1], [0]
        for index, parent in enumerate(draft.parents, start=1):
            sees.append(sees[parent + 1] | 1 << index)
            depth.append(depth[parent + 1] + 1)
        packed[0, row, 1:size] = draft.tokens
        packed[1, row, 1:size] = [parent + 1 for parent in draft.parents]
        packed[2, row, :size] = depth
        for word in range(words):
            packed[3 + word, row, :size] = [_signed(bits >> (WORD * word) & 0xFFFFFFFF) for bits in sees]
    return packed


def _pack_chain(packed: np.ndarray, tokens: Sequence[int]) -> None:
    """[3 + words, Q]: of one row, where each node follows the one before it."""
    size = len(tokens) + 1
    node = np.arange(size)
    packed[0, 1:size] = tokens
    packed[1, 1:size] = node[:-1]
    packed[2, :size] = node
    for word in range(len(packed) - 3):
        bits = np.clip(node + 1 - WORD * word, 0, WORD)
        packed[3 + word, :size] = ((1 << bits) - 1).astype(np.uint32).view(np.int32)


def _signed(word: int) -> int:
    """The int32 with these 32 bits."""
    return word - (1 << 32) if word >> 31 else word


@dataclass(frozen=True, slots=True)
class Walk:
    packed: Tensor  # int32 [R, 3·S + 1]: tokens and bits of both log-probabilities of each step, then the steps
    moves_RS: Tensor  # int32 [R, S − 1]: slots from which accepted nodes move; −1: they stay
    places_RS: Tensor  # int32 [R, S − 1]: target slots of these moves, after the root's slot
    at_RS: Tensor  # int64, index in the forward of each node on the path, the root first; the last one repeats
    steps_R: Tensor  # int64, nodes on the path = tokens emitted: 1 + accepted
