"""LoRA adapters in PEFT's files, merged into the policy's matrices: one at a time, each on the weights it came to.

Always holds: an adapted matrix is base + scale · B·A with the base as it was before the first adapter, so that adapters
replace each other without a trace. Adapters that change anything else are refused by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.errors import ModelError, shown, shown_names
from tlt.model.transformer import Transformer
from tlt.model.weights import hf_tensors
from tlt.strict_json import read_object

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."


class Adapters:
    def __init__(self) -> None:
        self.name = ""  # of the adapter in the weights; "": there is none
        self._bases: dict[str, Tensor] = {}  # adapted matrices as they were

    def forget(self) -> None:
        """The policy has other weights: there is no adapter in them."""
        self.name, self._bases = "", {}

    @torch.no_grad()
    def load(self, model: Transformer, directory: Path, name: str) -> None:
        """Replaces the adapter in the weights."""
        ours = hf_tensors(model)
        changes = read_changes(directory, ours)
        self.unload(model)
        for weight, (scale, a_rK, b_Nr) in changes.items():
            base = self._bases.setdefault(weight, ours[weight].clone())
            change = (b_Nr.to(base.device).float() @ a_rK.to(base.device).float()) * scale
            ours[weight].copy_(base.float() + change)
        self.name = name

    @torch.no_grad()
    def unload(self, model: Transformer) -> None:
        ours = hf_tensors(model)
        for weight, base in self._bases.items():
            ours[weight].copy_(base)
        self.forget()


def read_changes(directory: Path, ours: Mapping[str, Tensor]) -> dict[str, tuple[float, Tensor, Tensor]]:
    """Weight → (scale, A, B), checked against the policy's weights."""
    cure = "save the adapter again with PEFT's save_pretrained"
    config = read_object(directory / _CONFIG, ModelError, cure)
    for key, neutral in (("bias", "none"), ("use_dora", False), ("fan_in_fan_out", False), ("modules_to_save", None)):
        if config.get(key, neutral) not in (neutral, [], None):
            raise ModelError(f"{directory / _CONFIG}: {key} is {shown(config[key])}, which is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"{directory / _CONFIG}: r is {shown(rank)} and lora_alpha {shown(alpha)}; expected numbers")
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    try:
        tensors = load_file(directory / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{directory / _WEIGHTS} cannot be read: {error}; {cure}") from error
    found = dict[str, tuple[float, Tensor, Tensor]]()
    for name in [name for name in tensors if name.endswith(_A)]:
        weight = name.removeprefix(_PREFIX).removesuffix(_A) + ".weight"
        a_rK, b_Nr = tensors.pop(name), tensors.pop(name.removesuffix(_A) + _B, None)
        fits = weight in ours and b_Nr is not None and (len(b_Nr), a_rK.shape[1]) == tuple(ours[weight].shape)
        if not fits or b_Nr is None or b_Nr.shape[1] != len(a_rK):
            raise ModelError(f"{directory / _WEIGHTS}: {name} fits no matrix of the policy")
        found[weight] = (scale, a_rK, b_Nr)
    if tensors or not found:
        names = shown_names(tensors) if tensors else "no adapter of a matrix"
        raise ModelError(f"{directory / _WEIGHTS} holds {names}; expected lora_A and lora_B of matrices alone")
    return found
