"""Measures the cost book of this machine: what forwards of a policy and its drafter cost, in less than a minute.

Forwards are timed by the engine, as for its tuner. The rest of a tick is the difference to the median of real ticks:
with short prompts and with long ones, in plain decoding and with a chain of drafts.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

from tlt.config import EngineSettings, RunConfig, SpecSettings
from tlt.engine.build import build_engine, record_of, shapes_of
from tlt.engine.engine import EngineCore
from tlt.engine.graphs import padding
from tlt.engine.request import Request
from tlt.machine import describe, free_memory, wait_for
from tlt.policy import Policy
from tlt.sim.book import CostBook
from tlt.sim.world import World
from tlt.spec.shape import MOST_NODES, OFF, Shape
from tlt.spec.shape_policy import Fixed, SwappableShapePolicy
from tlt.types import Key, SamplingParams

_SHORT = 16  # tokens of a short prompt
_LONG = {False: 256, True: 1024}  # tokens of a long one; by whether it is a GPU: a CPU's caches hold fewer
_BATCH = {False: 32, True: 64}  # requests
_TICKS = {False: 12, True: 48}  # that are timed
_SETTLE = 4  # ticks before the timed ones


def measure_book(policy: Policy, config: RunConfig) -> CostBook:
    """`spec.drafter` is none or eagle. The engines run one after the other: a GPU's memory may hold only one."""
    at_once = max(config.engine.prefill_tokens, EngineSettings().prefill_tokens)  # or the first request would end early
    config = replace(config, engine=replace(config.engine, prefill_tokens=at_once))
    alone = replace(config, spec=SpecSettings())
    plain = _CostBookRun(policy, alone, build_engine(policy, alone), SwappableShapePolicy()).plain_book()
    if config.spec.drafter == "none":
        return plain
    free_memory()
    shape_policy = SwappableShapePolicy()
    book = _CostBookRun(policy, config, build_engine(policy, config, shape_policy), shape_policy).drafting_book(plain)
    free_memory()
    return book


def pad_of(book: CostBook) -> Callable[[int], int]:
    """Maps a batch size to the rows that its tick computes."""
    return padding(book.rows) if book.gpu else int


class _CostBookRun:
    def __init__(
        self, policy: Policy, config: RunConfig, engine: EngineCore, shape_policy: SwappableShapePolicy
    ) -> None:
        self._policy, self._config, self._engine, self._shape_policy = policy, config, engine, shape_policy
        self._gpu = policy.model.embed.is_cuda
        self._numbers = count()
        self._luck = random.Random(0)

    def plain_book(self) -> CostBook:
        config, page_stats = self._config, self._engine.report().pages
        pages = page_stats.free + page_stats.used + page_stats.cached
        batch, long = self._sizes(pages * config.engine.page_size)
        for length in (_SHORT, long):
            self._ticks(OFF, batch, length)  # compiles and loads
        short, later = self._ticks(OFF, batch, _SHORT), self._ticks(OFF, batch, long)
        book = CostBook(
            device=describe(self._policy.model.embed.device, None).device,
            policy=config.model.path,
            gpu=self._gpu,
            rows=config.engine.rows,
            pages=pages,
            page_size=config.engine.page_size,
            measured=tuple(self._engine.measure()),
            context_s=max(0.0, later.tick_s - short.tick_s) / (batch * (later.position - short.position)),
            padded=not self._gpu,
            prefill_s=max(0.0, later.first_s - later.tick_s) / (batch * long),
            plain_tick_s=0.0,
            off_tick_s=0.0,
            verify_tick_s=0.0,
        )
        return replace(book, plain_tick_s=self._beside(book, OFF, batch, short))

    def drafting_book(self, plain: CostBook) -> CostBook:
        """The book of an engine with a drafter: its timed forwards, and the rest of its ticks."""
        page_stats, record = self._engine.report().pages, record_of(self._config.spec)
        book = replace(
            plain,
            pages=page_stats.free + page_stats.used + page_stats.cached,
            measured=tuple(self._engine.measure()),
            window=self._config.draft.window,
            ranks=record.ranks if record else (),
        )
        batch, _ = self._sizes(book.pages * book.page_size)
        chains = [shape for shape in shapes_of(self._config.spec) if shape.width == 1 and not shape.share]
        chain = sorted(chains, key=lambda shape: shape.verify)[len(chains) // 2]  # neither short nor long
        for shape in (OFF, chain):
            self._ticks(shape, batch, _SHORT)
        beside = [self._beside(book, shape, batch, self._ticks(shape, batch, _SHORT)) for shape in (OFF, chain)]
        return replace(book, off_tick_s=beside[0], verify_tick_s=beside[1])

    def _sizes(self, cache_tokens: int) -> tuple[int, int]:
        """Batch size and length of the long prompts, limited by the KV cache."""
        batch = min(self._config.engine.rows, _BATCH[self._gpu])
        lag = MOST_NODES + 4 * _SETTLE + 2 * _TICKS[self._gpu]
        most = min(cache_tokens // (2 * batch), self._policy.model.config.max_positions) - lag
        return batch, max(2 * _SHORT, min(_LONG[self._gpu], most))

    def _beside(self, book: CostBook, shape: Shape, batch: int, ticks: "_Ticks") -> float:
        """Seconds of a tick beyond the forwards in the book."""
        known_s = World(book, (), pad_of(book), seed=0).tick_s(shape, [round(ticks.position)] * batch, may_draft=True)
        return max(0.0, ticks.tick_s - known_s)

    def _ticks(self, shape: Shape, batch: int, prompt_tokens: int) -> "_Ticks":
        """Times ticks of new requests after all of them decode."""
        self._shape_policy.now = Fixed(shape)
        keys = self._submit(shape, batch, prompt_tokens)
        wait_for(self._policy.model.embed.device)
        started = time.perf_counter()
        self._engine.tick()
        while self._engine.running < batch:
            self._engine.tick()
        wait_for(self._policy.model.embed.device)
        first_s = time.perf_counter() - started
        for _ in range(_SETTLE):
            self._engine.tick()
        seconds, written = [], self._written(keys)
        for _ in range(_TICKS[self._gpu]):
            started = time.perf_counter()
            self._engine.tick()
            seconds.append(time.perf_counter() - started)
        written += self._written(keys)
        self._engine.drain()
        return _Ticks(first_s, median(seconds), prompt_tokens + written / (2 * batch))

    def _written(self, keys: Sequence[Key]) -> int:
        return sum(len(self._engine.written(key)) for key in keys)

    def _submit(self, shape: Shape, batch: int, prompt_tokens: int) -> list[Key]:
        """Submits requests with room for all tokens up to the last timed tick, those during prefill included."""
        prefills = 1 + batch * prompt_tokens // self._config.engine.prefill_tokens
        params = SamplingParams(
            max_tokens=(prefills + 2 * _SETTLE + _TICKS[self._gpu]) * (1 + shape.depth), ignore_eos=True
        )
        vocab, requests = self._policy.model.config.vocab, list[Request]()
        for _ in range(batch):
            prompt = tuple(self._luck.randrange(vocab) for _ in range(prompt_tokens))
            number = next(self._numbers)
            requests.append(Request(Key(self._config.run.seed, number), prompt, params, f"book {number}"))
        self._engine.submit(requests)
        return [request.key for request in requests]


@dataclass(frozen=True, slots=True)
class _Ticks:
    first_s: float  # until all prompts were prefilled and the first token of each was drawn
    tick_s: float  # median tick after that
    position: float  # mean context length during these ticks
