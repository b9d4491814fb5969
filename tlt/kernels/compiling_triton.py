"""Compiles kernels many at a time, before they run.

Compiling a kernel takes a third of a second on one core; an engine has some two hundred, which are only known when they
are launched. So the work that launches them runs without launching any. Always holds: afterwards all of them are
compiled and loaded; no kernel of this thread ran meanwhile, and those of other threads did.
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
    """Compiles every kernel that `work` would launch."""
    with _TURN, _pool() as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)  # or it would stay active; they are raised below
        with _parsing_in_turn(), _launching_nothing(), mode, _none_left_if_it_fails(pool), _Zeros():
            work()
        for _ in pool.map(_load, mode.future_kernels.values()):
            pass


def _pool() -> ThreadPoolExecutor:
    """One thread per core, as this one mostly waits. All of them use the GPU that this one uses."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    chosen = driver.active.get_current_device()
    return ThreadPoolExecutor(threads, initializer=driver.active.set_current_device, initargs=(chosen,))


@contextmanager
def _none_left_if_it_fails(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Cancels compilations that are not needed any more."""
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
    """A launch is a "warm-up" in Triton's sense: it ends when the kernel is there, or is being compiled elsewhere.
    Repeated launches, one per layer of a model, are skipped here: Triton takes longer to recognise them."""
    mine, launch, seen = get_ident(), JITFunction.run, set[Any]()

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if get_ident() != mine:
            return launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        with torch._C.DisableTorchFunction():  # `_Zeros` would look at every address that is asked for
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
    """A key by which kernels may differ; finer than Triton's, which looks at some numbers only."""
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
    """Empty tensors are zero-filled: zero is a valid index into any table, uninitialized memory is not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FILLED.get(function, function)(*args, **(kwargs or {}))


_FILLED: dict[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
