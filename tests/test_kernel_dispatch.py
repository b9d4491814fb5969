"""Every module of kernels that has a counterpart in Triton, and which of the two does the work."""

import inspect
from types import ModuleType

import pytest
import torch

from tlt.kernels.attention import reference as attention
from tlt.kernels.batch_state import reference as batch_state
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import growth, pruning, verification

pytest.importorskip("triton")

CALLED = {  # what others call, on either device
    attention: ("paged_attention", "copy_kv", "rope_and_write"),
    batch_state: ("prepare_decode", "finish_decode", "move_rows", "enter_rows", "keep_states"),
    growth: ("start_trees", "expand"),
    pruning: ("prune",),
    verification: ("starts", "prepare", "finish"),
}


@pytest.mark.parametrize("reference", CALLED, ids=lambda module: module.__name__)
def test_a_gpu_gets_triton_and_every_other_device_the_reference(reference: ModuleType) -> None:
    assert dispatch(reference, torch.device("cpu")) is reference
    found = dispatch(reference, torch.device("cuda", 1))
    family, name = reference.__name__.rsplit(".", 1)
    assert found.__name__ == f"{family}." + ("triton" if name == "reference" else f"{name}_triton")
    for name in CALLED[reference]:
        ours, theirs = (list(inspect.signature(getattr(module, name)).parameters) for module in (reference, found))
        assert [parameter for parameter in ours if parameter != "pdl"] == theirs[: len(ours) - ("pdl" in ours)], name
