"""Exact mode (`engine.exact`): its requirements on policy and configuration, and its limit on tree walks.

In exact mode the tokens and log-probabilities of a request are equal bit for bit in every batch, with or without CUDA
graphs and speculation, and after preemption. The kernels sum in an order that depends on the request alone. This module
ensures that draft nodes lie in the KV cache where plain decoding puts tokens. That holds for chains only.
"""
# R requests, Q nodes of a tree

from dataclasses import replace

import torch

from tlt.config import SpecSettings
from tlt.errors import ConfigError
from tlt.model.transformer import Transformer
from tlt.spec.tree import Trees


def check_policy(model: Transformer) -> None:
    """Raises ConfigError unless the policy runs on the exact kernels: bfloat16, on one GPU."""
    weight = model.embed
    if model.parallel.size > 1:
        raise ConfigError(
            f"engine.exact is on, and cluster.tensor_parallel is {model.parallel.size}; expected 1, as sums over ranks "
            "depend on where a row lies in the batch: set one of them otherwise"
        )
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"engine.exact is on, and the policy is {dtype} on {weight.device.type}; expected bfloat16 on a GPU, where "
            "the kernels are that do not depend on the batch: set engine.exact = false, or model.device and model.dtype"
        )


def chains_only(spec: SpecSettings) -> SpecSettings:
    """The configuration with chains as its only shapes. Raises ConfigError if it allows no chain."""
    possible = 1 in spec.widths and any(depth + 1 in spec.verifies for depth in spec.depths)
    if spec.drafter != "none" and not possible:
        raise ConfigError(
            f"engine.exact is on, and spec.widths is {spec.widths}, depths {spec.depths}, verifies {spec.verifies}; "
            "expected a chain among them, for nothing else is checked exactly: width 1 and a verify size of depth + 1. "
            'Add one, or set spec.drafter = "none" or engine.exact = false'
        )
    return replace(spec, widths=(1,), shares=())


def head_chain(trees: Trees) -> Trees:
    """The trees, cut to their leading chain: the nodes whose parent is the node before them.

    In that chain a node's number is its depth: it lies where plain decoding puts its token, and sees all earlier ones.
    """
    before_Q = torch.arange(-1, trees.parent_RQ.shape[1] - 1, device=trees.parent_RQ.device)
    return replace(trees, parent_RQ=trees.parent_RQ.masked_fill(trees.parent_RQ != before_Q, -1))
