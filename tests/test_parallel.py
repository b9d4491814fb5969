"""Tensor parallelism: several ranks compute what one does, and draw what one draws."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import together
from tests.test_sampler_triton import FILTERED, PLAIN, rows_for
from tlt.engine.sampler import Sampled, sample, sample_slices
from tlt.errors import ModelError
from tlt.kernels.sampling import noise, slices
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.parallel import Ranks, check_divisible
from tlt.model.slices import refresh, slice_of
from tlt.model.transformer import Transformer

INF, NAN = float("inf"), float("nan")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3, head norms": {"model_type": "qwen3"},
    "smollm3": {"model_type": "smollm3"},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
}


def random_policy(**words: Any) -> Transformer:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 8}
    kv = {"num_key_value_heads": 4, "head_dim": 6, "vocab_size": 53, "max_position_embeddings": 64}
    model = Transformer(ModelConfig.from_hf({**sizes, **kv, **words}), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which a fresh policy has at zero and one
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_logits_of_one(family: str, size: int) -> None:
    whole = random_policy(**FAMILIES[family])
    tokens_T, lengths, taps = torch.arange(17) * 7 % 53, [9, 8], (1, 2)
    with torch.no_grad():
        expected = whole(tokens_T, PackedLayout.from_lengths(lengths), taps)
        logits_TV = whole.logits(expected.hidden_TD)

    def forward(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, int]:
        part = slice_of(whole, ranks)
        out = part(tokens_T, PackedLayout.from_lengths(lengths), taps)
        held = sum(parameter.numel() for parameter in part.blocks.parameters())
        return part.logit_slice(out.hidden_TD), torch.cat(out.taps), part.logits(out.hidden_TD), held

    found = together(size, forward)
    close = {"rtol": 1e-12, "atol": 1e-12 * float(logits_TV.abs().max())}
    torch.testing.assert_close(torch.cat([one[0] for one in found], 1), logits_TV, **close)
    torch.testing.assert_close(found[0][1], torch.cat(expected.taps), rtol=1e-12, atol=1e-11)
    for _, tapped, logits, _ in found[1:]:  # the residual stream is the same on all ranks
        assert torch.equal(tapped, found[0][1])
        assert torch.equal(logits, found[0][2])
    matrices = sum(p.numel() for b in whole.blocks for p in (b.qkv, b.o, b.gate_up, b.down))
    assert found[0][3] - matrices / size < 0.1 * matrices  # the rest is vectors


def test_a_slice_follows_its_policy() -> None:
    whole = random_policy(model_type="qwen2", tie_word_embeddings=True)
    tokens_T, layout = torch.arange(9), PackedLayout.from_lengths([9])
    replacement = random_policy(model_type="qwen2", tie_word_embeddings=True)
    with torch.no_grad():
        replacement.blocks[1].qkv.mul_(1.5)  # type: ignore[union-attr, operator]
        replacement.embed.mul_(0.5)
        expected = replacement.logits(replacement(tokens_T, layout).hidden_TD)

    parts = together(2, lambda ranks: slice_of(whole, ranks))
    assert parts[0].embed.data_ptr() == whole.embed.data_ptr()  # of what is whole there is no second copy
    with torch.no_grad():
        for mine, new in zip(whole.parameters(), replacement.parameters(), strict=True):
            mine.copy_(new)

    def forward(ranks: Ranks) -> Tensor:
        part = slice_of(whole, ranks)
        with torch.no_grad():
            part.blocks[0].down.zero_()  # type: ignore[union-attr, operator]
        refresh(part, whole.named_parameters())
        return part.logits(part(tokens_T, layout).hidden_TD)

    torch.testing.assert_close(together(2, forward)[1], expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("word", ["num_key_value_heads", "num_attention_heads", "intermediate_size"])
def test_a_policy_that_cannot_be_divided_is_refused_by_name(word: str) -> None:
    config = random_policy(model_type="llama").config
    fields = {"num_key_value_heads": "kv_heads", "num_attention_heads": "heads", "intermediate_size": "mlp"}
    with pytest.raises(ModelError, match=f"tensor_parallel is 4, and the policy's {word} is 6"):
        check_divisible(replace(config, **{fields[word]: 6}), 4)


def test_ranks_apart_exchange_nothing() -> None:
    """So that they may do different amounts of work, such as compiling."""
    whole = random_policy(model_type="llama")

    def work(ranks: Ranks) -> bool:
        part, rows = slice_of(whole, ranks), rows_for(PLAIN, 3)
        with ranks.apart():
            for _ in range(1 + 2 * ranks.rank):
                hidden_TD = part(torch.arange(3), PackedLayout.from_lengths([3])).hidden_TD
                sample_slices(part.logit_slice(hidden_TD), rows, ranks, 53)
                ranks.share(hidden_TD)
        together = ranks.gather(torch.full((2,), float(ranks.rank)))
        return together.tolist() == [[0.0, 0.0], [1.0, 1.0]]

    assert all(together(2, work))


# ---- sampling


def drawn_by(size: int, logits_RV: Tensor, params: list[Any]) -> list[Sampled]:
    rows = rows_for(params, len(logits_RV))

    def draw(ranks: Ranks) -> Sampled:
        mine = ranks.tokens(logits_RV.shape[1])
        return sample_slices(logits_RV[:, mine], rows, ranks, logits_RV.shape[1])

    return together(size, draw)


def assert_drawn_as_by_one(size: int, logits_RV: Tensor, params: list[Any]) -> None:
    expected = sample(logits_RV, rows_for(params, len(logits_RV)))
    wide = logits_RV.dtype == torch.float64
    close = {"rtol": 1e-7 if wide else 1e-6, "atol": 1e-12 if wide else 3e-6, "equal_nan": True}
    for found in drawn_by(size, logits_RV, params):
        assert torch.equal(found.token_R, expected.token_R)
        torch.testing.assert_close(found.logprob_R, expected.logprob_R, **close)
        torch.testing.assert_close(found.policy_logprob_R, expected.policy_logprob_R, **close)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocab", [5, 53, 1000])
def test_ranks_draw_what_one_draws(vocab: int, dtype: torch.dtype, size: int) -> None:
    logits_RV = 3 * torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    assert_drawn_as_by_one(size, logits_RV, PLAIN)
    assert_drawn_as_by_one(size, logits_RV, FILTERED)


def test_of_equals_the_lowest_token_wins_on_whichever_rank_it_is() -> None:
    greedy = [PLAIN[1]]
    logits_RV = torch.zeros(7, 40, dtype=torch.float64)
    for row, tied in enumerate([(3, 35), (19, 20), (20, 39), (0, 20), (39,), (9, 10), (10, 30)]):
        logits_RV[row, list(tied)] = 2.0
    for found in drawn_by(4, logits_RV, greedy):
        assert found.token_R.tolist() == [3, 19, 20, 0, 39, 9, 10]
        assert not found.logprob_R.any()
    flat = torch.zeros(3, 40)
    assert_drawn_as_by_one(4, flat, greedy)
    assert_drawn_as_by_one(4, flat, [PLAIN[0]])


def test_rows_without_a_distribution_and_slices_without_a_token() -> None:
    logits_RV = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    logits_RV[0, 33] = NAN
    logits_RV[1, 2] = INF
    logits_RV[2] = -INF
    logits_RV[3, :20] = -INF  # nothing that the first rank could draw
    logits_RV[4, 7:] = -INF
    assert sample(logits_RV, rows_for(PLAIN, 6)).token_R.tolist()[:3] == [-1, -1, -1]
    for params in (PLAIN, [PLAIN[0]], FILTERED):
        assert_drawn_as_by_one(2, logits_RV, params)


def test_noise_of_a_slice() -> None:
    keys = rows_for(PLAIN, 3).keys
    whole = noise.gumbel(*keys, 700)
    for first, count in ((0, 5), (31, 40), (127, 2), (128, 128), (130, 570), (699, 1)):
        assert torch.equal(noise.gumbel(*keys, count, first), whole[:, first : first + count])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, behind the interpreter, on inf − inf
@pytest.mark.parametrize("first", [0, 37, 256])
def test_a_slice_is_scanned_alike_by_torch_and_triton(first: int) -> None:
    slices_triton = pytest.importorskip("tlt.kernels.sampling.slices_triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits_RV = 3 * torch.randn(4, 900, generator=torch.Generator().manual_seed(first))
    logits_RV[1, : first + 3] = -INF
    logits_RV[3] = -INF
    rows = rows_for(PLAIN, 4, device)
    logits_Rv = logits_RV[:, first:].to(device)
    expected = slices.scan(logits_Rv, rows.keys, rows.temperature_R, first)
    found = slices_triton.scan(logits_Rv, rows.keys, rows.temperature_R, first)
    assert torch.equal(found[:3, :2].cpu(), expected[:3, :2].cpu())  # the best sums, and whose they are
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=1e-6)
    assert not found[3, 4:].any()
    assert not expected[3, 4:].any()
