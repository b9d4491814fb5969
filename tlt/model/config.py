"""The shape of a policy, read from a Hugging Face config and written back unchanged.

Owns which families are supported and how their configs differ. Every value a layer needs is resolved here, so that the
layers hold no `if family == ...`. What always holds: a config that was read has numbers that can make a model, or is an
error that names the word. Knows no tensors. `source` keeps the config as it was read: saving writes that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tlt.errors import ModelError, shown

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
_LARGEST = 2**31 - 1  # that any size may be: kernels count in 32 bits
_MOST_LAYERS = 4096
_MOST_ANGLES = 2**30  # positions × head_dim: the tables of all positions' angles then take 4 GiB
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_NEEDS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
_ROPE_MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # which is as good as left out


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
        if not isinstance(family, str) or family not in _FAMILIES:
            raise ModelError(f"model_type is {shown(family)}; supported: {', '.join(SUPPORTED)}")
        values = {**_COMMON, **_FAMILIES[family], **{k: v for k, v in source.items() if v is not None}}
        _refuse_unsupported(values)
        hidden, heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
        layers = _whole(values, "num_hidden_layers", highest=_MOST_LAYERS)
        bias = _flag(values, "attention_bias")
        config = cls(
            family=family,
            vocab=_whole(values, "vocab_size"),
            hidden=hidden,
            mlp=_whole(values, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=_whole(values, "num_key_value_heads") if "num_key_value_heads" in values else heads,
            head_dim=_head_dim(values, hidden, heads),
            norm_eps=_number(values, "rms_norm_eps", below=1.0),
            max_positions=_whole(values, "max_position_embeddings"),
            rope=_rope(values),
            tied=_flag(values, "tie_word_embeddings"),
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            mlp_bias=_flag(values, "mlp_bias"),
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
        if self.max_positions * self.head_dim > _MOST_ANGLES:
            raise ModelError(
                f"max_position_embeddings is {self.max_positions}; expected at most {_MOST_ANGLES // self.head_dim} "
                f"with a head_dim of {self.head_dim}, as the angles of all positions are kept in memory"
            )
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
        raise ModelError(f"hidden_act is {shown(values['hidden_act'])}; supported: 'silu'")
    if values.get("quantization_config"):
        raise ModelError("the checkpoint is quantized; expected plain weights: save a dequantized copy first")


def _whole(values: Mapping[str, Any], name: str, lowest: int = 1, highest: int = _LARGEST) -> int:
    value = values[name]
    if type(value) is not int or not lowest <= value <= highest:
        raise ModelError(f"{name} is {shown(value)}; expected an integer from {lowest} to {highest}")
    return value


def _number(values: Mapping[str, Any], name: str, above: float = 0.0, below: float = 1e30) -> float:
    """Strictly between the two, which also leaves NaN out, and integers beyond every float."""
    value = values[name]
    if type(value) not in (int, float) or not above < value < below:
        raise ModelError(f"{name} is {shown(value)}; expected a number above {above:g} and below {below:g}")
    return float(value)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values[name]
    if not isinstance(value, bool):
        raise ModelError(f"{name} is {shown(value)}; expected true or false")
    return value


def _head_dim(values: Mapping[str, Any], hidden: int, heads: int) -> int:
    if "head_dim" in values:
        return _whole(values, "head_dim")
    if hidden % heads:
        raise ModelError(f"num_attention_heads is {heads}; expected a divisor of hidden_size {hidden}, or a head_dim")
    return hidden // heads


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Reads today's `rope_parameters` and the older `rope_theta` + `rope_scaling`."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict | list) for value in given.values()):
        raise ModelError(
            f"the rope parameters are {shown(given)}; expected an object of numbers, the same for all layers"
        )
    parameters = {"original_max_position_embeddings": values["max_position_embeddings"]}
    parameters |= {name: value for name, value in given.items() if value is not None}
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = _number({"rope_theta": parameters.pop("rope_theta", values["rope_theta"])}, "rope_theta", above=1.0)
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type is {shown(kind)}; supported: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor is not 1.0; only full rotary embedding is supported")
    missing = [name for name in _ROPE_NEEDS.get(kind, ("factor",)) if name not in parameters]
    if missing:
        raise ModelError(f"rope type {kind!r} needs {', '.join(missing)}; found {shown(sorted(parameters))}")
    _whole(parameters, "original_max_position_embeddings")
    for name in _ROPE_NUMBERS:
        if name in parameters and not (name in _ROPE_MAY_BE_ZERO and parameters[name] == 0):
            _number(parameters, name, above=1e-6)  # far from what would make angles infinite
    if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        raise ModelError(
            f"low_freq_factor is {parameters['low_freq_factor']}; "
            f"expected less than high_freq_factor, which is {parameters['high_freq_factor']}"
        )
    return RopeConfig(theta, kind, parameters)


def _rotary_layers(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    flags = values.get("no_rope_layers")
    if flags is not None:
        if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
            raise ModelError(f"no_rope_layers is {shown(flags)}; expected a list of 0 and 1, one for each layer")
        return tuple(bool(flag) for flag in flags[:layers])
    if "no_rope_layer_interval" not in values:
        return (True,) * layers
    interval = _whole(values, "no_rope_layer_interval")
    return tuple((index + 1) % interval != 0 for index in range(layers))


def _windows(source: Mapping[str, Any], values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = _whole(values, "sliding_window", lowest=0) if "sliding_window" in values else 0
    if "sliding_window" in source and source["sliding_window"] is None:
        window = 0  # an explicit null switches the family's default off
    if not _flag(values, "use_sliding_window"):
        window = 0
    kinds = values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in _LAYER_TYPES for kind in kinds):
            raise ModelError(f"layer_types is {shown(kinds)}; expected a list of {' and '.join(_LAYER_TYPES)}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if "no_rope_layer_interval" in values:  # SmolLM3 slides where it does not rotate
        return tuple(0 if rotates else window for rotates in _rotary_layers(values, layers))
    slides_from = _whole(values, "max_window_layers", lowest=0)
    return tuple(window if index >= slides_from else 0 for index in range(layers))
