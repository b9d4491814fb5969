"""Linear layers for few rows: the weight is streamed once from memory, everything else is fused around that stream.

What always holds
- Routes are chosen by shape alone, from `plan`: our kernels (`tiles`) or the vendor's library. The tiles that
  `tlt tune-kernels` measured on this GPU are read when this module is imported.
- With `exact` there is one route for any number of rows, never the library's: a row's bits do not depend on the others.
- Two layers divide the norm between them: the layer that writes the residual stream multiplies it by the norm's weight
  and sums its squares (`PreNormedRows`), the layer that reads it scales its sums. Plain rows (written by the library,
  or a drafter's) are normed by the layer that reads them: as our kernels read them, or by a kernel of its own where
  that was faster (`apart`) and before the library's product.

Knows buffers and launches; knows nothing of models.
"""

# M rows (tokens), N outputs after gating, K inputs, D width of the residual stream, P parts of a sum, V rows of a table

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tlt.kernels.linear import elementwise_triton
from tlt.kernels.linear.plan import Config, bucket_of, choose, choose_exact, choose_quantized, use_tuned
from tlt.kernels.linear.reference import Matrix, PreNormedRows, QuantizedMatrix, bf16_of
from tlt.kernels.linear.tiles import copy_rows_kernel, skinny_linear_kernel, take_rows_kernel, wide_linear_kernel
from tlt.kernels.linear.workspace import Workspace, shared_workspace

INTERPRETED = not isinstance(skinny_linear_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter: no dependent launch and no inline assembly there."""

if torch.cuda.is_available():
    use_tuned(torch.cuda.get_device_name())


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
    workspace: Workspace | None = None,
    exact: bool = False,
) -> Tensor:
    """residual + act(norm(x)·Wᵀ + bias) as `reference.linear` defines it, by the measured best route."""
    weight_NK = bf16_of(weight)
    x_MK = x if isinstance(x, Tensor) else x.x_MD
    shape = (x_MK.shape[0], weight_NK.shape[0] // (2 if gated else 1), x_MK.shape[1], gated)
    fused: dict[str, Any] = {"bias": bias, "norm_weight": norm_weight, "norm_eps": norm_eps, "residual": residual}
    fused |= {"gated": gated, "out": out, "pdl": pdl}
    if exact:
        return exact_linear(x, weight_NK, choose_exact(*shape), workspace=workspace, **fused)
    weight, config = _route(weight, shape)
    if config is None:
        return composed_linear(x_MK, weight_NK, **fused)
    return skinny_linear(x, weight, config, workspace=workspace, **fused)


def _route(weight: Matrix, shape: tuple[int, int, int, bool]) -> tuple[Matrix, Config | None]:
    """The matrix to read, quantized or bf16, and the tiles that read it; None: the vendor's library reads it."""
    if isinstance(weight, QuantizedMatrix):
        config = choose_quantized(*shape)
        if config is not None:
            return weight, config
    return bf16_of(weight), choose(*shape)


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
    """`residual += x·Wᵀ + bias`, in place unless it is to be kept, and made ready for the norm that reads it next where
    that costs nothing. The sum has the same bits wherever it is written."""
    shape = (x_MK.shape[0], len(bf16_of(weight)), x_MK.shape[1], False)
    weight, config = (bf16_of(weight), choose_exact(*shape)) if exact else _route(weight, shape)
    if config is None:  # the library adds in place: it is given a copy to write over
        out = copy_rows(residual, pdl=pdl) if keep_residual else residual
        return composed_linear(x_MK, bf16_of(weight), bias=bias, residual=out, out=out, pdl=pdl)
    out = torch.empty_like(residual) if keep_residual else residual
    prepared = None if next_norm is None else room_for(out, next_norm, config.block_n)
    run: Any = exact_linear if exact else skinny_linear
    out = run(x_MK, weight, config, bias=bias, residual=residual, out=out, leave=prepared, pdl=pdl)
    return prepared or out


def copy_rows(x_MD: Tensor, *, pdl: bool = False) -> Tensor:
    """The same rows again, by a kernel that may start while the one before it ends."""
    out = torch.empty_like(x_MD)
    rows, width = x_MD.shape
    block = min(_COPIED, triton.next_power_of_2(width))
    pdl = pdl and not INTERPRETED
    copy_rows_kernel[(rows, triton.cdiv(width, block))](
        x_MD, out, x_MD.stride(0), out.stride(0), width, BLOCK=block, PDL=pdl, num_warps=4, **_launch_options(pdl)
    )
    return out


_COPIED = 1024
"""Columns of one program."""


def take_rows(
    table_VD: Tensor, index_M: Tensor, next_norm: Tensor, *, pdl: bool = False, exact: bool = False
) -> Tensor | PreNormedRows:
    """`table[index]`, made ready for the norm that reads it first where its reader can make use of that."""
    if bucket_of(len(index_M)) is None and not exact:
        return table_VD[index_M]
    width = table_VD.shape[1]
    block = triton.next_power_of_2(width)
    part = min(_PART, block)
    taken = room_for(table_VD.new_empty((len(index_M), width)), next_norm, part)
    pdl = pdl and not INTERPRETED
    take_rows_kernel[(len(index_M),)](
        index_M, table_VD, next_norm, taken.x_MD, taken.pre_normed_MD, taken.squares_MP,
        index_M.stride(0), table_VD.stride(0), *table_VD.shape,
        BLOCK=block, PART=part, PARTS=taken.squares_MP.shape[1], PDL=pdl,
        num_warps=min(16, max(1, block // 512)), **_launch_options(pdl),
    )  # fmt: skip
    return taken


_PART = 64
"""As most entries of the table cut the residual stream, so that the first layer runs the same kernel as the others."""


def room_for(x_MD: Tensor, norm_D: Tensor, part: int) -> PreNormedRows:
    """Buffers yet to be filled, with squares in parts of `part` columns."""
    rows, width = x_MD.shape
    squares_MP = torch.empty((rows, triton.cdiv(width, part)), dtype=torch.float32, device=x_MD.device)
    return PreNormedRows(x_MD, norm_D, torch.empty((rows, width), dtype=x_MD.dtype, device=x_MD.device), squares_MP)


def skinny_linear(
    x: Tensor | PreNormedRows,
    weight: Matrix,
    config: Config,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    leave: PreNormedRows | None = None,
    pdl: bool = False,
    workspace: Workspace | None = None,
) -> Tensor:
    """One fused kernel with the given configuration (two where the norm is `apart` and x is not pre-normed).

    `leave`: buffers to fill with the result as the next norm wants it; its x is `out`.
    """
    pdl = pdl and not INTERPRETED
    weight_NK, scale_N = (
        (weight.quantized_NK, weight.scale_N) if isinstance(weight, QuantizedMatrix) else (weight, None)
    )
    carried = None
    if isinstance(x, PreNormedRows):
        x_MK, carried, norm_weight = x.pre_normed_MD, x.squares_MP, None
    elif config.apart and norm_weight is not None:
        x_MK, norm_weight = elementwise_triton.rms_norm(x, norm_weight, norm_eps, pdl=pdl), None
    else:
        x_MK = x
    m, k = x_MK.shape
    n = weight_NK.shape[0] // (2 if gated else 1)
    _check(x_MK, weight_NK, residual, out, leave, n)
    if out is None:
        out = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    parts = 1 if carried is None else carried.shape[1]
    leaving = (None, None, None) if leave is None else (leave.norm_D, leave.pre_normed_MD, leave.squares_MP)
    around = (scale_N, norm_weight, carried, bias, residual, out, *leaving)
    strides = (x_MK.stride(0), weight_NK.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    options: dict[str, Any] = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "PARTS": parts, "BLOCK_P": triton.next_power_of_2(parts), "GATED": gated,
        "PREFETCH": config.prefetch if pdl and _aligned(weight_NK) else 0, "PDL": pdl, "LATE": config.late,
        "THREADS": config.warps * 32, "num_warps": config.warps, **_launch_options(pdl),
    }  # fmt: skip
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    if config.wide:
        slices = triton.next_power_of_2(triton.cdiv(k, config.block_k))
        wide_linear_kernel[(tiles,)](x_MK, weight_NK, *around, m, n, k, *strides, norm_eps, SLICES=slices, **options)
        return out
    scratch = _scratch(config, tiles, gated, x_MK.device, workspace)
    w_desc = _descriptor(weight_NK, [config.block_n, config.block_k]) if config.tma else None
    x_desc = _descriptor(x_MK, [config.block_m, config.block_k]) if config.tma_x else None
    skinny_linear_kernel[(tiles * config.split_k,)](
        x_MK, x_desc, weight_NK, w_desc, *around, *scratch, m, n, k, *strides, norm_eps,
        SPLIT_K=config.split_k, EVEN_K=k % config.block_k == 0 and not INTERPRETED, SWAP=config.swap,
        AHEAD=config.ahead if options["PREFETCH"] else 0, STEPS=_steps(config, k), num_stages=config.stages, **options,
    )  # fmt: skip
    return out


def exact_linear(
    x: Tensor | PreNormedRows,
    weight_NK: Tensor,
    config: Config,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    leave: PreNormedRows | None = None,
    workspace: Workspace | None = None,
    **fused: Any,
) -> Tensor:
    """`skinny_linear` over any number of rows: as many at a time as the workspace has room for."""
    x_MK = x if isinstance(x, Tensor) else x.x_MD
    rows, width = len(x_MK), len(weight_NK) // (2 if gated else 1)
    if out is None:
        out = torch.empty((rows, width), dtype=x_MK.dtype, device=x_MK.device)
    at_once = rows
    if config.split_k > 1:
        workspace = workspace or shared_workspace(x_MK.device)
        at_once = workspace.rows(config, triton.cdiv(width, config.block_n), gated)
    for first in range(0, rows, max(1, at_once)):
        part = slice(first, first + at_once)
        left = None if leave is None else _part(leave, part)
        skinny_linear(
            x[part] if isinstance(x, Tensor) else _part(x, part),
            weight_NK,
            config,
            residual=None if residual is None else residual[part],
            gated=gated,
            out=out[part] if left is None else left.x_MD,
            leave=left,
            workspace=workspace,
            **fused,
        )
    return out


def _part(x: PreNormedRows, rows: slice) -> PreNormedRows:
    return PreNormedRows(x.x_MD[rows], x.norm_D, x.pre_normed_MD[rows], x.squares_MP[rows])


def _launch_options(pdl: bool) -> dict[str, bool]:
    return {} if INTERPRETED else {"launch_pdl": pdl}


def _steps(config: Config, k: int) -> int:
    """The interpreter cannot count to a tensor: there the number of steps is a constant and K is always masked."""
    return triton.cdiv(triton.cdiv(k, config.block_k), config.split_k) if INTERPRETED else 0


def _scratch(
    config: Config, tiles: int, gated: bool, device: torch.device, workspace: Workspace | None
) -> tuple[Tensor | None, Tensor | None]:
    """Where the programs that share a tile leave their sums, and count themselves."""
    if config.split_k == 1:
        return None, None
    workspace = workspace or shared_workspace(device)
    workspace.check(config, tiles * config.split_k, gated)
    return workspace.partials, workspace.counters


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


def _aligned(rows: Tensor) -> bool:
    """Rows and their ends on 16-byte borders, as the bulk copy engine wants them; blocks are multiples of that."""
    size = rows.element_size()
    return rows.stride(0) * size % 16 == 0 and rows.data_ptr() % 16 == 0 and rows.shape[1] * size % 16 == 0


def _descriptor(rows: Tensor, block: list[int]) -> TensorDescriptor | None:
    return TensorDescriptor.from_tensor(rows, block) if _aligned(rows) else None


def _check(
    x_MK: Tensor, weight_NK: Tensor, residual: Tensor | None, out: Tensor | None, leave: PreNormedRows | None, n: int
) -> None:
    if x_MK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"x has {x_MK.shape[1]} columns and the weight {weight_NK.shape[1]}; they must be equal")
    if x_MK.stride(1) != 1 or weight_NK.stride(1) != 1:
        raise ValueError("x and weight must be contiguous along K; pass x.contiguous()")
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and (tensor.shape != (x_MK.shape[0], n) or tensor.stride(1) != 1):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {(x_MK.shape[0], n)} with contiguous rows")
    if leave is not None and leave.x_MD is not out:
        raise ValueError("leave is room for other rows than out; pass room_for(out, norm weight, block_n)")
    if out is not None and out.data_ptr() == x_MK.data_ptr():
        raise ValueError("out must not be x: other programs still read it; pass a buffer of its own")
