"""The fused candidates kernel names what torch names, with the same noise, and scores it closely.

Runs in Triton's interpreter where there is no GPU, and unchanged on a GPU, with larger sizes added.
"""

import math

import pytest
import torch
from torch import Tensor

from tlt.kernels.linear.workspace import shared_workspace
from tlt.kernels.sampling import candidates as reference

candidates_triton = pytest.importorskip("tlt.kernels.sampling.candidates_triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CASES = [
    (7, torch.float32, 7, 0),
    (600, torch.bfloat16, 4, 0),
    (2100, torch.float32, 8, 0),
    (1500, torch.bfloat16, 3, 9),
]
if ON_GPU:
    CASES += [(v, dtype, k, stride) for v in (49_152, 151_936) for dtype in (torch.bfloat16, torch.float32)
              for k, stride in ((1, 0), (8, 0), (8, 3))]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, behind the interpreter, on inf − inf


def keys_for(count: int) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.randint(-(1 << 62), 1 << 62, (2, count), generator=torch.Generator().manual_seed(count)) * 2
    return words[0], words[1], torch.arange(count) * 7919


def logits_for(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)


def on_device(part: object) -> object:
    return part.to(DEVICE) if isinstance(part, Tensor) else part


def assert_named_alike(*arguments: object, ahead: Tensor | None = None, counters: int | None = 128, repeat: int = 1):
    logits, key, *rest = arguments
    expected = reference.name(logits, key, *rest, repeat=repeat, ahead=ahead)
    found = candidates_triton.name(
        *(on_device(logits), tuple(on_device(part) for part in key), *(on_device(part) for part in rest)),
        repeat=repeat, ahead=on_device(ahead), counters=counters,
    )  # fmt: skip
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], atol=5e-5, rtol=1e-5)
    assert not shared_workspace(found[0].device).counters.any(), "the counters are zero again"
    return found


@pytest.mark.parametrize(("vocab", "dtype", "k", "every"), CASES)
@pytest.mark.parametrize("beta", [1.0, torch.tensor(1.4)])
def test_names_and_scores_equal_torch(vocab: int, dtype: torch.dtype, k: int, every: int, beta: float | Tensor) -> None:
    """Sampled, cold and greedy rows; all tokens, or a reduced vocabulary whose noise is keyed by the policy's ids."""
    temperature = torch.tensor([1.0, 0.6, 0.0])
    logits = logits_for(3, vocab, dtype)
    if dtype == torch.bfloat16:
        logits[2] = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:vocab] % 251 - 125
        logits[2, torch.arange(k) * 5] = torch.arange(k).bfloat16() * 2 + 130  # greedy rows are compared by id: no ties
    ids = torch.arange(vocab) * every + 1 if every else None
    assert_named_alike(logits, keys_for(3), temperature, beta, k, ids, counters=None if ON_GPU else 128)


@pytest.mark.parametrize("beta", [math.inf, torch.tensor(math.inf)])
def test_without_noise_the_largest_logits_are_named(beta: float | Tensor) -> None:
    logits = logits_for(2, 700, torch.float32)
    token, _ = assert_named_alike(logits, keys_for(2), torch.tensor([1.0, 0.3]), beta, 5)
    assert torch.equal(token.cpu(), logits.topk(5).indices)


def test_equals_go_by_lower_id() -> None:
    logits = torch.full((2, 1300), -1.0)
    logits[0, [1200, 3, 640, 70]] = 2.0
    logits[1, [900, 5]] = torch.tensor([0.0, -0.0])
    key, temperature = tuple(part.to(DEVICE) for part in keys_for(2)), torch.zeros(2, device=DEVICE)
    token, _ = candidates_triton.name(logits.to(DEVICE), key, temperature, 1.0, 6, counters=128)
    assert token.tolist() == [[3, 70, 640, 1200, 0, 1], [5, 900, 0, 1, 2, 3]]


@pytest.mark.parametrize("counters", [128, 256])
def test_the_split_of_the_vocabulary_changes_no_token(counters: int) -> None:
    assert_named_alike(logits_for(2, 1400, torch.float32), keys_for(2), torch.ones(2), 0.7, 8, counters=counters)


@pytest.mark.parametrize("ahead", [torch.tensor(3), torch.tensor([3, 3])])
def test_nodes_of_one_row_share_its_key_further_on(ahead: Tensor) -> None:
    logits = logits_for(6, 300, torch.float32)
    columns = torch.stack(keys_for(2), dim=1)  # as a row's state holds them
    key, temperature = columns.unbind(1), torch.tensor([[1.0, 0.9], [0.5, 0.9]])[:, 0]
    token, _ = assert_named_alike(logits, key, temperature, 1.0, 4, ahead=ahead, repeat=3)
    repeated = tuple(part.repeat_interleave(3) for part in (key[0], key[1], key[2] + 3))
    alone, _ = reference.name(logits, repeated, temperature.repeat_interleave(3), 1.0, 4)
    assert torch.equal(token.cpu(), alone)


def test_tokens_that_cannot_come_are_named_last() -> None:
    logits = logits_for(2, 600, torch.float32)
    logits[:, 9:] = -math.inf
    token, score = assert_named_alike(logits, keys_for(2), torch.ones(2), 1.0, 8)
    assert int(token.max()) < 9
    assert bool(score.isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    logits, key, temperature = torch.zeros(2, 64, device=DEVICE), keys_for(2), torch.ones(2)
    with pytest.raises(ValueError, match="9 candidates"):
        candidates_triton.name(logits, key, temperature, 1.0, 9)
    with pytest.raises(ValueError, match="vocabulary contiguous"):
        candidates_triton.name(logits[:, ::2], key, temperature, 1.0, 2)
    with pytest.raises(ValueError, match="an entry for each 2"):
        candidates_triton.name(logits, key, temperature, 1.0, 2, repeat=2)


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_logits_keys_and_sharpness() -> None:
    static, temperature, beta = (
        torch.zeros(16, 5003, device=DEVICE),
        torch.ones(4, device=DEVICE),
        torch.ones((), device=DEVICE),
    )
    key, ahead = tuple(part.to(DEVICE) for part in keys_for(4)), torch.zeros((), dtype=torch.int64, device=DEVICE)
    call = lambda: candidates_triton.name(static, key, temperature, beta, 4, repeat=4, ahead=ahead, pdl=True)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, score = call()
    for step in range(3):
        static.copy_(logits_for(16, 5003 + step, torch.float32)[:, :5003])
        ahead.add_(1)
        beta.add_(0.5)
        graph.replay()
        expected = reference.name(static, key, temperature, beta, 4, repeat=4, ahead=ahead)
        assert torch.equal(token, expected[0])
        torch.testing.assert_close(score, expected[1], atol=5e-5, rtol=1e-5)
