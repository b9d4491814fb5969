"""The fused linear kernels against fp64, in Triton's interpreter or, where there is one, on the GPU in bf16."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launches import Launches
from tiny import policy
from torch import Tensor

from tlt.kernels.linear import elementwise_triton
from tlt.kernels.linear import plan as linear_table
from tlt.kernels.linear import triton as linear_triton
from tlt.kernels.linear.plan import (
    BUCKETS,
    QUANTIZED_TILES,
    TILES,
    Config,
    bucket_of,
    choose,
    choose_exact,
    choose_quantized,
    ever_quantized,
)
from tlt.kernels.linear.reference import PreNormedRows, QuantizedMatrix, pre_norm, pre_normed_linear
from tlt.kernels.linear.reference import linear as torch_linear
from tlt.kernels.linear.triton import room_for, skinny_linear
from tlt.kernels.linear.workspace import Workspace
from tlt.model import linear as model_linear
from tlt.model.attention import PackedLayout

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 8e-3 if ON_GPU else 2e-6
WHOLE_MODEL = 1e-5  # two layers sum in another order: ten roundings of float32 in series, measured 7e-7 over 16 seeds
EPS = 1e-5

SMALL = Config(block_m=16, block_n=16, block_k=64)
CONFIGS = {
    "plain": SMALL,
    "split": replace(SMALL, split_k=3),
    "swapped": Config(block_m=16, block_n=64, block_k=64, swap=True),
    "swapped split": Config(block_m=16, block_n=64, block_k=64, split_k=4, swap=True),
    "copy engine": Config(block_m=16, block_n=32, block_k=64, tma=True),
    "copy engine for both": Config(16, 64, 64, split_k=2, swap=True, tma=True, tma_x=True),
    "running ahead": Config(32, 128, 64, split_k=2, swap=True, tma=True, tma_x=True, prefetch=256, ahead=128),
    "running ahead by threads": Config(16, 64, 64, swap=True, prefetch=128, ahead=64),
    "norm apart": replace(SMALL, split_k=2, apart=True, late=True),
    "wide": Config(block_m=16, block_n=8, block_k=64, wide=True),
}


def tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def fp64_linear(x, weight, *, bias=None, norm_weight=None, residual=None, gated=False) -> Tensor:
    """The definition, with no rounding to speak of."""
    y = x.double()
    if norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()
    y = y @ weight.double().t()
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def layer(
    m: int, n: int, k: int, *, norm=False, bias=False, residual=False, gated=False
) -> tuple[Tensor, Tensor, dict]:
    rows = 2 * n if gated else n
    extras = {
        "norm_weight": 1 + 0.3 * tensor(k, seed=2) if norm else None,
        "bias": tensor(rows, seed=3) if bias else None,
        "residual": tensor(m, n, seed=4) if residual else None,
        "gated": gated,
    }
    return 3 * tensor(m, k, seed=5), tensor(rows, k, seed=6) * k**-0.5, extras


FUSIONS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(
    ("config", "fusion"),
    [(CONFIGS["plain"], fusion) for fusion in FUSIONS]
    + [(config, fusion) for config in CONFIGS.values() for fusion in [(True,) * 4, (True, False, True, False)]],
)
def test_every_fusion_matches_fp64(config: Config, fusion: tuple[bool, bool, bool, bool]) -> None:
    norm, bias, residual, gated = fusion
    x, weight, extras = layer(3, 40, 200, norm=norm, bias=bias, residual=residual, gated=gated)
    out = torch.full((3, 40), float("nan"), dtype=DTYPE, device=DEVICE)
    skinny_linear(x, weight, config, norm_eps=EPS, out=out, **extras)
    assert error(out, fp64_linear(x, weight, **extras)) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 576), (17, 65, 72), (16, 64, 128)])
def test_odd_shapes_match_fp64(config: Config, m: int, n: int, k: int) -> None:
    x, weight, extras = layer(m, n, k, norm=True, residual=True)
    out = skinny_linear(x, weight, config, norm_eps=EPS, **extras)
    assert error(out, fp64_linear(x, weight, **extras)) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_residual_in_place(config: Config) -> None:
    x, weight, extras = layer(5, 72, 192, residual=True)
    reference = fp64_linear(x, weight, **extras)
    out = skinny_linear(x, weight, config, out=extras["residual"], **extras)
    assert out is extras["residual"]
    assert error(out, reference) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_row_does_not_depend_on_its_neighbours(config: Config) -> None:
    x, weight, extras = layer(13, 40, 200, norm=True, gated=True)
    together = skinny_linear(x, weight, config, norm_eps=EPS, **extras)
    alone = skinny_linear(x[4:5], weight, config, norm_eps=EPS, **extras)
    assert torch.equal(together[4:5], alone)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("fusion", [(True,) * 4, (False, False, True, False)])
def test_a_matrix_in_8_bits_is_multiplied_as_it_is(config: Config, fusion: tuple[bool, bool, bool, bool]) -> None:
    norm, bias, residual, gated = fusion
    x, weight, extras = layer(5, 72, 192, norm=norm, bias=bias, residual=residual, gated=gated)
    weight[3] *= 1000.0  # each row has a scale of its own
    light = QuantizedMatrix.of(weight)
    out = skinny_linear(x, light, config, norm_eps=EPS, **extras)
    read = light.quantized_NK.double() * light.scale_N.double()[:, None]
    assert error(out, fp64_linear(x, read, **extras)) < TOLERANCE
    assert error(out, fp64_linear(x, weight, **extras)) > 5e-3, "that is no matrix in 8 bits"


def test_8_bits_are_near_and_renewed_in_place() -> None:
    weight = tensor(24, 64)
    weight[5] = 0.0
    light = QuantizedMatrix.of(weight)
    places = light.quantized_NK.data_ptr(), light.scale_N.data_ptr()
    for _ in range(2):
        read = light.quantized_NK.float() * light.scale_N[:, None]
        assert torch.isfinite(read).all()
        assert (read - weight.float()).abs().max(1).values.le(weight.float().abs().amax(1) / 16 + 1e-30).all()
        assert error(read, weight.double()) < 0.04
        weight.copy_(1e-3 * tensor(24, 64, seed=9))
        light.requantize()
    assert places == (light.quantized_NK.data_ptr(), light.scale_N.data_ptr())


def test_few_rows_read_a_large_matrix_in_8_bits_and_all_others_the_fine_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, extras = layer(300, 32, 64, residual=True)
    light, residual = QuantizedMatrix.of(weight), extras["residual"]
    read = light.quantized_NK.double() * light.scale_N.double()[:, None]
    for rows in (3, 40, 300):
        assert torch.equal(linear_triton.linear(x[:rows], light), linear_triton.linear(x[:rows], weight)), "small"
    monkeypatch.setattr(linear_table, "LEAST_QUANTIZED", {16: 0, 32: 0})
    for rows in (3, 20):
        expected = fp64_linear(x[:rows], read)
        assert error(linear_triton.linear(x[:rows], light), expected) < TOLERANCE
        added = linear_triton.add_linear(x[:rows], light, residual=residual[:rows].clone(), next_norm=None)
        assert error(added, expected + residual[:rows].double()) < TOLERANCE
    for rows in (40, 300):
        assert torch.equal(linear_triton.linear(x[:rows], light), linear_triton.linear(x[:rows], weight)), "many rows"
    kept = {"residual": residual[:3], "next_norm": None, "keep_residual": True, "exact": True}
    for exact, expected in (
        (linear_triton.linear(x[:3], matrix, exact=True) for matrix in (light, weight)),
        (linear_triton.add_linear(x[:3], matrix, **kept) for matrix in (light, weight)),
    ):
        assert torch.equal(exact, expected), "exact products are those of 16 bits"
    if not ON_GPU:
        assert torch.equal(model_linear.linear(x[:3], light), model_linear.linear(x[:3], weight))


def test_split_k_repeats_bit_for_bit_and_leaves_its_counters_at_zero() -> None:
    x, weight, extras = layer(16, 40, 768, norm=True, residual=True)
    workspace = Workspace.on(x.device, floats=1 << 16, tiles=64)
    config = replace(SMALL, split_k=6)
    outs = [
        skinny_linear(x, weight, config, norm_eps=EPS, workspace=workspace, **extras) for _ in range(8 if ON_GPU else 2)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)
    assert workspace.counters.count_nonzero() == 0


def test_more_splits_than_steps_of_k() -> None:
    x, weight, extras = layer(2, 16, 128)
    out = skinny_linear(x, weight, replace(SMALL, split_k=4), **extras)
    assert error(out, fp64_linear(x, weight, **extras)) < TOLERANCE


def test_rows_of_a_wider_buffer() -> None:
    x, weight, extras = layer(4, 24, 64)
    wide = torch.zeros(4, 100, dtype=DTYPE, device=DEVICE)
    skinny_linear(x, weight, SMALL, out=wide[:, 8:32], **extras)
    assert error(wide[:, 8:32], fp64_linear(x, weight, **extras)) < TOLERANCE
    assert wide[:, :8].count_nonzero() == 0
    assert wide[:, 32:].count_nonzero() == 0


def test_the_fused_norm_is_no_worse_than_rounding_after_the_norm() -> None:
    """Scaling the accumulator instead of the input rounds once where Hugging Face's order rounds twice."""
    x, weight, extras = layer(16, 64, 576, norm=True)
    reference = fp64_linear(x, weight, **extras)
    ours = error(skinny_linear(x, weight, SMALL, norm_eps=EPS, **extras), reference)
    theirs = error(torch_linear(x, weight, norm_eps=EPS, **extras), reference)
    assert ours < theirs * 1.05 + 1e-7


# The norm between two layers: its weight and squares left by the first, its scale put on by the second.


def assert_weighed(found: PreNormedRows, x: Tensor, norm: Tensor, part: int) -> None:
    """Of the rows as they were stored, so that only the sums' order differs."""
    expected = pre_norm(x, norm, part)
    assert torch.equal(found.x_MD, x)
    assert found.norm_D is norm
    assert torch.equal(found.pre_normed_MD, expected.pre_normed_MD)
    torch.testing.assert_close(found.squares_MP, expected.squares_MP, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("m", "n", "k", "bias"), [(3, 72, 200, True), (17, 65, 72, False)])
def test_a_layer_leaves_its_result_weighed_for_the_next_norm(config: Config, m: int, n: int, k: int, bias) -> None:
    x, weight, extras = layer(m, n, k, bias=bias, residual=True)
    norm = 1 + 0.3 * tensor(n, seed=9)
    plain = skinny_linear(x, weight, config, **extras)
    out = extras["residual"]  # in place, as the model does it
    left = room_for(out, norm, config.block_n)
    left.pre_normed_MD.fill_(float("nan"))
    left.squares_MP.fill_(float("nan"))
    skinny_linear(x, weight, config, out=out, leave=left, **extras)
    assert torch.equal(out, plain)
    assert_weighed(left, plain, norm, config.block_n)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("bias", "gated", "part"), [(False, False, 256), (True, True, 16)])
def test_a_layer_that_reads_weighed_rows_scales_its_sums(config: Config, bias: bool, gated: bool, part: int) -> None:
    x, weight, extras = layer(17, 40, 200, norm=True, bias=bias, gated=gated)
    norm, without = extras["norm_weight"], {"bias": extras["bias"], "gated": gated}
    weighed = pre_norm(x, norm, part)
    out = skinny_linear(weighed, weight, config, norm_weight=norm, norm_eps=EPS, **without)
    assert error(out, pre_normed_linear(weighed, weight, norm_eps=EPS, **without).double()) < TOLERANCE
    assert error(out, fp64_linear(x, weight, **extras)) < TOLERANCE


@pytest.mark.parametrize(("bucket", "carried"), [(16, True), (BUCKETS[-1], False)])
def test_two_layers_and_the_norm_between_them(bucket: int, carried: bool) -> None:
    """By whichever route the table names: where the first is the library's, the second norms for itself."""
    x, weight, extras = layer(min(bucket, 200), 72, 64, residual=True)
    _, head, after = layer(2, 40, 72, norm=True, gated=True)
    norm, eps = after.pop("norm_weight"), {"norm_eps": EPS}
    between = fp64_linear(x, weight, **extras)
    stream = linear_triton.add_linear(x, weight, residual=extras["residual"], next_norm=norm)
    assert isinstance(stream, PreNormedRows) == carried
    out = linear_triton.linear(stream, head, norm_weight=norm, **eps, **after)
    assert error(out, fp64_linear(between, head, norm_weight=norm, **after)) < 2 * TOLERANCE
    assert linear_triton.add_linear(x, weight, residual=extras["residual"], next_norm=None) is extras["residual"]


@pytest.mark.parametrize("width", [24, 72, 576])
def test_rows_of_a_table_come_weighed(width: int) -> None:
    table, norm = tensor(9, width), 1 + 0.3 * tensor(width, seed=9)
    index = torch.tensor([3, 8, 0, 3, -1], device=DEVICE)
    taken = linear_triton.take_rows(table, index, norm)
    assert isinstance(taken, PreNormedRows)
    assert_weighed(taken, table[index], norm, 64)


def test_many_rows_of_a_table_come_as_they_are() -> None:
    table, index = tensor(9, 24), torch.zeros(BUCKETS[-1] + 1, dtype=torch.long, device=DEVICE)
    assert torch.equal(linear_triton.take_rows(table, index, table[0]), table[index])


@pytest.mark.skipif(ON_GPU, reason="there it is `test_engine_gpu` that compares the two ways")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # plain, with biases, with head norms
def test_a_model_in_rollout_computes_what_it_computes_elsewhere(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels stand in for a GPU's: the stream travels weighed, is written over, and taps are kept from that."""
    model = policy(torch.float32, family=family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which start as ones and zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
    tokens, layout = torch.tensor([3, 9, 4, 22, 7, 3]), PackedLayout.from_lengths([4, 2])
    with torch.no_grad():
        expected = model(tokens, layout, taps=(0, 1, 2))
        apart = elementwise_triton.rms_norm
        monkeypatch.setattr(elementwise_triton, "rms_norm", lambda x, weight, eps, pdl: apart(x, weight, eps))
        monkeypatch.setattr(model_linear, "in_gpu_rollout", lambda x: True)
        streams = []
        model.blocks[1].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        found = model(tokens, layout, taps=(0, 1, 2))
        assert isinstance(streams[0], PreNormedRows)
        logits = model.logits(found.hidden_TD), model.logits(expected.hidden_TD)
        for ours, theirs in (
            (found.hidden_TD, expected.hidden_TD),
            *zip(found.taps, expected.taps, strict=True),
            logits,
        ):
            assert error(ours, theirs.double()) < WHOLE_MODEL


@pytest.mark.parametrize(
    ("route", "bias", "exact"),
    [
        *((route, exact, exact) for route in CONFIGS for exact in (False, True)),
        ("library", False, False),
        ("library", True, False),
    ],
)
def test_a_residual_can_be_kept(route: str, bias: bool, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is then written elsewhere, with the same bits."""
    config = CONFIGS.get(route)
    for name in ("choose", "choose_exact"):
        monkeypatch.setattr(linear_triton, name, lambda *_: config)
    x, weight, extras = layer(3, 72, 200, bias=bias, residual=True)
    before, norm = extras["residual"].clone(), 1 + 0.3 * tensor(72, seed=9)
    how = {"bias": extras["bias"], "next_norm": norm, "exact": exact}
    kept = linear_triton.add_linear(x, weight, residual=extras["residual"], keep_residual=True, **how)
    assert torch.equal(extras["residual"], before)
    over = linear_triton.add_linear(x, weight, residual=extras["residual"], **how)
    assert isinstance(kept, PreNormedRows) == isinstance(over, PreNormedRows) == (config is not None)
    assert torch.equal(model_linear.rows_of(kept), model_linear.rows_of(over))
    assert model_linear.rows_of(over) is extras["residual"]
    if isinstance(kept, PreNormedRows) and isinstance(over, PreNormedRows):
        assert torch.equal(kept.pre_normed_MD, over.pre_normed_MD)
        assert torch.equal(kept.squares_MP, over.squares_MP)


@pytest.mark.skipif(ON_GPU, reason="there it is `test_engine_gpu` that compares the two ways")
@pytest.mark.parametrize("library", [False, True], ids=["kernels", "library"])
@torch.no_grad()
def test_tapping_costs_no_launch_and_no_bit(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the product behind a tap is the library's, it costs one copy."""
    model = policy(torch.float32)
    tokens, layout = torch.tensor([3, 9, 4, 22, 7, 3]), PackedLayout.from_lengths([4, 2])
    apart = elementwise_triton.rms_norm
    monkeypatch.setattr(elementwise_triton, "rms_norm", lambda x, weight, eps, pdl: apart(x, weight, eps))
    monkeypatch.setattr(model_linear, "in_gpu_rollout", lambda x: True)
    if library:
        monkeypatch.setattr(linear_triton, "choose", lambda *_: None)
        monkeypatch.setattr(linear_triton, "bucket_of", lambda _: None)
        fused = elementwise_triton.silu_mul
        monkeypatch.setattr(elementwise_triton, "silu_mul", lambda x, pdl: fused(x))
    seen = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: seen.append(model_linear.rows_of(inputs[0]).clone()))
        for block in model.blocks
    ]
    expected = model(tokens, layout)
    for hook in hooks:
        hook.remove()
    with Launches(monkeypatch) as launches:
        model(tokens, layout)
        plain = launches.taken()
        found = model(tokens, layout, taps=(0, 1, 2))
        tapped = launches.taken()
    assert len(seen) == len(model.blocks) == 2
    for tap, stream in zip(found.taps, seen, strict=False):
        assert torch.equal(tap, stream)
    assert torch.equal(found.hidden_TD, expected.hidden_TD)
    assert sum(plain.values()) > 8, "they are counted"
    assert tapped - plain == (Counter({"copy_rows_kernel": 2}) if library else Counter())


def test_rows_weighed_for_another_norm_are_refused() -> None:
    x, weight, extras = layer(2, 16, 64, norm=True)
    with pytest.raises(ValueError, match="pre-normed for another norm"):
        model_linear.linear(pre_norm(x, extras["norm_weight"].clone(), 64), weight, norm_weight=extras["norm_weight"])


def test_torch_version_is_the_definition() -> None:
    x, weight, extras = layer(3, 40, 200, norm=True, bias=True, residual=True, gated=True)
    assert error(torch_linear(x, weight, norm_eps=EPS, **extras), fp64_linear(x, weight, **extras)) < 2 * TOLERANCE


def test_torch_version_keeps_float64() -> None:
    x, weight, extras = layer(3, 40, 200, norm=True, bias=True, residual=True, gated=True)
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in extras.items()}
    out = torch_linear(x.double(), weight.double(), norm_eps=EPS, **wide)
    assert error(out, fp64_linear(x, weight, **extras)) < 1e-14


def test_the_choices_are_those_of_the_measurements() -> None:
    """For every measured shape and some others, at both ends of every bucket."""
    expected = json.loads((Path(__file__).parent / "data" / "tile_choices.json").read_text("utf-8"))
    tiles = [Config(**tile) for tile in expected["tiles"]]
    measured = {(n, k, gated) for n, k, gated, _ in (*TILES, *QUANTIZED_TILES)}
    assert measured < {(n, k, gated) for _, n, k, gated, *_ in expected["choices"]}
    for m, n, k, gated, *places in expected["choices"]:
        found = [choice(m, n, k, gated) for choice in (choose, choose_quantized, choose_exact)]
        assert found == [None if place is None else tiles[place] for place in places], (m, n, k, gated)


def test_large_matrices_are_read_in_8_bits_by_few_rows() -> None:
    """What was measured goes before what is guessed, and nobody keeps in 8 bits what nobody reads so."""
    assert (
        choose_quantized(8, 3840, 3072, False)
        == QUANTIZED_TILES[3840, 3072, False, 16]
        != choose_quantized(8, 3840, 3088, False)
    )
    assert choose_quantized(17, 3840, 3072, False) is QUANTIZED_TILES[3840, 3072, False, 32] is None
    assert choose_quantized(8, 18944, 3584, True) is not None
    assert choose_quantized(33, 18944, 3584, True) is None
    assert [ever_quantized(n, k, False) for n, k in ((3840, 3072), (1024, 3840), (960, 576))] == [True, False, False]


def test_all_rows_of_a_bucket_share_a_configuration() -> None:
    assert [bucket_of(m) for m in (1, 16, 17, BUCKETS[-1], BUCKETS[-1] + 1)] == [16, 16, 32, BUCKETS[-1], None]
    shapes = {(n, k, gated) for n, k, gated, _ in TILES} | {(5120, 3840, False), (100, 72, True)}
    for (n, k, gated), bucket in itertools.product(shapes, BUCKETS):
        low = next((b for b in reversed(BUCKETS) if b < bucket), 0) + 1
        assert choose(low, n, k, gated) == choose(bucket, n, k, gated)
    assert choose(BUCKETS[-1] + 1, 5120, 3840, False) is None


def test_every_choice_is_one_a_kernel_can_run() -> None:
    shapes = [(n, k, gated) for n, k, gated, _ in (*TILES, *QUANTIZED_TILES)] + [
        (100, 72, True),
        (18944, 3584, True),
        (3584, 18944, False),
    ]
    for (n, k, gated), bucket in itertools.product(shapes, BUCKETS):
        for config in filter(None, (choose(bucket, n, k, gated), choose_quantized(bucket, n, k, gated))):
            sizes = (config.block_m, config.block_n, config.block_k, config.warps, config.prefetch, config.ahead)
            assert all(size & (size - 1) == 0 for size in sizes), config
            assert 1 <= config.split_k <= -(-k // config.block_k), config
            assert config.ahead == 0 or (config.prefetch > 0 and config.ahead % config.block_k == 0), config
            assert not (config.wide and (config.split_k > 1 or config.tma or config.swap)), config


def test_a_guess_for_an_unmeasured_shape_computes_the_layer() -> None:
    assert choose(4, 16, 136, False) is not None
    x, weight, extras = layer(4, 16, 136, norm=True)
    out = linear_triton.linear(x, weight, norm_eps=EPS, **extras)
    assert error(out, fp64_linear(x, weight, **extras)) < TOLERANCE


def test_out_must_not_be_x() -> None:
    x, weight, extras = layer(2, 64, 64)
    with pytest.raises(ValueError, match="out must not be x"):
        skinny_linear(x, weight, SMALL, out=x, **extras)


def test_a_workspace_too_small_is_an_error() -> None:
    x, weight, extras = layer(2, 64, 128)
    with pytest.raises(ValueError, match="use less split_k or a larger Workspace"):
        skinny_linear(x, weight, replace(SMALL, split_k=2), workspace=Workspace.on(x.device, 10, 1), **extras)


@pytest.mark.skipif(not ON_GPU, reason="dependent launches exist on the GPU only")
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_graph_of_dependent_launches_equals_ordinary_launches(config: Config, carried: bool) -> None:
    """Each layer reads what the one before wrote, in buffers used over and over: any early read or write shows."""
    width, depth, m = 256, 12, 8
    weights = [tensor(width, width, seed=i) * width**-0.5 for i in range(depth)]
    gates = [tensor(2 * width, width, seed=100 + i) * width**-0.5 for i in range(depth)]
    norm_weight = 1 + 0.1 * tensor(width, seed=7)
    start = tensor(m, width, seed=8)
    hidden, inner = torch.empty_like(start), torch.empty_like(start)
    config = replace(config, prefetch=256)

    def chain(pdl: bool) -> None:
        hidden.copy_(start)
        stream = hidden
        for weight, gate in zip(weights, gates, strict=True):
            skinny_linear(stream, gate, config, norm_weight=norm_weight, norm_eps=EPS, gated=True, out=inner, pdl=pdl)
            stream = room_for(hidden, norm_weight, config.block_n) if carried else hidden
            leave = stream if carried else None
            skinny_linear(inner, weight, config, residual=hidden, out=hidden, leave=leave, pdl=pdl)

    chain(pdl=False)
    expected = hidden.clone()
    chain(pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(pdl=True)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(hidden, expected)
