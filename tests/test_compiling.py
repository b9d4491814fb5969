"""Kernels compiled before they run: none is launched, all are there, and what reads them meanwhile finds zeros."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import JITFunction
from triton.runtime.jit import JITCallable

from tlt.kernels import compiling, compiling_triton


def a_kernel(x: Any) -> None:
    """Never called."""


class NoDriver:
    """Of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 3

    def set_current_device(self, device: int) -> None:
        assert device == 3


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_triton, "driver", SimpleNamespace(active=NoDriver()))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every launch, whether it would only have compiled."""
    seen: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: seen.append(warmup))
    return seen


def test_nothing_is_launched(launched: list[bool]) -> None:
    kernel, before = JITFunction(a_kernel), JITFunction.run
    compiling_triton.compile_ahead(lambda: kernel[(1,)](1))
    kernel[(1,)](1)
    assert launched == [True, False]
    assert JITFunction.run is before


def test_what_is_launched_again_is_passed_over(launched: list[bool]) -> None:
    """Every layer of a model launches the same kernels."""
    kernel, numbers = JITFunction(a_kernel), torch.zeros(64)

    def work() -> None:
        for x in (numbers, numbers[1:], numbers.double(), 1, True, 1.0, 2):  # seven kernels, or as good as
            for _ in range(3):
                kernel[(1,)](x)
        kernel[(1,)](numbers[4:])  # just as the first: 16 divides both addresses
        kernel[(1,)](numbers, num_warps=8)
        JITFunction(a_kernel)[(1,)](numbers)

    compiling_triton.compile_ahead(work)
    assert launched == [True] * 9


def test_other_threads_go_on(launched: list[bool]) -> None:
    kernel = JITFunction(a_kernel)
    with ThreadPoolExecutor(1) as another:
        compiling_triton.compile_ahead(lambda: another.submit(lambda: kernel[(1,)](1)).result())
    assert launched == [False]


def test_sources_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Python would object."""
    inside, most = 0, 0

    def parse(kernel: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    monkeypatch.setattr(JITCallable, "parse", parse)
    kernel = JITFunction(a_kernel)
    with ThreadPoolExecutor(4) as others:
        compiling_triton.compile_ahead(lambda: list(others.map(lambda _: kernel.parse(), range(8))))
    assert most == 1


def test_all_is_as_before_when_the_work_fails(launched: list[bool]) -> None:
    run, parse = JITFunction.run, JITFunction.parse
    with pytest.raises(ZeroDivisionError):
        compiling_triton.compile_ahead(lambda: 1 // 0)
    assert JITFunction.run is run
    assert JITFunction.parse is parse
    compiling_triton.compile_ahead(lambda: JITFunction(a_kernel)[(1,)](1))
    assert launched == [True], "and it can be done again"


def test_what_no_kernel_fills_is_zero() -> None:
    table, found = torch.arange(3.0), list[torch.Tensor]()

    def work() -> None:
        for index in (torch.empty(400, dtype=torch.int64), torch.empty_like(table, dtype=torch.int64)):
            found.append(table[index])
        found.append(table.new_empty((5, 5)))

    compiling_triton.compile_ahead(work)
    assert not any(tensor.any() for tensor in found)


def test_a_cpu_compiles_nothing() -> None:
    compiling.compile_ahead(lambda: pytest.fail("it was run"))


COMPILED = """
import json
import threading
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from tlt.kernels import compiling_triton


class NoDriver:
    def __init__(self):
        self.loaded = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 200_000},
            load_binary=lambda name, *rest: (self.loaded.append(name), 1, 0, 0, 1024),
        )

    def launcher_cls(self, source, metadata):
        return lambda *arguments: print("launched")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        threads.add(threading.get_ident())

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def scale(x, n, FACTOR: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(x + at, FACTOR * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def wrong(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 0)


threads, compiled_in, x = set(), set(), torch.zeros(64)
two = threading.Barrier(2, timeout=200)  # the first two compilations wait for each other
no_gpu = NoDriver()
driver.set_active(no_gpu)
compiling_triton.os.sched_getaffinity = lambda process: range(3)
generate = ASTSource.make_ir


def make_ir(*args, **options):
    compiled_in.add(threading.get_ident())
    if next(waiting, False):
        two.wait()
    return generate(*args, **options)


ASTSource.make_ir, waiting = make_ir, iter([])
try:
    compiling_triton.compile_ahead(lambda: wrong[(1,)](x, 3))
    refused = ""
except triton.compiler.CompilationError as error:
    refused = str(error)
compiled_in.clear()
waiting = iter([True, True])
compiling_triton.compile_ahead(lambda: [scale[(1,)](x, n, factor) for factor in (2, 3, 4) for n in (1, 5, 7, 16)])
there = scale.device_caches[0][0]
told = {
    "refused": refused,
    "kernels": len(there),
    "compiled": sum(bool(kernel.asm["cubin"]) for kernel in there.values()),
    "loaded": len(no_gpu.loaded),
    "threads": len(compiled_in),
    "here": threading.get_ident() in compiled_in,
    "told the GPU": compiled_in <= threads,
}
print(json.dumps(told))
"""


def test_many_are_compiled_at_a_time(tmp_path: Path) -> None:
    """For a GPU that is not there. Numbers that are 1, that 16 divides and others are told apart: three times three.
    One that cannot be compiled says so, and leaves nothing behind."""
    script = tmp_path / "script.py"  # a kernel's source is read from its file
    script.write_text(COMPILED, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(compiling.__file__).parents[2])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)  # and nothing was launched
    assert "power of 2" in told["refused"]
    assert (told["kernels"], told["compiled"], told["loaded"]) == (9, 9, 9)
    assert told["threads"] > 1
    assert not told["here"]
    assert told["told the GPU"]
