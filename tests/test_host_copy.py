"""Copies through a ring of few slots: every byte, however late it arrives, and no slot used before it is emptied."""

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.train.host_copy import SLOT_BYTES, SLOTS, HostCopy, PinnedRing

SLOT = 1000  # bytes
GARBAGE = 0xAB


class Device:
    """A device whose copies arrive when they are waited for, and not before: until then the slot holds garbage."""

    def __init__(self) -> None:
        self.under_way: dict[int, Tensor] = {}  # by the slot's address
        self.slots: set[int] = set()
        self.most_under_way = 0

    def begin(self, source: Tensor, slot: Tensor) -> Callable[[], None]:
        address = slot.data_ptr()
        assert address not in self.under_way, "a slot is filled again before it was emptied"
        slot.fill_(GARBAGE)
        self.under_way[address] = slot
        self.slots.add(address)
        self.most_under_way = max(self.most_under_way, len(self.under_way))

        def arrived() -> None:
            slot.copy_(source)
            del self.under_way[address]

        return arrived


def host_copy(device: Device, slots: int = 3) -> HostCopy:
    return HostCopy(PinnedRing(device.begin, slots=slots, slot_bytes=SLOT), lambda tensor: True)


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(37, 101, generator=generator)
    return {
        "many pieces": draw,
        "one piece": draw[0].clone(),
        "exactly two": draw.flatten()[:500].clone(),
        "views": [draw[3:9], draw.T, draw[::2, 1:50]],
        "kinds": (draw.bfloat16(), draw.double(), draw > 0, (draw * 9).long()),
        "small": {"number": torch.tensor(float(seed)), "none": torch.empty(0, 4), 7: "words"},
    }


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("slots", [1, 3])
def test_every_byte_comes_through_the_ring(slots: int) -> None:
    device = Device()
    copies = host_copy(device, slots)
    first = state_of(1)
    copied = copies.begin(first).result()
    assert same(copied, state_of(1))
    assert copied["small"][7] == "words"
    assert not device.under_way
    assert len(device.slots) == device.most_under_way == slots  # it is bounded, and all of it is used
    for tensor in tensors(first):
        tensor.zero_()
    assert same(copied, state_of(1))


def test_memory_is_used_again() -> None:
    device = Device()
    copies = host_copy(device)
    first = [tensor.data_ptr() for tensor in tensors(copies.begin(state_of(1)).result())]
    second = copies.begin(state_of(2)).result()
    assert [tensor.data_ptr() for tensor in tensors(second)] == first
    assert same(second, state_of(2))
    other = copies.begin({**state_of(2), "one piece": torch.ones(5)}).result()
    assert torch.equal(other["one piece"], torch.ones(5))
    assert len(device.slots) == 3


def test_what_is_on_the_host_needs_no_ring() -> None:
    def refuse(source: Tensor, slot: Tensor) -> Callable[[], None]:
        raise AssertionError("a copy from host to host went through the ring")

    assert same(HostCopy(PinnedRing(refuse)).begin(state_of(1)).result(), state_of(1))


def test_nothing_waits_for_a_copy_but_who_asks_for_it() -> None:
    device, gate = Device(), Event()
    begin = device.begin

    def slow(source: Tensor, slot: Tensor) -> Callable[[], None]:
        gate.wait()
        return begin(source, slot)

    copies = HostCopy(PinnedRing(slow, slots=2, slot_bytes=SLOT), lambda tensor: True)
    state = {**state_of(1), "plain": [1, {"steps": 2}]}
    first = copies.begin({"first": state})
    second = copies.begin({"second": state_of(2)})
    state["plain"][1]["steps"] = 3  # plain values are taken at once
    assert not first.done()
    assert not second.done()
    gate.set()
    assert same(second.result()["second"], state_of(2))
    assert same(first.result()["first"], state_of(1))
    assert first.result()["first"]["plain"] == [1, {"steps": 2}]


def test_what_a_copy_failed_with_is_raised_to_who_asks_for_it() -> None:
    def fail(source: Tensor, slot: Tensor) -> Callable[[], None]:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        HostCopy(PinnedRing(fail), lambda tensor: True).begin(state_of(1)).result()


@pytest.mark.gpu
def test_a_gpu_copies_through_few_pinned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of its work: what is launched before the copy is in it, whatever other streams do meanwhile."""
    pinned: list[int] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        pinned.extend([made.nbytes] if options.get("pin_memory") else [])
        return made

    monkeypatch.setattr(torch, "empty", counted)
    weight = torch.zeros(3 * SLOTS * SLOT_BYTES // 4, device="cuda")
    copies = HostCopy()
    for number in (1.0, 2.0):
        weight.fill_(number)
        future = copies.begin({"weight": weight})
        weight.sin()  # work of another stream goes on
        copied = future.result()["weight"]
        weight.fill_(-1.0)
        assert not copied.is_pinned()
        assert bool((copied == number).all())
    assert pinned == [SLOT_BYTES] * SLOTS
