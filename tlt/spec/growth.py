"""Growing draft trees from a learned drafter, on its device, in static shapes: one graph serves every tick.

`grow` names `width` candidates level by level along the likeliest paths. A path's score only falls with depth, so the
likeliest nodes of all levels are a tree.
"""
# R rows, w width, L = w · depth nodes, D hidden, v draft tokens

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.spec.candidates import Candidates, DrawKeys, candidates
from tlt.spec.eagle import Eagle
from tlt.spec.window import Nodes, Ring


@dataclass(frozen=True, slots=True)
class Growth:
    """Every node that was named, level by level."""

    token_RL: Tensor  # int64
    parent_RL: Tensor  # int64, index among the L; −1 for the root
    score_RL: Tensor  # float32, log-probability of the whole path
    root_logits_Rv: Tensor  # what the first level was named from


@dataclass(frozen=True, slots=True)
class Soil:
    """What a tree grows from: the drafter, its keys and values, its newest state of each row, the policy's tensors."""

    drafter: Eagle
    ring: Ring
    nodes: Nodes  # room for the tree's own keys and values
    g_RD: Tensor
    embed_VD: Tensor
    head_vD: Tensor


def grow(soil: Soil, draws: DrawKeys, beta: Tensor | float, depth: int, width: int) -> Growth:
    """`draws` are the keys of the roots' successors; a level deeper, the position is one more."""
    drafter, rows, device = soil.drafter, len(soil.g_RD), soil.g_RD.device
    slots = width * depth
    root_logits_Rv = drafter.logits(soil.g_RD, soil.head_vD)
    named = _name(drafter, root_logits_Rv, draws, 0, beta, width)
    token_Rw, score_Rw = named.token_Nk, named.score_Nk
    g_RwD = soil.g_RD[:, None].expand(-1, width, -1)
    seen_RwN = torch.zeros((rows, width, slots), dtype=torch.bool, device=device)
    levels = [(token_Rw, torch.full_like(token_Rw, -1), score_Rw)]
    for level in range(1, depth):
        slot_w = torch.arange(width, device=device) + (level - 1) * width
        seen_RwN = seen_RwN.scatter(2, slot_w[None, :, None].expand(rows, -1, 1), True)
        entry_Rw = (draws.position_N + level - 2)[:, None].expand(-1, width)  # a node's entry is one before its token
        g_RwD = drafter.step(
            *(soil.ring, soil.nodes, token_Rw, g_RwD, entry_Rw, slot_w.expand(rows, -1), seen_RwN, soil.embed_VD)
        )
        logits_Nv = drafter.logits(g_RwD.flatten(0, 1), soil.head_vD)
        named = _name(drafter, logits_Nv, draws, level, beta, width, repeat=width)
        paths = (score_Rw[:, :, None] + named.score_Nk.view(rows, width, width)).flatten(1).topk(width, dim=1)
        above_Rw = paths.indices // width
        token_Rw, score_Rw = named.token_Nk.view(rows, -1).gather(1, paths.indices), paths.values
        g_RwD = g_RwD.gather(1, above_Rw[:, :, None].expand(-1, -1, g_RwD.shape[2]))
        seen_RwN = seen_RwN.gather(1, above_Rw[:, :, None].expand(-1, -1, slots))
        levels.append((token_Rw, above_Rw + (level - 1) * width, score_Rw))
    token_RL, parent_RL, score_RL = (torch.cat(part, dim=1) for part in zip(*levels, strict=True))
    return Growth(token_RL, parent_RL, score_RL, root_logits_Rv)


def _name(
    drafter: Eagle, logits_Nv: Tensor, draws: DrawKeys, level: int, beta: Tensor | float, width: int, repeat: int = 1
) -> Candidates:
    """Successors at this level, with the very noise the policy will draw them with."""
    keys = DrawKeys(
        draws.seed_N.repeat_interleave(repeat),
        draws.request_N.repeat_interleave(repeat),
        (draws.position_N + level).repeat_interleave(repeat),
        draws.temperature_N.repeat_interleave(repeat),
    )
    return candidates(logits_Nv, keys, beta, width, drafter.token_of_draft_v)


def paths_of(growth: Growth) -> Sequence[tuple[list[int], list[int], list[float]]]:
    """Tokens, parents and probabilities of each row, on the host."""
    columns = (growth.token_RL.tolist(), growth.parent_RL.tolist(), growth.score_RL.exp().tolist())
    return list(zip(*columns, strict=True))
