"""On a GPU in bfloat16, exact mode: the same bits in any batch, with graphs and speculation or without."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.test_engine_gpu import batch, gpu_policy
from tests.tiny import letters
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.kernels.linear import triton as linear_triton
from tlt.kernels.linear.plan import TILES, choose_exact
from tlt.kernels.linear.reference import PreNormedRows, pre_norm
from tlt.model.config import ModelConfig
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer
from tlt.spec.shape import OFF, Draft, Shape
from tlt.types import Completion, Key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Bits = dict[Key, tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]]
CHAINS = [OFF, *(Shape(("x",), depth, 1, depth + 1) for depth in (1, 2, 4, 8))]


def windowed_policy() -> Transformer:
    """Attends to the last 100 tokens only."""
    config = ModelConfig.from_hf(
        {
            "model_type": "mistral",
            "vocab_size": 1000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 100,
            "max_position_embeddings": 2048,
        }
    )
    model = Transformer(config, dtype=torch.bfloat16, device="cuda")
    model.init_weights(0)
    return model


POLICIES: dict[str, Callable[[], Transformer]] = {"all keys": gpu_policy, "a window": windowed_policy}


def bits_of(completions: Sequence[Completion]) -> Bits:
    assert len(completions) == 24
    return {done.key: (done.tokens, done.logprobs, done.policy_logprobs) for done in completions}


def answers(model: Transformer, speculation: object = None, **knobs: object) -> Bits:
    settings = EngineSettings(**{"rows": 24, "exact": True, **knobs})  # type: ignore[arg-type]
    engine = EngineCore(model, letters(), settings, speculation=speculation)  # type: ignore[arg-type]
    engine.submit(batch(24))
    return bits_of(engine.drain())


@pytest.mark.parametrize("name", POLICIES)
def test_batches_graphs_pieces_and_preemption_change_no_bit(name: str) -> None:
    model = POLICIES[name]()
    expected = answers(model)
    for knobs in (
        {"rows": 7},
        {"rows": 1},
        {"graphs": False},
        {"rows": 5, "graphs": False},
        {"prefill_tokens": 50},
        {"admission": "fifo"},
    ):
        assert answers(model, **knobs) == expected, f"other bits with {knobs}"
    gib = 60.5 * KVCache.page_bytes(model.config, 16, torch.bfloat16) / 1024**3
    engine = EngineCore(model, letters(), EngineSettings(rows=24, kv_gib=gib, exact=True))
    engine.submit(batch(24))
    assert bits_of(engine.drain()) == expected
    assert engine.report().preemptions > 0


def test_without_it_bits_do_change() -> None:
    """What the others assert can fail."""
    model = gpu_policy()
    assert answers(model, exact=False) != answers(model, exact=False, rows=1)


def test_it_says_what_the_usual_engine_says_up_to_rounding() -> None:
    model = gpu_policy()
    exact, baseline = answers(model), answers(model, exact=False)
    gaps = []
    for key, (tokens, _, policy_logprobs) in exact.items():
        common = next(
            (i for i, (a, b) in enumerate(zip(tokens, baseline[key][0], strict=False)) if a != b), len(tokens)
        )
        assert common > 0
        gaps += [abs(a - b) for a, b in zip(policy_logprobs[:common], baseline[key][2][:common], strict=True)]
    assert sum(gaps) / len(gaps) < 0.02
    assert max(gaps) < 0.25


def guesser(answers: Bits, miss: float) -> Callable[[Key, Sequence[int], Shape], Draft]:
    """Knows the answers and errs now and then; with a miss of 1 it knows nothing."""
    dice = random.Random(5)

    def guess(key: Key, written: Sequence[int], shape: Shape) -> Draft:
        future = answers[key][0][len(written) : len(written) + shape.depth]
        tokens = tuple(token if dice.random() >= miss else dice.randrange(1000) for token in future)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), tuple(0.9**i for i in range(len(tokens))))

    return guess


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("miss", [0.0, 0.2, 1.0])
def test_chains_of_drafts_change_no_bit(name: str, miss: float) -> None:
    from tests.test_speculation import Scripted

    model = POLICIES[name]()
    expected = answers(model)
    for knobs in ({}, {"rows": 3}, {"graphs": False}):
        dice = random.Random(3)
        speculation = Scripted(
            guesser(expected, miss), lambda running, dice=dice: dice.choice(CHAINS) if running else OFF
        )
        assert answers(model, speculation, **knobs) == expected, f"other bits with {knobs}"
        assert miss == 1.0 or speculation.accept_length > 1.5


def test_trees_change_no_bit_either() -> None:
    """They are walked along their first chain."""
    from tests.test_speculation import Scripted, changing, oracle

    model = gpu_policy()
    expected = answers(model)
    right = oracle({key: list(tokens) for key, (tokens, _, _) in expected.items()}, miss=0.2)
    assert answers(model, Scripted(right, changing(4))) == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_a_learned_drafter_changes_no_bit(graphs: bool) -> None:
    from tests.test_learned import Always
    from tlt.spec.eagle import Eagle, EagleConfig
    from tlt.spec.learned import LearnedDrafting
    from tlt.spec.speculation import Speculating

    model = gpu_policy()
    drafter = Eagle(EagleConfig.of_policy(model.config, window=64), dtype=torch.bfloat16, device="cuda")
    drafter.init_weights(3)
    learned = LearnedDrafting(drafter, model, rows=24)
    ticks = iter(range(10**6))
    shape = Shape(("eagle",), 4, 1, 5)
    always = Always(lambda running: shape if running and next(ticks) % 9 > 2 else OFF)
    speculation = Speculating([learned], always, deepest=8)
    assert answers(model, speculation, graphs=graphs) == answers(model)


def random_rows(count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(count, width, generator=generator, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(("n", "k", "gated"), sorted({(n, k, gated) for n, k, gated, _ in TILES}))
def test_rows_of_the_measured_layers_do_not_depend_on_their_number(n: int, k: int, gated: bool) -> None:
    """With a norm carried in, and one carried out where the layer writes the residual stream."""
    x, residual = random_rows(1100, k, 1), random_rows(1100, n, 3)
    weight = random_rows(2 * n if gated else n, k, 2) * k**-0.5
    norm_in, norm_out = random_rows(1, k, 4)[0], random_rows(1, n, 5)[0]

    def compute(rows: slice) -> list[Tensor]:
        normed = pre_norm(x[rows].clone(), norm_in, 64)
        found = [linear_triton.linear(normed, weight, norm_weight=norm_in, gated=gated, pdl=True, exact=True)]
        if not gated:
            summed = residual[rows].clone()
            left = linear_triton.add_linear(
                x[rows].clone(), weight, residual=summed, next_norm=norm_out, pdl=True, exact=True
            )
            assert isinstance(left, PreNormedRows)
            found += [left.x_MD, left.pre_normed_MD, left.squares_MP]
        return found

    whole = compute(slice(None))
    for rows in (slice(0, 1), slice(0, 7), slice(0, 16), slice(0, 17), slice(0, 65), slice(1, 301), slice(333, 340)):
        for some, all_rows in zip(compute(rows), whole, strict=True):
            assert torch.equal(some, all_rows[rows]), f"{rows}, {choose_exact(len(some), n, k, gated)}"
