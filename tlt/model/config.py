"""The shape of a policy, read from a Hugging Face config and written back unchanged.

Owns which families are supported and how their configs differ. Every value a layer needs is resolved here, so that the
layers hold no `if family == ...`. Knows no tensors. `source` keeps the config as it was read: saving writes that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tlt.errors import ModelError

# What a family assumes when config.json is silent (transformers writes only what differs from its own defaults).
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "qwen2": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "smollm3": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
}
SUPPORTED = tuple(_FAMILIES)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles."""

    theta: float
    type: str = "default"  # one of ROPE_TYPES
    parameters: Mapping[str, Any] = field(default_factory=dict)  # factor, original_max_position_embeddings, …


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the layers need to know, resolved."""

    family: str
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied: bool  # the LM head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary_layers: tuple[bool, ...]  # False: this layer sees no positions (NoPE)
    windows: tuple[int, ...]  # per layer, keys a query may look back on; 0 = all
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a config.json. Raises ModelError on a family or feature that is not supported."""
        family = source.get("model_type")
        if family not in _FAMILIES:
            raise ModelError(f"model_type is {family!r}; supported: {', '.join(SUPPORTED)}")
        values = {**_COMMON, **_FAMILIES[family], **{k: v for k, v in source.items() if v is not None}}
        _refuse_unsupported(values)
        heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
        config = cls(
            family=family,
            vocab=values["vocab_size"],
            hidden=values["hidden_size"],
            mlp=values["intermediate_size"],
            layers=layers,
            heads=heads,
            kv_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim", values["hidden_size"] // heads),
            norm_eps=values["rms_norm_eps"],
            max_positions=values["max_position_embeddings"],
            rope=_rope(values),
            tied=values["tie_word_embeddings"],
            qkv_bias=family == "qwen2" or values["attention_bias"],
            o_bias=family != "qwen2" and values["attention_bias"],
            mlp_bias=values["mlp_bias"],
            qk_norm=family == "qwen3",
            rotary_layers=_rotary_layers(values, layers),
            windows=_windows(source, values, layers),
            source=dict(source),
        )
        config.check()
        return config

    def check(self) -> None:
        """Raises ModelError where the numbers cannot make a model."""
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        for name in ("rotary_layers", "windows"):
            if len(getattr(self, name)) != self.layers:
                raise ModelError(f"{name} has {len(getattr(self, name))} entries for {self.layers} layers")

    def reshaped(
        self, *, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, norm_eps: float
    ) -> "ModelConfig":
        """The same family in another size; `source` follows, so that the result can be saved and read again."""
        source = {
            **self.source,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": norm_eps,
        }
        grown = layers - self.layers
        rotary = self.rotary_layers + (True,) * grown
        if "no_rope_layers" in source:
            source["no_rope_layers"] = [int(rotates) for rotates in rotary]
        if "layer_types" in source:
            source["layer_types"] = [*source["layer_types"], *["full_attention"] * grown]
        return replace(
            self,
            hidden=hidden,
            mlp=mlp,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            norm_eps=norm_eps,
            rotary_layers=rotary,
            windows=self.windows + (self.windows[-1] if self.family == "mistral" else 0,) * grown,
            source=source,
        )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    if values["hidden_act"] != "silu":
        raise ModelError(f"hidden_act is {values['hidden_act']!r}; supported: 'silu'")
    if values.get("quantization_config"):
        raise ModelError("the checkpoint is quantized; expected plain weights: save a dequantized copy first")


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Reads today's `rope_parameters` and the older `rope_theta` + `rope_scaling`."""
    parameters = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = float(parameters.pop("rope_theta", values["rope_theta"]))
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor is not 1.0; only full rotary embedding is supported")
    parameters.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if kind != "default" and "factor" not in parameters:
        raise ModelError(f"rope type {kind!r} needs a `factor`; found {sorted(parameters)}")
    return RopeConfig(theta, kind, parameters)


def _rotary_layers(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if values.get("no_rope_layers") is not None:
        return tuple(bool(flag) for flag in values["no_rope_layers"][:layers])
    interval = values.get("no_rope_layer_interval")
    return tuple(interval is None or (index + 1) % interval != 0 for index in range(layers))


def _windows(source: Mapping[str, Any], values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = values.get("sliding_window") or 0
    if "sliding_window" in source and source["sliding_window"] is None:
        window = 0  # an explicit null switches the family's default off
    if not values["use_sliding_window"]:
        window = 0
    kinds = values.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if "no_rope_layer_interval" in values:  # SmolLM3 slides where it does not rotate
        return tuple(0 if rotates else window for rotates in _rotary_layers(values, layers))
    return tuple(window if index >= values["max_window_layers"] else 0 for index in range(layers))
