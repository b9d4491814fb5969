"""Costs of a tick beside the model: reading hidden states, host work, and synchronization.

The only module that reaches into an engine: it times single methods and replays graphs without the host's work.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tlt.bench.lab import Lab, LabRun
from tlt.engine.engine import EngineCore
from tlt.engine.features import Features
from tlt.machine import wait_for

_RING_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class FeaturesCost:
    taps: tuple[int, ...]
    prompts: int
    without_s: float
    with_s: float
    percent: float  # of rollout time
    same_tokens: bool
    features: int  # positions whose states were read in a run
    median: int
    longest: int
    cap: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Sync:
    batch: int
    ticks: int
    host_syncs: str
    plan_us: float
    launch_us: float  # on a CPU this is the model itself
    observe_us: float
    host_us: float  # host time of a tick while the device is idle
    tick_ms: float  # of consecutive ticks
    replay_ms: float | None  # of the tick's graph alone, replayed back to back
    device_idle_percent: float | None
    replays: int | None  # forwards by graph since the engine began
    eager: int | None  # forwards without a graph: prefill, whose sizes hardly repeat
    temperature: float


class _Ring:
    """Receives hidden states: a ring buffer on the device."""

    def __init__(self, parts: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty((parts, _RING_ROWS, width), dtype=dtype, device=device)
        self._next = 0
        self.seen = 0

    def take(self, features: Features) -> None:
        count = features.hidden.shape[0] * features.hidden.shape[1]
        if self._next + count > _RING_ROWS:
            self._next = 0
        for part, values in zip(self._rows, (*features.taps, features.hidden), strict=True):
            part[self._next : self._next + count].copy_(values.flatten(0, 1))
        self._next += count
        self.seen += count


def features(lab: Lab) -> Iterator[FeaturesCost]:
    count, layers = lab.scale.naturals[0], lab.model.config.layers
    taps = tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))
    ring = _Ring(len(taps) + 1, lab.model.config.hidden, lab.model.embed.dtype, lab.device)
    tapped = _best(lab, lab.tapped_engine(count, taps, ring.take), count)
    plain = _best(lab, lab.engine(count), count)
    yield FeaturesCost(
        taps=taps,
        prompts=count,
        without_s=plain.seconds,
        with_s=tapped.seconds,
        percent=100 * (tapped.seconds / plain.seconds - 1),
        same_tokens=all(a.tokens == b.tokens for a, b in zip(plain.completions, tapped.completions, strict=True)),
        features=ring.seen // lab.scale.repeats,
        median=sorted(plain.lengths)[len(plain.lengths) // 2],
        longest=max(plain.lengths),
        cap=lab.scale.features_cap,
        temperature=lab.temperature,
    )


def _best(lab: Lab, engine: EngineCore, count: int) -> LabRun:
    runs = [lab.natural(engine, count, lab.scale.features_cap) for _ in range(lab.scale.repeats)]
    return min(runs, key=lambda run: run.seconds)


# ---- waiting and the host's work


def sync(lab: Lab) -> Iterator[Sync]:
    ticks, batch = lab.scale.ticks, lab.scale.sync_batch
    engine = lab.engine(batch)
    room = lab.model.config.max_positions - max(len(prompt) for prompt in lab.prompts[:batch])
    engine.submit(lab.requests(batch, max_tokens=min(8 * ticks, room), ignore_eos=True))
    while engine.running < batch and not engine.idle:
        engine.tick()
    engine.tick()  # the first tick of the full batch is under way
    tick_ms = _tick_ms(lab, engine, ticks)
    host_syncs = _syncs(engine, ticks) if lab.on_gpu else "none: there is no device to wait for"
    watches = _host_work(lab, engine, ticks)
    graphs = engine.report().graphs
    replay_ms = _replay_ms(engine, ticks) if lab.on_gpu else None
    del engine  # the replays have overwritten its pages
    lab.release()
    yield Sync(
        batch=batch,
        ticks=ticks,
        host_syncs=host_syncs,
        **{f"{name}_us": 1e6 * seconds / ticks for name, seconds in watches.items()},
        tick_ms=tick_ms,
        replay_ms=replay_ms,
        device_idle_percent=None if replay_ms is None else 100 * max(0.0, 1 - replay_ms / tick_ms),
        replays=graphs.replays if graphs else None,
        eager=graphs.eager if graphs else None,
        temperature=lab.temperature,
    )


def _tick_ms(lab: Lab, engine: EngineCore, ticks: int) -> float:
    wait_for(lab.device)
    started = time.perf_counter()
    for _ in range(ticks):
        engine.tick()
    wait_for(lab.device)
    return 1e3 * (time.perf_counter() - started) / ticks


def _syncs(engine: EngineCore, ticks: int) -> str:
    """Counts blocking calls: torch raises at each of them. Waiting for the tokens' event is not one of them."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(ticks):
            engine.tick()
    except RuntimeError as error:
        return f"more than the token read: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "1 per tick (token read)"


def _host_work(lab: Lab, engine: EngineCore, ticks: int) -> dict[str, float]:
    """Host seconds of all ticks. The device is idle before each, so no tick waits for it."""
    inside: Any = engine
    watches = {
        "plan": _Watch(inside._scheduler, "plan"),
        "launch": _Watch(inside._runner, "launch"),
        "observe": _Watch(inside, "_accept"),
        "host": _Watch(inside, "tick"),
    }
    for _ in range(ticks):
        wait_for(lab.device)
        engine.tick()
    for watch in watches.values():
        watch.remove()
    return {name: watch.seconds for name, watch in watches.items()}


class _Watch:
    """Times one method of one object."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds = 0.0
        self._owner, self._method = owner, method
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = inner(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def remove(self) -> None:
        delattr(self._owner, self._method)


def _replay_ms(engine: EngineCore, times: int) -> float | None:
    """Milliseconds that the device needs for a tick: replays the decode graph of the running batch back to back.

    Each replay moves the rows on by one position, into pages of other requests: in bounds, but completions are lost.
    """
    pool = _pool(engine)
    if pool is None:
        return None
    key = _key_of_a_tick(engine, pool)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    started.record()
    for _ in range(times):
        pool.replay(key)
    ended.record()
    ended.synchronize()
    milliseconds: float = started.elapsed_time(ended)
    return milliseconds / times


def _pool(engine: EngineCore) -> Any:
    inside: Any = engine
    return inside._runner._pool


def _key_of_a_tick(engine: EngineCore, pool: Any) -> Any:
    """The key of the graph that a tick of the running batch replays."""
    keys: list[Any] = []
    replay = pool.replay

    def noted(key: Any) -> Any:
        keys.append(key)
        return replay(key)

    pool.replay = noted
    engine.tick()
    del pool.replay
    return keys[-1]
