"""Which function does the work: a reference in torch, or the Triton function of the same name and signature.

Always holds: the counterparts of a family's `reference` are in its `triton`, those of any other module `name` in
`name_triton`; they are imported only when they are chosen, because Triton is installed only where there is a GPU.
Callers decide where Triton runs (on a GPU, in bfloat16, without gradients); this module only finds the function.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def dispatch(reference: F, in_triton: bool) -> F:
    """`reference`, or its counterpart in Triton."""
    if not in_triton:
        return reference
    counterpart: F = getattr(_triton_module(reference.__module__), reference.__name__)
    return counterpart


@cache
def _triton_module(name: str) -> ModuleType:
    family, _, module = name.rpartition(".")
    return import_module(f"{family}.triton" if module == "reference" else f"{name}_triton")
