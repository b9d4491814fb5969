"""LoRA adapters in the format of PEFT: `adapter_model.safetensors` and `adapter_config.json`, which peft and vLLM load.

Always holds: base + lora_alpha / r · B·A of every module is the policy's weight. Here queries, keys and values are one
matrix, as are gate and up; in the file each has a B of its own and a copy of the common A. Reading is strict: a PEFT
feature that is not supported here is an error that names it.
"""
# N outputs, K inputs, r rank

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.errors import ModelError, shown, shown_names
from tlt.model.config import ModelConfig
from tlt.model.stream import write_safetensors
from tlt.model.transformer import Transformer
from tlt.model.weights import Place, places
from tlt.strict_json import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTED = ("qkv", "o", "gate_up", "down")  # matrices of a block that get an adapter
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
# Accepted values of settings that change how an adapter is applied.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": ([], None),
}


@dataclass(frozen=True, slots=True)
class AdapterWords:
    """The settings of an adapter that are read here."""

    base: str  # directory of the policy that it changes, or its name on the Hugging Face hub
    revision: str | None  # of a name
    rank: int
    scale: float


def adapted_places(config: ModelConfig) -> dict[str, Place]:
    """Hugging Face's module name → its place, for every module that an adapter may change."""
    return {
        name.removesuffix(_SUFFIX): place
        for name, place in places(config).items()
        if place.parameter.rpartition(".")[2] in ADAPTED
    }


def peft_tensors(
    config: ModelConfig, a: Mapping[str, Tensor], b: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors under PEFT's names, from A and B by the parameter that they change."""
    found: dict[str, Tensor] = {}
    for module, place in adapted_places(config).items():
        rows_Nr = b[place.parameter][place.start : place.start + place.shape[0]]
        found[_key(module, "A")] = a[place.parameter].detach().to(dtype)
        found[_key(module, "B")] = rows_Nr.detach().to(dtype)
    return found


def write_adapter(tensors: Mapping[str, Tensor], words: AdapterWords, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    alpha = words.scale * words.rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": words.base,
        "revision": words.revision,
        "r": words.rank,
        "lora_alpha": round(alpha) if alpha == round(alpha) else alpha,  # peft and vLLM declare it as an int
        "lora_dropout": 0.0,
        "target_modules": sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(directory / WEIGHTS, tensors)


def is_adapter(directory: Path) -> bool:
    return isfile(directory / CONFIG) and not isfile(directory / "config.json")


def read_words(directory: Path) -> AdapterWords:
    file = directory / CONFIG
    words = read_object(file, ModelError, "copy the adapter again")
    base, rank, alpha = (words.get(name) for name in ("base_model_name_or_path", "r", "lora_alpha"))
    if words.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type is {shown(words.get('peft_type'))}; expected 'LORA'")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{file}: base_model_name_or_path is {shown(base)}; expected the policy's path or name")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"{file}: r is {shown(rank)} and lora_alpha {shown(alpha)}; expected a rank ≥ 1 and a number")
    for name, accepted in _PLAIN.items():
        if name in words and words[name] not in accepted:
            raise ModelError(f"{file}: {name} is {shown(words[name])}; tlt reads plain LoRA adapters, {accepted[0]!r}")
    return AdapterWords(base, words.get("revision"), rank, alpha / rank)


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """The change of one module: scale · B·A."""

    place: Place
    a_rK: Tensor
    b_Nr: Tensor
    scale: float

    @torch.no_grad()
    def add_to(self, weight_NK: Tensor) -> None:
        wide = torch.promote_types(weight_NK.dtype, torch.float32)
        a_rK, b_Nr = (tensor.to(weight_NK.device, wide) for tensor in (self.a_rK, self.b_Nr))
        weight_NK.copy_(torch.addmm(weight_NK.to(wide), b_Nr, a_rK, alpha=self.scale))


def merge_adapter(model: Transformer, directory: Path) -> None:
    """Adds the adapter in this directory to the weights of its policy."""
    ours = dict(model.named_parameters())
    for change in read_adapter(model.config, directory):
        change.add_to(change.place.of(ours))


def read_adapter(config: ModelConfig, directory: Path) -> list[AdapterChange]:
    """The checked changes of the adapter in this directory, for a policy of this shape."""
    words, found = read_words(directory), _read(directory / WEIGHTS)
    wanted, changes = adapted_places(config), list[AdapterChange]()
    modules = [module for module in wanted if _key(module, "A") in found or _key(module, "B") in found]
    keys = {_key(module, part) for module in modules for part in "AB"}
    if keys != found.keys() or not keys:
        missing, unexpected = shown_names(sorted(keys - found.keys())), shown_names(sorted(found.keys() - keys))
        raise ModelError(
            f"{directory / WEIGHTS} does not fit {words.base}: missing {missing}, unexpected {unexpected}; expected an "
            "A and a B for each module it changes"
        )
    for module in modules:
        place = wanted[module]
        (N, K), a_rK, b_Nr = place.shape, found[_key(module, "A")], found[_key(module, "B")]
        if a_rK.shape != (words.rank, K) or b_Nr.shape != (N, words.rank):
            raise ModelError(
                f"{directory / WEIGHTS}: the adapter of {module} has shapes {list(a_rK.shape)} and {list(b_Nr.shape)}, "
                f"expected {[words.rank, K]} and {[N, words.rank]}"
            )
        changes.append(AdapterChange(place, a_rK, b_Nr, words.scale))
    return changes


def adapter_bytes(config: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Bytes of the tensors in the file."""
    return sum(sum(place.shape) for place in adapted_places(config).values()) * rank * dtype.itemsize


def _key(module: str, part: str) -> str:
    return f"{_PREFIX}{module}.lora_{part}{_SUFFIX}"


def _read(file: Path) -> dict[str, Tensor]:
    if not isfile(file):
        raise ModelError(f"no weights in {file.parent}: expected {file.name}; copy the adapter again")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}; copy it again") from error
