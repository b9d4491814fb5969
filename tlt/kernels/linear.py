"""A linear layer with everything that touches it: norm before, gate, bias and residual after. Torch, on any device.

What always holds: `linear` here defines what the fused kernels in `linear_triton` must compute, and rounds where a
Hugging Face model rounds (the normed row, each product and the activation are cast back to the dtype of `x`).
Knows nothing of devices, tiles, or which layer of a model it serves.
"""

# M rows (tokens), N outputs, K inputs

from torch import Tensor
from torch.nn import functional

from tlt.kernels.elementwise import rms_norm, silu_mul


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """residual + act(norm(x)·Wᵀ + bias). Gated: W holds gate rows, then up rows; act(g, u) = silu(g)·u.

    `out` may be `residual` itself (in place); it must not overlap `x`.
    """
    normed_MK = x_MK if norm_weight is None else rms_norm(x_MK, norm_weight, norm_eps)
    product_MN = functional.linear(normed_MK, weight_NK, bias)
    if gated:
        product_MN = silu_mul(product_MN)
    if residual is not None:
        product_MN = residual + product_MN
    return product_MN if out is None else out.copy_(product_MN)
