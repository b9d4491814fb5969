"""The weights of one rank of an engine: of every matrix of a policy the rows or columns that the rank computes.

Always holds: what is not divided (embedding, LM head, norms, biases of summed products) is the whole policy's own
tensor, and what is divided is a copy, which `refresh` brings up to date. Slices are cut at Hugging Face's names, where
each head and each MLP column is contiguous. Does not know how the ranks exchange anything.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tlt.model.parallel import Alone
from tlt.model.transformer import Transformer
from tlt.model.weights import places

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # weights and biases
_BY_COLUMNS = ("o_proj", "down_proj")  # weights


def slice_of(whole: Transformer, parallel: Alone) -> Transformer:
    """This rank's slice of a policy; the policy itself for an engine of one rank."""
    if parallel.size == 1:
        return whole
    dtype, device = whole.embed.dtype, whole.embed.device
    part = Transformer(whole.config, dtype=dtype, device="meta", parallel=parallel)
    theirs = dict(whole.named_parameters())
    for name, parameter in list(part.named_parameters()):
        own = theirs[name]
        if parameter.shape != own.shape:
            own = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        module, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(module), leaf, own)
    part.cos_PR, part.sin_PR = whole.cos_PR, whole.sin_PR
    refresh(part, whole.named_parameters())
    return part


@torch.no_grad()
def refresh(part: Transformer, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Copies what the slice holds of these parameters of the whole policy, one after the other. The engine of one rank
    has the policy's own tensors, in which there is nothing to bring up to date."""
    if part.parallel.size == 1:
        return
    ours = dict(part.named_parameters())
    local = places(part.local)
    by_parameter: dict[str, list[str]] = {}
    for name, place in places(part.config).items():
        by_parameter.setdefault(place.parameter, []).append(name)
    found = places(part.config)
    for parameter, whole in parameters:
        if ours[parameter].data_ptr() == whole.data_ptr():
            continue
        for name in by_parameter[parameter]:
            local[name].of(ours).copy_(cut(name, found[name].of({parameter: whole}), part.parallel))


def cut(name: str, tensor: Tensor, parallel: Alone) -> Tensor:
    """This rank's part of the tensor that has this name at Hugging Face."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in _BY_ROWS:
        return tensor.chunk(parallel.size, dim=0)[parallel.rank]
    if layer in _BY_COLUMNS and kind == "weight":
        return tensor.chunk(parallel.size, dim=1)[parallel.rank]
    return tensor
