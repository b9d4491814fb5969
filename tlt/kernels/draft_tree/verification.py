"""Around a verification tick, in torch: row state and trees → inputs, drawn tokens → walk → row state.

A node's position is its root's plus its depth, and its slot is its root's plus its number in the tree. The forward
holds the rows' nodes one row after the other: row r's from `start_R1[r]` up to the next row's start, all Q of them or
the first ones that fit; tokens behind the last row are padding. Rows past `count` are idle: their slots are −1, their
context is 0, and nothing of them changes.
"""
# R rows, Q nodes of a tree, T tokens of the forward, S steps of a walk, P pages of a row, W mask words

import torch
from torch import Tensor


def starts(size_R: Tensor, count: Tensor, tokens: int) -> Tensor:
    """int32 [R + 1]: where each row's nodes start if its tree has `size_R` nodes behind the root.

    All roots fit into the tokens. Where the other nodes do not, the last rows' trees are cut to their first nodes.
    """
    rows = len(size_R)
    row_R = torch.arange(rows, device=size_R.device)
    behind_R = (size_R * (row_R < count)).cumsum(0).clamp(max=tokens - rows)
    start_R1 = torch.zeros(rows + 1, dtype=torch.int32, device=size_R.device)
    start_R1[1:] = row_R + 1 + behind_R
    return start_R1


def prepare(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    trees: tuple[Tensor, Tensor, Tensor],
    start_R1: Tensor,
    tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows (ints [R, 5], floats [R, 3], pages [R, P], count) and trees (token, depth [R, Q], mask [R, Q, W]) → inputs.

    Puts each row's newest token at the root of its tree. Returns int64 [6, T]: token, position, position of the next,
    seed, request, top-k; int32 slots [T]; int32 context [R]; float32 [2, T]: temperature, top-p; int32 mask [T, W].
    """
    (ints_R5, floats_R3, pages_RP, count), (token_RQ, depth_RQ, mask_RQW) = state, trees
    rows, device = len(token_RQ), count.device
    ints, floats = ints_R5[:rows], floats_R3[:rows]
    token_RQ[:, 0] = ints[:, 0]
    row_T, node_T, owned_T = _places(start_R1, tokens)
    live_R = torch.arange(rows, device=device) < count
    live_T = live_R[row_T] & owned_T
    # idle rows hold positions of the past: they must not look beyond their table
    position_T = ints[row_T, 1] * live_T
    place_T = (position_T + node_T) * live_T
    page_T = pages_RP[row_T, place_T // page_size]
    slot_T = (page_T * page_size + place_T % page_size).masked_fill(~live_T, -1).int()
    deep_T = (position_T + depth_RQ[row_T, node_T]) * live_T
    each = [ints[row_T, column] for column in (2, 3, 4)]
    context_R = ((ints[:, 1] + start_R1[1:] - start_R1[:-1]) * live_R).int()
    int64s = torch.stack((token_RQ[row_T, node_T], deep_T, deep_T + 1, *each))
    return int64s, slot_T, context_R, floats[row_T].t().contiguous(), mask_RQW[row_T, node_T]


def _places(start_R1: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row and node of each token, and whether it is no padding: padding counts as the last row's root."""
    token_T, rows = torch.arange(tokens, device=start_R1.device), len(start_R1) - 1
    owned_T = token_T < start_R1[-1]
    row_T = (torch.searchsorted(start_R1, token_T, right=True) - 1).clamp(max=rows - 1)
    return row_T, (token_T - start_R1[row_T]) * owned_T, owned_T


def finish(
    ints_R5: Tensor,
    count: Tensor,
    tree: tuple[Tensor, Tensor],
    start_R1: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Walks each tree (parent, token [R, Q]) along the drawn tokens (slot, token, logprob, policy logprob [T]).

    The last token of a walk becomes the row's newest. Returns
    int32 [R, 3·S + 1]: tokens and the bits of both log-probabilities of each step, then the number of steps;
    int32 [R, S − 1] twice: slots from which accepted nodes must move, −1 where they lie right, and slots they move to;
    int64 [R, S]: the tokens of the forward walked through; int64 [R]: the steps.
    """
    (parent_RQ, token_RQ), (rows, nodes) = tree, tree[0].shape
    node_Q = torch.arange(nodes, device=count.device)
    there_RQ = node_Q < (start_R1[1:] - start_R1[:-1])[:, None]
    at_RQ = (start_R1[:-1, None] + node_Q * there_RQ).long()
    slot_RQ, drawn_RQ, logprob_RQ, policy_RQ = (part[at_RQ] for part in drawn)
    slot_RQ = slot_RQ.masked_fill(~there_RQ, -1)
    node_RS, steps_R = walk(parent_RQ.masked_fill(~there_RQ, -1), token_RQ, drawn_RQ, steps)
    last_R = drawn_RQ.gather(1, node_RS[:, -1:]).squeeze(1)
    live_R = torch.arange(rows, device=count.device) < count
    ints_R5[:rows, 0] = torch.where(live_R, last_R.clamp(min=0), ints_R5[:rows, 0])
    ints_R5[:rows, 1] += steps_R * live_R
    place = torch.arange(1, steps, device=count.device)
    moves_RS = (place < steps_R[:, None]) & (node_RS[:, 1:] != place)
    source_RS = slot_RQ.gather(1, node_RS[:, 1:]).masked_fill(~moves_RS, -1)
    bits = [part.gather(1, node_RS).view(torch.int32) for part in (logprob_RQ, policy_RQ)]
    packed = torch.cat((drawn_RQ.gather(1, node_RS).int(), *bits, steps_R[:, None].int()), dim=1)
    return packed, source_RS, slot_RQ[:, 1:steps].contiguous(), at_RQ.gather(1, node_RS), steps_R


def walk(parent_RQ: Tensor, token_RQ: Tensor, drawn_RQ: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Follows each tree from its root along the drawn tokens, at most `steps` nodes; the last node repeats.

    At each node the policy drew its token as plain decoding would have at that place. If a child carries that token,
    what was drawn at the child was drawn in the right place too; the walk ends where no child does.
    """
    rows = torch.arange(len(drawn_RQ), device=drawn_RQ.device)
    node = torch.zeros_like(rows)
    walked = torch.ones_like(rows)
    walking = torch.ones_like(rows, dtype=torch.bool)
    nodes = [node]
    for _ in range(steps - 1):
        follows_RQ = (parent_RQ == node[:, None]) & (token_RQ == drawn_RQ[rows, node][:, None])
        walking = walking & follows_RQ.any(dim=1)
        if not walking.any():  # chunks of written-ahead text are long, and may differ early
            break
        node = torch.where(walking, follows_RQ.int().argmax(dim=1), node)
        walked = walked + walking
        nodes.append(node)
    nodes += [node] * (steps - len(nodes))
    return torch.stack(nodes, dim=1), walked
