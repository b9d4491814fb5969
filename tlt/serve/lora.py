"""LoRA adapters in PEFT's format, merged into the policy's weights, one at a time.

Always holds: an adapted matrix is base + scale · B·A. The base is kept, so that another adapter replaces this one
exactly.
"""

from pathlib import Path

import torch
from torch import Tensor

from tlt.model.transformer import Transformer
from tlt.model.weights import Place
from tlt.train.adapter import read_adapter


class Adapters:
    def __init__(self) -> None:
        self.name = ""  # of the adapter in the weights; "": there is none
        self._bases: list[tuple[Place, Tensor]] = []  # adapted matrices as they were

    def forget(self) -> None:
        """The policy has other weights: there is no adapter in them."""
        self.name, self._bases = "", []

    def load(self, model: Transformer, directory: Path, name: str) -> None:
        """Replaces the adapter in the weights."""
        changes = read_adapter(model.config, directory)
        self.unload(model)
        ours = dict(model.named_parameters())
        for change in changes:
            weight = change.place.of(ours)
            self._bases.append((change.place, weight.detach().clone()))
            change.add_to(weight)
        self.name = name

    @torch.no_grad()
    def unload(self, model: Transformer) -> None:
        ours = dict(model.named_parameters())
        for place, base in self._bases:
            place.of(ours).copy_(base)
        self.forget()
