"""Tuning tiles: what is tried fits the GPU, what is kept is faster, and dispatch reads the file that was written."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tlt.cli import main
from tlt.errors import ConfigError
from tlt.kernels.linear import plan
from tlt.kernels.linear.plan import BUCKETS, Config, choose, choose_exact
from tlt.kernels.linear.tuning import (
    GAIN,
    H200,
    Layer,
    Timed,
    candidates,
    fits,
    neighbours,
    table_of,
    tune_layer,
    work_order,
)
from tlt.model.shapes import MODEL_SHAPES, shape_config
from tlt.tune_kernels import keep, layers_of, read_budget, read_rows, told, tune_all

LAYER = Layer("down", 1536, 8960, residual=True)
GPU = "Some GPU (80 GB)"


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TLT_CACHE", str(tmp_path))
    before = dict(plan.TUNED)
    yield
    plan.TUNED.clear()
    plan.TUNED.update(before)


class Stopwatch:
    """Seconds of tiles by a formula: 100 µs, less for tiles that are alike to the best."""

    def __init__(self, best: Config, unusable: Sequence[Config] = ()) -> None:
        self.best, self.unusable, self.asked = best, unusable, list[Config]()

    def __call__(self, configs: Sequence[Config]) -> Timed:
        self.asked += configs
        usable = [config for config in configs if config not in self.unusable]
        return sorted(((self.seconds(config), config) for config in usable), key=lambda pair: pair[0])

    def seconds(self, config: Config) -> float:
        names = ("block_m", "block_n", "block_k", "stages", "warps", "swap", "tma", "late", "prefetch", "split_k")
        return 1e-4 - 5e-6 * sum(getattr(config, name) == getattr(self.best, name) for name in names)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_what_is_tried_fits_the_gpu_and_the_layer(name: str) -> None:
    for layer, bucket in work_order(layers_of(shape_config(name))):
        tried = candidates(layer, bucket, H200)
        assert len(tried) == len(set(tried)) >= 5
        for config in tried:
            assert fits(layer, config, H200)
            assert 1 <= config.split_k <= max(1, layer.k // config.block_k)
            assert config.prefetch & (config.prefetch - 1) == 0
    small = replace(H200, shared_bytes=99 * 1024)
    assert all(config in tried for config in candidates(layer, bucket, small))
    assert len(candidates(layer, bucket, small)) < len(tried)


def test_the_search_goes_on_around_the_fastest() -> None:
    leader = candidates(LAYER, 16, H200)[5]
    best = replace(leader, late=True, prefetch=leader.prefetch * 4)  # a neighbour, and no candidate
    stopwatch = Stopwatch(best)
    tuned = tune_layer(LAYER, 16, H200, None, 1e-3, stopwatch)
    assert best not in candidates(LAYER, 16, H200)
    assert tuned.config == best
    assert tuned.seconds == pytest.approx(stopwatch.seconds(best))
    assert tuned.seconds_before == 1e-3
    assert len(stopwatch.asked) == len(set(stopwatch.asked)) == tuned.tried


def test_tiles_in_use_stay_unless_others_are_faster_by_more_than_noise() -> None:
    in_use, best = candidates(LAYER, 16, H200)[2], candidates(LAYER, 16, H200)[7]
    stopwatch = Stopwatch(best)

    def timed(configs: Sequence[Config]) -> Timed:
        return [(took if config != in_use else fastest * (1 + slower), config) for took, config in stopwatch(configs)]

    fastest = min(stopwatch.seconds(near) for near in [best, *neighbours(best)])
    slower = GAIN / 2
    assert tune_layer(LAYER, 16, H200, in_use, 1e-3, timed).config == in_use
    slower = 2 * GAIN
    tuned = tune_layer(LAYER, 16, H200, in_use, 1e-3, timed)
    assert tuned.config not in (in_use, None)
    assert tuned.seconds < tuned.seconds_before * (1 - GAIN)


def test_the_vendors_library_is_kept_where_it_is_fastest() -> None:
    stopwatch = Stopwatch(candidates(LAYER, 64, H200)[0])
    assert tune_layer(LAYER, 64, H200, None, 1e-6, stopwatch).config is None
    in_use = candidates(LAYER, 64, H200)[3]
    assert tune_layer(LAYER, 64, H200, in_use, 1e-6, stopwatch).config is None


def test_tiles_that_cannot_run_are_never_kept() -> None:
    best = candidates(LAYER, 16, H200)[4]
    tuned = tune_layer(LAYER, 16, H200, best, 1e-3, Stopwatch(best, unusable=[best]))
    assert tuned.config not in (best, None)
    none = tune_layer(LAYER, 16, H200, best, 1e-3, lambda configs: [])
    assert none.config is None
    assert none.seconds == 1e-3


def test_what_was_tuned_is_written_and_dispatch_reads_it() -> None:
    ours = Config(16, 128, 64, split_k=2, stages=5, swap=True, prefetch=256)
    assert choose(3, LAYER.n, LAYER.k, False) != ours
    exact = choose_exact(3, LAYER.n, LAYER.k, False)
    path = plan.cache_file(GPU)
    assert path.name == "some-gpu-80-gb.json"
    keep(path, GPU, {(1, 2, True, 32): Config(32, 64, 64)})
    keep(path, GPU, {(LAYER.n, LAYER.k, False, 16): ours, (LAYER.n, LAYER.k, False, 64): None})
    assert json.loads(path.read_text())["gpu"] == GPU
    plan.use_tuned("another GPU")
    assert choose(3, LAYER.n, LAYER.k, False) != ours
    plan.use_tuned(GPU)
    assert len(plan.TUNED) == 3, "entries of other shapes stay"
    assert choose(3, LAYER.n, LAYER.k, False) == choose(16, LAYER.n, LAYER.k, False) == ours
    assert choose(40, LAYER.n, LAYER.k, False) is None
    assert choose_exact(3, LAYER.n, LAYER.k, False) == exact, "exact mode has the package's tiles on every machine"


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        '{"bf16": [{"n": 1}]}',
        '{"bf16": [{"n": 1, "k": 2, "gated": false, "rows": 16, "tile": {"block": 3}}]}',
        '{"bf16": [{"n": 1, "k": 2, "gated": false, "rows": 8, "tile": {"block_m": 1, "block_n": 1, "block_k": 2.0}}]}',
    ],
)
def test_a_damaged_cache_file_is_named(content: str) -> None:
    path = plan.cache_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no tile table"):
        plan.use_tuned(GPU)


def test_small_batches_are_tuned_first_and_equal_layers_once() -> None:
    layers = layers_of(shape_config("Qwen2.5-7B"))
    assert [layer.n for layer in layers] == [4608, 3584, 18944, 3584, 152064]
    work = work_order(layers)
    assert [bucket for _, bucket in work] == sorted(bucket for _, bucket in work)
    assert len(work_order([*layers, *layers])) == len(work) == 5 * len(BUCKETS)


def test_no_layer_is_begun_after_the_time_is_over() -> None:
    work = work_order(layers_of(shape_config("Qwen3-4B")))
    left = iter([False, False, True])
    stopwatch = Stopwatch(candidates(LAYER, 16, H200)[0])
    tuned = list(tune_all(work, lambda x, b: tune_layer(x, b, H200, None, 1e-3, stopwatch), lambda: next(left)))
    assert [(each.layer, each.bucket) for each in tuned] == work[:2]
    assert table_of(tuned).keys() == {each.key for each in tuned}
    assert told(tuned[0]).startswith("qkv              6144 x 2560   up to  16 rows:")


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_rows("64,16") == (16, 64)
    assert read_rows(None) == BUCKETS
    for read, word in (
        (read_rows, "48"),
        (read_rows, "x"),
        (read_budget, "0"),
        (read_budget, "-1"),
        (read_budget, "∞"),
    ):
        with pytest.raises(ConfigError, match="expected"):
            read(word)
    assert main(["tune-kernels", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert main(["tune-kernels", "tiny", "--engine.rows", "3"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune-kernels", "Qwen2.5-7B"]) == 2
    assert "tlt tune-kernels times kernels on a GPU, and torch sees none here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    from tlt.kernels.linear.tuning_triton import LayerTimer, this_gpu, weight_pool

    assert main(["tune-kernels", "tiny", "--rows", "16", "--budget", "60"]) == 0
    gpu = this_gpu()
    plan.use_tuned(gpu.name)
    assert len(plan.TUNED) >= 1
    assert str(plan.cache_file(gpu.name)) in capsys.readouterr().out.replace("\n", "")
    layer = Layer("gate and up", 1024, 768, norm=True, gated=True)
    timer = LayerTimer(layer, 8, weight_pool([layer]))
    timed = timer.time_all(candidates(layer, 16, gpu)[:3])
    assert timed
    assert all(0 < seconds < 1e-2 for seconds, _ in timed)
    assert timer.error(timer.ours(timed[0][1])) < 1e-2
