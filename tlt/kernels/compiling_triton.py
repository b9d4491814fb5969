"""Compiles kernels many at a time, before they run.

A kernel takes a compiler a third of a second, on one core; an engine has some two hundred, which are only known when
they are launched. So the work that launches them is gone through without launching any. What always holds: when it is
done, all of them are compiled and loaded; no kernel of this thread ran meanwhile, and other threads' did.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction
from triton.runtime import driver
from triton.runtime.jit import JITCallable
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_THREADS = 16
_TURN = Lock()  # what is changed in Triton meanwhile is changed for all threads


def compile_ahead(work: Callable[[], object]) -> None:
    """Has everything compiled that this work would launch."""
    with _TURN, _pool() as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)  # or it would stay active; they are raised below
        with _parsing_in_turn(), _launching_nothing(), mode, _none_left_if_it_fails(pool), _Zeros():
            work()
        for _ in pool.map(_load, mode.future_kernels.values()):
            pass


def _pool() -> ThreadPoolExecutor:
    """Of as many threads as there are cores: this one waits, mostly. All of them mean the GPU that this one does."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    chosen = driver.active.get_current_device()
    return ThreadPoolExecutor(threads, initializer=driver.active.set_current_device, initargs=(chosen,))


@contextmanager
def _none_left_if_it_fails(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Nobody waits for what is not needed any more."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed:
            pool.shutdown(cancel_futures=True)


def _load(kernel: Any) -> None:
    """Onto the GPU, with what launches it, for which Triton 3.6 asks a C compiler."""
    _ = kernel.result().run


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """A launch is a "warm-up" in Triton's sense: it ends when the kernel is there, or is being compiled elsewhere. What
    is launched again, by every layer of a model, is passed over: Triton takes longer to find that out."""
    mine, launch, seen = get_ident(), JITFunction.run, set[Any]()

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if get_ident() != mine:
            return launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        alike = (id(kernel), *map(_told_apart, arguments), *((name, _told_apart(x)) for name, x in options.items()))
        if alike not in seen:
            seen.add(alike)
            launch(kernel, *arguments, grid=grid, warmup=True, **options)
        return None

    JITFunction.run = compiled
    try:
        yield
    finally:
        JITFunction.run = launch


def _told_apart(argument: Any) -> Any:
    """What kernels may differ by, and more: of numbers Triton looks only at some."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.shape), tuple(argument.strides), tuple(argument.block_shape)
    return type(argument), argument


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
