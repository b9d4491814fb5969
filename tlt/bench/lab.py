"""The environment of the engine benchmark's sections: one policy, its prompts, and one engine at a time.

An engine is warmed up before it is used: graphs are captured and kernels compiled outside every measured time. Two
engines never exist at once, so each gets the memory that a user's engine would get.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tlt.bench.bandwidth import read_bandwidth
from tlt.bench.options import EngineScale
from tlt.bench.peer_file import PeerFile
from tlt.config import RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.features import Features
from tlt.engine.graphs import buckets
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.machine import Machine, free_memory, wait_for
from tlt.model.shapes import MODEL_SHAPES, shape_config
from tlt.model.transformer import Transformer
from tlt.model.widen import SHAPES, wide_config, widen
from tlt.text import Tokenizer
from tlt.types import Completion, Key, SamplingParams

_WARM_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class LabRun:
    """Completions of requests that were submitted together."""

    completions: tuple[Completion, ...]  # in the order of their keys
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def lengths(self) -> list[int]:
        return [len(completion.tokens) for completion in self.completions]


@dataclass(frozen=True, slots=True)
class FreshStart:
    """The start of an engine."""

    first_token_s: float  # from weights on the device to one token out
    capture_s: float  # all decode graphs, those of the first token included
    graphs: int
    pool_bytes: int


def check_shape(shape: str | None, *, random_weights: bool = False) -> None:
    """Raises ConfigError for an unknown shape. `random_weights`: those of `MODEL_SHAPES` are allowed, too."""
    known = [*SHAPES, *(MODEL_SHAPES if random_weights else ())]
    if shape is not None and shape not in known:
        raise ConfigError(f"--shape is {shape!r}; predefined: {', '.join(known)}")


def shaped(model: Transformer, shape: str | None) -> Transformer:
    """`model` widened to a shape of `SHAPES`, or in its place random weights in a shape of `MODEL_SHAPES`."""
    if shape not in MODEL_SHAPES:
        return widened(model, shape)
    with torch.no_grad():
        other = Transformer(shape_config(shape), dtype=model.embed.dtype, device=model.embed.device)
        other.init_weights(0)
    return other


def widened(model: Transformer, shape: str | None) -> Transformer:
    if shape is None:
        return model
    with torch.no_grad():
        return widen(model, wide_config(model.config, shape))


class Lab:
    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[int, ...]],
        config: RunConfig,
        scale: EngineScale,
        machine: Machine,
        peer: PeerFile | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.scale = scale
        self.machine = machine
        self.peer = peer  # figures of another engine, if they were handed in
        self.device = model.embed.device
        self.on_gpu = model.embed.is_cuda
        self.bandwidth = read_bandwidth(self.device, scale.read_gib)  # bytes per second, while no engine holds memory
        self.start: FreshStart | None = None  # of the first engine: later ones find their kernels compiled
        self._config = config
        self._engine: EngineCore | None = None
        self._engine_rows = 0
        self._naturals: dict[tuple[int, int], LabRun] = {}

    # ---- sizes

    @property
    def temperature(self) -> float:
        return self._config.sampling.temperature

    @property
    def weight_bytes(self) -> int:
        """Bytes read by every decode step: all layers, the last norm, the LM head (a tied embedding is the head)."""
        model = self.model
        return model.head_weight.nbytes + model.norm.nbytes + sum(p.nbytes for p in model.blocks.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.model.config
        return 2 * config.layers * config.kv_heads * config.head_dim * self.model.embed.element_size()

    def floor_ms(self, batch: int, context: float) -> float:
        """Time to read from memory the weights and KV cache that a step of `batch` requests with that context needs."""
        return 1e3 * (self.weight_bytes + self.kv_bytes_per_token * batch * context) / self.bandwidth

    # ---- engines

    def engine(self, rows: int | None = None) -> EngineCore:
        """A warmed-up plain engine; the same one as long as `rows` is the same."""
        rows = rows or self.scale.rows
        if self._engine is None or self._engine_rows != rows:
            self.release()
            self._engine = self._fresh(rows)
            self._engine_rows = rows
        return self._engine

    def tapped_engine(self, rows: int, taps: Sequence[int], on_features: Callable[[Features], None]) -> EngineCore:
        """An engine whose hidden states are read. Drop it before making another one."""
        self.release()
        settings = replace(self._config.engine, rows=rows)
        engine = EngineCore(self.model, self.tokenizer, settings, taps=taps, on_features=on_features)
        engine.warm_up(buckets(rows))
        return engine

    def release(self) -> None:
        """Frees the engine's memory."""
        self._engine = None
        free_memory()

    def _fresh(self, rows: int) -> EngineCore:
        wait_for(self.device)
        started = time.perf_counter()
        engine = EngineCore(self.model, self.tokenizer, replace(self._config.engine, rows=rows))
        engine.submit(self.requests(1, max_tokens=1))
        engine.drain()
        first_token_s = time.perf_counter() - started
        engine.warm_up(buckets(rows))
        self.completion(engine, self.requests(min(rows, _WARM_PROMPTS), max_tokens=2))  # a full piece of prefill
        pool = engine.report().graphs
        if self.start is None:
            self.start = FreshStart(
                first_token_s=first_token_s,
                capture_s=pool.capture_s if pool else 0.0,
                graphs=pool.graphs if pool else 0,
                pool_bytes=pool.memory_bytes if pool else 0,
            )
        return engine

    # ---- requests

    def params(self, max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
        return replace(self._config.sampling, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def requests(self, count: int, *, max_tokens: int, ignore_eos: bool = False) -> list[Request]:
        params = self.params(max_tokens, ignore_eos)
        seed = self._config.run.seed
        return [Request(Key(seed, i), self.prompts[i], params, f"prompt {i}") for i in range(count)]

    def completion(self, engine: EngineCore, requests: Iterable[Request]) -> LabRun:
        wait_for(self.device)
        started = time.perf_counter()
        engine.submit(requests)
        completions = engine.drain()
        seconds = time.perf_counter() - started
        return LabRun(tuple(sorted(completions, key=lambda completion: completion.key.request)), seconds)

    def natural(self, engine: EngineCore, count: int, cap: int) -> LabRun:
        """Completes `count` prompts to their natural end, with an empty prefix cache."""
        engine.load_policy(engine.version + 1)  # the same weights as a new version: empties the prefix cache
        return self.completion(engine, self.requests(count, max_tokens=cap))

    def natural_once(self, count: int, cap: int) -> LabRun:
        """The natural run of the plain engine, computed once."""
        if (count, cap) not in self._naturals:
            self._naturals[count, cap] = self.natural(self.engine(), count, cap)
        return self._naturals[count, cap]
