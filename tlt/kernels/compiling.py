"""Compiling before anybody waits: with torch alone there is nothing to compile. The reference of `compiling_triton`."""

from collections.abc import Callable


def compile_ahead(work: Callable[[], object]) -> None:
    """Has everything compiled that this work would launch. It changes nothing that counts, and may be run or not."""
