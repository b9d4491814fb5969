"""32,768 tokens: a row in training stays within the memory that is planned for it, and an engine writes up to there."""

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import letters
from tlt import memory_plan
from tlt.config import EngineSettings, GrpoSettings, RunConfig, SamplingParams, TrainSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.memory_plan import Sizes
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed, SwappableShapePolicy
from tlt.spec.speculation import Speculating
from tlt.spec.suffix import SuffixDrafting
from tlt.train import logprobs
from tlt.train.logprobs import token_logprobs
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

TOKENS = 32_768
CHUNK = 2**20  # logits at once: 1,024 tokens of this vocabulary
SOURCE = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": True,
}


def long_policy() -> Transformer:
    model = Transformer(ModelConfig.from_hf(SOURCE), dtype=torch.float32)
    model.init_weights(0)
    with torch.no_grad():
        model.embed.mul_(4.0)
    return model


class LiveBytes(TorchDispatchMode):
    """Follows the memory of all tensors that come about."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}  # by storage
        self.now = self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = size
            weakref.finalize(storage, self._gone, key)
            self.now += size
            self.most, self.largest = max(self.most, self.now), max(self.largest, size)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def completions(lengths: Sequence[int]) -> list[Experience]:
    """Which alternate in their advantage."""
    generator, found = torch.Generator().manual_seed(0), []
    for number, length in enumerate(lengths):
        tokens = tuple(torch.randint(2, 1000, (length - 1,), generator=generator).tolist())
        zeros = (-6.9,) * len(tokens)
        completion = Completion(Key(0, number), (3,), tokens, "", zeros, zeros, "eos", 0, Timing(0.0, 0.0))
        found.append(Experience(Rollout(Prompt("", ""), completion, 0.0), 1.0 - 2.0 * (number % 2)))
    return found


@pytest.mark.parametrize("lengths", [(512,) * 64, pytest.param((TOKENS,), marks=pytest.mark.slow)], ids=len)
def test_an_update_stays_within_what_is_planned(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "most_logits", lambda device: CHUNK)
    device = CHUNK * 4 * memory_plan._LOGITS_SHARE  # a GPU whose share of logits is such a chunk
    most = {}
    choices: tuple[Literal["always", "never"], ...] = ("always", "never")
    for checkpointed in choices:
        train = TrainSettings(row_tokens=TOKENS, checkpoint_activations=checkpointed, learning_rate=1e-4)
        model = long_policy()
        trainer = PolicyTrainer(model, train, GrpoSettings(mismatch_limit=0.0))
        trainer.update(completions((8, 8)))  # Adam's moments come about
        with LiveBytes() as live:
            told = trainer.update(completions(lengths))
        assert told.tokens == TOKENS
        plan = memory_plan.memory_plan(RunConfig(train=train), Sizes(model.config, 4, device))
        (planned,) = (part.bytes for part in plan.phases if part.name.startswith("update, rows of 32,768 tokens"))
        assert 0.75 * planned < live.most <= planned
        assert live.largest <= TOKENS * 2 * model.config.mlp * 4, "gate and up of a row, and no logits of it"
        most[checkpointed] = live.most
    assert most["always"] < 0.4 * most["never"]


def test_log_probabilities_of_a_long_row_are_those_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 1,024 tokens, beside those of each completion alone and at once."""
    model, lengths = long_policy(), (512,) * 64
    tokens_T = torch.randint(2, 1000, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden_TD = model(tokens_T, PackedLayout.from_lengths(lengths)).hidden_TD
        packed = token_logprobs(hidden_TD[:-1], model.head_weight, tokens_T[1:], logits_at_once=CHUNK)
        for start in range(0, TOKENS, 16 * 512):
            part_T = tokens_T[start : start + 512]
            alone_TD = model(part_T, PackedLayout.from_lengths((512,))).hidden_TD
            whole = torch.log_softmax(alone_TD[:-1] @ model.head_weight.T, dim=-1)
            expected = whole.gather(1, part_T[1:, None])[:, 0]
            torch.testing.assert_close(packed[start : start + 511], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_engine_writes_up_to_32k_tokens_with_drafts_and_without() -> None:
    """The drafts are what was written without them, so that some are accepted."""
    model, prompt = long_policy(), tuple(3 + n % 7 for n in range(TOKENS - 40))
    shapes, found = SwappableShapePolicy(), list[Completion]()
    speculation = Speculating([SuffixDrafting(10**5)], shapes, deepest=3, widest=4)
    settings = EngineSettings(rows=2, kv_gib=0.1, prefill_tokens=2048)
    engine = EngineCore(model, letters(), settings, speculation=speculation)
    for shape in (OFF, Shape(("suffix",), 3, 1, 4)):
        shapes.now = Fixed(shape)
        guess = found[0].tokens if found else ()
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.submit([Request(Key(0, 0), prompt, params, draft_tokens=guess)])
        found += engine.drain()
    plain, drafted = found
    assert len(plain.tokens) == 40, "to the last position there is"
    assert drafted.tokens == plain.tokens
    assert any(drafted.drafted), "some of them were drafts"
    text_T = torch.tensor([*prompt, *plain.tokens])
    with torch.no_grad():
        hidden_TD = model(text_T, PackedLayout.from_lengths((TOKENS,))).hidden_TD[-41:-1]
    expected = token_logprobs(hidden_TD, model.head_weight, text_T[-40:])
    torch.testing.assert_close(torch.tensor(plain.policy_logprobs), expected, rtol=1e-3, atol=1e-3)
