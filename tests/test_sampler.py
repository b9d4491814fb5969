"""The keyed sampler is sampling: right distribution, independent draws, same token in any batch, right logprobs.

Every statistical check is a function that takes a sampler; the biased samplers at the end must fail the same functions.
Seeds are fixed, so nothing here is random from run to run.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from scipy import stats
from torch import Tensor

from tlt.engine.sampler import Sampled, SamplingRows, log_min_p, sample
from tlt.kernels.sampling import noise, reference
from tlt.types import Key, SamplingParams

# R rows, V vocabulary, N tokens or keys

Draw = Callable[[Tensor, SamplingRows], Tensor]  # (logits_RV, rows) → token_R
Noise = Callable[[Tensor, Tensor, Tensor, int], Tensor]

ACCEPT = 1e-5  # p-values of the true sampler lie above
REJECT = 1e-9  # p-values of biased ones lie below
INF, NAN = float("inf"), float("nan")

PEAKED = torch.tensor([6.0, 2.0, 1.0, 0.0, -2.0])
FLAT = torch.zeros(6)
SKEWED = torch.tensor([0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.5])


def rows_of(seed_R: Tensor, request_R: Tensor, position_R: Tensor, **settings: float) -> SamplingRows:
    """Rows with one setting for all."""
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    full = torch.full_like(seed_R, 0, dtype=torch.float32)
    return SamplingRows(
        *(seed_R, request_R, position_R, full + params.temperature, torch.full_like(seed_R, params.top_k)),
        *(full + params.top_p, full + log_min_p(params), params.filtered),
    )


def many_rows(count: int, seed: int = 11, **settings: float) -> SamplingRows:
    """Keys as a run makes them: few seeds, consecutive requests, consecutive positions."""
    index = torch.arange(count)
    return rows_of(torch.full_like(index, seed), index // 1000, index % 1000, **settings)


def keyed(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    return sample(logits_RV, rows).token_R


def with_noise(gumbel: Noise) -> Draw:
    """A sampler that differs from ours in the noise alone."""

    def draw(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
        noise_RV = torch.cat(
            [
                gumbel(part.seed_R, part.request_R, part.position_R, logits_RV.shape[-1])
                for part in (pick(rows, slice(k, k + 2000)) for k in range(0, len(logits_RV), 2000))  # in cache
            ]
        )
        return (logits_RV / rows.temperature_R[:, None] + noise_RV).argmax(-1)

    return draw


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These operations are too small to share: on a busy machine a second thread is only waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The tests as functions: each gives a p-value or a z-score


def fit(counts: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts (chi-square, rare cells pooled)."""
    impossible = expected == 0
    if counts[impossible].any():
        return 0.0
    counts, expected = counts[~impossible].double(), expected[~impossible].double()
    rare = expected < 10
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def goodness(draw: Draw, logits_V: Tensor, probs_V: Tensor, count: int = 1_000_000, **settings: float) -> float:
    """p-value of `count` draws from one row of logits against its probabilities."""
    vocab_size = len(logits_V)
    token_R = draw(logits_V.expand(count, vocab_size), many_rows(count, **settings))
    return fit(token_R.bincount(minlength=vocab_size), probs_V.double() * count)


def pair_independence(draw: Draw, first: SamplingRows, second: SamplingRows, logits_V: Tensor) -> float:
    """p-value of the tokens of paired keys against independent draws."""
    count, vocab_size = len(first.seed_R), len(logits_V)
    logits_RV = logits_V.expand(count, vocab_size)
    pair_R = draw(logits_RV, first) * vocab_size + draw(logits_RV, second)
    probs_V = logits_V.double().softmax(-1)
    return fit(pair_R.bincount(minlength=vocab_size**2), (probs_V[:, None] * probs_V).flatten() * count)


def score_test(probs_RV: Tensor, token_R: Tensor, feature_RV: Tensor) -> float:
    """z-score of Σ f(token) − E_p[f] over rows that each have their own distribution; N(0, 1) if token ~ p."""
    probs_RV, feature_RV = probs_RV.double(), feature_RV.double()
    mean_R = (probs_RV * feature_RV).sum(-1)
    variance_R = (probs_RV * feature_RV**2).sum(-1) - mean_R**2
    difference_R = feature_RV.gather(-1, token_R[:, None])[:, 0] - mean_R
    return (difference_R.sum() / variance_R.sum().sqrt()).item()


def score_features(probs_RV: Tensor) -> dict[str, Tensor]:
    """−log p and rank indicators, the features that rollouts are judged by."""
    rank_RV = probs_RV.argsort(-1, descending=True).argsort(-1)
    features = {"-log p": -probs_RV.double().clamp_min(1e-300).log()}
    for low, high in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 1 << 30)):
        features[f"rank {low}–{high}"] = (rank_RV >= low) & (rank_RV < high)
    return features


def worst_score(draw: Draw, count: int = 100_000, vocab_size: int = 20) -> float:
    """The largest |z| over the features, on rows that all have different logits."""
    logits_RV = 2 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(3))
    probs_RV, token_R = logits_RV.double().softmax(-1), draw(logits_RV, many_rows(count, seed=5))
    return max(abs(score_test(probs_RV, token_R, feature_RV)) for feature_RV in score_features(probs_RV).values())


# Distribution


@pytest.mark.parametrize(
    ("logits_V", "temperature"), [(PEAKED, 1.0), (FLAT, 1.0), (SKEWED, 1.0), (PEAKED, 2.5), (SKEWED, 0.6)]
)
def test_draws_follow_softmax(logits_V: Tensor, temperature: float) -> None:
    probs_V = (logits_V.double() / temperature).softmax(-1)
    assert goodness(keyed, logits_V, probs_V, temperature=temperature) > ACCEPT


def test_draws_follow_softmax_over_many_lanes_and_blocks() -> None:
    logits_V = torch.randn(300, generator=torch.Generator().manual_seed(1))
    assert goodness(keyed, logits_V, logits_V.double().softmax(-1), count=20_000) > ACCEPT


def test_draws_follow_the_filtered_softmax() -> None:
    probs_V = SKEWED.double().softmax(-1)
    top_3_V = torch.where(torch.arange(7) < 3, probs_V, 0)
    assert goodness(keyed, SKEWED, top_3_V / top_3_V.sum(), count=300_000, top_k=3) > ACCEPT
    # 0.64 + 0.23 < 0.9 ≤ 0.64 + 0.23 + 0.09
    assert goodness(keyed, SKEWED, top_3_V / top_3_V.sum(), count=100_000, top_p=0.9) > ACCEPT
    # 0.09 / 0.64 ≥ 0.1 > 0.03 / 0.64
    assert goodness(keyed, SKEWED, top_3_V / top_3_V.sum(), count=100_000, min_p=0.1) > ACCEPT
    # of the top 3, 0.67 + 0.24 ≥ 0.9: top-p counts what top-k left
    top_2_V = torch.where(torch.arange(7) < 2, probs_V, 0)
    assert goodness(keyed, SKEWED, top_2_V / top_2_V.sum(), count=100_000, top_k=3, top_p=0.9) > ACCEPT


def test_scores_of_varied_rows() -> None:
    assert worst_score(keyed) < 4.5


def test_keys_that_differ_in_one_part_draw_independently() -> None:
    index = torch.arange(100_000)
    base = (torch.full_like(index, 17), index // 300, index % 300)
    for part, step in ((0, 1), (0, 1 << 32), (0, 1 << 63), (1, 1000), (1, 1 << 32), (1, -1), (2, 1000)):
        step = step - (1 << 64) if step >= 1 << 63 else step
        other = [word + step if k == part else word for k, word in enumerate(base)]
        p_value = pair_independence(keyed, rows_of(*base), rows_of(*other), SKEWED)
        assert p_value > ACCEPT, f"part {part}, step {step}: {p_value}"


# Noise


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [  # the published answers of Random123
        (7, [0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            7,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
        (10, [0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ],
)
def test_philox_gives_the_published_answers(rounds: int, counter: list[int], key: list[int], words: list[int]) -> None:
    seed, request = (torch.tensor([noise.as_int64(low | high << 32)]) for low, high in (key, counter[:2]))
    position, token_counter = torch.tensor([counter[2]]), torch.tensor([counter[3]])
    assert [word.item() for word in noise.philox(seed, request, position, token_counter, rounds)] == words


def test_every_bit_of_the_key_flips_half_of_the_output() -> None:
    index = torch.arange(64)
    base = [index * 0 + 3, index, index + 5, torch.arange(64)]  # seed, request, position, token counter
    words = torch.stack(noise.philox(*base))
    for part, bits in ((0, 64), (1, 64), (2, 32), (3, 32)):
        for bit in range(bits):
            changed = list(base)
            changed[part] = changed[part] ^ torch.tensor(noise.as_int64(1 << bit))
            flipped = words ^ torch.stack(noise.philox(*changed))
            share = torch.stack([(flipped >> k & 1).double().mean() for k in range(32)])
            assert abs(share.mean() - 0.5) < 0.01, f"part {part}, bit {bit}"  # 524,288 bits: 14 standard deviations
            assert (share - 0.5).abs().max() < 0.03, f"part {part}, bit {bit}"  # 16,384 bits each: 7.7


def test_bits_are_uniform_in_every_lane() -> None:
    rows = many_rows(4000)
    for lane, word in enumerate(noise.philox(rows.seed_R, rows.request_R, rows.position_R, torch.arange(100))):
        for shift in (0, 8, 16, 24):
            counts = (word >> shift & 0xFF).flatten().bincount(minlength=256)
            assert fit(counts, torch.full((256,), word.numel() / 256)) > ACCEPT, f"lane {lane}, shift {shift}"


def test_noise_of_different_tokens_is_uncorrelated_and_gumbel() -> None:
    rows = many_rows(20_000)
    noise_RV = noise.gumbel(rows.seed_R, rows.request_R, rows.position_R, 200).double()
    correlation_VV = torch.corrcoef(noise_RV.T) - torch.eye(200)
    assert correlation_VV.abs().max() * 20_000**0.5 < 5.5  # 19,900 pairs
    assert stats.kstest(noise_RV.flatten()[::40].numpy(), "gumbel_r").pvalue > ACCEPT


def test_gumbel_is_exact_to_float32_over_the_whole_range() -> None:
    edge = torch.arange(1 << 16)
    middle = torch.randint(0, 1 << 32, (1 << 18,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([edge, (1 << 32) - 1 - edge, (1 << 31) - (1 << 15) + edge, middle])
    truth = -(-torch.log1p(-(bits.double() + 0.5) / 2**32)).log()
    gumbel = noise.gumbel_from_bits(bits)
    assert gumbel.isfinite().all()
    assert ((gumbel - truth).abs() <= 6e-7 * truth.abs().clamp_min(1)).all()


def test_portable_exp_is_exact_to_float32() -> None:
    x = -30 * torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert ((noise.exp(x) / x.double().exp() - 1).abs() < 1.5e-7).all()
    assert noise.exp(torch.tensor([0.0, -INF])).tolist() == [1.0, noise.exp(torch.tensor([-30.0])).item()]


@pytest.mark.parametrize("vocab_size", [1, 31, 100, 129, 5000])
def test_noise_does_not_depend_on_the_vocabulary_size(vocab_size: int) -> None:
    key = (torch.tensor([-5, 1 << 62]), torch.tensor([1 << 40, -1]), torch.tensor([0, (1 << 32) - 1]))
    whole_RV = noise.gumbel(*key, 6000)
    assert torch.equal(noise.gumbel(*key, vocab_size), whole_RV[:, :vocab_size])
    token_RN = torch.randint(0, vocab_size, (2, 50), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.gumbel_at(*key, token_RN), whole_RV.gather(1, token_RN))


# One row's answer


def mixed_rows(count: int) -> SamplingRows:
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.7, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.2, min_p=0.1),
    ]
    keys = [Key(seed=(1 << 64) - 1 - k, request=(k << 40) - 3) for k in range(count)]
    return SamplingRows.of(keys, [7 * k for k in range(count)], [settings[k % len(settings)] for k in range(count)])


def pick(rows: SamplingRows, index: Tensor | slice) -> SamplingRows:
    return SamplingRows(
        rows.seed_R[index],
        rows.request_R[index],
        rows.position_R[index],
        rows.temperature_R[index],
        rows.top_k_R[index],
        rows.top_p_R[index],
        rows.log_min_p_R[index],
        rows.filtered,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_order_and_split_of_the_batch_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    logits_RV, rows = (3 * torch.randn(40, 150, generator=generator)).to(dtype), mixed_rows(40)
    whole = sample(logits_RV, rows)
    order = torch.randperm(40, generator=generator)
    assert torch.equal(sample(logits_RV[order], pick(rows, order)).token_R, whole.token_R[order])
    for size in (1, 7):
        parts = [sample(logits_RV[k : k + size], pick(rows, slice(k, k + size))) for k in range(0, 40, size)]
        assert torch.equal(torch.cat([part.token_R for part in parts]), whole.token_R)
    monkeypatch.setattr(reference, "_CHUNK", 450)  # three rows at a time
    chunked = sample(logits_RV, rows, out=Sampled.empty(40))
    assert torch.equal(chunked.token_R, whole.token_R)
    assert torch.equal(chunked.logprob_R, whole.logprob_R)
    assert torch.equal(chunked.policy_logprob_R, whole.policy_logprob_R)


def kept_tokens(logits: list[float], params: SamplingParams) -> list[bool]:
    """The filters as their definition reads, token by token."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    kth = logits[order[params.top_k - 1]] if 0 < params.top_k < len(logits) else -INF
    probs = torch.tensor([x if x >= kth else -INF for x in logits], dtype=torch.float64)
    probs = (probs / params.temperature).softmax(-1)
    mass, last = 0.0, kth
    for v in order:
        if mass >= params.top_p:
            break
        mass, last = mass + probs[v].item(), logits[v]
    ratios = (torch.tensor(logits, dtype=torch.float64) / params.temperature).softmax(-1)
    floor = params.min_p * ratios.max().item() * (1 - 1e-6)
    return [
        x >= (last if params.top_p < 1 else kth) and ratio >= floor
        for x, ratio in zip(logits, ratios.tolist(), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_those_of_the_filtered_softmax(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_RV = 2 * torch.randn(30, 60, dtype=dtype, generator=generator)
    settings = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.05 if top_k == 10 else 0.0)
        for temperature in (0.5, 1.0, 1.5)
        for top_k in (0, 1, 10, 60, 100)
        for top_p in (1.0, 0.7)
    ]
    rows = SamplingRows.of([Key(1, k) for k in range(30)], list(range(30)), settings)
    sampled = sample(logits_RV, rows)
    kept_RV = torch.tensor([kept_tokens(logits_RV[k].tolist(), settings[k]) for k in range(30)])
    temperature_R1 = torch.tensor([params.temperature for params in settings])[:, None]
    filtered_RV = (logits_RV.double() / temperature_R1).masked_fill(~kept_RV, -INF).log_softmax(-1)
    token_R1 = sampled.token_R[:, None]
    torch.testing.assert_close(sampled.logprob_R.double()[:, None], filtered_RV.gather(1, token_R1), atol=2e-6, rtol=0)
    policy_R1 = logits_RV.double().log_softmax(-1).gather(1, token_R1)
    torch.testing.assert_close(sampled.policy_logprob_R.double()[:, None], policy_R1, atol=2e-6, rtol=0)


def test_greedy_takes_the_first_of_the_largest_with_certainty() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-INF, -1.0, -INF, -1.0]])
    sampled = sample(logits_RV, rows_of(*torch.arange(9).view(3, 3), temperature=0.0, top_k=1, top_p=0.1))
    assert sampled.token_R.tolist() == [1, 0, 1]
    assert sampled.logprob_R.tolist() == [0.0, 0.0, 0.0]
    expected_R = logits_RV.log_softmax(-1)[[0, 1, 2], [1, 0, 1]]
    torch.testing.assert_close(sampled.policy_logprob_R, expected_R, atol=2e-6, rtol=0)


def test_equals_at_the_threshold_all_stay() -> None:
    logits_V = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])
    for settings in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.3}, {"top_p": 1e-6}):
        token_R = keyed(logits_V.expand(300, 5), many_rows(300, **settings))
        assert set(token_R.tolist()) == {1, 2, 4}, settings


def test_float64_logits_are_not_rounded_to_float32() -> None:
    logits_RV = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert keyed(logits_RV, many_rows(1, temperature=0.0)).tolist() == [1]
    assert keyed(logits_RV.float(), many_rows(1, temperature=0.0)).tolist() == [0]


def test_rows_without_a_distribution_say_so_and_leave_the_others_alone() -> None:
    logits_RV = torch.randn(10, 30, generator=torch.Generator().manual_seed(6))
    rows, clean = mixed_rows(10), logits_RV.clone()
    logits_RV[1, 7], logits_RV[2, 0], logits_RV[4] = NAN, INF, -INF
    sampled, expected = sample(logits_RV, rows), sample(clean, rows)
    bad = [1, 2, 4]
    good = [k for k in range(10) if k not in bad]
    assert sampled.token_R[bad].tolist() == [-1] * 3
    assert sampled.logprob_R[bad].isnan().all()
    assert sampled.policy_logprob_R[bad].isnan().all()
    assert torch.equal(sampled.token_R[good], expected.token_R[good])
    assert torch.equal(sampled.logprob_R[good], expected.logprob_R[good])


def test_impossible_tokens_are_never_drawn() -> None:
    logits_V = torch.tensor([-INF, 0.0, -INF, 0.0])
    assert set(keyed(logits_V.expand(200, 4), many_rows(200)).tolist()) == {1, 3}


# Positive controls: what must not pass does not


def one_noise_for_all_tokens(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    return noise.gumbel(seed_R, request_R, position_R, 1).expand(-1, vocab_size)


def too_weak(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    return 0.9 * noise.gumbel(seed_R, request_R, position_R, vocab_size)


def from_8_bits(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    bits_RV = noise._bits(seed_R, request_R, position_R, vocab_size)
    return noise.gumbel_from_bits((bits_RV & 0xFF000000) + (1 << 23))


def blind_to_position(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    return noise.gumbel(seed_R, request_R, position_R * 0, vocab_size)


def blind_to_request(seed_R: Tensor, request_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    return noise.gumbel(seed_R, request_R * 0, position_R, vocab_size)


@pytest.mark.parametrize(
    "biased", [one_noise_for_all_tokens, too_weak, from_8_bits, blind_to_position, blind_to_request]
)
def test_biased_samplers_do_not_fit(biased: Noise) -> None:
    assert goodness(with_noise(biased), SKEWED, SKEWED.double().softmax(-1), count=300_000) < REJECT


@pytest.mark.parametrize(("biased", "part"), [(blind_to_position, 2), (blind_to_request, 1)])
def test_samplers_blind_to_a_part_of_the_key_are_not_independent(biased: Noise, part: int) -> None:
    index = torch.arange(20_000)
    first = [torch.full_like(index, 17), index, index]
    second = [word + 1 if k == part else word for k, word in enumerate(first)]
    assert pair_independence(with_noise(biased), rows_of(*first), rows_of(*second), SKEWED) < REJECT


@pytest.mark.parametrize("biased", [one_noise_for_all_tokens, too_weak])
def test_scores_of_biased_samplers_are_far_out(biased: Noise) -> None:
    assert worst_score(with_noise(biased)) > 8
