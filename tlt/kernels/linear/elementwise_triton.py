"""Row-wise layers between the matrix products, in Triton. Same functions as `elementwise`, which is their reference.

Always holds: one launch, one pass over memory, any width. Knows rows only, nothing of tokens or layers.

Legend: T rows, D width, N = 2D.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SILU_BLOCK = 1024  # columns per program


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, stride_x, stride_residual, width,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one row. With ADD the row is x + residual, rounded to its type and kept."""
    column = tl.arange(0, BLOCK)
    ok = column < width
    weight = tl.load(weight_ptr + column, mask=ok, other=0.0).to(tl.float32)
    if PDL:  # the weights were there long before; x comes from the kernel this one may have overtaken
        gdc_launch_dependents()  # the next kernel waits for this one in turn, and may fetch its weights meanwhile
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * stride_x + column, mask=ok, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * stride_residual + column, mask=ok, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + column, x, mask=ok)
    fp32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(fp32 * fp32, 0) / width + eps)
    normed = (fp32 * inverse).to(x.dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * width + column, normed.to(x.dtype), mask=ok)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """As `elementwise.rms_norm`, for rows of any leading shape."""
    rows = _rows(x_TD)
    out = rows.new_empty(rows.shape)
    _launch_norm(rows, rows, weight_D, out, out, eps, add=False, pdl=pdl)
    return out.view(x_TD.shape)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As `elementwise.add_rms_norm`."""
    rows, residual_rows = _rows(x_TD), _rows(residual_TD)
    out, total = rows.new_empty(rows.shape), rows.new_empty(rows.shape)
    _launch_norm(rows, residual_rows, weight_D, out, total, eps, add=True, pdl=pdl)
    return out.view(x_TD.shape), total.view(x_TD.shape)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool, pdl: bool
) -> None:
    height, width = x.shape
    block = triton.next_power_of_2(width)
    if height:
        _rms_norm_kernel[(height,)](
            x, residual, weight, out, total, eps, x.stride(0), residual.stride(0), width,
            BLOCK=block, ADD=add, PDL=pdl, num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for this one in turn, and may fetch its weights meanwhile
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, mask=ok, other=0.0)
    up = tl.load(gate_up_ptr + row * stride + width + column, mask=ok, other=0.0)
    fp32 = gate.to(tl.float32)
    silu = (fp32 / (1.0 + tl.exp(-fp32))).to(gate.dtype)
    tl.store(out_ptr + row * width + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=ok)


def silu_mul(gate_up_TN: Tensor, *, pdl: bool = False) -> Tensor:
    """As `elementwise.silu_mul`."""
    rows = _rows(gate_up_TN)
    height, width = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty((height, width))
    if height:
        _silu_mul_kernel[(height, triton.cdiv(width, SILU_BLOCK))](
            rows, out, rows.stride(0), width, BLOCK=SILU_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out.view(*gate_up_TN.shape[:-1], width)
