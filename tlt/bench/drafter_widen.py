"""Function-preserving widening of a drafter, for a policy that `tlt.model.widen` has widened.

A widened policy's hidden states, embeddings and head rows are the small one's, followed by zeros. The wide drafter
reads the former from the same layers, keeps zeros zero, and drafts the same tokens as the small one, at the cost of a
drafter of the wide policy's size.
"""
# D hidden, small and wide

from dataclasses import replace

import torch
from torch import Tensor

from tlt.errors import ModelError
from tlt.model.config import ModelConfig
from tlt.model.widen import CornerPlacement, place_heads, placing
from tlt.spec.eagle import TAPS, Eagle, EagleConfig, layer_source


@torch.no_grad()
def widen_drafter(
    drafter: Eagle,
    policy: ModelConfig,
    *,
    mlp: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Eagle:
    """The drafter for `policy`, the widened shape of its own policy, with equal logits. `mlp`: its MLP's width as a
    fraction of the policy's."""
    small, config = drafter.config, wide_drafter_config(drafter.config, policy, mlp)
    wide = Eagle(config, dtype=dtype or drafter.fc.dtype, device=device or drafter.fc.device)
    place = placing(torch.Generator(device=wide.fc.device).manual_seed(seed))
    shrink = (small.layer.hidden / config.layer.hidden) ** 0.5
    for name in ("embed_norm", "feature_norm", "mlp_norm", "norm"):
        place(getattr(wide, name), getattr(drafter, name) * shrink, free=False)
    if wide.fc_norm is not None and drafter.fc_norm is not None:
        for ours, theirs in zip(wide.fc_norm.chunk(TAPS), drafter.fc_norm.chunk(TAPS), strict=True):
            place(ours, theirs * shrink, free=False)
    _place_beside(wide.fc, drafter.fc, TAPS, place)
    wide.fc[small.layer.hidden :].zero_()  # the new units of the state stay zero
    qkv = torch.empty((drafter.qkv.shape[0], 2 * config.layer.hidden), dtype=wide.fc.dtype, device=wide.fc.device)
    _place_beside(qkv, drafter.qkv, 2, place)
    place_heads(wide.qkv, qkv, small.layer, config.layer, place)
    for ours, theirs in zip(wide.gate_up.chunk(2), drafter.gate_up.chunk(2), strict=True):
        place(ours, theirs, free=True)
    place(wide.o, drafter.o, free=False)
    place(wide.down, drafter.down, free=False)
    _take_vocabulary(wide, drafter)
    return wide


def wide_drafter_config(small: EagleConfig, policy: ModelConfig, mlp: float = 1.0) -> EagleConfig:
    layer = ModelConfig.from_hf(layer_source(policy, mlp))
    if policy.layers < small.policy_layers or layer.head_dim != small.layer.head_dim:
        raise ModelError(
            f"a policy of {policy.layers} layers and heads of {layer.head_dim} is no widened form of one with "
            f"{small.policy_layers} and {small.layer.head_dim}; expected the shape the drafter's policy was widened to"
        )
    eps, expected = layer.norm_eps * layer.hidden, small.layer.norm_eps * small.layer.hidden
    if abs(eps - expected) > 1e-9 * small.layer.hidden:
        raise ModelError(f"norm_eps is {layer.norm_eps}, expected {expected / layer.hidden} as `widen` makes it")
    return replace(small, layer=layer, policy_layers=policy.layers)


def _place_beside(target: Tensor, source: Tensor, parts: int, place: CornerPlacement) -> None:
    """Places columns of `parts` concatenated vectors, each of which is followed by zeros in the wide shape."""
    for ours, theirs in zip(target.chunk(parts, dim=1), source.chunk(parts, dim=1), strict=True):
        place(ours, theirs, free=True)


def _take_vocabulary(wide: Eagle, drafter: Eagle) -> None:
    if drafter.token_of_draft_v is not None:
        wide.set_vocabulary(drafter.token_of_draft_v.to(wide.fc.device))
    if drafter.own_head_vD is not None:
        head_vD = wide.fc.new_zeros((len(drafter.own_head_vD), wide.config.layer.hidden))
        head_vD[:, : drafter.own_head_vD.shape[1]] = drafter.own_head_vD
        wide.register_buffer("own_head_vD", head_vD)
