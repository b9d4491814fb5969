"""The drafter's attention by flash attention: merged with the chain it is what `Band` computes, forth and back."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tlt.spec.window import Band, FlashBand, chained_attention

# T packed positions, H query heads, K key heads, d head width

LENGTHS, HEADS, KV, WIDTH = (70, 5, 1, 33), 6, 2, 16


class DenseFlash:
    """What flash attention computes, by its definition: all scores, and a mask."""

    def __init__(self, lengths: Sequence[int], reach: int) -> None:
        sizes = torch.tensor(lengths)
        sequence = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        back = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))[None, :]
        self.seen = (sequence[:, None] == sequence[None, :]) & (back >= 0) & (back <= reach)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("thd,jhd->htj", q, k) * q.shape[2] ** -0.5
        return scores.masked_fill(~self.seen, -torch.inf)

    def forth(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        scores = self.scores(q, k)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return torch.einsum("htj,jhd->thd", scores.softmax(-1), v), scores.logsumexp(-1), ()

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum_HT: Tensor, rest: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        weights = (self.scores(q, k) - logsum_HT[..., None]).exp()
        mean = (grad * out).sum(-1).t()[..., None]
        pull = weights * (torch.einsum("thd,jhd->htj", grad, wide_v) - mean) * q.shape[2] ** -0.5
        q_grad = torch.einsum("htj,jhd->thd", pull, wide_k)
        k_grad = torch.einsum("htj,thd->jhd", pull, q).unflatten(1, (-1, group)).sum(2)
        v_grad = torch.einsum("htj,thd->jhd", weights, grad).unflatten(1, (-1, group)).sum(2)
        return q_grad, k_grad, v_grad


def draw(heads: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    x = torch.randn(sum(LENGTHS), heads, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def places() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("window", [9, 64])
def test_window_and_chain_equal_the_band(window: int, step: int) -> None:
    q, k, v = draw(HEADS, 0), draw(KV, 1), draw(KV, 2)
    chain = [(draw(KV, 10 + place), draw(KV, 20 + place)) for place in range(step)]
    band = Band.of(places(), window, torch.device("cpu"))
    expected = band.attend(q, band.windows(k), band.windows(v), step, chain)
    found = chained_attention(q, k, v, chain, DenseFlash(LENGTHS, window - 1 - step))
    torch.testing.assert_close(found, expected)
    pull = draw(HEADS, 3).detach()
    inputs = [q, k, v, *(x for pair in chain for x in pair)]
    gradients = [torch.autograd.grad(out, inputs, pull) for out in (found, expected)]
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("window", [9, 64])
def test_the_vendors_flash_attention_equals_the_band(window: int, step: int) -> None:
    def both(dtype: torch.dtype, device: str) -> list[Tensor]:
        q, k, v = (draw(heads, seed, torch.bfloat16) for heads, seed in ((HEADS, 0), (KV, 1), (KV, 2)))
        chain = [tuple(draw(KV, 10 * kind + place, torch.bfloat16) for kind in (1, 2)) for place in range(step)]
        inputs = [
            x.detach().to(device, dtype).requires_grad_() for x in (q, k, v, *(x for pair in chain for x in pair))
        ]
        band = FlashBand.of(LENGTHS, window, torch.device(device))
        if dtype == torch.float64:
            band = Band.of(places(), window, torch.device(device))  # type: ignore[assignment]
        pairs = list(zip(inputs[3::2], inputs[4::2], strict=True))
        out = band.attend(inputs[0], band.windows(inputs[1]), band.windows(inputs[2]), step, pairs)
        return [out, *torch.autograd.grad(out, inputs, draw(HEADS, 3, torch.bfloat16).detach().to(device, dtype))]

    for found, expected in zip(both(torch.bfloat16, "cuda"), both(torch.float64, "cpu"), strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(found.double().cpu(), expected, rtol=2**-6, atol=2**-6 * size)
