"""The drafter's attention in rollout, in torch: what a CPU runs, and the reference of `window_triton`.

Each query sees the positions of its row's ring within the sliding window, and the draft tree's nodes that its mask
names. Knows slots and positions; knows nothing of weights, tokens or trees.
"""
# R rows, Q queries of a row, W ring slots that count (one more lies behind them: padding, never read), N keys beside
# H query heads, K key heads, d head width

import torch
from torch import Tensor

Beside = tuple[Tensor, Tensor, Tensor]  # k [R, K, N, d], v alike, and which queries see them: bool [R, Q, N]


def attend(
    q_RQHd: Tensor,
    k_RKWd: Tensor,
    v_RKWd: Tensor,
    held_RW: Tensor,
    position_RQ: Tensor,
    beside: Beside | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """[R, Q, H, d]. `held` is the position each slot holds (−1: none), all of them no newer than the queries'.

    A query that sees nothing gives finite values that must not be used. `pdl` is a launch hint for the GPU.
    """
    (R, Q, H, d), K, W = q_RQHd.shape, k_RKWd.shape[1], held_RW.shape[1] - 1
    q_RKQd = (q_RQHd * d**-0.5).view(R, Q, K, H // K, d).permute(0, 2, 3, 1, 4).reshape(R, K, -1, d)
    scores = torch.matmul(q_RKQd, k_RKWd[:, :, :W].transpose(2, 3)).view(R, K, H // K, Q, W)
    seen = seen_by(held_RW, position_RQ)
    if beside is not None:
        k_RKNd, v_RKNd, seen_RQN = beside
        near = torch.matmul(q_RKQd, k_RKNd.transpose(2, 3)).view(R, K, H // K, Q, -1)
        scores, seen = torch.cat((scores, near), dim=-1), torch.cat((seen, seen_RQN), dim=2)
    hidden = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~seen[:, None, None], hidden).softmax(-1).flatten(2, 3)
    unseen = ~seen.any(dim=1)[:, None, :, None]  # a weight of zero would not silence a NaN
    out = torch.matmul(weights[..., :W], v_RKWd[:, :, :W].masked_fill(unseen[:, :, :W], 0.0))
    if beside is not None:
        out = out + torch.matmul(weights[..., W:], v_RKNd.masked_fill(unseen[:, :, W:], 0.0))
    return out.view(R, K, H // K, Q, d).permute(0, 3, 1, 2, 4).reshape(R, Q, H, d)


def seen_by(held_RW: Tensor, position_RQ: Tensor) -> Tensor:
    """[R, Q, W] bool: slots within the window of queries at these positions."""
    window = held_RW.shape[1] - 1
    held_R1W = held_RW[:, None, :window]
    return (held_R1W >= 0) & (held_R1W > position_RQ[:, :, None] - window)
