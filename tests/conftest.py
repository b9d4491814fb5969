"""Shared set-up: every test starts from a seed of its own, kernels run in Triton's interpreter where there is no GPU,
nothing reaches for a model hub, and what takes long begins first."""

import gc
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TLT_CACHE"] = os.path.join(os.path.dirname(__file__), "no-cache")  # no tiles tuned here
os.environ["RAY_AUTH_MODE"] = "disabled"  # of all of a process's clusters: Ray reads it once
torch.set_num_threads(1)  # the operations are small, and tests run beside each other

gc.disable()  # until `pytest_collection_finish`

# Some thirty processes are started by tests, Ray's among them: what one has compiled, the others need not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The files that take longest. Those that mostly wait for processes stand apart, the longest of them before all: beside
# each there is something to compute, and at the end there are only short ones to share out.
LONGEST_FIRST = (
    "test_cluster_fleet",
    "test_watch_page",
    "test_tuner",
    "test_learned",
    "test_resume",
    "test_cost_shift",
    "test_cluster_engines",
    "test_linear_kernels",
    "test_exact",
    "test_loop",
    "test_cluster_nodes",
    "test_bench_rollout",
    "test_bench",
    "test_speculation",
    "test_attention_kernels",
    "test_graphs",
    "test_workloads",
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with the files of many tests, which are the quickest


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a collection of garbage need not look through it each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def seed_from(name: str) -> None:
    """Seeds every global generator. TLT_TEST_SEED selects another seed for each name."""
    text = f"{os.environ.get('TLT_TEST_SEED', '0')} {name}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")  # numpy takes 32 bits
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _own_seed(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers alone, after other tests and in another process."""
    seed_from(request.node.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """A fixture that several tests share draws the same numbers whichever test comes first."""
    if fixturedef.scope != "function":
        seed_from(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.fixture(autouse=True)
def _every_number_counts() -> Iterator[None]:
    """Opening a policy on a CPU has the whole process count numbers next to nothing as zero."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def _small_engines() -> None:
    """Those that are not told otherwise would each fill a GiB with zeros; and what ticks and micro-steps cost is timed
    once and on few tokens: that is a third of the time of a run as small as here."""
    from tlt.drafting import trainer
    from tlt.engine import memory, runner

    if not torch.cuda.is_available():
        memory.CPU_GIB, runner._TIMED_RUNS = 1 / 16, 1
        trainer._WARM_UP_TOKENS = trainer._TIMED_TOKENS = 64


def _hurry_the_interpreter() -> None:
    """Triton's interpreter looks through its whole language at each call of a jitted function, to replace what it has
    replaced already, and writes a table of dtypes to look one up: together a third of its time."""
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_get_np_dtype")):
        return  # another version, which is then as slow as it is
    is_builtin, dtype_of = interpreter.tl.core.is_builtin, interpreter._get_np_dtype
    names: dict[int, list[str]] = {}
    dtypes: dict[str, Any] = {}

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        if id(package) not in names:  # a kernel's launch comes before the calls in it: nothing is replaced yet
            names[id(package)] = [name for name in dir(package) if is_builtin(getattr(package, name, None))]
        builtins = names[id(package)]
        if builtins and is_builtin(getattr(package, builtins[0])):  # they are replaced, and put back, all together
            for name in builtins:
                interpreter._patch_attr(package, name, getattr(package, name), builder, *scope)

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, np_dtype


def _sum_dots_in_order() -> None:
    """`tl.dot` in the interpreter adds up in ascending order of k, with one rounding per product and per sum.

    The interpreter calls BLAS. Depending on the CPU, BLAS adds up an element in an order that depends on the matrix
    sizes and on the row's place in the matrix. A matrix unit does not. Here the bits of an element depend on its own
    row and column alone, and are the same on every CPU.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    by_blas = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return by_blas(builder, a, b, d, *precision)  # decodes them first
        dtype = d.data.dtype
        a_MK, b_KN = a.data.astype(dtype), b.data.astype(dtype)
        total_MN = a_MK[..., :, 0:1] * b_KN[..., 0:1, :]
        product_MN = np.empty_like(total_MN)
        for k in range(1, a_MK.shape[-1]):
            np.multiply(a_MK[..., :, k : k + 1], b_KN[..., k : k + 1, :], out=product_MN)
            total_MN += product_MN
        return TensorHandle(total_MN + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


if not torch.cuda.is_available() and find_spec("triton"):
    _hurry_the_interpreter()
    _sum_dots_in_order()
