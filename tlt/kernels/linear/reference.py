"""A linear layer with everything that touches it: norm before, gate, bias and residual after. Torch, on any device.

What always holds: `linear` here defines what the fused kernels in `triton` must compute, and rounds where a
Hugging Face model rounds (the normed row, each product and the activation are cast back to the dtype of `x`).
On a GPU the rows of the residual stream are `PreNormedRows`, prepared for the norm that reads them; `pre_norm` and
`pre_normed_linear` define that: the sums are scaled where `linear` scales the rows, so bfloat16 rounds once less.
A `QuantizedMatrix` has a copy in 8 bits, which only kernels for few rows read.
Knows nothing of devices, tiles, or which layer of a model it serves.
"""

# M rows (tokens), N outputs, K inputs, D width of the residual stream, P parts of a sum

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tlt.kernels.linear.elementwise import rms_norm, silu_mul

_LARGEST = 448.0  # of an e4m3 number
_ROWS = 8192  # of a matrix rounded to such numbers at a time


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix and its copy in 8 bits, with one scale per row: half the bytes to read. Products with the copy are less
    accurate, so only drafts use it, which the policy verifies."""

    bf16_NK: Tensor
    quantized_NK: Tensor  # float8_e4m3fn
    scale_N: Tensor  # float32: bf16 ≈ quantized · scale

    @classmethod
    def of(cls, bf16_NK: Tensor) -> "QuantizedMatrix":
        scale_N = torch.empty(len(bf16_NK), dtype=torch.float32, device=bf16_NK.device)
        quantized = cls(bf16_NK, torch.empty_like(bf16_NK, dtype=torch.float8_e4m3fn), scale_N)
        quantized.requantize()
        return quantized

    @torch.no_grad()
    def requantize(self) -> None:
        """Quantizes the matrix again after it has changed, in place: CUDA graphs hold these pointers."""
        for first in range(
            0, len(self.bf16_NK), _ROWS
        ):  # in parts: a head would need several times its memory for a moment
            rows = slice(first, first + _ROWS)
            wide_NK, scale_N = self.bf16_NK[rows].float(), self.scale_N[rows]
            scale_N.copy_((wide_NK.abs().amax(1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
            self.quantized_NK[rows].copy_((wide_NK / scale_N[:, None]).clamp_(-_LARGEST, _LARGEST))


Matrix = Tensor | QuantizedMatrix


def bf16_of(matrix: Matrix) -> Tensor:
    return matrix.bf16_NK if isinstance(matrix, QuantizedMatrix) else matrix


@dataclass(frozen=True, slots=True)
class PreNormedRows:
    """Rows multiplied by the weight of the norm that reads them: norm(x) = pre_normed · rsqrt(mean(x²) + eps)."""

    x_MD: Tensor
    norm_D: Tensor  # the weight of that norm
    pre_normed_MD: Tensor  # x · norm_D, in the dtype of x
    squares_MP: Tensor  # float32: sums of x² over parts of the row


def linear(
    x: Tensor | PreNormedRows,
    weight: Matrix,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    exact: bool = False,
) -> Tensor:
    """residual + act(norm(x)·Wᵀ + bias). Gated: W holds gate rows, then up rows; act(g, u) = silu(g)·u.

    `out` may be `residual` itself (in place); it must not overlap `x`. `pdl` and `exact` (a row's bits do not depend on
    the other rows) are for the GPU and change nothing here.
    """
    x_MK = x if isinstance(x, Tensor) else x.x_MD
    normed_MK = x_MK if norm_weight is None else rms_norm(x_MK, norm_weight, norm_eps)
    product_MN = functional.linear(normed_MK, bf16_of(weight), bias)
    if gated:
        product_MN = silu_mul(product_MN)
    if residual is not None:
        product_MN = residual + product_MN
    return product_MN if out is None else out.copy_(product_MN)


def add_linear(
    x_MK: Tensor,
    weight: Matrix,
    *,
    bias: Tensor | None = None,
    residual: Tensor,
    next_norm: Tensor | None,
    keep_residual: bool = False,
    pdl: bool = False,
    exact: bool = False,
) -> Tensor | PreNormedRows:
    """residual + x·Wᵀ + bias. A GPU writes it over `residual` unless that is kept, and prepares it for `next_norm`."""
    return linear(x_MK, weight, bias=bias, residual=residual)


def take_rows(
    table_VD: Tensor, index_M: Tensor, next_norm: Tensor, *, pdl: bool = False, exact: bool = False
) -> Tensor | PreNormedRows:
    """The table's rows; a GPU prepares them for `next_norm`."""
    return table_VD[index_M]


def pre_norm(x_MD: Tensor, norm_D: Tensor, part: int) -> PreNormedRows:
    """x prepared for the norm of weight `norm`, its squares summed over parts of `part` columns."""
    fp32_MD = x_MD.float()
    squares = [columns.square().sum(-1) for columns in fp32_MD.split(part, dim=-1)]
    return PreNormedRows(x_MD, norm_D, (fp32_MD * norm_D.float()).to(x_MD.dtype), torch.stack(squares, dim=-1))


def pre_normed_linear(
    x: PreNormedRows, weight_NK: Tensor, *, bias: Tensor | None = None, norm_eps: float = 0.0, gated: bool = False
) -> Tensor:
    """act(norm(x)·Wᵀ + bias), with the products scaled instead of the rows."""
    scale_M1 = torch.rsqrt(x.squares_MP.sum(-1, keepdim=True) / x.x_MD.shape[1] + norm_eps)
    product_MN = scale_M1 * functional.linear(x.pre_normed_MD.float(), weight_NK.float())
    if bias is not None:
        product_MN = product_MN + bias.float()
    if gated:
        product_MN = silu_mul(product_MN)
    return product_MN.to(x.x_MD.dtype)
