"""Memory that is given back during updates: tensors keep their place, tokens stay the same, and the plan counts it."""

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import letters, policy
from tests.training import small
from tlt.config import EngineSettings, RunConfig, SamplingParams, TrainSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import TltError
from tlt.library import train
from tlt.memory_plan import GIB, MemoryPlan, Sizes, memory_plan, table_lines
from tlt.model.config import ModelConfig
from tlt.model.kv import KVCache
from tlt.model.returnable import AddressRange, returnable
from tlt.model.shapes import MODEL_SHAPES
from tlt.types import Key
from tlt.watch.events import EngineSlept, StepFinished

CPU = torch.device("cpu")
SEVEN = ModelConfig.from_hf(MODEL_SHAPES["Qwen2.5-7B"])


# ---- tensors


def test_a_tensor_has_no_memory_until_it_is_taken_again() -> None:
    held = returnable((3, 5), torch.float32, CPU)
    part = held.tensor[1]
    assert not held.tensor.any()
    held.tensor.fill_(7.0)
    held.give_back()
    assert held.tensor.untyped_storage().nbytes() == 0
    held.give_back()
    held.take()
    assert held.tensor.shape == (3, 5)
    assert not held.tensor.any(), "zero, as attention multiplies what is masked by zero"
    part.fill_(1.0)
    held.take()
    assert held.tensor.sum() == 5.0, "what has memory keeps it, and views see it"


class Driver:
    """What CUDA's driver promises of virtual memory, held against how it is called."""

    UNIT = 2 << 20

    def __init__(self, memory: int) -> None:
        self.free, self.next, self.handle = memory, 1 << 40, 0
        self.ranges: dict[int, int] = {}  # start → size
        self.memory: dict[int, int] = {}  # handle → size
        self.maps: dict[int, int] = {}  # start → handle
        self.open: set[int] = set()  # that may be read and written
        self.waited = 0

    def cuMemGetAllocationGranularity(self, unit: Any, kind: Any, flag: int) -> int:
        found = kind._obj
        assert (ctypes.sizeof(found), found.type, found.location.type, flag) == (32, 1, 1, 0)
        unit._obj.value = self.UNIT
        return 0

    def cuMemAddressReserve(self, start: Any, size: Any, alignment: Any, wanted: Any, flags: Any) -> int:
        assert size.value % self.UNIT == 0
        start._obj.value = self.next
        self.ranges[self.next] = size.value
        self.next += size.value
        return 0

    def cuMemCreate(self, handle: Any, size: Any, kind: Any, flags: Any) -> int:
        if size.value > self.free:
            return 2
        self.free -= size.value
        self.handle += 1
        self.memory[self.handle], handle._obj.value = size.value, self.handle
        return 0

    def cuMemMap(self, start: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert start.value not in self.maps
        assert self.ranges[start.value] == self.memory[handle.value] == size.value
        self.maps[start.value] = handle.value
        return 0

    def cuMemSetAccess(self, start: Any, size: Any, access: Any, count: Any) -> int:
        assert (ctypes.sizeof(access._obj), access._obj.flags, count.value) == (12, 3, 1)
        assert start.value in self.maps
        self.open.add(start.value)
        return 0

    def cuCtxSynchronize(self) -> int:
        self.waited += 1
        return 0

    def cuMemUnmap(self, start: Any, size: Any) -> int:
        assert self.waited, "the GPU may still use it"
        self.open.discard(start.value)
        del self.maps[start.value]
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        assert handle.value not in self.maps.values()
        self.free += self.memory.pop(handle.value)
        return 0

    def cuMemAddressFree(self, start: Any, size: Any) -> int:
        assert start.value not in self.maps
        assert self.ranges.pop(start.value) == size.value
        return 0


def test_an_address_outlives_its_memory() -> None:
    driver = Driver(10 * Driver.UNIT)
    kept = AddressRange(3 * Driver.UNIT - 5, 0, driver)
    kept.map()
    told = kept.__cuda_array_interface__
    assert told["shape"] == (3 * Driver.UNIT,)
    for _ in range(3):
        kept.unmap()
        kept.unmap()
        assert (driver.free, driver.open) == (10 * Driver.UNIT, set())
        kept.map()
        kept.map()
        assert (driver.free, driver.open) == (7 * Driver.UNIT, {told["data"][0]})
    assert kept.__cuda_array_interface__ == told
    del kept
    assert (driver.free, driver.ranges) == (10 * Driver.UNIT, {})


def test_memory_that_others_have_taken_is_told() -> None:
    driver = Driver(2 * Driver.UNIT)
    kept = AddressRange(2 * Driver.UNIT, 0, driver)
    kept.map()
    kept.unmap()
    driver.free -= 1
    with pytest.raises(TltError, match=r"cuMemCreate failed with error 2 for 4,194,304 bytes on GPU 0; .*engine.sleep"):
        kept.map()


@pytest.mark.gpu
def test_a_graph_stays_valid_over_a_sleep() -> None:
    device, size = torch.device("cuda", torch.cuda.current_device()), 1 << 30
    held = returnable((size // 2,), torch.bfloat16, device)
    source, graph = torch.ones(size // 2, dtype=torch.bfloat16, device=device), torch.cuda.CUDAGraph()
    address = held.tensor.data_ptr()
    with torch.cuda.graph(graph):
        held.tensor.copy_(source)
    for _ in range(3):
        before = torch.cuda.mem_get_info()[0]
        held.give_back()
        assert torch.cuda.mem_get_info()[0] - before >= size
        held.take()
        assert held.tensor.data_ptr() == address
        assert not held.tensor.any()
        graph.replay()
        assert bool((held.tensor == 1).all())


# ---- the engine


def completions(engine: EngineCore, first: int) -> dict[Key, tuple[int, ...]]:
    engine.submit(Request(Key(0, first + n), (3, 4 + n), SamplingParams(max_tokens=12)) for n in range(6))
    return {one.key: one.tokens for one in engine.drain()}


def test_tokens_after_a_sleep_are_those_without_one() -> None:
    model = policy(torch.float64, sharpness=4.0)
    sleeper, other = (
        EngineCore(model, letters(), EngineSettings(rows=4, kv_gib=0.01, sleep=sleep)) for sleep in ("always", "never")
    )
    assert completions(sleeper, 0) == completions(other, 0)
    for engine in (sleeper, other):
        engine.sleep()
        engine.sleep()
    assert sleeper._cache.k.untyped_storage().nbytes() == 0
    assert other._cache.k.untyped_storage().nbytes() > 0
    for engine in (sleeper, other):
        engine.load_policy(1)
    assert sleeper.slept is not None
    assert other.slept is None
    assert sleeper.slept.bytes == sleeper._cache.bytes == other._cache.bytes
    assert completions(sleeper, 6) == completions(other, 6)


def test_requests_under_way_go_on_after_a_sleep() -> None:
    model = policy(torch.float64, sharpness=4.0)
    sleeper, other = (
        EngineCore(model, letters(), EngineSettings(rows=4, kv_gib=0.01, sleep=sleep)) for sleep in ("always", "never")
    )
    found = []
    for engine in (sleeper, other):
        engine.submit(Request(Key(0, n), (3, 4 + n), SamplingParams(max_tokens=12)) for n in range(6))
        for _ in range(4):
            assert not engine.tick()
        engine.sleep()
        engine.load_policy(1)
        found.append({one.key: one.tokens for one in engine.drain()})
    assert found[0] == found[1]


def test_a_run_whose_engine_sleeps_learns_the_same(tmp_path: Any) -> None:
    told = {}
    for sleep in ("always", "never"):
        config = small(tmp_path, f"--engine.sleep={sleep}", "--run.steps=2", f"--run.name={sleep}")
        events = [one.event for one in train(config).events]
        slept = [event for event in events if isinstance(event, EngineSlept)]
        assert [event.step for event in slept] == ([1, 2] if sleep == "always" else [])
        assert all(event.gib > 0 for event in slept)
        told[sleep] = [(event.loss, event.grad_norm) for event in events if isinstance(event, StepFinished)]
    assert told["always"] == told["never"]


# ---- the plan


def on(gib: float, sleep: str = "auto", **train: Any) -> MemoryPlan:
    config = RunConfig(
        sampling=SamplingParams(max_tokens=8192),
        train=TrainSettings(lora_rank=16, row_tokens=8192, checkpoint_activations="never", **train),
        engine=EngineSettings(sleep=sleep),  # type: ignore[arg-type]
    )
    return memory_plan(config, Sizes(SEVEN, 2, int(gib * GIB)))


def test_keys_and_values_make_room_for_the_update() -> None:
    awake, asleep = on(90, "never"), on(90, "always")
    (update,) = [part.bytes for part in asleep.phases if part.asleep]
    (others,) = [part.bytes for part in asleep.phases if not part.asleep]
    assert not awake.sleeps
    assert asleep.kv_bytes == min(asleep.most_kv_bytes, asleep.left_bytes)
    assert asleep.left_bytes - awake.left_bytes == update - others
    rolling = asleep.kept_bytes + others + asleep.kv_bytes + asleep.reserve_bytes
    assert max(rolling, asleep.kept_bytes + update + asleep.reserve_bytes) <= 90 * GIB
    kv = awake.least_kv_bytes
    assert awake.needed_bytes == awake.kept_bytes + awake.reserve_bytes + update + kv
    assert asleep.needed_bytes == asleep.kept_bytes + asleep.reserve_bytes + max(update, others + kv)


def test_a_run_sleeps_by_itself_only_where_it_would_not_fit() -> None:
    least = on(0, "never").needed_bytes / GIB
    reserve = 1 / 0.95  # of the GPU
    assert not on(reserve * least + 0.1).sleeps
    tight = on(reserve * least - 0.1)
    assert tight.sleeps
    assert tight.fits
    assert "The engine sleeps during updates: its keys and values give their memory back" in table_lines(tight)
    assert not on(8).sleeps, "nor would that help"


def test_the_table_adds_up_to_the_largest_phase() -> None:
    plan = on(90, "always")
    assert plan.peak.asleep is (
        max(part.bytes for part in plan.phases if part.asleep)
        > max(part.bytes for part in plan.phases if not part.asleep) + plan.kv_bytes
    )
    lines = table_lines(replace(plan, most_kv_bytes=plan.least_kv_bytes))
    assert not any(line.startswith("keys and values") for line in lines)
    assert any(line.startswith("Not at the same time") and "keys and values" in line for line in lines)


@pytest.mark.gpu
def test_a_sleeping_engine_on_a_gpu_writes_the_same() -> None:
    model = policy(torch.bfloat16, sharpness=4.0).cuda()
    engine = EngineCore(model, letters(), EngineSettings(rows=4, kv_gib=0.5, sleep="always"))
    engine.compile()
    expected = completions(engine, 0)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 0.4 * GIB
    engine.load_policy(1)
    assert completions(engine, 0) == expected
    assert isinstance(engine._cache, KVCache)
