"""Kernels of a training pass: forth and back they are what torch's autograd makes of their references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB, policy
from tlt.kernels.training import reference as training
from tlt.model import attention, linear
from tlt.model.attention import PackedLayout

pytest.importorskip("triton")
from tlt.kernels.training import triton as training_triton

# T tokens, D width, N = 2D or all heads' width, C tokens, V vocabulary

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def outputs_and_gradients(function: Callable[..., Any], *inputs: Any) -> list[Tensor]:
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pulls = [draw(*out.shape, dtype=out.dtype, seed=9 + place).detach() for place, out in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, tensors, pulls)
    return [out.detach() for out in outputs] + list(grads)


def assert_alike(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        size = b.float().abs().max().item()
        rtol = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (37, 96), (70, 576), (3, 5000)])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    found = outputs_and_gradients(training_triton.rms_norm, x, weight, 1e-5)
    expected = outputs_and_gradients(training.rms_norm, x, weight, 1e-5)
    assert_alike(found, expected, dtype)


def test_norm_of_heads_and_of_columns_of_something_wider() -> None:
    whole, weight = draw(5, 3, 40), draw(32, seed=1)
    assert_alike(
        outputs_and_gradients(lambda x, w: training_triton.rms_norm(x[..., :32], w, 1e-5), whole, weight),
        outputs_and_gradients(lambda x, w: training.rms_norm(x[..., :32], w, 1e-5), whole, weight),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (9, 48), (4, 1536)])
def test_gate(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = draw(rows, 2 * width, dtype=dtype)
    found = outputs_and_gradients(training_triton.silu_mul, gate_up)
    assert_alike(found, outputs_and_gradients(training.silu_mul, gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "kv", "dim"), [(9, 3, 64), (4, 4, 16), (2, 1, 24)])
def test_rotation(query: int, kv: int, dim: int, dtype: torch.dtype) -> None:
    tokens = 11
    qkv = draw(tokens, (query + 2 * kv) * dim, dtype=dtype)
    angle = draw(50, dim // 2, seed=2).detach()
    position = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    inputs = (qkv, angle.cos(), angle.sin(), position, query, kv, dim)
    found = outputs_and_gradients(training_triton.split_and_rotate, *inputs)
    assert_alike(found, outputs_and_gradients(training.split_and_rotate, *inputs), dtype)


def test_rotation_of_heads_that_were_normed_apart() -> None:
    q, k, v = draw(7, 4, 16), draw(7, 2, 16, seed=1), draw(7, 96, seed=2)
    angle, position = draw(9, 8, seed=3).detach(), torch.arange(7).to(DEVICE)

    def through(function: Callable[..., Any]) -> list[Tensor]:
        def some(q: Tensor, k: Tensor, v: Tensor) -> Any:  # values still stand in the fused row
            return function(q * 2, k.transpose(0, 1).contiguous().transpose(0, 1), v[:, 64:].view(7, 2, 16), *tables)

        return outputs_and_gradients(some, q, k, v)

    tables = (angle.cos(), angle.sin(), position)
    assert_alike(through(training_triton.rotate_heads), through(training.rotate_heads), torch.float32)


def test_rotation_takes_gradients_as_attention_lays_them_out() -> None:
    """Heads before tokens in memory: a way back that read them as contiguous would mix tokens up."""
    inputs = (draw(5, 64), *(draw(9, 8, seed=2).detach(),) * 2, torch.arange(5).to(DEVICE), 2, 1, 16)

    def through(function: Callable[..., Any]) -> list[Tensor]:
        heads_first = lambda *given: tuple(x.transpose(0, 1).contiguous() for x in function(*given))
        return outputs_and_gradients(heads_first, *inputs)

    assert_alike(through(training_triton.split_and_rotate), through(training.split_and_rotate), torch.float32)


@pytest.mark.parametrize(("count", "vocab"), [(1, 7), (6, 4096), (5, 9001)])
@pytest.mark.parametrize("sharpness", [1.0, 1 / 0.7])
def test_logprobs_and_their_gradient(count: int, vocab: int, sharpness: float) -> None:
    logits = draw(count, vocab).detach() * 6
    token = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    slope = draw(count, seed=2).detach()
    found, expected = (kernels.read_logprobs(logits, token, sharpness) for kernels in (training_triton, training))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    plain = torch.log_softmax(logits.double() * sharpness, dim=-1)
    torch.testing.assert_close(expected[0].double(), plain.gather(1, token[:, None]).squeeze(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(expected[1].double(), -(plain.exp() * plain).sum(-1), rtol=1e-5, atol=1e-4)
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        given = (logits.clone(), token, expected[2], slope, sharpness, dtype)
        a, b = training_triton.logprobs_gradient(*given), training.logprobs_gradient(*given)
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=2 * close, atol=close)


def test_a_token_that_cannot_be_drawn_does_no_harm() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 1.0]], device=DEVICE)
    logprob, entropy, logsum = training_triton.read_logprobs(logits, torch.tensor([2], device=DEVICE), 1.0)
    assert all(value.isfinite().all() for value in (logprob, entropy, logsum))


@pytest.mark.parametrize(("family", "checkpointed"), [("llama", (False,)), ("qwen3", (False, True))])
def test_a_policy_trained_through_the_kernels_is_trained_alike(
    family: str, checkpointed: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model on the path a GPU takes in training, against the one a CPU takes."""
    model = policy(torch.float32, family=family).to(DEVICE)
    tokens = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def gradients() -> list[Tensor]:
        hidden = model(tokens, PackedLayout.from_lengths([9, 1, 13], DEVICE)).hidden_TD
        return list(torch.autograd.grad(hidden.square().sum() + hidden[::3].sum(), [*model.blocks.parameters()]))

    expected = gradients()
    for module in (linear, attention):
        monkeypatch.setattr(module, "in_gpu_training", lambda x: True)
    for model.checkpoint_activations in checkpointed:
        for found, right in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())
