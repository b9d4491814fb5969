"""Figures of another engine, measured beforehand with the method of `tlt.bench.steps`: shown where they compare.

vLLM 0.26.0, in-process, torch.compile and full CUDA graphs, asynchronous scheduling, FlashAttention 3, one H200; bf16,
temperature 1, GSM8K prompts; SmolLM2-135M-Instruct itself and widened to the 7B shape (`tlt.model.widen`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tlt.model.config import ModelConfig
from tlt.model.widen import SHAPES


@dataclass(frozen=True, slots=True)
class Published:
    engine: str
    step_ms: Mapping[int, float]  # batch → decode step
    tokens_per_s: Mapping[int, float]  # prompts → natural lengths, cap 1024


_VLLM = "vLLM 0.26.0"
_H200 = {
    "135M": Published(
        _VLLM,
        {1: 2.23, 8: 1.96, 32: 2.37, 64: 3.60, 128: 4.80, 256: 5.81},
        {64: 12922.0, 256: 30113.0},
    ),
    "7B": Published(
        _VLLM,
        {1: 4.78, 8: 4.76, 32: 5.19, 64: 5.76, 128: 7.27, 256: 10.5},
        {64: 5646.0, 256: 14788.0},
    ),
}
NOTHING = Published("", {}, {})


def published(device_name: str, config: ModelConfig) -> Published:
    """What is known of this model on this device; NOTHING where nothing compares."""
    if "H200" not in device_name or config.vocab != 49152:
        return NOTHING
    seven = SHAPES["7B"]
    if (config.hidden, config.layers, config.mlp) == (seven["hidden"], seven["layers"], seven["mlp"]):
        return _H200["7B"]
    if (config.hidden, config.layers, config.mlp) == (576, 30, 1536):
        return _H200["135M"]
    return NOTHING
