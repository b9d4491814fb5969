"""The parts of a tick are timed, each by itself: on a CPU by a clock, on a GPU by events that nobody waits for."""

import pytest
import torch

from tests.clocks import Clock
from tests.test_engine import MODEL, requests
from tests.test_learned import drafting, engine_with, shape_of
from tests.tiny import letters
from tlt.config import EngineSettings
from tlt.engine import timer as timer_module
from tlt.engine.engine import EngineCore
from tlt.engine.timer import TickTimer
from tlt.spec.costs import DECODE, DRAFT, EXTEND, INGEST, PRUNE, VERIFY, TickTimes
from tlt.spec.shape import OFF
from tlt.spec.speculation import Speculation


class Timed:
    """A timer of which every part takes as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        self.clock, self.captured_s = Clock(), 0.0
        self.clock.used_by(monkeypatch, timer_module)
        self.timer = TickTimer(torch.device(device), lambda: self.captured_s)

    def part(self, name: str, seconds: float, captured_s: float = 0.0) -> None:
        def work() -> None:
            self.clock.now += seconds + captured_s
            self.captured_s += captured_s

        with self.timer.part(name):
            work()


def test_a_tick_is_its_parts_and_what_is_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Timed(monkeypatch)
    here.part(DECODE, 2.0)
    first = here.timer.read(here.timer.launched(None))
    assert first == TickTimes({DECODE: 2.0}, None), "it followed no other tick"
    here.part(EXTEND, 1.0)
    here.part(DRAFT, 0.5)
    here.clock.now += 0.25
    here.part(DRAFT, 0.5)
    here.part(VERIFY, 3.0)
    assert here.timer.read(here.timer.launched(None)) == TickTimes({EXTEND: 1.0, DRAFT: 1.0, VERIFY: 3.0}, 5.25)
    here.timer.restart()
    here.clock.now += 100.0
    here.part(DECODE, 2.0)
    assert here.timer.read(here.timer.launched(None)).seconds is None


def test_a_part_that_waits_for_a_capture_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Timed(monkeypatch)
    here.timer.read(here.timer.launched(None))
    here.part(EXTEND, 1.0, captured_s=7.0)
    here.part(VERIFY, 3.0)
    assert here.timer.read(here.timer.launched(None)) == TickTimes({VERIFY: 3.0}, 4.0, 7.0)


class FakeEvent:
    """Passes when the device gets there, which is told by the host's clock here."""

    clock: Clock
    made, waits = 0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        type(self).made += 1

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")


def test_on_a_gpu_a_tick_lasts_as_long_as_the_device_says_whenever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ticks are in flight, and the second is drafted for before the first is read. Events are used again."""
    here = Timed(monkeypatch, "cuda")
    FakeEvent.clock, FakeEvent.made = here.clock, 0
    monkeypatch.setattr(timer_module.torch.cuda, "Event", FakeEvent)
    found, in_flight = list[TickTimes](), []
    for _ in range(20):
        here.part(VERIFY, 3.0)
        end = FakeEvent(enable_timing=True)
        end.record()
        in_flight.append(here.timer.launched(end))
        here.part(DRAFT, 1.0)  # for the next tick
        if len(in_flight) > 1:
            here.clock.now += 0.5  # the host is busy
            found.append(here.timer.read(in_flight.pop(0)))
    assert found[0] == TickTimes({VERIFY: 3.0}, None)
    assert found[1] == TickTimes({DRAFT: 1.0, VERIFY: 3.0}, 4.0)
    assert found[5] == TickTimes({DRAFT: 1.0, VERIFY: 3.0}, 4.5)
    assert FakeEvent.made <= 20 + 12, "but for the ends"
    here.timer.read(here.timer.launched(None))  # nothing ran that anybody waited for
    assert here.timer.read(in_flight.pop()).seconds is None


class Listening(Speculation):
    def __init__(self) -> None:
        self.times: list[TickTimes] = []
        self.contexts: list[float] = []

    def decoded(self, running: int, times: TickTimes, context: float = 0.0) -> None:
        self.times.append(times)
        self.contexts.append(context)


def test_an_engine_tells_the_parts_of_plain_ticks() -> None:
    told = Listening()
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=8), speculation=told)
    engine.submit(requests(4))
    engine.drain()
    assert all(times.parts.keys() == {DECODE} for times in told.times)
    assert all(times.seconds is None or times.seconds >= times.parts[DECODE] for times in told.times)
    assert told.contexts[-1] > told.contexts[0] >= 0.0


def test_an_engine_tells_the_parts_of_ticks_that_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(drafting(), lambda running: shape_of(3, 2, 6) if running else OFF, False)
    parts, read = list[set[str]](), TickTimer.read

    def reading(timer: TickTimer, tick: timer_module.TickMarks) -> TickTimes:
        times = read(timer, tick)
        parts.append(set(times.parts))
        return times

    monkeypatch.setattr(TickTimer, "read", reading)
    engine.submit(requests(4))
    engine.drain()
    usual = {VERIFY, EXTEND, DRAFT, PRUNE}
    assert all(found - {INGEST} in (usual, {DECODE}) for found in parts)
    assert parts.count(usual) > 5
