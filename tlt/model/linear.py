"""Matrix products and norms of the model: torch where gradients flow or there is no GPU, our kernels in GPU rollout."""

from typing import Any

import torch
from torch import Tensor

from tlt.kernels import linear as torch_linear


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`residual + activation(norm(x) @ weightᵀ + bias)`; gated: weight holds gate rows, then up rows.

    In GPU rollout the sum is written over `residual`: whoever wants to keep that must copy it before.
    """
    options: dict[str, Any] = {
        "bias": bias,
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "residual": residual,
        "gated": gated,
    }
    if not in_gpu_rollout(x_TK):
        return torch_linear.linear(x_TK, weight_NK, **options)
    from tlt.kernels.linear_triton import linear as fused  # Triton is installed only where there is a GPU

    # pdl: each kernel may start while the one before it ends (see linear_triton)
    return fused(x_TK, weight_NK, **options, out=residual, pdl=True)


def wide_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """A product whose sums are not rounded to half precision."""
    if in_gpu_rollout(x_TK):
        from tlt.kernels.linear_triton import linear as fused

        out = torch.empty((len(x_TK), len(weight_NK)), dtype=torch.float32, device=x_TK.device)
        return fused(x_TK, weight_NK, out=out, pdl=True)
    if x_TK.dtype in (torch.bfloat16, torch.float16):
        if not x_TK.is_cuda:
            return x_TK.float() @ weight_NK.float().t()
        product_TN: Tensor = _WideProduct.apply(x_TK, weight_NK)  # type: ignore[no-untyped-call]
        return product_TN
    return torch.nn.functional.linear(x_TK, weight_NK)


class _WideProduct(torch.autograd.Function):
    """x @ Wᵀ of half-precision operands with float32 sums, by one call of the vendor's library each way."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x_TK, weight_NK = ctx.saved_tensors
        gradient_TN = gradients[0].to(x_TK.dtype)
        return gradient_TN @ weight_NK, gradient_TN.t() @ x_TK


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if in_gpu_rollout(x_TD):
        from tlt.kernels.elementwise_triton import rms_norm as fused

        return fused(x_TD, weight_D, eps, pdl=True)
    return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def in_gpu_rollout(x: Tensor) -> bool:
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype == torch.bfloat16
