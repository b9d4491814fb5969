"""Which of two modules does the work: the reference in torch, or its twin in Triton, which is held equal to it.

What always holds: the twin of `name` is `name_triton`, and is imported only for a GPU: elsewhere there is no Triton.
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
    return import_module(f"{name}_triton")
