"""The device state of each row of the batch: next token, position, key, sampling settings and page table.

The host sends only changes (entries, moves, new pages). A tick reads and advances the state on the device, so the next
tick can start before the host has read this one's tokens. Always holds: rows at or beyond `count` are idle and write
nothing. In a tensor-parallel engine only the leader has rows; the other ranks receive its inputs.
"""
# R rows, P pages of a row, E changed rows, Q nodes of a tree, T nodes of all trees, S steps of a walk, W mask words

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from tlt.engine.sampler import Sampled, SamplingRows, log_min_p
from tlt.engine.scheduler import Plan
from tlt.kernels.batch_state import reference as batch_state
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import verification as tree_kernels
from tlt.kernels.sampling.noise import as_int64
from tlt.model.parallel import ALONE, Alone
from tlt.spec.drafter import RowView
from tlt.spec.shape import FAVOUR
from tlt.spec.tree import Trees, Walk


@dataclass(frozen=True, slots=True)
class TickInputs:
    """Inputs of forward and sampler for the first rows, in plain decoding."""

    token_R: Tensor
    position_R: Tensor
    slot_R: Tensor  # int32, slot of the token's key and value in the KV cache; −1 in idle rows
    context_R: Tensor  # int32, context length, the token included; 0 in idle rows
    pages_RP: Tensor
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs of forward and sampler for the draft trees of the first rows, packed row by row."""

    start_R1: Tensor  # int32, index of each row's first node; last: the number of nodes
    token_T: Tensor
    position_T: Tensor  # position of the root plus the node's depth
    slot_T: Tensor  # int32: consecutive places of the KV cache, from the root's on; −1 in idle rows
    mask_TW: Tensor  # int32 bits: the nodes of its tree that a node attends to
    context_R: Tensor  # int32, 0 in idle rows
    pages_RP: Tensor
    sampling: SamplingRows  # T rows


class Rows:
    def __init__(self, rows: int, pages: int, page_size: int, device: torch.device, parallel: Alone = ALONE) -> None:
        self._parallel = parallel
        self._page_size = page_size
        self._device = device
        self._ints = torch.zeros((rows, 5), dtype=torch.int64, device=device)  # token, position, seed, request, top-k
        self._floats = torch.tensor([[1.0, 1.0, -inf]], device=device).repeat(rows, 1)  # temperature, top-p, ln min-p
        self._pages = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self._ends = torch.zeros(rows, dtype=torch.int64, device=device)  # position of the request's last allowed token
        self._remaining_bias = torch.zeros((), dtype=torch.float32, device=device)  # see `RowView`
        self._known_remaining_bias = 0.0
        self._count = torch.zeros((), dtype=torch.int32, device=device)  # graphs hold this pointer: fill_, never rebind
        self._known_count = 0

    def view(self) -> RowView:
        """Views of the live tensors, for drafters."""
        ints, temperature = self._ints, self._floats[:, 0]
        return RowView(ints[:, 1], ints[:, 2], ints[:, 3], temperature, self._ends, self._remaining_bias, self._count)

    def apply(self, plan: Plan) -> None:
        """Brings the rows to where the plan's decode starts."""
        if plan.moves:
            self._move(plan.moves)
        if plan.entries:
            self._enter(plan)
        if plan.new_pages:
            row, column, page = self._send(list(zip(*plan.new_pages, strict=True)), torch.int64)
            self._pages[row, column] = page.int()
        self.set_count(len(plan.reqs))
        self._set_remaining_bias(0.0 if plan.has_waiting else FAVOUR)

    def set_count(self, count: int) -> int:
        """Sets the number of live rows. Returns the previous number."""
        before, self._known_count = self._known_count, count
        if count != before:
            self._count.fill_(count)
        return before

    def _set_remaining_bias(self, remaining_bias: float) -> None:
        """The bias is 0 while requests wait for a row, when only throughput counts. See `RowView`."""
        if remaining_bias != self._known_remaining_bias:
            self._known_remaining_bias = remaining_bias
            self._remaining_bias.fill_(remaining_bias)

    def inputs(self, rows: int, filtered: bool) -> TickInputs:
        """Inputs of the first `rows` rows. In a captured graph this reads the state at replay."""
        int64s, int32s, float32s = dispatch(batch_state.prepare_decode, self._ints.is_cuda)(
            *self._state(), rows, self._page_size
        )
        self._parallel.share(int64s, int32s, float32s, self._pages[:rows])
        token, position = int64s[:2]
        sampling = _sampling(int64s, float32s, filtered)
        return TickInputs(token, position, int32s[0], int32s[1], self._pages[:rows], sampling)

    def finish(self, rows: int, drawn: Sampled) -> Tensor:
        """Makes the drawn tokens the next inputs. Returns tokens and bits of both log-probabilities, int32 [R, 3].

        A row whose logits are NaN or infinite has drawn −1. It continues with token 0 until its request is removed.
        """
        ints, _, _, count = self._state()
        drawn_parts = (drawn.token_R, drawn.logprob_R, drawn.policy_logprob_R)
        return dispatch(batch_state.finish_decode, ints.is_cuda)(ints, count, *drawn_parts, rows)

    def tree_inputs(self, trees: Trees, tokens: int, filtered: bool) -> TreeInputs:
        """Puts each row's newest token at the root of its tree, and packs the nodes of all trees into `tokens` tokens.

        Padding nodes are kept if `tokens` = rows × nodes, and left out otherwise.
        """
        (rows, nodes), state, on_gpu = trees.token_RQ.shape, self._state(), self._ints.is_cuda
        if tokens == rows * nodes:
            start_R1 = torch.arange(0, tokens + 1, nodes, dtype=torch.int32, device=self._device)
        else:
            start_R1 = dispatch(tree_kernels.starts, on_gpu)(trees.size_R, self._count, tokens)
        laid = (trees.token_RQ, trees.depth_RQ, trees.mask_RQW)
        int64s, slot_T, context_R, float32s, mask_TW = dispatch(tree_kernels.prepare, on_gpu)(
            state, laid, start_R1, tokens, self._page_size
        )
        pages_RP = self._pages[:rows]
        self._parallel.share(start_R1, int64s, slot_T, context_R, float32s, mask_TW, pages_RP)
        token_T, position_T = int64s[:2]
        sampling = _sampling(int64s, float32s, filtered)
        return TreeInputs(start_R1, token_T, position_T, slot_T, mask_TW, context_R, pages_RP, sampling)

    def finish_trees(self, trees: Trees, inputs: TreeInputs, drawn: Sampled, steps: int) -> Walk:
        """Walks the trees. The last token of each walk becomes the next root."""
        ints, _, _, count = self._state()
        tree = (trees.parent_RQ, trees.token_RQ)
        drawn_parts = (inputs.slot_T, drawn.token_R, drawn.logprob_R, drawn.policy_logprob_R)
        walk = Walk(
            *dispatch(tree_kernels.finish, ints.is_cuda)(ints, count, tree, inputs.start_R1, drawn_parts, steps)
        )
        self._parallel.share(walk.moves_RS, walk.places_RS)  # the other ranks have no trees
        return walk

    def _state(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._ints, self._floats, self._pages, self._count

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        source, target = self._send(list(zip(*moves, strict=True)), torch.int64)
        batch_state.move_rows((self._ints, self._floats, self._pages, self._ends), source, target)

    def _enter(self, plan: Plan) -> None:
        entries = plan.entries
        ints, floats, pages = [], [], []
        width = max(len(entry.pages) for entry in entries)
        for entry in entries:
            key, params = entry.request.noise_key, entry.request.params
            ints.append([entry.token, entry.position, as_int64(key.seed), as_int64(key.request), params.top_k])
            floats.append([params.temperature, params.top_p, log_min_p(params)])
            pages.append([*entry.pages, *[0] * (width - len(entry.pages))])
        row, ends = self._send([(entry.row, entry.position + entry.left) for entry in entries], torch.int64).unbind(1)
        self._ends[row] = ends
        self._ints[row] = self._send(ints, torch.int64)
        self._floats[row] = self._send(floats, torch.float32)
        self._pages[row, :width] = self._send(pages, torch.int32)

    def _send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _sampling(int64s: Tensor, float32s: Tensor, filtered: bool) -> SamplingRows:
    next_position, seed, request, top_k = int64s[2:]
    temperature, top_p, min_p = float32s
    return SamplingRows(seed, request, next_position, temperature, top_k, top_p, min_p, filtered)


def send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values on the device, without waiting for it."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
