"""What surrounds a decode tick, in torch: row state → inputs, drawn tokens → row state. Rows past `count` are idle."""
# R rows, P pages of a row

import torch
from torch import Tensor


def prepare(
    ints_R5: Tensor, floats_R2: Tensor, pages_RP: Tensor, count: Tensor, rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [6, R]: token, position, position of the next, seed, request, top-k; int32 [2, R]: slot, context;
    float32 [2, R]: temperature, top-p."""
    token, position, seed, request, top_k = ints_R5[:rows].t()
    live = torch.arange(rows, device=count.device) < count
    page = pages_RP[:rows].gather(1, (position // page_size)[:, None]).squeeze(1)
    slot = (page * page_size + position % page_size).masked_fill(~live, -1)
    int64s = torch.stack((token, position, position + 1, seed, request, top_k))
    return int64s, torch.stack((slot, (position + 1) * live)).int(), floats_R2[:rows].t().contiguous()


def finish(
    ints_R5: Tensor, count: Tensor, token_R: Tensor, logprob_R: Tensor, policy_logprob_R: Tensor, rows: int
) -> Tensor:
    """Advances the rows that are live; returns int32 [R, 3]: token and the bits of both log-probabilities."""
    live = torch.arange(rows, device=count.device) < count
    ints_R5[:rows, 0] = torch.where(live, token_R.clamp(min=0), ints_R5[:rows, 0])
    ints_R5[:rows, 1] += live
    bits = torch.stack((logprob_R, policy_logprob_R), dim=1).view(torch.int32)
    return torch.cat((token_R.int()[:, None], bits), dim=1)
