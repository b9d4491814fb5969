"""Every module of kernels that has a twin in Triton, and which of the two does the work."""

import inspect
from types import ModuleType

import pytest
import torch

from tlt.kernels import attention, entering, growth, moving, pruning, rows, states, trees
from tlt.kernels.dispatch import dispatch

pytest.importorskip("triton")

CALLED = {  # what others call, on either device
    attention: ("paged_attention", "copy_kv", "rope_and_write"),
    entering: ("enter_rows",),
    growth: ("start_trees", "expand"),
    moving: ("move_rows",),
    pruning: ("prune",),
    rows: ("prepare", "finish"),
    states: ("keep_states",),
    trees: ("starts", "prepare", "finish"),
}


@pytest.mark.parametrize("reference", CALLED, ids=lambda module: module.__name__)
def test_a_gpu_gets_the_twin_and_everybody_else_the_reference(reference: ModuleType) -> None:
    assert dispatch(reference, torch.device("cpu")) is reference
    found = dispatch(reference, torch.device("cuda", 1))
    assert found.__name__ == f"{reference.__name__}_triton"
    for name in CALLED[reference]:
        ours, theirs = (list(inspect.signature(getattr(module, name)).parameters) for module in (reference, found))
        assert [parameter for parameter in ours if parameter != "pdl"] == theirs[: len(ours) - ("pdl" in ours)], name
