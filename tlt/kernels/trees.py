"""What surrounds a verification tick, in torch: row state and trees → inputs, drawn tokens → walk → row state.

A node of a tree stands as many positions behind its root as it is deep, and lies as many slots behind it as its number.
Rows past `count` are idle: their slots are −1, their context 0, and nothing of them changes.
"""
# R rows, Q nodes of a tree, S steps of a walk, P pages of a row

import torch
from torch import Tensor


def prepare(
    ints_R5: Tensor,
    floats_R2: Tensor,
    pages_RP: Tensor,
    count: Tensor,
    token_RQ: Tensor,
    depth_RQ: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Puts each row's newest token at the root of its tree. Returns int64 [5, R, Q]: position, position of the next,
    seed, request, top-k; int32 slots [R, Q]; int32 context [R]; float32 [2, R, Q]: temperature, top-p."""
    rows, nodes = token_RQ.shape
    ints, floats = ints_R5[:rows], floats_R2[:rows]
    token_RQ[:, 0] = ints[:, 0]
    live_R1 = (torch.arange(rows, device=count.device) < count)[:, None]
    # idle rows hold positions of the past: they must not look beyond their table
    position_R1 = ints[:, 1:2] * live_R1
    place_RQ = (position_R1 + torch.arange(nodes, device=count.device)) * live_R1
    page_RQ = pages_RP[:rows].gather(1, place_RQ // page_size)
    slot_RQ = (page_RQ * page_size + place_RQ % page_size).masked_fill(~live_R1, -1).int()
    position_RQ = (position_R1 + depth_RQ) * live_R1
    each = [ints[:, column, None].expand(rows, nodes) for column in (2, 3, 4)]
    context_R = ((position_R1 + nodes) * live_R1).squeeze(1).int()
    float32s = floats.t()[:, :, None].expand(2, rows, nodes).contiguous()
    return torch.stack((position_RQ, position_RQ + 1, *each)), slot_RQ, context_R, float32s


def finish(
    ints_R5: Tensor,
    count: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
    drawn: tuple[Tensor, Tensor, Tensor],
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks each tree (parent, token, slot [R, Q]) along the drawn tokens (token, logprob, policy logprob [R·Q]).

    The last token of a walk becomes the row's newest. Returns
    int32 [R, 3·S + 1]: tokens and the bits of both log-probabilities of each step, then the number of steps;
    int32 [R, S − 1]: slots from which accepted nodes must move to slot 1, 2, … of their tree, −1 where they lie right;
    int64 [R, S]: the nodes walked through; int64 [R]: the steps.
    """
    parent_RQ, token_RQ, slot_RQ = tree
    rows, nodes = parent_RQ.shape
    drawn_RQ, logprob_RQ, policy_RQ = (part.view(rows, nodes) for part in drawn)
    node_RS, steps_R = walk(parent_RQ, token_RQ, drawn_RQ, steps)
    last_R = drawn_RQ.gather(1, node_RS[:, -1:]).squeeze(1)
    live_R = torch.arange(rows, device=count.device) < count
    ints_R5[:rows, 0] = torch.where(live_R, last_R.clamp(min=0), ints_R5[:rows, 0])
    ints_R5[:rows, 1] += steps_R * live_R
    place = torch.arange(1, steps, device=count.device)
    moves_RS = (place < steps_R[:, None]) & (node_RS[:, 1:] != place)
    source_RS = slot_RQ.gather(1, node_RS[:, 1:]).masked_fill(~moves_RS, -1)
    bits = [part.gather(1, node_RS).view(torch.int32) for part in (logprob_RQ, policy_RQ)]
    packed = torch.cat((drawn_RQ.gather(1, node_RS).int(), *bits, steps_R[:, None].int()), dim=1)
    return packed, source_RS, node_RS, steps_R


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
        node = torch.where(walking, follows_RQ.int().argmax(dim=1), node)
        walked = walked + walking
        nodes.append(node)
    return torch.stack(nodes, dim=1), walked
