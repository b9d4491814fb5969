"""The hand-offs of a tick: calls from one module of `tlt` into another while the engine runs one warm tick on a CPU.

    python benchmarks/handoffs.py [--list]

The shipped tiny policy decodes eight requests with an untrained learned drafter, the suffix drafter, or both in one
tree. The shape is fixed, but the tuner decides and learns in every tick. A tick is warm when no request enters or
ends; of nine, the one with the median number of calls is shown: no review of the tuner, no probe of β.

Counted is Python code of the host. A module counts if any of its functions runs. A hand-off is a pair of modules, the
first of which calls the second; code that is not in `tlt` (functools, torch) may lie between them. Reading a property
or a length is no hand-off, and is counted apart. Left out are `tlt.kernels`, `tlt.model`, and what a GPU replays from a
CUDA graph: the policy's forward (`Runner.run`) and the work of a drafter's segments. On a GPU the pool of graphs comes
on top, and the tick is read behind the next one.
"""

import argparse
import inspect
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import tlt
from tlt.config import NEW, EngineSettings, ModelSettings, RunConfig, SpecSettings
from tlt.engine.build import build_engine
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.policy import Policy, open_policy
from tlt.spec.costs import CostModel
from tlt.spec.shape import OFF, Shape
from tlt.spec.tuner import Tuner
from tlt.types import Key, SamplingParams

SHAPES = {
    "plain": OFF,
    "learned": Shape(("eagle",), 3, 2, 5),
    "suffix": Shape(("suffix",), 3, 2, 5),
    "both": Shape(("eagle", "suffix"), 3, 2, 8),
}
WARM_TICKS, COUNTED_TICKS, REQUESTS = 40, 9, 8
_ROOT = str(Path(tlt.__file__).parent)
_APART = ("tlt.kernels.", "tlt.model.")
_REPLAYED = "Runner.run", "Runner._run_segment"  # below these a GPU replays a graph
_COMPREHENSION = re.compile(r"\.<locals>\.<(gen|list|dict|set)(expr|comp)>")


class Place(NamedTuple):
    module: str
    function: str


class HeldTuner(Tuner):
    """Decides and learns as every tuner, but one shape is used."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(list(SHAPES.values()), CostModel(lambda rows: rows, learned=["eagle"]))
        self._held = shape

    def choose(self, batch: int, lag: int = 0) -> Shape:
        super().choose(batch, lag)
        return self._held


@dataclass
class TickCalls:
    """What a tick called."""

    modules: set[str] = field(default_factory=set)
    calls: Counter[tuple[Place, Place]] = field(default_factory=Counter)  # that cross modules
    reads: Counter[tuple[Place, Place]] = field(default_factory=Counter)  # the same, of properties and lengths

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (place := place_of(frame)) is None:
            return
        callers = callers_of(frame)
        if any(caller.function in _REPLAYED for caller in callers):
            return
        self.modules.add(place.module)
        if callers and callers[0].module != place.module:
            (self.reads if is_read(place) else self.calls)[callers[0], place] += 1

    @property
    def only_read(self) -> set[str]:
        """Modules of which a tick only reads properties and lengths."""
        return {callee.module for _, callee in self.reads} - {callee.module for _, callee in self.calls}

    @property
    def handoffs(self) -> set[tuple[str, str]]:
        return {(caller.module, callee.module) for caller, callee in self.calls}


def callers_of(frame: FrameType) -> list[Place]:
    """The frames of `tlt` above, the nearest first."""
    found, above = list[Place](), frame.f_back
    while above is not None:
        if place := place_of(above):
            found.append(place)
        above = above.f_back
    return found


def place_of(frame: FrameType) -> Place | None:
    """None: not in `tlt`, or not counted."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if not file.startswith(_ROOT):
        return None
    module = ".".join(("tlt", *Path(file).relative_to(_ROOT).with_suffix("").parts))
    return None if module.startswith(_APART) else Place(module, _COMPREHENSION.sub("", name))


def is_read(place: Place) -> bool:
    """Whether it is a property or a length: a fact that is read, no work that is handed over."""
    if place.function.endswith("__len__"):
        return True
    owner, _, name = place.function.partition(".")
    return isinstance(getattr(sys.modules[place.module], owner, None), type) and isinstance(
        inspect.getattr_static(getattr(sys.modules[place.module], owner), name, None), property
    )


def engine_of(policy: Policy, shape: Shape) -> EngineCore:
    settings = EngineSettings(rows=REQUESTS, kv_gib=0.05)
    config = RunConfig(engine=settings, spec=SpecSettings(drafter="both", path=NEW, depths=(3,), verifies=(5, 8)))
    engine = build_engine(policy, config, HeldTuner(shape))
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    prompts = torch.randint(3, 20, (REQUESTS, 20), generator=torch.Generator().manual_seed(1)).tolist()
    engine.submit([Request(Key(0, i), tuple(prompt), params, str(i)) for i, prompt in enumerate(prompts)])
    return engine


def warm_tick(policy: Policy, shape: Shape) -> TickCalls:
    engine = engine_of(policy, shape)
    for _ in range(WARM_TICKS):
        engine.tick()
    ticks = [TickCalls() for _ in range(COUNTED_TICKS)]
    for tick in ticks:
        sys.setprofile(tick.profile)
        try:
            engine.tick()
        finally:
            sys.setprofile(None)
    return sorted(ticks, key=lambda tick: tick.calls.total())[COUNTED_TICKS // 2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list each hand-off")
    asked = parser.parse_args(arguments)
    policy = open_policy(ModelSettings(device="cpu"))
    for name, shape in SHAPES.items():
        found = warm_tick(policy, shape)
        calls, reads = found.calls.total(), found.reads.total()
        print(
            f"{name:8} {len(found.modules)} modules ({len(found.only_read)} only read), "
            f"{len(found.handoffs)} hand-offs, {len(found.calls)} pairs of functions, {calls} calls, {reads} reads"
        )
        if asked.list:
            print("   ", *sorted(found.modules))
            for (caller, callee), times in sorted(found.calls.items()):
                print(f"    {caller.module} {caller.function} -> {callee.module} {callee.function}: {times}")


if __name__ == "__main__":
    main()
