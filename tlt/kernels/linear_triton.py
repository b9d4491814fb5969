"""Linear layers for few rows: the weight is streamed once from memory, everything else is fused around that stream.

What always holds
- One element of `out` is written by exactly one program, which is also the only one to read that element of `residual`:
  `out` may be `residual`.
- The result is a function of the inputs and the configuration: split-K partial sums are added in a fixed order by
  whichever program arrives last, so runs agree bit for bit, and a row does not depend on the other rows.
- The counters of a workspace are all zero between kernels.

Programmatic dependent launch (`pdl=True`). The kernel may start while its predecessor on the stream still runs. Then
everything a predecessor could have written, and every buffer it could still be reading (x, residual, bias, norm weight,
out, workspace), is touched only after `gdc_wait`, which returns when the predecessor has completed and its writes are
visible. Before the wait only weights are asked into L2: that is a hint without a destination, so even a predecessor
that writes weights is safe. Every program waits, hence this kernel completes only after its predecessor has, hence
waiting for it covers all earlier kernels too; and a kernel launched the ordinary way (a library call) is a barrier.
A kernel launched with `launch_pdl` that does NOT wait in every program would break this chain for all that follow.
The signal that lets the successor start is given at once, or (`late`) when the weights have been read: programs of the
successor can only occupy what is free once all programs of this kernel are resident, and while waiting they fill the
gap with their own prefetch.

Knows tiles, pipelines and memory order; knows nothing of models or of which configuration is best (`linear_table`).
"""

# M rows (tokens), N outputs after gating, K inputs. On tiles M, N, K stand for BLOCK_M, BLOCK_N, BLOCK_K.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tlt.kernels import elementwise_triton
from tlt.kernels.linear_table import Config, choose
from tlt.kernels.workspace import Workspace, shared_workspace


@triton.jit
def _ask_into_l2(rows_ptr, rows, row_stride, first_k, last_k, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
                 THREADS: tl.constexpr):  # fmt: skip
    """Start moving the first COLUMNS of each weight row to L2; one instruction per thread, nothing to wait for."""
    PER_ROW: tl.constexpr = THREADS // BLOCK_N if THREADS > BLOCK_N else 1
    CHUNKS: tl.constexpr = PER_ROW if PER_ROW * 32 <= COLUMNS else 1  # whole 16-byte pieces, and not too small
    WIDTH: tl.constexpr = COLUMNS // CHUNKS
    lane = tl.arange(0, BLOCK_N * CHUNKS)
    row = tl.minimum(lane // CHUNKS, rows - 1)
    column = first_k + (lane % CHUNKS) * WIDTH
    size = tl.maximum(tl.minimum(last_k - column, WIDTH), 0) * (rows_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [(rows_ptr + row * row_stride + column).to(tl.int64, bitcast=True), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _begin(w_ptr, up_ptr, rows, row_stride, first_k, last_k, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
           PREFETCH: tl.constexpr, LATE: tl.constexpr, THREADS: tl.constexpr):  # fmt: skip
    """What a dependent launch does before it may touch anything: signal, prefetch, wait."""
    if not LATE:
        gdc_launch_dependents()
    if PREFETCH > 0:
        _ask_into_l2(w_ptr, rows, row_stride, first_k, last_k, BLOCK_N, PREFETCH, THREADS)
        if GATED:
            _ask_into_l2(up_ptr, rows, row_stride, first_k, last_k, BLOCK_N, PREFETCH, THREADS)
    gdc_wait()


@triton.jit
def _weight_tile(w_ptr, w_desc, row_in_tile_N, row, w_stride, k, k_K, K, EVEN_K: tl.constexpr):
    if w_desc is not None:
        tile_NK = w_desc.load([row, k])
    else:
        at_NK = w_ptr + row_in_tile_N[:, None] * w_stride + k_K[None, :]
        if EVEN_K:
            tile_NK = tl.load(at_NK, eviction_policy="evict_first")
        else:
            tile_NK = tl.load(at_NK, mask=(k_K < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tile_NK


@triton.jit
def _product(acc, y_MK, w_NK, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(w_NK, tl.trans(y_MK), acc, input_precision="ieee")
    else:
        acc = tl.dot(y_MK, tl.trans(w_NK), acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(acc_MN, up_MN, squares_M, bias_ptr, residual_ptr, out_ptr, m_M, n_N, M, N, K, residual_stride, out_stride,
            eps, HAS_NORM: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Norm scale, bias, gate, residual, store."""
    if HAS_NORM:
        scale_M = tl.rsqrt(squares_M / K + eps)
        acc_MN *= scale_M[:, None]
        if GATED:
            up_MN *= scale_M[:, None]
    if bias_ptr is not None:
        acc_MN += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_MN += tl.load(bias_ptr + N + n_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc_MN = acc_MN * tl.sigmoid(acc_MN) * up_MN
    inside_MN = (m_M < M)[:, None] & (n_N < N)[None, :]
    if residual_ptr is not None:
        at_MN = residual_ptr + m_M[:, None].to(tl.int64) * residual_stride + n_N[None, :]
        acc_MN += tl.load(at_MN, mask=inside_MN, other=0.0).to(tl.float32)
    at_MN = out_ptr + m_M[:, None].to(tl.int64) * out_stride + n_N[None, :]
    tl.store(at_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=inside_MN)


@triton.jit(do_not_specialize=["M"])
def _skinny_linear(
    x_ptr, w_ptr, w_desc, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    LATE: tl.constexpr, THREADS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    HAS_NORM: tl.constexpr = norm_ptr is not None
    split = tl.program_id(0) % SPLIT_K
    tile = tl.program_id(0) // SPLIT_K
    tiles_m = tl.cdiv(M, BLOCK_M)
    first_m = (tile % tiles_m) * BLOCK_M  # neighbours share a weight tile, so it is read from memory once
    first_n = (tile // tiles_m) * BLOCK_N
    steps_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first_k = split * steps_per_split * BLOCK_K
    last_k = tl.minimum(first_k + steps_per_split * BLOCK_K, K)
    steps = tl.cdiv(tl.maximum(last_k - first_k, 0), BLOCK_K)

    w_ptr += first_n.to(tl.int64) * w_stride
    up_ptr = w_ptr + N.to(tl.int64) * w_stride
    if PDL:
        _begin(w_ptr, up_ptr, N - first_n, w_stride, first_k, last_k, BLOCK_N, GATED, PREFETCH, LATE, THREADS)

    m_M = first_m + tl.arange(0, BLOCK_M)
    n_N = first_n + tl.arange(0, BLOCK_N)
    row_N = tl.minimum(tl.arange(0, BLOCK_N), N - first_n - 1)  # rows past the end repeat the last one, unused
    x_ptr += first_m.to(tl.int64) * x_stride
    row_M = tl.arange(0, BLOCK_M)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K // 8), tl.float32)

    for step in range(STEPS if STEPS > 0 else steps):
        k = first_k + step * BLOCK_K
        k_K = k + tl.arange(0, BLOCK_K)
        at_MK = x_ptr + row_M[:, None] * x_stride + k_K[None, :]
        if EVEN_K:
            y_MK = tl.load(at_MK, mask=(m_M < M)[:, None], other=0.0)
        else:
            y_MK = tl.load(at_MK, mask=(m_M < M)[:, None] & (k_K < K)[None, :], other=0.0)
        w_NK = _weight_tile(w_ptr, w_desc, row_N, first_n, w_stride, k, k_K, K, EVEN_K)
        if HAS_NORM:
            # The norm's scale is one number per row, so it commutes with the product: weight now, scale at the end.
            wide_MK = y_MK.to(tl.float32)
            squares += tl.sum(tl.reshape(wide_MK * wide_MK, (BLOCK_M, BLOCK_K // 8, 8)), axis=2)
            if EVEN_K:
                norm_K = tl.load(norm_ptr + k_K)
            else:
                norm_K = tl.load(norm_ptr + k_K, mask=k_K < K, other=0.0)
            y_MK = (wide_MK * norm_K.to(tl.float32)[None, :]).to(y_MK.dtype)
        acc = _product(acc, y_MK, w_NK, SWAP)
        if GATED:
            up_NK = _weight_tile(up_ptr, w_desc, row_N, N + first_n, w_stride, k, k_K, K, EVEN_K)
            up = _product(up, y_MK, up_NK, SWAP)

    if PDL and LATE:
        gdc_launch_dependents()
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    squares_M = tl.sum(squares, axis=1)
    if SPLIT_K == 1:
        _finish(acc, up, squares_M, bias_ptr, residual_ptr, out_ptr, m_M, n_N, M, N, K, residual_stride, out_stride,
                eps, HAS_NORM, GATED)  # fmt: skip
    else:
        # One slot per program: its tile (two when gated), then its rows' sums of squares.
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        SLOT: tl.constexpr = TILE * (2 if GATED else 1) + BLOCK_M
        slots_ptr = partial_ptr + tile.to(tl.int64) * SPLIT_K * SLOT
        offset_MN = row_M[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        live_MN = (m_M < M)[:, None] & (offset_MN >= 0)
        tl.store(slots_ptr + split * SLOT + offset_MN, acc, mask=live_MN)
        if GATED:
            tl.store(slots_ptr + split * SLOT + TILE + offset_MN, up, mask=live_MN)
        if HAS_NORM:
            tl.store(slots_ptr + (split + 1) * SLOT - BLOCK_M + row_M, squares_M)
        tl.debug_barrier()  # every thread's stores come before the one atomic that publishes them
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(counter_ptr + tile, 0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares_M = tl.zeros((BLOCK_M,), tl.float32)
            for part in tl.static_range(SPLIT_K):  # in order, own part included: the sum must not depend on who is last
                # .cg: past the first-level cache, which may hold another kernel's leftovers of the same slot
                acc += tl.load(slots_ptr + part * SLOT + offset_MN, mask=live_MN, other=0.0, cache_modifier=".cg")
                if GATED:
                    up_at = slots_ptr + part * SLOT + TILE + offset_MN
                    up += tl.load(up_at, mask=live_MN, other=0.0, cache_modifier=".cg")
                if HAS_NORM:
                    squares_M += tl.load(slots_ptr + (part + 1) * SLOT - BLOCK_M + row_M, cache_modifier=".cg")
            _finish(acc, up, squares_M, bias_ptr, residual_ptr, out_ptr, m_M, n_N, M, N, K, residual_stride,
                    out_stride, eps, HAS_NORM, GATED)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _wide_linear(
    x_ptr, w_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """All loads in flight at once. S: slices of K, one warp's work each, added up at the end within the program."""
    HAS_NORM: tl.constexpr = norm_ptr is not None
    tiles_m = tl.cdiv(M, BLOCK_M)
    first_m = (tl.program_id(0) % tiles_m) * BLOCK_M
    first_n = (tl.program_id(0) // tiles_m) * BLOCK_N
    w_ptr += first_n.to(tl.int64) * w_stride
    up_ptr = w_ptr + N.to(tl.int64) * w_stride
    if PDL:
        _begin(w_ptr, up_ptr, N - first_n, w_stride, 0, K, BLOCK_N, GATED, PREFETCH, LATE, THREADS)

    m_M = first_m + tl.arange(0, BLOCK_M)
    n_N = first_n + tl.arange(0, BLOCK_N)
    row_N = tl.minimum(tl.arange(0, BLOCK_N), N - first_n - 1)  # rows past the end repeat the last one, unused
    k_S1K = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    inside_S1K = k_S1K < K
    at_SNK = row_N[None, :, None] * w_stride + k_S1K
    w_SNK = tl.load(w_ptr + at_SNK, mask=inside_S1K, other=0.0, eviction_policy="evict_first")
    up_SNK = w_SNK
    if GATED:
        up_SNK = tl.load(up_ptr + at_SNK, mask=inside_S1K, other=0.0, eviction_policy="evict_first")
    at_SMK = m_M[None, :, None].to(tl.int64) * x_stride + k_S1K
    y_SMK = tl.load(x_ptr + at_SMK, mask=inside_S1K & (m_M < M)[None, :, None], other=0.0)
    squares_M = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_NORM:  # weight now, scale at the end, as above
        norm_S1K = tl.load(norm_ptr + k_S1K, mask=inside_S1K, other=0.0)
        wide_SMK = y_SMK.to(tl.float32)
        squares_M = tl.sum(tl.sum(wide_SMK * wide_SMK, axis=2), axis=0)
        y_SMK = (wide_SMK * norm_S1K.to(tl.float32)).to(y_SMK.dtype)
    if PDL and LATE:
        gdc_launch_dependents()
    acc_MN = tl.sum(tl.dot(y_SMK, tl.permute(w_SNK, (0, 2, 1)), input_precision="ieee"), axis=0)
    up_MN = acc_MN
    if GATED:
        up_MN = tl.sum(tl.dot(y_SMK, tl.permute(up_SNK, (0, 2, 1)), input_precision="ieee"), axis=0)
    _finish(acc_MN, up_MN, squares_M, bias_ptr, residual_ptr, out_ptr, m_M, n_N, M, N, K, residual_stride, out_stride,
            eps, HAS_NORM, GATED)  # fmt: skip


INTERPRETED = not isinstance(_skinny_linear, triton.JITFunction)
"""Whether kernels run in Triton's interpreter: no dependent launch and no inline assembly there."""


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
    pdl: bool = False,
    workspace: Workspace | None = None,
) -> Tensor:
    """residual + act(norm(x)·Wᵀ + bias) as `tlt.kernels.linear.linear` defines it, by the measured best route."""
    config = choose(x_MK.shape[0], weight_NK.shape[0] // (2 if gated else 1), x_MK.shape[1], gated)
    if config is None:
        return composed_linear(
            x_MK,
            weight_NK,
            bias=bias,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            residual=residual,
            gated=gated,
            out=out,
            pdl=pdl,
        )
    return skinny_linear(
        x_MK,
        weight_NK,
        config,
        bias=bias,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        residual=residual,
        gated=gated,
        out=out,
        pdl=pdl,
        workspace=workspace,
    )


def skinny_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    config: Config,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    workspace: Workspace | None = None,
) -> Tensor:
    """One fused kernel with the given configuration (two where the norm is `apart`)."""
    m, k = x_MK.shape
    n = weight_NK.shape[0] // (2 if gated else 1)
    _check(x_MK, weight_NK, residual, out, n)
    pdl = pdl and not INTERPRETED
    if config.apart and norm_weight is not None:
        x_MK, norm_weight = elementwise_triton.rms_norm(x_MK, norm_weight, norm_eps, pdl=pdl), None
    if out is None:
        out = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    # The bulk copy engine wants rows on 16-byte borders. Blocks are multiples of that, so only K and the rows decide.
    aligned = weight_NK.stride(0) * weight_NK.element_size() % 16 == 0 and weight_NK.data_ptr() % 16 == 0
    aligned = aligned and k * weight_NK.element_size() % 16 == 0
    prefetch = config.prefetch if pdl and aligned else 0
    launch_options: dict[str, Any] = {} if INTERPRETED else {"launch_pdl": pdl}
    if config.wide:
        programs = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        _wide_linear[(programs,)](
            x_MK, weight_NK, norm_weight, bias, residual, out,
            m, n, k, x_MK.stride(0), weight_NK.stride(0), residual_stride, out.stride(0), norm_eps,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            SLICES=triton.next_power_of_2(triton.cdiv(k, config.block_k)),
            GATED=gated, PREFETCH=prefetch, PDL=pdl, LATE=config.late, THREADS=config.warps * 32,
            num_warps=config.warps, **launch_options,
        )  # fmt: skip
        return out
    programs = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.split_k
    partials = counters = None
    if config.split_k > 1:
        scratch = workspace or shared_workspace(x_MK.device)
        scratch.check(config, programs, gated)
        partials, counters = scratch.partials, scratch.counters
    descriptor = None
    if config.tma and aligned and not INTERPRETED:
        descriptor = TensorDescriptor.from_tensor(weight_NK, [config.block_n, config.block_k])
    # The interpreter cannot count to a tensor: there the number of steps is a constant and K is always masked.
    steps = triton.cdiv(triton.cdiv(k, config.block_k), config.split_k) if INTERPRETED else 0
    _skinny_linear[(programs,)](
        x_MK, weight_NK, descriptor, norm_weight, bias, residual, out, partials, counters,
        m, n, k, x_MK.stride(0), weight_NK.stride(0), residual_stride, out.stride(0), norm_eps,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k,
        GATED=gated, EVEN_K=k % config.block_k == 0 and not INTERPRETED, SWAP=config.swap,
        PREFETCH=prefetch, PDL=pdl, LATE=config.late, THREADS=config.warps * 32, STEPS=steps,
        num_warps=config.warps, num_stages=config.stages, **launch_options,
    )  # fmt: skip
    return out


def composed_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The same by the vendor's matrix product, with the norm and the gate as kernels of their own."""
    if norm_weight is not None:
        x_MK = elementwise_triton.rms_norm(x_MK, norm_weight, norm_eps, pdl=pdl)
    if residual is not None and bias is None and not gated:
        if out is None:
            return torch.addmm(residual, x_MK, weight_NK.t())
        return torch.addmm(residual, x_MK, weight_NK.t(), out=out)
    if out is not None and bias is None and residual is None and not gated:
        if out.dtype != x_MK.dtype:
            return torch.mm(x_MK, weight_NK.t(), out_dtype=out.dtype, out=out)
        return torch.mm(x_MK, weight_NK.t(), out=out)
    product_MN = functional.linear(x_MK, weight_NK, bias)
    if gated:
        product_MN = elementwise_triton.silu_mul(product_MN, pdl=pdl)
    if residual is not None:
        product_MN = product_MN.add_(residual)
    return product_MN if out is None else out.copy_(product_MN)


def _check(x_MK: Tensor, weight_NK: Tensor, residual: Tensor | None, out: Tensor | None, n: int) -> None:
    if x_MK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"x has {x_MK.shape[1]} columns and the weight {weight_NK.shape[1]}; they must be equal")
    if x_MK.stride(1) != 1 or weight_NK.stride(1) != 1:
        raise ValueError("x and weight must be contiguous along K; pass x.contiguous()")
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and (tensor.shape != (x_MK.shape[0], n) or tensor.stride(1) != 1):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {(x_MK.shape[0], n)} with contiguous rows")
    if out is not None and out.data_ptr() == x_MK.data_ptr():
        raise ValueError("out must not be x: other programs still read it; pass a buffer of its own")
