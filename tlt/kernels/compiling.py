"""Compiling kernels before requests wait for them; torch has nothing to compile. Reference of `compiling_triton`."""

from collections.abc import Callable


def compile_ahead(work: Callable[[], object]) -> None:
    """Compiles every kernel that `work` would launch. Here `work` is not run. In Triton it runs without its kernels,
    and their outputs are zeros or stale, so `work` must have no lasting effect and read no number back."""
