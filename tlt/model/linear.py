"""Matrix products and norms of the model: the vendor's products between our kernels on a GPU, torch elsewhere.

On a GPU in bfloat16 there are two ways: rollout, where no gradients flow and sums are written over the residual; and
training, where nothing is overwritten and the layers between the products are fused forward and backward. Both round
where torch does elsewhere, with one exception: rollout scales a normed layer's sums rather than its rows, which rounds
once less. There the residual stream is pre-normed for the norm that reads it next, and no kernel is spent on norms.
`exact` asks GPU rollout for rows whose bits do not depend on the other rows, nor on their number.
"""

from typing import Any

import torch
from torch import Tensor

from tlt.kernels.dispatch import dispatch
from tlt.kernels.linear import elementwise
from tlt.kernels.linear import reference as kernels
from tlt.kernels.linear.reference import Matrix, PreNormedRows, bf16_of
from tlt.kernels.training import reference as training

Stream = Tensor | PreNormedRows
"""The residual stream: rows, or in GPU rollout rows and what their next norm needs of them."""


def linear(
    x: Stream,
    weight: Matrix,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    exact: bool = False,
) -> Tensor:
    """`residual + activation(norm(x) @ weightᵀ + bias)`; gated: weight holds gate rows, then up rows.

    In GPU rollout the sum is written over `residual`: callers that keep it must copy it before. Only there our kernels
    read a `QuantizedMatrix` in 8 bits.
    """
    if isinstance(x, PreNormedRows) and x.norm_D is not norm_weight:
        raise ValueError(
            "x is pre-normed for another norm than the one given; give that norm to the layer that makes x"
        )
    x_TK = rows_of(x)
    options: dict[str, Any] = {
        "bias": bias,
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "residual": residual,
        "gated": gated,
    }
    if in_gpu_training(x_TK):
        return _trained_linear(x_TK, bf16_of(weight), **options)
    in_triton = in_gpu_rollout(x_TK)
    out = residual if in_triton else None
    # pdl: each kernel may start while the one before it ends
    return dispatch(kernels.linear, in_triton)(x, weight, **options, out=out, pdl=True, exact=exact)


def add_linear(
    x_TK: Tensor,
    weight: Matrix,
    *,
    bias: Tensor | None = None,
    residual: Stream,
    next_norm: Tensor | None = None,
    keep_residual: bool = False,
    exact: bool = False,
) -> Stream:
    """`residual + x @ weightᵀ + bias`, for `next_norm` to read. In GPU rollout written over `residual`, as above, but
    unless that is kept."""
    if in_gpu_training(x_TK):
        return linear(x_TK, weight, bias=bias, residual=rows_of(residual))
    how: dict[str, Any] = {"next_norm": next_norm, "keep_residual": keep_residual, "pdl": True, "exact": exact}
    add = dispatch(kernels.add_linear, in_gpu_rollout(x_TK))
    return add(x_TK, weight, bias=bias, residual=rows_of(residual), **how)


def embed(table_VD: Tensor, tokens_T: Tensor, next_norm: Tensor, *, exact: bool = False) -> Stream:
    """The table's rows of these tokens, for `next_norm` to read."""
    take_rows = dispatch(kernels.take_rows, in_gpu_rollout(table_VD))
    return take_rows(table_VD, tokens_T, next_norm, pdl=True, exact=exact)


def rows_of(x: Stream) -> Tensor:
    return x.x_MD if isinstance(x, PreNormedRows) else x


def _trained_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    normed_TK = x_TK if norm_weight is None else dispatch(training.rms_norm, True)(x_TK, norm_weight, norm_eps)
    if residual is not None and bias is None and not gated:
        return torch.addmm(residual, normed_TK, weight_NK.t())  # one launch, and rounded once
    product_TN = torch.nn.functional.linear(normed_TK, weight_NK, bias)
    if gated:
        product_TN = dispatch(training.silu_mul, True)(product_TN)
    return product_TN if residual is None else residual + product_TN


def wide_linear(x_TK: Tensor, weight_NK: Tensor, *, exact: bool = False) -> Tensor:
    """A product whose sums are not rounded to half precision."""
    if in_gpu_rollout(x_TK):
        out = torch.empty((len(x_TK), len(weight_NK)), dtype=torch.float32, device=x_TK.device)
        return dispatch(kernels.linear, True)(x_TK, weight_NK, out=out, pdl=True, exact=exact)
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
        return dispatch(elementwise.rms_norm, True)(x_TD, weight_D, eps, pdl=True)
    if in_gpu_training(x_TD):
        return dispatch(training.rms_norm, True)(x_TD, weight_D, eps)
    return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def in_gpu_rollout(x: Tensor) -> bool:
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype == torch.bfloat16


def reads_quantized(weight: Tensor) -> bool:
    """Whether rollout may read such a matrix in 8 bits: the kernels are made for Hopper."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device) >= _QUANTIZED_SINCE


_QUANTIZED_SINCE = (9, 0)  # compute capability


def in_gpu_training(x: Tensor) -> bool:
    return x.is_cuda and torch.is_grad_enabled() and x.dtype == torch.bfloat16
