"""The fused sampler equals the torch sampler: noise bits and tokens exactly, log-probabilities closely.

Runs in Triton's interpreter where there is no GPU, and unchanged on a GPU, with larger sizes added.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tlt.engine import sampler
from tlt.engine.sampler import Sampled, SamplingRows
from tlt.kernels.sampling import noise
from tlt.types import Key, SamplingParams

sampling_triton = pytest.importorskip("tlt.kernels.sampling.triton")
noise_triton = pytest.importorskip("tlt.kernels.sampling.noise_triton")

# R rows, V vocabulary, N tokens

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter takes milliseconds per operation: few and small cases there, all of them on a GPU.
PLAIN_CASES = [(5, torch.float16), (100, torch.bfloat16), (3001, torch.bfloat16), (8192, torch.float32)]
FILTERED_CASES = [(5, torch.float16), (1000, torch.bfloat16), (5003, torch.float32)]
if ON_GPU:
    PLAIN_CASES = [(v, dtype) for v in (1, 5, 100, 3001, 8192, 49_152, 151_936) for dtype in DTYPES]
    FILTERED_CASES = [(v, dtype) for v in (1, 5, 1000, 5003, 49_152, 151_936) for dtype in DTYPES]


def fused_sample(logits_RV: Tensor, rows: SamplingRows, out: Sampled | None = None) -> Sampled:
    """As `sampler.sample` where there is a GPU; here in the interpreter, too."""
    out = out or Sampled.empty(len(logits_RV), logits_RV.device)
    sampling_triton.sample(logits_RV, rows.keys, rows.settings, out.parts, filtered=rows.filtered)
    return out


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These operations are too small to share: on a busy machine a second thread is only waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, behind the interpreter, on inf − inf

PLAIN = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.6)]
FILTERED = [
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.8),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.7, top_p=1e-4),
    SamplingParams(temperature=0.7, min_p=0.2),
    SamplingParams(temperature=1.4, top_k=200, min_p=0.01),
    SamplingParams(),
]


def rows_for(params: list[SamplingParams], count: int, device: str = "cpu") -> SamplingRows:
    """Rows that cycle through the settings, with keys from all over 64 bits."""
    keys = [Key(seed=(k * 0x9E3779B97F4A7C15) % (1 << 64), request=(k << 36) - k) for k in range(count)]
    return SamplingRows.of(
        keys, [k * 7919 for k in range(count)], [params[k % len(params)] for k in range(count)], device
    )


def logits_for(rows: int, vocab_size: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)


def assert_equal_samples(logits_RV: Tensor, params: list[SamplingParams]) -> Sampled:
    expected = sampler.sample(logits_RV, rows_for(params, len(logits_RV)))
    fused = fused_sample(logits_RV.to(DEVICE), rows_for(params, len(logits_RV), DEVICE))
    assert torch.equal(fused.token_R.cpu(), expected.token_R)
    close = {"atol": 5e-5, "rtol": 1e-6, "equal_nan": True}  # 152k float32 terms summed in another order
    torch.testing.assert_close(fused.logprob_R.cpu(), expected.logprob_R, **close)
    torch.testing.assert_close(fused.policy_logprob_R.cpu(), expected.policy_logprob_R, **close)
    return fused


def test_noise_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 62), 1 << 62, (2, 6), generator=generator) * 2
    key = (words[0], words[1], torch.tensor([0, 1, 77, 1 << 20, (1 << 31) + 5, (1 << 32) - 1]))
    token_RN = torch.randint(0, 300_000, (6, 20_000 if ON_GPU else 3000), generator=generator)
    token_RN[:, :512] = torch.arange(512)
    expected_RN = noise.gumbel_at(*key, token_RN)
    fused_RN = noise_triton.gumbel_at(*(word.to(DEVICE) for word in key), token_RN.to(DEVICE))
    assert torch.equal(fused_RN.cpu().view(torch.int32), expected_RN.view(torch.int32))


@pytest.mark.parametrize(("vocab_size", "dtype"), PLAIN_CASES)
def test_plain_rows_equal_torch(vocab_size: int, dtype: torch.dtype) -> None:
    assert_equal_samples(logits_for(3, vocab_size, dtype), PLAIN)


@pytest.mark.parametrize(("vocab_size", "dtype"), FILTERED_CASES)
def test_filtered_rows_equal_torch(vocab_size: int, dtype: torch.dtype) -> None:
    params = FILTERED if ON_GPU or vocab_size < 5000 else FILTERED[1:4]
    assert_equal_samples(logits_for(len(params), vocab_size, dtype, spread=1.5), params)


def test_thresholds_equal_torch_on_every_sign_scale_and_tie() -> None:
    logits_RV = logits_for(6, 200, torch.float32)
    logits_RV *= torch.tensor([1e-30, 1e-3, 1.0, 1.0, 1.0, 1e3])[:, None]
    logits_RV += torch.tensor([0.0, 0.0, -50.0, 50.0, 0.0, 0.0])[:, None]
    logits_RV[3:5] = (logits_RV[3:5] * 2).round() / 2
    assert_equal_samples(logits_RV, [SamplingParams(top_k=7), SamplingParams(top_p=0.7)])
    assert_equal_samples(logits_RV.bfloat16(), [SamplingParams(top_p=0.99), SamplingParams(top_k=150, top_p=0.5)])


def test_ties_go_to_the_lowest_token() -> None:
    logits_RV = torch.zeros(3, 5000)
    logits_RV[0, [4097, 700, 2500]] = 1.0
    logits_RV[1, [33, 4999]] = -0.0
    assert assert_equal_samples(logits_RV, [SamplingParams(temperature=0.0)]).token_R.tolist() == [700, 0, 0]


@pytest.mark.parametrize("params", [PLAIN, FILTERED[1:3]])
def test_rows_without_a_distribution_say_so(params: list[SamplingParams]) -> None:
    logits_RV = logits_for(6, 300, torch.bfloat16)
    logits_RV[1, 7], logits_RV[2, 299], logits_RV[3], logits_RV[4, 30:] = NAN, INF, -INF, -INF
    token_R = assert_equal_samples(logits_RV, params).token_R.tolist()
    assert [k for k in range(6) if token_R[k] < 0] == [1, 2, 3]
    assert token_R[4] < 30


def test_rows_may_be_strided_and_out_is_used() -> None:
    wide_RV = logits_for(3, 256, torch.float32).to(DEVICE)
    rows, out = rows_for(PLAIN, 3, DEVICE), Sampled.empty(3, DEVICE)
    fused_sample(wide_RV[:, :130], rows, out)
    assert torch.equal(out.token_R, fused_sample(wide_RV[:, :130].contiguous(), rows).token_R)
    with pytest.raises(ValueError, match="contiguous"):
        fused_sample(wide_RV[:, ::2], rows)


@pytest.mark.parametrize("tiles", [1, 4])
def test_the_split_of_the_vocabulary_changes_no_token(tiles: int) -> None:
    logits_RV, rows = logits_for(3, 9000, torch.float32).to(DEVICE), rows_for(PLAIN, 3, DEVICE)
    out = Sampled.empty(3, DEVICE)
    sampling_triton.sample(
        logits_RV,
        rows.keys,
        rows.settings,
        out.parts,
        filtered=False,
        counters=256,
        tiles=tiles,
    )
    assert torch.equal(out.token_R.cpu(), sampler.sample(logits_RV.cpu(), rows_for(PLAIN, 3)).token_R)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [PLAIN, FILTERED])
def test_a_captured_graph_replays_on_new_logits_and_keys(params: list[SamplingParams]) -> None:
    static_RV = torch.zeros(14, 5003, device=DEVICE)
    rows, out = rows_for(params, 14, DEVICE), Sampled.empty(14, DEVICE)
    sampler.sample(static_RV, rows, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(static_RV, rows, out)
    for step in range(3):
        static_RV.copy_(logits_for(14, 5003 + step, torch.float32)[:, :5003])
        rows.position_R.add_(1)
        graph.replay()
        eager = sampler.sample(static_RV, rows)
        assert torch.equal(out.token_R, eager.token_R)
        assert torch.equal(out.logprob_R, eager.logprob_R)
