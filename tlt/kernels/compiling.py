"""Compiling before anybody waits: with torch alone there is nothing to compile. The reference of `compiling_triton`."""

from collections.abc import Callable


def compile_ahead(work: Callable[[], object]) -> None:
    """Has everything compiled that this work would launch. Work that changes nothing which counts and reads no number
    back: it is not run here, and in Triton without its kernels, whose results are zeros, or old."""
