"""Which tile shape a linear layer runs with. Pure: no torch, no device.

What always holds: the choice depends on the bucket of M, never on M itself, so all batches of one bucket are computed
by the same kernel in the same order and a row's result does not depend on how many other rows there are.
Does not know how a kernel works. Measured tile shapes are data: first those that `tlt tune-kernels` measured on this
GPU, then the package's (`tile_tables/<GPU>.json`, which `benchmarks/linear.py --write-table` writes); other shapes get
a guess. Exact mode uses the package's alone: its bits must not depend on what was tuned on a machine.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, shown
from tlt.strict_json import InvalidJson, parse

BUCKETS = (16, 32, 64, 128, 256)
"""Upper ends of the ranges of M that share a configuration. Above the last one the vendor's library is used."""


@dataclass(frozen=True)
class Config:
    """One way to cut a linear layer into programs. Blocks are in elements and powers of two."""

    block_m: int
    block_n: int
    """Outputs per program; a gated layer computes this many gates and as many ups."""
    block_k: int
    split_k: int = 1
    """Programs that share one output tile, each over a part of K."""
    warps: int = 4
    stages: int = 4
    swap: bool = False
    """Compute W·xᵀ instead of x·Wᵀ: the weight becomes the tall operand, as Hopper's matrix units want."""
    tma: bool = False
    """Fetch weight tiles with the bulk copy engine instead of by the threads."""
    tma_x: bool = False
    """Fetch input tiles so too."""
    prefetch: int = 0
    """Columns of each weight row asked into L2 before waiting for the previous kernel: 0 or a power of two."""
    ahead: int = 0
    """Columns asked into L2 at a time as the loop runs, `prefetch` columns before use: 0 or ≥ block_k."""
    late: bool = False
    """Let the next kernel start when this one's weights are read, rather than at once."""
    apart: bool = False
    """Run the norm as a kernel of its own before this one, where x is not pre-normed for it."""
    wide: bool = False
    """All of K at once, in slices of block_k side by side: no loop, no split. For layers where latency rules."""


def bucket_of(m: int) -> int | None:
    """The smallest bucket that holds m rows, or None where no skinny kernel applies."""
    return next((bucket for bucket in BUCKETS if m <= bucket), None)


Table = dict[tuple[int, int, bool, int], Config | None]  # by N, K, gated and bucket


def read_table(path: Path, name: str) -> Table:
    """One of the tables in a file: `bf16` or `quantized`. Raises ConfigError where the file holds something else."""
    try:
        entries = parse(path.read_bytes())[name]
        return {
            (entry["n"], entry["k"], entry["gated"], entry["rows"]): None if entry["tile"] is None else _tile(entry)
            for entry in entries
        }
    except (InvalidJson, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no tile table ({type(error).__name__}: {shown(str(error))}); remove it, and run "
            "`tlt tune-kernels MODEL` again"
        ) from error


def _tile(entry: dict[str, Any]) -> Config:
    config = Config(**entry["tile"])
    for setting in fields(Config):
        value = getattr(config, setting.name)
        if type(value) is not type(setting.default if setting.default is not MISSING else 1):
            raise ValueError(f"{setting.name} is {value!r}")
    return config


def table_lines(table: Table) -> str:
    """Entries of a tile table, one per line; settings at their default are left out."""
    default = {setting.name: setting.default for setting in fields(Config)}
    lines = []
    for (n, k, gated, bucket), config in table.items():
        tile = config and {name: value for name, value in asdict(config).items() if value != default[name]}
        lines.append("    " + json.dumps({"n": n, "k": k, "gated": gated, "rows": bucket, "tile": tile}))
    return ",\n".join(lines)


def table_text(gpu: str, tables: dict[str, Table]) -> str:
    """The contents of a file that `read_table` reads."""
    body = ",\n".join(f'  "{name}": [\n{table_lines(table)}\n  ]' for name, table in tables.items())
    return f'{{\n  "gpu": {json.dumps(gpu)},\n{body}\n}}\n'


def cache_file(gpu: str) -> Path:
    """Where `tlt tune-kernels` keeps the tiles of a GPU: under $TLT_CACHE, or `tlt` in the user's cache directory."""
    if home := os.environ.get("TLT_CACHE"):
        directory = Path(home).expanduser()
    else:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tlt"
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return directory / "tiles" / f"{slug}.json"


def use_tuned(gpu: str) -> None:
    """From now on, choices prefer the tiles that `tlt tune-kernels` measured on this GPU, if it has."""
    TUNED.clear()
    path = cache_file(gpu)
    if path.is_file():
        TUNED.update(read_table(path, "bf16"))


_SHIPPED = Path(__file__).with_name("tile_tables") / "h200.json"
TUNED: Table = {}
"""Of `tlt tune-kernels`, for the GPU in use."""
TILES = read_table(_SHIPPED, "bf16")
"""None where the vendor's library was measured faster."""
QUANTIZED_TILES = read_table(_SHIPPED, "quantized")
"""Of matrices in 8 bits. None where 16 bits were measured as fast, within a few hundredths, or faster."""


def choose(m: int, n: int, k: int, gated: bool) -> Config | None:
    """The configuration for m rows, n outputs (after gating) and k inputs; None: use the vendor's library."""
    bucket = bucket_of(m)
    if bucket is not None and (n, k, gated, bucket) in TUNED:
        return TUNED[n, k, gated, bucket]
    return _chosen(TILES, _guess, m, n, k, gated)


def _chosen(
    table: Table, guess: Callable[[int, int, int, bool], Config | None], m: int, n: int, k: int, gated: bool
) -> Config | None:
    """The measured entry of the bucket, else a guess."""
    bucket = bucket_of(m)
    if bucket is None:
        return None
    if (n, k, gated, bucket) in table:
        return table[n, k, gated, bucket]
    return guess(bucket, n, k, gated)


def choose_quantized(m: int, n: int, k: int, gated: bool) -> Config | None:
    """The configuration for a matrix in 8 bits; None: read it in 16."""
    return _chosen(QUANTIZED_TILES, _guess_quantized, m, n, k, gated)


LEAST_QUANTIZED = {16: 8_000_000, 32: 20_000_000}
"""Outputs (after gating) × inputs, by bucket, up to which a matrix is read so fast that half the bytes save nothing."""


def ever_quantized(n: int, k: int, gated: bool) -> bool:
    """Whether any number of rows reads such a matrix in 8 bits."""
    return any(choose_quantized(bucket, n, k, gated) is not None for bucket in BUCKETS)


def _guess_quantized(bucket: int, n: int, k: int, gated: bool) -> Config | None:
    """For an unmeasured shape: programs that fill a Hopper once, as the best measured tiles do."""
    if bucket not in LEAST_QUANTIZED or n * k <= LEAST_QUANTIZED[bucket]:
        return None
    if bucket == 16:
        tile, programs = Config(16, 64, 256, stages=3 if gated else 4, prefetch=256, swap=True, tma=True), 264
    else:
        tile = Config(32, 128, 256, stages=4, prefetch=256, swap=True, tma=True, tma_x=True)
        tile, programs = replace(tile, block_n=64, block_k=128) if gated else tile, 132
    most = min(8, k // (2 * tile.block_k))
    return replace(tile, split_k=max(1, min(most, programs // -(-n // tile.block_n))))


def choose_exact(m: int, n: int, k: int, gated: bool) -> Config:
    """One way to compute a layer for any number of rows, so that none of its sums depends on how many there are.

    What was measured best for 64 rows: few rows waste some of its tile, many are cut into such tiles.
    """
    config = TILES.get((n, k, gated, 64)) or _guess(64, n, k, gated)
    config = config or Config(64, 128, 64, stages=4, swap=True, prefetch=256)
    if config.swap and not config.wide:
        blocks = [block for block in EXACT_BLOCKS if block >= min(m, EXACT_BLOCKS[-1])]
        config = replace(config, block_m=blocks[0])
    return config


EXACT_BLOCKS = (64,)
"""Rows of a tile in exact products, rising: the smallest that holds them all, else the last. More than one may stand
here only where they give the same bits, norms included: `benchmarks/exact.py` tells, and what small batches would gain.
Kernels that multiply by x·Wᵀ keep theirs: there a tile's rows choose the instruction."""


def _guess(bucket: int, n: int, k: int, gated: bool) -> Config | None:
    """For an unmeasured shape: tiles that were never far from the best of measured shapes, else the library."""
    if bucket > 64 or (bucket == 64 and n > 4 * k and not gated):  # wider than a layer that carries a norm: a head
        return None
    if n * k <= 4_000_000:
        tile = Config(bucket, 64, 64, stages=6, swap=True, prefetch=128)
    elif bucket == 64 and not gated:
        tile = Config(bucket, 64, 128, stages=4, swap=True, prefetch=256)
    else:
        tile = Config(bucket, 128, 64, stages=4 if bucket == 64 else 5, swap=True, prefetch=256)
    one_each = 132 // -(-n // tile.block_n)  # programs for the multiprocessors of a Hopper
    return replace(tile, split_k=max(1, min(8, one_each, k // (2 * tile.block_k))))
