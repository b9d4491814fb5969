"""Which tiles of a linear layer are worth timing on a GPU, and which of the timed ones to keep.

Always holds: only tiles are kept that were faster than the tiles in use and than the vendor's library, by more than
noise. Knows sizes and seconds; does not know how a kernel is run or timed (`tuning_triton`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlt.kernels.linear.plan import BUCKETS, Config, Table

# M rows, N outputs after gating, K inputs

ROWS_TIMED = {16: 8, 32: 32, 64: 64, 128: 128, 256: 256}
"""The rows with which each bucket is timed."""
MOST_PARTIALS = 1 << 23
"""Floats of a split-K workspace."""
GAIN = 0.03
"""Tiles in use are replaced by tiles that take less of their time than 1 − this: smaller differences are noise."""


@dataclass(frozen=True)
class Layer:
    """One linear layer as a model uses it."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    gated: bool = False
    float32_out: bool = False

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.n * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Of the weight, in 16 bits."""
        return self.rows * self.k * 2


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which tiles fit."""

    name: str
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may have."""


H200 = Gpu("NVIDIA H200", 132, 227 * 1024)

Timed = list[tuple[float, Config]]
"""Seconds and tiles, the fastest first."""
TimeAll = Callable[[Sequence[Config]], Timed]
"""Times tiles; leaves out those that do not compile or compute something else."""


@dataclass(frozen=True)
class Tuned:
    """The result for one layer and bucket."""

    layer: Layer
    bucket: int
    config: Config | None
    """The tiles to use from now on; None: the vendor's library."""
    seconds: float
    seconds_before: float
    """Of the tiles, or the library, in use before."""
    tried: int

    @property
    def key(self) -> tuple[int, int, bool, int]:
        return self.layer.n, self.layer.k, self.layer.gated, self.bucket


def tune_layer(
    layer: Layer, bucket: int, gpu: Gpu, in_use: Config | None, library_seconds: float, time_all: TimeAll
) -> Tuned:
    """Times the candidates, then small changes to the fastest two, against the tiles in use and the library."""
    first = candidates(layer, bucket, gpu)
    if in_use is not None:
        first = list(dict.fromkeys([in_use, *first]))
    timed = time_all(first)
    second = {near: None for _, leader in timed[:2] for near in neighbours(leader) if fits(layer, near, gpu)}
    timed = sorted([*timed, *time_all([near for near in second if near not in first])], key=lambda pair: pair[0])
    tried = len(first) + sum(near not in first for near in second)
    seconds = {config: took for took, config in timed}
    before_s = library_seconds if in_use is None else seconds.get(in_use, float("inf"))
    best = min([(library_seconds, None), *timed], key=lambda pair: pair[0])
    if best[0] > before_s * (1 - GAIN):
        best = before_s, in_use
    return Tuned(layer, bucket, best[1], best[0], before_s, tried)


def table_of(tuned: Sequence[Tuned]) -> Table:
    return {each.key: each.config for each in tuned}


def work_order(layers: Sequence[Layer], buckets: Sequence[int] = BUCKETS) -> list[tuple[Layer, int]]:
    """Small batches first: they decide the time of a long tail. Layers of equal sizes are tuned once."""
    alike: Mapping[tuple[int, int, bool], Layer] = {(layer.n, layer.k, layer.gated): layer for layer in layers}
    return [(layer, bucket) for bucket in buckets for layer in alike.values()]


def candidates(layer: Layer, bucket: int, gpu: Gpu) -> list[Config]:
    """Tiles × splits of K that give about one, two or three programs per multiprocessor."""
    found = []
    for tile in _tiles_to_try(layer, bucket):
        tiles = -(-layer.n // tile.block_n) * -(-ROWS_TIMED[bucket] // tile.block_m)
        slot = tile.block_m * tile.block_n * (2 if layer.gated else 1) + tile.block_m
        most = max(1, min(8, layer.k // (2 * tile.block_k), MOST_PARTIALS // (slot * tiles)))
        targets = (0.9 * gpu.multiprocessors, 2 * gpu.multiprocessors, 3 * gpu.multiprocessors)
        for split in sorted({min(most, max(1, round(target / tiles))) for target in targets}):
            ahead = min(tile.block_k * (tile.stages - 1), -(-layer.k // split))
            ahead = max(64, 1 << (ahead.bit_length() - 1))
            found.append(replace(tile, split_k=split, prefetch=ahead))
    return [config for config in dict.fromkeys(found) if fits(layer, config, gpu)]


def neighbours(config: Config) -> list[Config]:
    """Small changes to a good configuration."""
    ahead = config.prefetch or 2 * config.block_k
    return [
        replace(config, prefetch=0 if config.prefetch else ahead, ahead=0 if config.prefetch else config.ahead),
        replace(config, prefetch=ahead * 2),
        replace(config, late=not config.late),
        replace(config, late=True, prefetch=ahead * 4),
        replace(config, warps=8 if config.warps == 4 else 4),
    ] + ([] if config.wide else [replace(config, stages=config.stages + more) for more in (1, 2)])


def shared_bytes(layer: Layer, config: Config) -> int:
    """Shared memory of one program's pipeline."""
    if config.wide:
        return 0
    return config.stages * (config.block_n * (2 if layer.gated else 1) + config.block_m) * config.block_k * 2


def fits(layer: Layer, config: Config, gpu: Gpu) -> bool:
    """Whether the pipeline fits a multiprocessor."""
    return shared_bytes(layer, config) <= gpu.shared_bytes


def _tiles_to_try(layer: Layer, bucket: int) -> list[Config]:
    """Tile shapes, before the split of K is decided."""
    if bucket == 16 and layer.bytes < 8e6:
        return [
            Config(16, 16, 64, stages=8, warps=2),
            Config(16, 16, 64, stages=8),
            Config(16, 16, 128, stages=5, warps=2),
            Config(16, 16, 128, stages=5),
            Config(16, 16, 256, stages=4),
            Config(16, 32, 64, stages=8),
            Config(16, 32, 128, stages=5),
            Config(16, 64, 64, stages=6, swap=True),
            Config(16, 64, 128, stages=4, swap=True, tma=True),
        ]
    if bucket == 16:
        return [
            Config(16, 16, 256, stages=4),
            Config(16, 16, 512, stages=3),
            Config(16, 32, 128, stages=5),
            Config(16, 32, 256, stages=4),
            Config(16, 64, 128, stages=4),
            Config(16, 64, 128, stages=4, swap=True),
            Config(16, 64, 256, stages=3, swap=True),
            Config(16, 128, 64, stages=5, swap=True),
            Config(16, 32, 256, stages=4, tma=True),
            Config(16, 64, 128, stages=4, swap=True, tma=True),
            Config(16, 64, 256, stages=3, swap=True, tma=True),
            Config(16, 128, 128, stages=4, swap=True, tma=True),
        ]
    if bucket in (32, 64):
        small = [Config(bucket, 16, 64, stages=6), Config(bucket, 16, 128, stages=4), Config(bucket, 32, 64, stages=6)]
        return (small if layer.bytes < 8e6 else []) + [
            Config(bucket, 32, 128, stages=4),
            Config(bucket, 64, 64, stages=5),
            Config(bucket, 64, 128, stages=4),
            Config(bucket, 64, 64, stages=6, swap=True),
            Config(bucket, 64, 128, stages=4, swap=True),
            Config(bucket, 128, 64, stages=4, swap=True),
            Config(bucket, 64, 128, stages=4, swap=True, tma=True),
            Config(bucket, 128, 64, stages=5, swap=True, tma=True),
            Config(bucket, 128, 128, stages=3, swap=True, tma=True),
        ]
    return [
        Config(64, 64, 64, stages=5),
        Config(64, 64, 64, stages=5, swap=True),
        Config(64, 128, 64, stages=4, swap=True, tma=True),
        Config(128, 64, 64, stages=4),
        Config(128, 64, 64, stages=4, swap=True, tma=True),
        Config(128, 128, 64, stages=4, swap=True, tma=True),
        Config(128, 128, 64, stages=4, swap=True, tma=True, warps=8),
        Config(128, 128, 64, stages=4, tma=True, warps=8),
    ]
