"""Sending: what arrives is what was sent, whatever its type and shape."""

import pytest
import torch
from torch import Tensor

from tlt.model.device import copied, upload

SENT = {
    "numbers": torch.arange(12).view(3, 4),
    "turned": torch.arange(12).view(3, 4).t(),
    "every other": torch.arange(12)[::2],
    "marks": torch.tensor([[True, False], [False, True]]),
    "half": torch.tensor([1.5, -2.0, 3.0]).bfloat16(),
    "one": torch.tensor(0.25, dtype=torch.float64),
    "none": torch.empty((0, 3), dtype=torch.int32),
}


@pytest.mark.parametrize("x", SENT.values(), ids=SENT.keys())
def test_a_copy_for_a_device_holds_the_same(x: Tensor) -> None:
    target = copied(x, torch.empty(x.shape, dtype=x.dtype))
    assert torch.equal(target, x)
    assert target.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("x", SENT.values(), ids=SENT.keys())
def test_what_is_sent_arrives(x: Tensor) -> None:
    assert torch.equal(upload(x, "cuda").cpu(), x)
