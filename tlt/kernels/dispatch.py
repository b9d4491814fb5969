"""Which of two modules does the work: the reference in torch, or its counterpart in Triton, which is held equal to it.

Always holds: the counterpart of a family's `reference` is its `triton`, that of any other module `name` is
`name_triton`; it is imported only for a GPU: elsewhere Triton need not be installed.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


def dispatch(reference: ModuleType, device: torch.device) -> Any:
    """The module that does on this device what `reference` does."""
    return _in_triton(reference.__name__) if device.type == "cuda" else reference


@cache
def _in_triton(name: str) -> ModuleType:
    return import_module(f"{name.removesuffix('reference')}triton" if name.endswith(".reference") else f"{name}_triton")
