"""LoRA: the policy learns a low-rank change of its matrices; all other weights are frozen.

Always holds: after `merge` every adapted weight is base + scale · B·A, written in place, so trainer and engine share
tensors and the exported policy is a plain one. Training computes with merged weights too. The gradients of A and B
follow from the merged weight's gradient (dB = scale · dW·Aᵀ, dA = scale · Bᵀ·dW), which is dropped at once. The
optimizer needs memory for A and B only; a pass takes the time of full training. The four matrices of each block are
adapted; queries, keys and values are one matrix here and share an A. Knows weights; does not know losses or rows.
"""
# N outputs, K inputs, r rank

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tlt.errors import CheckpointError, ConfigError
from tlt.model.fingerprint import fingerprint
from tlt.model.transformer import Transformer
from tlt.train.adapter import ADAPTED, peft_tensors
from tlt.train.restore import expect_keys, expect_list


class Lora(nn.Module):
    """The adapters of a policy. Freezes all other weights. B starts at 0, so the policy is unchanged at first."""

    def __init__(self, model: Transformer, rank: int, alpha: float = 0.0) -> None:
        super().__init__()
        self.rank, self.scale = rank, alpha / rank if alpha else 1.0
        self._config = model.config
        self._names = [f"blocks.{index}.{name}" for index in range(len(model.blocks)) for name in ADAPTED]
        self._weights = [getattr(block, name) for block in model.blocks for name in ADAPTED]
        _check_rank(rank, self._weights)
        model.requires_grad_(False)
        self._bases = [weight.detach().clone() for weight in self._weights]
        self.a = nn.ParameterList(_first(weight, rank, index) for index, weight in enumerate(self._weights))
        self.b = nn.ParameterList(_second(weight, rank) for weight in self._weights)
        for weight, a_rK, b_Nr in zip(self._weights, self.a, self.b, strict=True):
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(_Projection(a_rK, b_Nr, self.scale))

    @torch.no_grad()
    def merge(self) -> None:
        """Writes base + scale · B·A into the policy."""
        for weight, base, a_rK, b_Nr in zip(self._weights, self._bases, self.a, self.b, strict=True):
            weight.copy_(torch.addmm(base.to(a_rK.dtype), b_Nr, a_rK, alpha=self.scale))

    @contextmanager
    def off(self) -> Iterator[None]:
        """The policy without its adapters, in place: what it was when it was opened. No copy is made."""
        with torch.no_grad():
            for weight, base in zip(self._weights, self._bases, strict=True):
                weight.copy_(base)
        try:
            yield
        finally:
            self.merge()

    def state(self) -> dict[str, Any]:
        """The adapters, and a fingerprint of the weights they are added to. Live tensors."""
        return {"a": [a.detach() for a in self.a], "b": [b.detach() for b in self.b], "base": self._fingerprint}

    def peft_tensors(self) -> dict[str, Tensor]:
        """The adapters in the policy's dtype, under PEFT's names."""
        a, b = (dict(zip(self._names, part, strict=True)) for part in (self.a, self.b))
        return peft_tensors(self._config, a, b, self._bases[0].dtype)

    @cached_property
    def _fingerprint(self) -> int:
        return fingerprint(self._bases)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`. The policy was opened with the weights that the adapters were learned on."""
        parts = {"a": list(self.a), "b": list(self.b)}
        expect_keys(state, (*parts, "base"), "the adapters")
        if state["base"] != self._fingerprint:
            raise CheckpointError(
                "the adapters were learned on other weights than model.path has now, or in another dtype; resume with "
                "model.path and model.dtype as they were"
            )
        for name, ours in parts.items():
            wanted = {f"{name}.{index}": tensor for index, tensor in enumerate(ours)}
            expect_list(state[name], wanted, f"the adapters of train.lora_rank {self.a[0].shape[0]}")
        for name, ours in parts.items():
            for tensor, saved in zip(ours, state[name], strict=True):
                tensor.copy_(saved)
        self.merge()


class _Projection:
    """Computes the gradients of the adapters from the merged weight's gradient."""

    def __init__(self, a_rK: nn.Parameter, b_Nr: nn.Parameter, scale: float) -> None:
        self._a_rK, self._b_Nr, self._scale = a_rK, b_Nr, scale

    @torch.no_grad()
    def __call__(self, weight_NK: Tensor) -> None:
        assert weight_NK.grad is not None
        grad_NK = weight_NK.grad.to(self._a_rK.dtype)
        weight_NK.grad = None
        _accumulate(self._a_rK, (self._b_Nr.T @ grad_NK).mul_(self._scale))
        _accumulate(self._b_Nr, (grad_NK @ self._a_rK.T).mul_(self._scale))


def _check_rank(rank: int, weights: Sequence[Tensor]) -> None:
    """Refuses ranks above min(N, K), which add memory and no capacity."""
    most = min(min(weight.shape) for weight in weights)
    if rank > most:
        raise ConfigError(
            f"train.lora_rank is {rank}, but the smallest matrix that gets an adapter has {most} rows or columns; "
            f"expected a rank of at most {most}: lower train.lora_rank (8 to 64 is usual), or set it to 0 to learn "
            "all weights"
        )


def _accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _first(weight_NK: Tensor, rank: int, seed: int) -> nn.Parameter:
    """A, scaled to preserve the variance of its input. Drawn on the host, so it is the same on every device."""
    wide = torch.promote_types(weight_NK.dtype, torch.float32)
    width = weight_NK.shape[1]
    a_rK = torch.randn(rank, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter((a_rK / math.sqrt(width)).to(weight_NK.device, wide))


def _second(weight_NK: Tensor, rank: int) -> nn.Parameter:
    wide = torch.promote_types(weight_NK.dtype, torch.float32)
    return nn.Parameter(torch.zeros(len(weight_NK), rank, dtype=wide, device=weight_NK.device))
