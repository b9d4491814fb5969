"""Row-wise layers and losses of a training pass, in Triton. Same functions as in `reference`, which explains them.

One launch forward and one backward; the loss of a drafter has both in one launch. Between the matrix products of a
small policy, reading and writing rows is most of a training step: torch's autograd makes several passes over float32
copies of the rows, half a dozen over rows as long as the vocabulary.
Always holds: sums are in float32, results are rounded where the reference rounds, rows do not depend on each other.
"""
# T tokens, D width, N = 2D, or width of a fused row of queries, keys and values; H heads, R = half a head, P positions;
# C tokens of a loss, V vocabulary, S draft steps, v draft vocabulary

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.linear import elementwise_triton

_TILE = 4096  # numbers of the rows a program of a norm's way back holds at once
_PASSES = 4  # tiles it goes through, one after the other: as many fewer partial sums
_SILU_BLOCK = 1024  # columns per program
_LOGITS_BLOCK = 4096  # logits of a row at a time

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
        fp32 = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(fp32 * fp32, 1) / width + eps)[:, None]
        normed = fp32 * inverse
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
    """As `reference.rms_norm`, for rows of any leading shape."""
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
    fp32 = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-fp32))
    silu = (fp32 * sigmoid).to(gate.dtype).to(tl.float32)
    gate_grad = (grad * up) * sigmoid * (1.0 + fp32 * (1.0 - sigmoid))
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
    """As `reference.silu_mul`."""
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
    """As `reference.split_and_rotate`. The three share one tensor."""
    q, k, v = _SplitAndRotate.apply(qkv_TN, cos_PR, sin_PR, position_T, query, kv, dim)
    return q, k, v


def rotate_heads(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.rotate_heads`. The three share one tensor."""
    q, k, v = _RotateHeads.apply(q_THd, k_THd, v_THd, cos_PR, sin_PR, position_T)
    return q, k, v


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


# ---- log-probabilities of given tokens


@triton.jit
def _read_logprobs_kernel(
    logits_ptr, token_ptr, logprob_ptr, entropy_ptr, logsum_ptr, stride, sharpness,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: one row, in one sweep: largest logit, Σ e^z and Σ z·e^z, the sums relative to the largest."""
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full((), -float("inf"), tl.float32)
    total, weighted = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        ok = start + lane < WIDTH
        z = tl.load(line + start + lane, mask=ok, other=-float("inf")).to(tl.float32) * sharpness
        higher = tl.maximum(top, tl.max(z, 0))
        share = tl.exp(z - higher)
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(share, 0)
        weighted = weighted * kept + tl.sum(tl.where(share > 0.0, share * z, 0.0), 0)
        top = higher
    logsum = top + tl.log(total)
    own = tl.load(line + tl.load(token_ptr + row)).to(tl.float32) * sharpness
    tl.store(logprob_ptr + row, own - logsum)
    tl.store(entropy_ptr + row, logsum - weighted / total)
    tl.store(logsum_ptr + row, logsum)


def read_logprobs(logits_CV: Tensor, token_C: Tensor, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.read_logprobs`, for logits of up to 32 bits."""
    count, width = logits_CV.shape
    logprob_C, entropy_C, logsum_C = (
        torch.empty(count, dtype=torch.float32, device=logits_CV.device) for _ in range(3)
    )
    if count:
        _read_logprobs_kernel[(count,)](
            logits_CV, token_C, logprob_C, entropy_C, logsum_C, logits_CV.stride(0), sharpness,
            WIDTH=width, BLOCK=min(_LOGITS_BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return logprob_C, entropy_C, logsum_C


@triton.jit
def _logprobs_gradient_kernel(
    logits_ptr, token_ptr, logsum_ptr, slope_ptr, out_ptr, stride, sharpness, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    z = tl.load(logits_ptr + row * stride + column, mask=ok, other=-float("inf")).to(tl.float32) * sharpness
    probability = tl.exp(z - tl.load(logsum_ptr + row))
    one = tl.where(column == tl.load(token_ptr + row), 1.0, 0.0)
    gradient = tl.load(slope_ptr + row) * sharpness * (one - probability)
    tl.store(out_ptr + row * width + column, gradient.to(out_ptr.dtype.element_ty), mask=ok)


def logprobs_gradient(
    logits_CV: Tensor, token_C: Tensor, logsum_C: Tensor, slope_C: Tensor, sharpness: float, dtype: torch.dtype
) -> Tensor:
    """As `reference.logprobs_gradient`. The logits stay as they are."""
    count, width = logits_CV.shape
    out_CV = torch.empty((count, width), dtype=dtype, device=logits_CV.device)
    if count:
        block = min(_LOGITS_BLOCK, triton.next_power_of_2(width))
        _logprobs_gradient_kernel[(count, triton.cdiv(width, block))](
            logits_CV, token_C, logsum_C, slope_C.contiguous(), out_CV, logits_CV.stride(0), sharpness, width,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out_CV


# ---- a drafter's distribution against the policy's


@triton.jit
def _logits(row_ptr, column, WIDTH: tl.constexpr):
    return tl.load(row_ptr + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32)


@triton.jit
def _compare_distributions_kernel(
    policy_ptr, draft_ptr, weight_ptr, loss_ptr, tokens, variation, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program: one draft step of one token. Three sweeps; after the first the row is in cache."""
    row = tl.program_id(0).to(tl.int64)
    p_row, q_row = policy_ptr + (row % tokens) * WIDTH, draft_ptr + row * WIDTH
    weight = tl.load(weight_ptr + row)
    lane = tl.arange(0, BLOCK)

    p_max, q_max = tl.full((), -float("inf"), tl.float32), tl.full((), -float("inf"), tl.float32)
    p_sum, q_sum = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        p, q = _logits(p_row, start + lane, WIDTH), _logits(q_row, start + lane, WIDTH)
        p_top, q_top = tl.maximum(p_max, tl.max(p, 0)), tl.maximum(q_max, tl.max(q, 0))
        p_sum = p_sum * tl.exp(p_max - p_top) + tl.sum(tl.exp(p - p_top), 0)
        q_sum = q_sum * tl.exp(q_max - q_top) + tl.sum(tl.exp(q - q_top), 0)
        p_max, q_max = p_top, q_top
    p_log, q_log = p_max + tl.log(p_sum), q_max + tl.log(q_sum)

    entropy = tl.full((), 0.0, tl.float32)
    p_above, q_above = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + lane
        log_q = _logits(q_row, column, WIDTH) - q_log
        p, q = tl.exp(_logits(p_row, column, WIDTH) - p_log), tl.exp(log_q)
        entropy -= tl.sum(tl.where(column < WIDTH, p * log_q, 0.0), 0)
        p_above += tl.sum(tl.where(q > p, p, 0.0), 0)
        q_above += tl.sum(tl.where(q > p, q, 0.0), 0)
    tl.store(loss_ptr + row, weight * ((1.0 - variation) * entropy + variation * (q_above - p_above)))

    for start in range(0, WIDTH, BLOCK):
        column = start + lane
        p = tl.exp(_logits(p_row, column, WIDTH) - p_log)
        q = tl.exp(_logits(q_row, column, WIDTH) - q_log)
        slope = (1.0 - variation) + variation * (tl.where(q > p, 1.0, 0.0) - q_above)
        gradient = weight * (q * slope - (1.0 - variation) * p)
        tl.store(q_row + column, gradient.to(draft_ptr.dtype.element_ty), mask=column < WIDTH)


def compare_distributions(
    policy_Cv: Tensor, draft_SCv: Tensor, weight_SC: Tensor, variation: float
) -> tuple[Tensor, Tensor]:
    """As the reference, for logits of up to 32 bits. Writes the gradient over the drafter's logits."""
    (steps, tokens), width = weight_SC.shape, policy_Cv.shape[1]
    loss_SC = torch.empty((steps, tokens), dtype=torch.float32, device=draft_SCv.device)
    _compare_distributions_kernel[(steps * tokens,)](
        *(policy_Cv.contiguous(), draft_SCv, weight_SC.contiguous(), loss_SC, tokens, variation),
        WIDTH=width,
        BLOCK=min(_LOGITS_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )
    return loss_SC.sum(), draft_SCv
