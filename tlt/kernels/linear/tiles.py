"""The kernels that `triton` launches: tiles of a linear layer, from the weight stream to the stored result.

What always holds
- One element of `out` is written by exactly one program, which is also the only one to read that element of `residual`:
  `out` may be `residual`.
- The result is a function of the inputs and the configuration: split-K partial sums are added in a fixed order by
  whichever program arrives last, so runs agree bit for bit, and a row does not depend on the other rows.
- The counters of a workspace are all zero between kernels.
- A quantized matrix (`scale`: one for each of its rows) is multiplied as it is, and the sums are scaled at the end.
- A norm's scale is one number per row, so it commutes with the product: what is multiplied is x · norm weight, and the
  sums are scaled at the end. Either this kernel multiplies x by the norm weight as it reads it and sums its squares;
  or x comes pre-normed, its squares in parts (`input_squares`), from the kernel that wrote it, which leaves the loop to
  the matrix units alone.

Programmatic dependent launch (`pdl=True`). The kernel may start while its predecessor on the stream still runs. Then
everything a predecessor could have written, and every buffer it could still be reading (x, residual, bias, norm weight,
out, workspace), is touched only after `gdc_wait`, which returns when the predecessor has completed and its writes are
visible. Before the wait only weights are asked into L2: that is a hint without a destination, so even a predecessor
that writes weights is safe. Every program waits, hence this kernel completes only after its predecessor has, hence
waiting for it covers all earlier kernels too; and a kernel launched the ordinary way (a library call) is a barrier.
A kernel launched with `launch_pdl` in which NO program waits would break this chain for all that follow; attention, in
which those without work leave at once, has one with work for every request.
The signal that lets the successor start is given at once, or (`late`) when the weights have been read: programs of the
successor can only occupy what is free once all programs of this kernel are resident, and while waiting they fill the
gap with their own prefetch. With `ahead` the loop goes on asking, so that memory is kept busy from L2's distance and a
shallow pipeline is enough; a program that needs little shared memory leaves room for its successor to wait beside it.

Knows tiles, pipelines and memory order; knows nothing of models or of which configuration is best (`plan`).
"""

# M rows (tokens), N outputs after gating, K inputs, P parts of a sum. On tiles M, N, K, P stand for BLOCK_M and so on.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _ask_into_l2(rows_ptr, rows, row_stride, first_k, last_k, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
                 THREADS: tl.constexpr):  # fmt: skip
    """Start moving COLUMNS of each weight row to L2; one instruction per thread, nothing to wait for."""
    LANES: tl.constexpr = THREADS if THREADS > BLOCK_N else BLOCK_N  # fewer would be asked for by several threads each
    PIECES: tl.constexpr = COLUMNS // 128 if COLUMNS > 128 else 1  # smaller ones cost more to ask for than they bring
    CHUNKS: tl.constexpr = PIECES if LANES // BLOCK_N > PIECES else LANES // BLOCK_N
    WIDTH: tl.constexpr = COLUMNS // CHUNKS
    lane = tl.arange(0, LANES)
    row = lane // CHUNKS
    column = first_k + (lane % CHUNKS) * WIDTH
    wanted = tl.where(row < tl.minimum(rows, BLOCK_N), tl.maximum(tl.minimum(last_k - column, WIDTH), 0), 0)
    size = wanted * (rows_ptr.dtype.element_ty.primitive_bitwidth // 8)
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
def _input_tile(x_ptr, x_desc, row_in_tile_M, m_M, first_m, x_stride, k, k_K, M, K, EVEN_K: tl.constexpr):
    if x_desc is not None:
        tile_MK = x_desc.load([first_m, k])  # zeros past the last row and the last column
    else:
        at_MK = x_ptr + row_in_tile_M[:, None] * x_stride + k_K[None, :]
        if EVEN_K:
            tile_MK = tl.load(at_MK, mask=(m_M < M)[:, None], other=0.0)
        else:
            tile_MK = tl.load(at_MK, mask=(m_M < M)[:, None] & (k_K < K)[None, :], other=0.0)
    return tile_MK


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
def _unpacked(w, dtype: tl.constexpr):
    """Weights as the matrix units want them. From 8 bits exactly, and by way of float32: from float16, as which they
    come out first, straight to bfloat16 leads an instruction of which a multiprocessor does 16 in a cycle."""
    if w.dtype == tl.float8e4nv:
        w = w.to(tl.float16).to(tl.float32)
    return w.to(dtype)


@triton.jit
def _product(acc, y_MK, w_NK, SWAP: tl.constexpr):
    w_NK = _unpacked(w_NK, y_MK.dtype)
    if SWAP:
        acc = tl.dot(w_NK, tl.trans(y_MK), acc, input_precision="ieee")
    else:
        acc = tl.dot(y_MK, tl.trans(w_NK), acc, input_precision="ieee")
    return acc


@triton.jit
def _carried_squares(input_squares_ptr, m_M, M, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    p_P = tl.arange(0, BLOCK_P)
    at_MP = input_squares_ptr + m_M[:, None] * PARTS + p_P[None, :]
    return tl.load(at_MP, mask=(m_M < M)[:, None] & (p_P < PARTS)[None, :], other=0.0)


@triton.jit
def _finish(acc_MN, up_MN, squares_M, scale_ptr, bias_ptr, residual_ptr, out_ptr,
            next_norm_ptr, pre_normed_ptr, next_squares_ptr, m_M, n_N, part, parts,
            M, N, K, residual_stride, out_stride, eps, SCALED: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Scales, bias, gate, residual, store; then the pre-normed rows and their squares, from the values as stored."""
    if scale_ptr is not None:
        acc_MN *= tl.load(scale_ptr + n_N, mask=n_N < N, other=0.0)[None, :]
        if GATED:
            up_MN *= tl.load(scale_ptr + N + n_N, mask=n_N < N, other=0.0)[None, :]
    if SCALED:
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
    out_MN = acc_MN.to(out_ptr.dtype.element_ty)
    at_MN = out_ptr + m_M[:, None].to(tl.int64) * out_stride + n_N[None, :]
    tl.store(at_MN, out_MN, mask=inside_MN)
    if next_norm_ptr is not None:
        fp32_MN = tl.where(inside_MN, out_MN.to(tl.float32), 0.0)
        norm_N = tl.load(next_norm_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)
        at_MN = pre_normed_ptr + m_M[:, None].to(tl.int64) * N + n_N[None, :]
        tl.store(at_MN, (fp32_MN * norm_N[None, :]).to(pre_normed_ptr.dtype.element_ty), mask=inside_MN)
        tl.store(next_squares_ptr + m_M * parts + part, tl.sum(fp32_MN * fp32_MN, axis=1), mask=m_M < M)


@triton.jit
def _leave_in_slot(slot_ptr, acc_MN, up_MN, squares_M, m_M, M, HAS_NORM: tl.constexpr, GATED: tl.constexpr):
    """A slot holds a program's tile (two when gated), then its rows' sums of squares."""
    BLOCK_M: tl.constexpr = acc_MN.shape[0]
    BLOCK_N: tl.constexpr = acc_MN.shape[1]
    row_M = tl.arange(0, BLOCK_M)
    at_MN = slot_ptr + row_M[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(at_MN, acc_MN, mask=(m_M < M)[:, None])
    if GATED:
        tl.store(at_MN + BLOCK_M * BLOCK_N, up_MN, mask=(m_M < M)[:, None])
    if HAS_NORM:
        tl.store(slot_ptr + BLOCK_M * BLOCK_N * (2 if GATED else 1) + row_M, squares_M)


@triton.jit
def _add_slot(slot_ptr, acc_MN, up_MN, squares_M, m_M, M, HAS_NORM: tl.constexpr, GATED: tl.constexpr):
    """Read past the first-level cache (.cg), which may hold another kernel's leftovers of the same slot."""
    BLOCK_M: tl.constexpr = acc_MN.shape[0]
    BLOCK_N: tl.constexpr = acc_MN.shape[1]
    row_M = tl.arange(0, BLOCK_M)
    at_MN = slot_ptr + row_M[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc_MN += tl.load(at_MN, mask=(m_M < M)[:, None], other=0.0, cache_modifier=".cg")
    if GATED:
        up_MN += tl.load(at_MN + BLOCK_M * BLOCK_N, mask=(m_M < M)[:, None], other=0.0, cache_modifier=".cg")
    if HAS_NORM:
        squares_at_M = slot_ptr + BLOCK_M * BLOCK_N * (2 if GATED else 1) + row_M
        squares_M += tl.load(squares_at_M, cache_modifier=".cg")
    return acc_MN, up_MN, squares_M


@triton.jit(do_not_specialize=["M"])
def skinny_linear_kernel(
    x_ptr, x_desc, w_ptr, w_desc, scale_ptr, norm_ptr, input_squares_ptr, bias_ptr, residual_ptr, out_ptr,
    next_norm_ptr, pre_normed_ptr, next_squares_ptr, partial_ptr, counter_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr, THREADS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    HAS_NORM: tl.constexpr = norm_ptr is not None
    CARRIED: tl.constexpr = input_squares_ptr is not None
    SCALED: tl.constexpr = HAS_NORM or CARRIED
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
    if CARRIED and SPLIT_K == 1:  # asked for now, waited for at the end
        carried_MP = _carried_squares(input_squares_ptr, m_M, M, PARTS, BLOCK_P)

    for step in range(STEPS if STEPS > 0 else steps):
        k = first_k + step * BLOCK_K
        k_K = k + tl.arange(0, BLOCK_K)
        if AHEAD > 0:  # L2 runs ahead of the pipeline, which then has to cover L2's latency only
            tl.static_assert(AHEAD % BLOCK_K == 0)
            ask_to = tl.where(step % (AHEAD // BLOCK_K) == 0, last_k, 0)
            _ask_into_l2(w_ptr, N - first_n, w_stride, k + PREFETCH, ask_to, BLOCK_N, AHEAD, THREADS)
            if GATED:
                _ask_into_l2(up_ptr, N - first_n, w_stride, k + PREFETCH, ask_to, BLOCK_N, AHEAD, THREADS)
        y_MK = _input_tile(x_ptr, x_desc, row_M, m_M, first_m, x_stride, k, k_K, M, K, EVEN_K)
        w_NK = _weight_tile(w_ptr, w_desc, row_N, first_n, w_stride, k, k_K, K, EVEN_K)
        if HAS_NORM:
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
    part, parts = first_n // BLOCK_N, tl.cdiv(N, BLOCK_N)
    if SPLIT_K == 1:
        if CARRIED:
            squares_M = tl.sum(carried_MP, axis=1)
        _finish(acc, up, squares_M, scale_ptr, bias_ptr, residual_ptr, out_ptr,
                next_norm_ptr, pre_normed_ptr, next_squares_ptr, m_M, n_N, part, parts,
                M, N, K, residual_stride, out_stride, eps, SCALED, GATED)  # fmt: skip
    else:
        SLOT: tl.constexpr = BLOCK_M * BLOCK_N * (2 if GATED else 1) + BLOCK_M
        slots_ptr = partial_ptr + tile.to(tl.int64) * SPLIT_K * SLOT
        _leave_in_slot(slots_ptr + split * SLOT, acc, up, squares_M, m_M, M, HAS_NORM, GATED)
        tl.debug_barrier()  # every thread's stores come before the one atomic that publishes them
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(counter_ptr + tile, 0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares_M = tl.zeros((BLOCK_M,), tl.float32)
            if CARRIED:
                squares_M = tl.sum(_carried_squares(input_squares_ptr, m_M, M, PARTS, BLOCK_P), axis=1)
            for slot in tl.static_range(
                SPLIT_K
            ):  # in order, own slot included: the sum must not depend on the order of arrival
                acc, up, squares_M = _add_slot(slots_ptr + slot * SLOT, acc, up, squares_M, m_M, M, HAS_NORM, GATED)
            _finish(acc, up, squares_M, scale_ptr, bias_ptr, residual_ptr, out_ptr,
                    next_norm_ptr, pre_normed_ptr, next_squares_ptr, m_M, n_N, part, parts,
                    M, N, K, residual_stride, out_stride, eps, SCALED, GATED)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def wide_linear_kernel(
    x_ptr, w_ptr, scale_ptr, norm_ptr, input_squares_ptr, bias_ptr, residual_ptr, out_ptr,
    next_norm_ptr, pre_normed_ptr, next_squares_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    GATED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """All loads in flight at once. S: slices of K, one warp's work each, added up at the end within the program."""
    HAS_NORM: tl.constexpr = norm_ptr is not None
    CARRIED: tl.constexpr = input_squares_ptr is not None
    SCALED: tl.constexpr = HAS_NORM or CARRIED
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
    if CARRIED:
        squares_M = tl.sum(_carried_squares(input_squares_ptr, m_M, M, PARTS, BLOCK_P), axis=1)
    if HAS_NORM:
        norm_S1K = tl.load(norm_ptr + k_S1K, mask=inside_S1K, other=0.0)
        wide_SMK = y_SMK.to(tl.float32)
        squares_M = tl.sum(tl.sum(wide_SMK * wide_SMK, axis=2), axis=0)
        y_SMK = (wide_SMK * norm_S1K.to(tl.float32)).to(y_SMK.dtype)
    if PDL and LATE:
        gdc_launch_dependents()
    w_SKN = tl.permute(_unpacked(w_SNK, y_SMK.dtype), (0, 2, 1))
    acc_MN = tl.sum(tl.dot(y_SMK, w_SKN, input_precision="ieee"), axis=0)
    up_MN = acc_MN
    if GATED:
        up_SKN = tl.permute(_unpacked(up_SNK, y_SMK.dtype), (0, 2, 1))
        up_MN = tl.sum(tl.dot(y_SMK, up_SKN, input_precision="ieee"), axis=0)
    part, parts = first_n // BLOCK_N, tl.cdiv(N, BLOCK_N)
    _finish(acc_MN, up_MN, squares_M, scale_ptr, bias_ptr, residual_ptr, out_ptr,
            next_norm_ptr, pre_normed_ptr, next_squares_ptr, m_M, n_N, part, parts,
            M, N, K, residual_stride, out_stride, eps, SCALED, GATED)  # fmt: skip


@triton.jit
def take_rows_kernel(
    index_ptr, table_ptr, norm_ptr, out_ptr, pre_normed_ptr, squares_ptr, index_stride, table_stride, rows, width,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one row of a table, pre-normed for the norm that reads it; its squares in parts of PART columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + at * index_stride).to(tl.int64)
    index = tl.where(index < 0, index + rows, index)  # from the end, as in torch
    column = tl.arange(0, BLOCK)
    ok = column < width
    x = tl.load(table_ptr + index * table_stride + column, mask=ok, other=0.0)
    fp32 = x.to(tl.float32)
    norm = tl.load(norm_ptr + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + at * width + column, x, mask=ok)
    tl.store(pre_normed_ptr + at * width + column, (fp32 * norm).to(x.dtype), mask=ok)
    part = tl.arange(0, BLOCK // PART)
    squares = tl.sum(tl.reshape(fp32 * fp32, (BLOCK // PART, PART)), axis=1)
    tl.store(squares_ptr + at * PARTS + part, squares, mask=part < PARTS)


@triton.jit
def copy_rows_kernel(x_ptr, out_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program: a block of columns of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    tl.store(out_ptr + row * out_stride + column, tl.load(x_ptr + row * x_stride + column, mask=ok), mask=ok)
