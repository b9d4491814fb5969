"""Policy training on a GPU in bfloat16: flash attention and fused kernels, against float32 on the CPU."""

from dataclasses import replace

import pytest
import torch

from tests.test_policy import FREE, ONE_STEP, experiences, gradients_of
from tests.tiny import VOCAB, letters, policy
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.train.policy import PolicyTrainer
from tlt.types import Experience, Key, Prompt, Rollout, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def wider(**changes: object) -> Transformer:
    source = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **changes,
    }
    model = Transformer(ModelConfig.from_hf(source))
    model.init_weights(0)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("checkpointed", ["never", "always"])
def test_gradients_point_where_those_of_float32_do(family: str, checkpointed: str) -> None:
    model = wider(model_type=family, head_dim=64)
    given = experiences(model)
    train = replace(ONE_STEP, row_tokens=40, checkpoint_activations=checkpointed)  # type: ignore[arg-type]
    half = wider(model_type=family, head_dim=64).to("cuda", torch.bfloat16)
    half.load_state_dict(model.state_dict())
    expected_result, expected = gradients_of(PolicyTrainer(model, train, FREE), given)
    result, found = gradients_of(PolicyTrainer(half, train, FREE), given)
    assert result.entropy == pytest.approx(expected_result.entropy, rel=0.02)
    assert result.grad_norm == pytest.approx(expected_result.grad_norm, rel=0.05)
    assert result.mismatch_mean < 0.05
    for name, a, b in zip([n for n, _ in model.named_parameters()], found, expected, strict=True):
        alike = torch.nn.functional.cosine_similarity(a.float().cpu().flatten(), b.flatten(), dim=0)
        assert alike > 0.98, name


def test_the_engine_reads_the_weights_that_were_trained() -> None:
    model = policy(torch.bfloat16, sharpness=5.0).to("cuda")
    engine = EngineCore(model, letters())
    trainer = PolicyTrainer(model, replace(ONE_STEP, learning_rate=1e-3), FREE)
    for step in range(3):
        keys = [Key(step, index) for index in range(16)]
        engine.submit(Request(key, (5, 6, 7), SamplingParams(max_tokens=24)) for key in keys)
        answers = engine.drain()
        given = [
            Experience(Rollout(Prompt(str(a.key.request), ""), a, 0.0), advantage=1.0 if a.key.request % 2 else -1.0)
            for a in answers
        ]
        result = trainer.update(given)
        assert result.mismatch_mean < 0.1  # it would be several nats if the engine had kept the old ones
