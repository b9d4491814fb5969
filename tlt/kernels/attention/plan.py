"""How attention over a paged KV cache is cut into programs, by shape alone: pure numbers, chosen by measurement."""

from dataclasses import dataclass

import triton

MAX_EXTRA = 255  # the splits of a context are numbered in a byte
_MOST_PART_ROWS = 1 << 18  # of one launch: 64 MiB where heads are 64 wide


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """How one attention call is cut up."""

    block_m: int  # rows (query, head of the group) of a program; at least 16 for the matrix units
    block_n: int  # keys per tile
    extra: int  # splits beyond one per request, among which long contexts are divided
    min_split: int  # keys of a split at least, before a context is divided
    num_warps: int
    num_stages: int

    def kv_splits(self, n_requests: int) -> int:
        return n_requests + self.extra


def plan_launch(n_requests: int, n_kv: int, group: int, max_query: int, multiprocessors: int) -> AttentionLaunch:
    """Small batches are cut into small programs that fill the chip. Large batches get large tiles and extra splits: one
    long context would otherwise keep the whole chip waiting. Batches with very many rows get no extra
    splits: the partial sums would take too much memory.
    """
    rows = max_query * group
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    while block_m > 16 and 2 * n_requests * n_kv * triton.cdiv(rows, block_m) <= multiprocessors:
        block_m //= 2
    row_blocks = triton.cdiv(rows, block_m)
    programs = n_requests * n_kv * row_blocks
    wanted = 2 * multiprocessors
    if programs < wanted:
        extra = min(n_requests * (min(triton.cdiv(wanted, programs), 32) - 1), MAX_EXTRA)
        return AttentionLaunch(block_m, 64, extra, 64, _warps(block_m), num_stages=3)
    extra = min(max(16, n_requests // 4), MAX_EXTRA)
    if (n_requests + extra) * n_kv * row_blocks * block_m > _MOST_PART_ROWS:
        extra = 0
    if block_m == 16:  # measured: many small programs per multiprocessor hide each other's latency
        return AttentionLaunch(block_m, 64, extra, 512, num_warps=2, num_stages=2)
    return AttentionLaunch(block_m, 64, extra, 512, _warps(block_m), num_stages=4 if block_m < 128 else 3)


def _warps(block_m: int) -> int:
    return 8 if block_m == 128 else 4
