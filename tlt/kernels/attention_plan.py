"""How attention over a paged KV cache is cut into programs, by shape alone: pure numbers, chosen by measurement."""

from dataclasses import dataclass
from typing import Literal

import triton


@dataclass(frozen=True, slots=True)
class Launch:
    """How one attention call is cut up."""

    block_m: int  # rows (query, head of the group) of a program; at least 16 for the matrix units
    block_n: int  # keys per tile
    splits: int  # programs that share one context
    min_split: int  # keys a program takes at least, before a context is shared
    num_warps: int
    num_stages: int
    combine: Literal["fused", "separate"] = "fused"  # who sums the splits: the last of them, or a second kernel


def plan_launch(n_requests: int, n_kv: int, group: int, max_query: int, multiprocessors: int) -> Launch:
    """Small batches are cut fine to fill the chip; large ones get big tiles, and split only contexts that are long.

    A large batch of few rows still gets a few splits: one straggler of a long context would otherwise keep the whole
    chip waiting. With many rows it gets none: the parts would take more memory than that is worth.
    """
    rows = max_query * group
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    while block_m > 16 and 2 * n_requests * n_kv * triton.cdiv(rows, block_m) <= multiprocessors:
        block_m //= 2
    programs = n_requests * n_kv * triton.cdiv(rows, block_m)
    wanted = 2 * multiprocessors
    if programs < wanted:
        return Launch(block_m, 64, min(triton.cdiv(wanted, programs), 32), 64, _warps(block_m), num_stages=3)
    most = 2 if programs >= 4 * multiprocessors else 4  # programs with nothing to do cost time too
    splits = max(1, min(most, 8192 * 16 // (programs * block_m)))
    if block_m == 16:  # measured: small programs, of which many fit on the chip at once, hide each other's waiting
        return Launch(block_m, 64, splits, 1024, num_warps=2, num_stages=2)
    return Launch(block_m, 64, splits, 1024, _warps(block_m), num_stages=4 if block_m < 128 else 3)


def _warps(block_m: int) -> int:
    return 8 if block_m == 128 else 4
