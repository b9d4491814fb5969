"""Shapes of well-known policies: the sizes in their config.json files, for measurements with random weights.

Always holds: a shape costs what the policy of that name costs per token. Knows no weights and no tokenizers.
"""

from typing import Any

from tlt.model.config import ModelConfig

_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _sizes(hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    """Every one of these policies has attention heads of 128."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        **others,
    }


_QWEN25 = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 40960}
_LLAMA31 = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": _LLAMA_31_ROPE,
    "max_position_embeddings": 131072,
}

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": _sizes(1536, 28, 8960, 12, 2, 151936, tie_word_embeddings=True, **_QWEN25),
    "Qwen3-4B": _sizes(2560, 36, 9728, 32, 8, 151936, tie_word_embeddings=True, **_QWEN3),
    "Qwen2.5-7B": _sizes(3584, 28, 18944, 28, 4, 152064, **_QWEN25),
    "Llama-3.1-8B": _sizes(4096, 32, 14336, 32, 8, 128256, **_LLAMA31),
    "Qwen3-8B": _sizes(4096, 36, 12288, 32, 8, 151936, **_QWEN3),
    "Qwen2.5-14B": _sizes(5120, 48, 13824, 40, 8, 152064, **_QWEN25),
}


def shape_config(name: str) -> ModelConfig:
    """The configuration of a policy in `MODEL_SHAPES`."""
    return ModelConfig.from_hf(MODEL_SHAPES[name])
