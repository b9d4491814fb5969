"""Every choice between torch and Triton goes through `dispatch`, and both functions take the same arguments."""

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tlt
from tlt.kernels.attention import reference as attention
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import pruning
from tlt.kernels.training import reference as training

pytest.importorskip("triton")

ROOT = Path(tlt.__file__).parents[1]
# Triton functions whose reference is not beside them.
IMPORTED = {
    "tlt.model.attention": "tlt.kernels.attention.exact_triton",  # the reference of any attention is its reference
    "tlt.tune_kernels": "tlt.kernels.linear.tuning_triton",  # times kernels: there is nothing to time in torch
}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
    for path in sorted((ROOT / "tlt").rglob("*.py"))
}


def dispatched() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every `dispatch(function, …)` of the package."""
    for name, tree in MODULES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "dispatch"]
        for call in found:
            written = ast.unparse(call.args[0])
            yield f"{name}: {written}", eval(written, vars(import_module(name)))


DISPATCHED = dict(dispatched())


def test_the_whole_package_is_searched() -> None:
    assert len(set(DISPATCHED.values())) > 20


@pytest.mark.parametrize("written", DISPATCHED)
def test_a_counterpart_takes_what_its_reference_takes(written: str) -> None:
    reference = DISPATCHED[written]
    assert dispatch(reference, False) is reference
    module = eval(written.partition(": ")[2].rpartition(".")[0], vars(import_module(written.partition(":")[0])))
    assert reference.__module__ == module.__name__, "a function that is imported there has its counterpart elsewhere"
    triton = dispatch(reference, True)
    assert triton is not reference
    ours, theirs = (inspect.signature(function).parameters for function in (reference, triton))
    assert list(ours) == [name for name in theirs if name in ours], "the same order"
    for name, parameter in theirs.items():
        if name in ours:
            assert (parameter.kind, parameter.default) == (ours[name].kind, ours[name].default), name
        else:
            assert parameter.default is not parameter.empty, name


def test_where_counterparts_are() -> None:
    assert dispatch(attention.copy_kv, True).__module__ == "tlt.kernels.attention.cache_triton"  # by way of `triton`
    assert dispatch(attention.paged_attention, True).__module__ == "tlt.kernels.attention.triton"
    assert dispatch(training.rms_norm, True).__module__ == "tlt.kernels.training.triton"
    assert dispatch(pruning.prune, True).__module__ == "tlt.kernels.draft_tree.pruning_triton"


def triton_imports(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tlt.kernels"):
            named = [node.module or "", *(alias.name for alias in node.names)]
            if any(word.endswith("triton") for word in named) and IMPORTED.get(name) != node.module:
                yield f"{name}, line {node.lineno}"


def test_nobody_outside_the_kernels_imports_triton_functions() -> None:
    outside = [(name, tree) for name, tree in MODULES.items() if not name.startswith("tlt.kernels.")]
    assert [line for name, tree in outside for line in triton_imports(name, tree)] == []


@pytest.mark.parametrize(
    "source", ["from tlt.kernels.linear import triton", "def f():\n    from tlt.kernels.linear.triton import linear"]
)
def test_an_import_of_a_triton_function_is_noticed(source: str) -> None:
    assert len(list(triton_imports("tlt.model.linear", ast.parse(source)))) == 1
