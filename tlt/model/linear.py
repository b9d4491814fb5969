"""Matrix products and norms of the model: torch where gradients flow or there is no GPU, our kernels in GPU rollout."""

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
    """`residual + activation(norm(x) @ weightᵀ + bias)`; gated: weight holds gate rows, then up rows."""
    run = _triton_linear() if _in_gpu_rollout(x_TK) else torch_linear.linear
    out: Tensor = run(
        x_TK, weight_NK, bias=bias, norm_weight=norm_weight, norm_eps=norm_eps, residual=residual, gated=gated
    )
    return out


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if _in_gpu_rollout(x_TD):
        from tlt.kernels.elementwise_triton import rms_norm as fused

        return fused(x_TD, weight_D, eps)
    return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def _in_gpu_rollout(x: Tensor) -> bool:
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype == torch.bfloat16


def _triton_linear():  # type: ignore[no-untyped-def]  # Triton is installed only where there is a GPU
    from tlt.kernels.linear_triton import linear

    return linear
