"""Row-wise layers between the matrix products, in torch: what a CPU runs, and the reference of `elementwise_triton`.

Always holds: rounding as in Hugging Face's Llama and Qwen: statistics in float32 or finer, cast to the row's type, then
the weight. Knows rows only, nothing of tokens or layers. `pdl` is a launch hint for the GPU and changes nothing here.

Legend: T rows, D width, N = 2D.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""
    if x_TD.dtype in (torch.float32, torch.float64):
        return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    fp32_TD = x_TD.float()
    inverse_T1 = torch.rsqrt(fp32_TD.square().mean(-1, keepdim=True) + eps)
    return (fp32_TD * inverse_T1).to(x_TD.dtype) * weight_D


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself, which is the next residual."""
    residual_TD = x_TD + residual_TD
    return rms_norm(residual_TD, weight_D, eps), residual_TD


def silu_mul(gate_up_TN: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(first half) · second half."""
    gate_TD, up_TD = gate_up_TN.chunk(2, dim=-1)
    return functional.silu(gate_TD) * up_TD
