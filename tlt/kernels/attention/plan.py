"""How attention over a paged KV cache is cut into programs, by shape alone: pure numbers, chosen by measurement."""

from dataclasses import dataclass

import triton

MOST_EXTRA = 255  # shares of a context are numbered in a byte
_MOST_PART_ROWS = 1 << 18  # of one launch: 64 MiB where heads are 64 wide


@dataclass(frozen=True, slots=True)
class Launch:
    """How one attention call is cut up."""

    block_m: int  # rows (query, head of the group) of a program; at least 16 for the matrix units
    block_n: int  # keys per tile
    extra: int  # shares beyond one per request: long contexts are divided among so many programs more
    min_split: int  # keys of a share at least, before a context is divided
    num_warps: int
    num_stages: int

    def shares(self, n_requests: int) -> int:
        return n_requests + self.extra


def plan_launch(n_requests: int, n_kv: int, group: int, max_query: int, multiprocessors: int) -> Launch:
    """Small batches are cut fine to fill the chip; large ones get big tiles and a few shares more, for stragglers: one
    long context would otherwise keep the whole chip waiting. With very many rows they get none: the parts would take
    more memory than that is worth.
    """
    rows = max_query * group
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    while block_m > 16 and 2 * n_requests * n_kv * triton.cdiv(rows, block_m) <= multiprocessors:
        block_m //= 2
    row_blocks = triton.cdiv(rows, block_m)
    programs = n_requests * n_kv * row_blocks
    wanted = 2 * multiprocessors
    if programs < wanted:
        extra = min(n_requests * (min(triton.cdiv(wanted, programs), 32) - 1), MOST_EXTRA)
        return Launch(block_m, 64, extra, 64, _warps(block_m), num_stages=3)
    extra = min(max(16, n_requests // 4), MOST_EXTRA)
    if (n_requests + extra) * n_kv * row_blocks * block_m > _MOST_PART_ROWS:
        extra = 0
    if block_m == 16:  # measured: small programs, of which many fit on the chip at once, hide each other's waiting
        return Launch(block_m, 64, extra, 512, num_warps=2, num_stages=2)
    return Launch(block_m, 64, extra, 512, _warps(block_m), num_stages=4 if block_m < 128 else 3)


def _warps(block_m: int) -> int:
    return 8 if block_m == 128 else 4
