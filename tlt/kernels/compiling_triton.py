"""Compiles kernels many at a time, before they run.

A kernel takes a compiler half a second, on one core; an engine has some two hundred, which are only known when they are
launched. So the work that launches them is gone through without launching any. What always holds: when it is done,
all of them are compiled; no kernel of this thread ran meanwhile, and other threads' did.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction
from triton.runtime.jit import JITCallable

_MOST_THREADS = 16


def compile_ahead(work: Callable[[], object]) -> None:
    """Has everything compiled that this work would launch. It must read no number back: they are zeros, or old."""
    with (
        ThreadPoolExecutor(_threads()) as pool,
        _parsing_in_turn(),
        _launching_nothing(),
        AsyncCompileMode(pool),
        _Zeros(),
    ):
        work()


def _threads() -> int:
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """A launch is a "warm-up" in Triton's sense: it ends when the kernel is there, or is being compiled elsewhere."""
    mine, launch = get_ident(), JITFunction.run

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *arguments, grid=grid, warmup=warmup or get_ident() == mine, **options)

    JITFunction.run = compiled
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def _parsing_in_turn() -> Iterator[None]:
    """Python 3.11 and 3.12 count how deep they are in a syntax tree for all threads together, and object when two parse
    at once: "AST constructor recursion depth mismatch"."""
    parse, turn = JITCallable.parse, Lock()

    def parsed(kernel: Any) -> Any:
        with turn:
            return parse(kernel)

    JITCallable.parse = parsed
    try:
        yield
    finally:
        JITCallable.parse = parse


class _Zeros(TorchFunctionMode):
    """What no kernel fills is zero, which is a place in any table; what happened to lie there need not be."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FILLED.get(function, function)(*args, **(kwargs or {}))


_FILLED: dict[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
