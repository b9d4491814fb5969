"""Row-wise layers of a training pass in Triton: the functions of `training`, one launch forth and one back.

Between the matrix products of a small policy, reading and writing rows is most of a training step; torch's own autograd
makes several passes over float32 copies of them. Sums are in float32, results are rounded where the reference rounds.
Knows rows and heads; knows nothing of weights' names or layers.
"""
# T tokens, D width, N = 2D, or width of a fused row of queries, keys and values; H heads, R = half a head, P positions

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels import elementwise_triton

_TILE = 4096  # numbers of the rows a program of a norm's way back holds at once
_PASSES = 4  # tiles it goes through, one after the other: as many fewer partial sums
_SILU_BLOCK = 1024  # columns per program


# ---- norm


@triton.jit
def _rms_norm_backward_kernel(
    x_ptr, weight_ptr, grad_ptr, x_grad_ptr, partial_ptr, eps, stride_x, rows, width,
    ROWS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: PASSES times ROWS rows; the weight's gradient is summed over them and left as a partial sum."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for index in range(PASSES):
        row = (tl.program_id(0) * PASSES + index).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        ok = (row < rows) & inside
        x = tl.load(x_ptr + row * stride_x + column, mask=ok, other=0.0)
        grad = tl.load(grad_ptr + row * width + column, mask=ok, other=0.0).to(tl.float32)
        fine = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(fine * fine, 1) / width + eps)[:, None]
        normed = fine * inverse
        total += grad * normed.to(x.dtype).to(tl.float32)
        pull = grad * weight
        x_grad = inverse * (pull - normed * (tl.sum(pull * normed, 1) / width)[:, None])
        tl.store(x_grad_ptr + row * width + column, x_grad.to(x.dtype), mask=ok)
    partial = tl.sum(total, 0)[None, :]
    tl.store(partial_ptr + tl.program_id(0) * width + column, partial, mask=inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return elementwise_triton.rms_norm(x_TD, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D = ctx.saved_tensors
        x, grad = _rows(x_TD), grads[0].reshape(-1, len(weight_D)).contiguous()
        height, width = x.shape
        block = triton.next_power_of_2(width)
        tile = max(1, _TILE // block)
        programs = triton.cdiv(height, tile * _PASSES)
        x_grad = torch.empty((height, width), dtype=x.dtype, device=x.device)
        partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
        if height:
            _rms_norm_backward_kernel[(programs,)](
                x, weight_D, grad, x_grad, partial, ctx.eps, x.stride(0), height, width,
                ROWS=tile, PASSES=_PASSES, BLOCK=block, num_warps=8,
            )  # fmt: skip
        return x_grad.view(x_TD.shape), partial.sum(0).to(weight_D.dtype), None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As `training.rms_norm`, for rows of any leading shape."""
    normed: Tensor = _RmsNorm.apply(x_TD, weight_D, eps)
    return normed


# ---- gate


@triton.jit
def _silu_mul_backward_kernel(gate_up_ptr, grad_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, mask=ok, other=0.0)
    up = tl.load(gate_up_ptr + row * stride + width + column, mask=ok, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + column, mask=ok, other=0.0).to(tl.float32)
    fine = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-fine))
    silu = (fine * sigmoid).to(gate.dtype).to(tl.float32)
    gate_grad = (grad * up) * sigmoid * (1.0 + fine * (1.0 - sigmoid))
    tl.store(out_ptr + row * 2 * width + column, gate_grad.to(gate.dtype), mask=ok)
    tl.store(out_ptr + row * 2 * width + width + column, (grad * silu).to(gate.dtype), mask=ok)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TN: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TN)
        return elementwise_triton.silu_mul(gate_up_TN)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_TN,) = ctx.saved_tensors
        rows = _rows(gate_up_TN)
        height, width = rows.shape[0], rows.shape[1] // 2
        grad = grads[0].reshape(-1, width).contiguous()
        out = torch.empty((height, 2 * width), dtype=rows.dtype, device=rows.device)
        if height:
            _silu_mul_backward_kernel[(height, triton.cdiv(width, _SILU_BLOCK))](
                rows, grad, out, rows.stride(0), width, BLOCK=_SILU_BLOCK, num_warps=4
            )
        return out.view(gate_up_TN.shape)


def silu_mul(gate_up_TN: Tensor) -> Tensor:
    """As `training.silu_mul`."""
    product: Tensor = _SiluMul.apply(gate_up_TN)
    return product


# ---- queries and keys


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, position_ptr, stride_q, stride_k, stride_v,
    QUERY: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Program: one token. Queries and keys are turned (BACK: the other way), values copied, into one fused row."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = pair < HALF
    angle = tl.load(position_ptr + token) * HALF + pair
    turned = inside & (head < QUERY + KV)
    cos = tl.where(turned, tl.load(cos_ptr + angle, mask=inside, other=1.0), 1.0)
    sin = tl.where(turned, tl.load(sin_ptr + angle, mask=inside, other=0.0), 0.0)
    if BACK:
        sin = -sin

    is_q = inside & (head < QUERY)
    is_k = inside & (head >= QUERY) & (head < QUERY + KV)
    is_v = inside & (head >= QUERY + KV) & (head < QUERY + 2 * KV)
    q = q_ptr + token * stride_q + head * 2 * HALF + pair
    k = k_ptr + token * stride_k + (head - QUERY) * 2 * HALF + pair
    v = v_ptr + token * stride_v + (head - QUERY - KV) * 2 * HALF + pair
    first = tl.load(q, mask=is_q, other=0.0).to(tl.float32) + tl.load(k, mask=is_k, other=0.0).to(tl.float32)
    first += tl.load(v, mask=is_v, other=0.0).to(tl.float32)
    second = tl.load(q + HALF, mask=is_q, other=0.0).to(tl.float32)
    second += tl.load(k + HALF, mask=is_k, other=0.0).to(tl.float32)
    second += tl.load(v + HALF, mask=is_v, other=0.0).to(tl.float32)

    out = out_ptr + token * (QUERY + 2 * KV) * 2 * HALF + head * 2 * HALF + pair
    written = is_q | is_k | is_v
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=written)
    tl.store(out + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=written)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TN: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor, query: int, kv: int, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_PR, sin_PR, position_T)
        ctx.heads = (query, kv, dim)
        q, k, v = torch.split(qkv_TN.view(len(qkv_TN), -1, dim), [query, kv, kv], dim=1)
        out = _rotate(q, k, v, cos_PR, sin_PR, position_T, back=False)
        q, k, v = torch.split(out, [query, kv, kv], dim=1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        q, k, v = (_heads_in_line(grad) for grad in grads)
        out = _rotate(q, k, v, *ctx.saved_tensors, back=True)
        return out.flatten(1), None, None, None, None, None, None


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_PR, sin_PR, position_T)
        ctx.heads = [q.shape[1], k.shape[1], v.shape[1]]
        q, k, v = (_heads_in_line(x) for x in (q, k, v))
        out = _rotate(q, k, v, cos_PR, sin_PR, position_T, back=False)
        q, k, v = torch.split(out, ctx.heads, dim=1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v = (_heads_in_line(grad) for grad in grads)
        out = _rotate(q, k, v, *ctx.saved_tensors, back=True)
        q, k, v = torch.split(out, ctx.heads, dim=1)
        return q, k, v, None, None, None


def _heads_in_line(x_THd: Tensor) -> Tensor:
    """Tokens may lie apart, a token's heads may not."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


def _rotate(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor, *, back: bool
) -> Tensor:
    """All heads of each token in one new tensor."""
    tokens, query, dim = q_THd.shape
    kv, half = k_THd.shape[1], dim // 2
    out = torch.empty((tokens, query + 2 * kv, dim), dtype=q_THd.dtype, device=q_THd.device)
    if tokens:
        _rotate_kernel[(tokens,)](
            q_THd, k_THd, v_THd, out, cos_PR, sin_PR, position_T, q_THd.stride(0), k_THd.stride(0), v_THd.stride(0),
            QUERY=query, KV=kv, HALF=half, HEADS_BLOCK=triton.next_power_of_2(query + 2 * kv),
            HALF_BLOCK=triton.next_power_of_2(half), BACK=back, num_warps=4,
        )  # fmt: skip
    return out


def split_and_rotate(
    qkv_TN: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor, query: int, kv: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `training.split_and_rotate`. The three share one tensor."""
    q, k, v = _SplitAndRotate.apply(qkv_TN, cos_PR, sin_PR, position_T, query, kv, dim)
    return q, k, v


def rotate_heads(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `training.rotate_heads`. The three share one tensor."""
    q, k, v = _RotateHeads.apply(q_THd, k_THd, v_THd, cos_PR, sin_PR, position_T)
    return q, k, v


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
