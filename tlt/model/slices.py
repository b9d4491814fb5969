"""The weights of one rank of an engine: of every matrix of a policy the rows or columns that the rank computes.

Always holds: what is not divided (embedding, LM head, norms, biases of summed products) is the whole policy's own
tensor, and what is divided is a copy, which `refresh` brings up to date. Slices are cut at Hugging Face's names, where
each head and each MLP column is contiguous. Does not know how the ranks exchange anything.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from tlt.model.attention import PackedLayout
from tlt.model.parallel import Alone
from tlt.model.transformer import Output, Transformer
from tlt.model.weights import places

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # weights and biases
_BY_COLUMNS = ("o_proj", "down_proj")  # weights
PACKED = "packed"  # told to followers


def slice_of(whole: Transformer, parallel: Alone) -> Transformer:
    """This rank's slice of a policy; the policy itself for an engine of one rank, or where it is a slice already."""
    if whole.parallel is parallel:
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
    write = writer(part)
    for name, whole in parameters if part.parallel.size > 1 else ():
        write(name, whole)


def writer(part: Transformer) -> Callable[[str, Tensor], None]:
    """Copies into a slice, or a whole policy, what it holds of a parameter of the whole policy."""
    ours = dict(part.named_parameters())
    found, local = places(part.config), places(part.local)
    names: dict[str, list[str]] = {}
    for name, place in found.items():
        names.setdefault(place.parameter, []).append(name)

    def write(parameter: str, whole: Tensor) -> None:
        if ours[parameter].data_ptr() == whole.data_ptr():
            return
        if part.parallel.size == 1:
            ours[parameter].copy_(whole)
            return
        for name in names[parameter]:
            local[name].of(ours).copy_(cut(name, found[name].of({parameter: whole}), part.parallel))

    return write


def cut(name: str, tensor: Tensor, parallel: Alone) -> Tensor:
    """This rank's part of the tensor that has this name at Hugging Face."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in _BY_ROWS:
        return tensor.chunk(parallel.size, dim=0)[parallel.rank]
    if layer in _BY_COLUMNS and kind == "weight":
        return tensor.chunk(parallel.size, dim=1)[parallel.rank]
    return tensor


def forward_packed(model: Transformer, tokens_T: Tensor, lengths: Sequence[int], taps: Sequence[int] = ()) -> Output:
    """A forward over whole texts, one behind the other, without a cache; on all ranks, where the others follow."""
    device = tokens_T.device
    model.parallel.announce((PACKED, len(tokens_T), len(lengths)))
    if model.parallel.size > 1:
        model.parallel.share(tokens_T, torch.tensor(lengths, device=device))
    out: Output = model(tokens_T, PackedLayout.from_lengths(lengths, device), taps)
    return out


def follow_packed(model: Transformer, tokens: int, texts: int) -> None:
    """Follower: takes part in a forward over so many tokens of so many texts."""
    tokens_T = torch.empty(tokens, dtype=torch.int64, device=model.embed.device)
    lengths = torch.empty(texts, dtype=torch.int64, device=model.embed.device)
    model.parallel.share(tokens_T, lengths)
    model(tokens_T, PackedLayout.from_lengths(lengths.tolist(), tokens_T.device))
