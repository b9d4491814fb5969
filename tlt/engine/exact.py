"""Exact mode: what it asks of a policy and of a configuration, and how far it lets a walk through a draft go.

In exact mode the tokens and log-probabilities of a request are the same bit for bit whatever else is in the batch, with
graphs and speculation or without, and after preemption. Everything that is summed is then summed in an order that
depends on the request alone: the kernels see to that. What is left to see to here is that draft nodes lie in the cache
where plain decoding would put them, which is true of a chain and of nothing else.
"""
# R requests, Q nodes of a tree

from dataclasses import replace

import torch

from tlt.config import SpecSettings
from tlt.errors import ConfigError
from tlt.model.transformer import Transformer
from tlt.spec.tree import Trees


def check_policy(model: Transformer) -> None:
    """Raises unless the policy runs on the kernels that are exact."""
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
    """The configuration with chains left as the only shapes. Raises where there are none."""
    possible = 1 in spec.widths and any(depth + 1 in spec.verifies for depth in spec.depths)
    if spec.drafter != "none" and not possible:
        raise ConfigError(
            f"engine.exact is on, and spec.widths is {spec.widths}, depths {spec.depths}, verifies {spec.verifies}; "
            "expected a chain among them, for nothing else is checked exactly: width 1 and a verify size of depth + 1. "
            'Add one, or set spec.drafter = "none" or engine.exact = false'
        )
    return replace(spec, widths=(1,), shares=())


def head_chain(trees: Trees) -> Trees:
    """The same trees, to be walked no further than node follows node. There numbers are depths: the nodes lie where
    plain decoding puts tokens, and each sees all before it."""
    before_Q = torch.arange(-1, trees.parent_RQ.shape[1] - 1, device=trees.parent_RQ.device)
    return replace(trees, parent_RQ=trees.parent_RQ.masked_fill(trees.parent_RQ != before_Q, -1))
