"""The book of this machine: what runs of a policy and its drafter cost here, measured in less than a minute.

Runs are timed as engines time them for their tuners; what is beside them in a tick is the difference to real ticks, of
requests with short prompts and with long ones, plainly and with a chain of drafts. The middle one of some ticks counts.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from statistics import median

from tlt.bench.machine import describe, free_memory, wait_for
from tlt.bench.variants import Understudy
from tlt.config import RunConfig, SpecSettings
from tlt.engine.build import build_engine, record_of, shapes_of
from tlt.engine.engine import Engine
from tlt.engine.graphs import padding
from tlt.engine.request import Request
from tlt.policy import Policy
from tlt.sim.book import CostBook
from tlt.sim.world import World
from tlt.spec.fixed import Fixed
from tlt.spec.shape import MOST_NODES, OFF, Shape
from tlt.types import Key, SamplingParams

_SHORT = 16  # tokens of prompts, and of long ones …
_LONG = {False: 256, True: 1024}  # … on a CPU, whose caches many tokens would not fit, and on a GPU
_BATCH = {False: 32, True: 64}  # requests
_TICKS = {False: 12, True: 48}
_SETTLE = 4  # ticks before them


def measure_book(policy: Policy, config: RunConfig) -> CostBook:
    """`spec.drafter` is none or eagle. One engine after the other: a GPU's memory may hold but one."""
    alone = replace(config, spec=SpecSettings())
    plain = _Bench(policy, alone, build_engine(policy, alone), Understudy()).plain_book()
    if config.spec.drafter == "none":
        return plain
    free_memory()
    chooser = Understudy()
    return _Bench(policy, config, build_engine(policy, config, chooser), chooser).drafting_book(plain)


def pad_of(book: CostBook) -> Callable[[int], int]:
    """Rows that a tick of so many requests computes."""
    return padding(book.rows) if book.gpu else int


class _Bench:
    def __init__(self, policy: Policy, config: RunConfig, engine: Engine, chooser: Understudy) -> None:
        self._policy, self._config, self._engine, self._chooser = policy, config, engine, chooser
        self._gpu = policy.model.embed.is_cuda
        self._numbers = count()
        self._luck = random.Random(0)

    def plain_book(self) -> CostBook:
        config, census = self._config, self._engine.report().pages
        pages = census.free + census.used + census.cached
        batch, long = self._sizes(pages * config.engine.page_size)
        self._ticks(OFF, batch, _SHORT)  # what is compiled or loaded at first
        _, short_s = self._ticks(OFF, batch, _SHORT)
        prefill_s, long_s = self._ticks(OFF, batch, long)
        book = CostBook(
            device=describe(self._policy.model.embed.device, None).device,
            policy=config.model.path,
            gpu=self._gpu,
            rows=config.engine.rows,
            pages=pages,
            page_size=config.engine.page_size,
            measured=tuple(self._engine.measure()),
            context_s=max(0.0, long_s - short_s) / (batch * (long - _SHORT)),
            padded=not self._gpu,
            prefill_s=max(0.0, prefill_s - long_s) / (batch * long),
            plain_tick_s=0.0,
            off_tick_s=0.0,
            verify_tick_s=0.0,
        )
        return replace(book, plain_tick_s=self._beside(book, OFF, batch, short_s))

    def drafting_book(self, plain: CostBook) -> CostBook:
        """The same engine with a drafter: what it measures, and what its ticks take beside that."""
        census, record = self._engine.report().pages, record_of(self._config.spec)
        book = replace(
            plain,
            pages=census.free + census.used + census.cached,
            measured=tuple(self._engine.measure()),
            window=self._config.draft.window,
            ranks=record.ranks if record else (),
        )
        batch, _ = self._sizes(book.pages * book.page_size)
        chains = [shape for shape in shapes_of(self._config.spec) if shape.width == 1 and not shape.share]
        chain = sorted(chains, key=lambda shape: shape.verify)[len(chains) // 2]  # neither short nor long
        for shape in (OFF, chain):
            self._ticks(shape, batch, _SHORT)
        off_s, verify_s = (self._ticks(shape, batch, _SHORT)[1] for shape in (OFF, chain))
        beside = [self._beside(book, OFF, batch, off_s), self._beside(book, chain, batch, verify_s)]
        return replace(book, off_tick_s=beside[0], verify_tick_s=beside[1])

    def _sizes(self, cache_tokens: int) -> tuple[int, int]:
        """Requests and tokens of long prompts, as far as there is room."""
        batch = min(self._config.engine.rows, _BATCH[self._gpu])
        behind = MOST_NODES + (_SETTLE + _TICKS[self._gpu]) * (1 + max(self._config.spec.depths))
        most = min(cache_tokens // (2 * batch), self._policy.model.config.max_positions) - behind
        return batch, max(2 * _SHORT, min(_LONG[self._gpu], most))

    def _beside(self, book: CostBook, shape: Shape, batch: int, seconds: float) -> float:
        """What a tick takes beside what the book knows of it."""
        each = _SHORT + (_SETTLE + _TICKS[self._gpu] // 2) * (shape.depth + 1)
        known_s = World(book, (), pad_of(book), seed=0).tick_s(shape, [each] * batch, may_draft=True)
        return max(0.0, seconds - known_s)

    def _ticks(self, shape: Shape, batch: int, prompt_tokens: int) -> tuple[float, float]:
        """Seconds until so many new prompts were taken in and a token of each was drawn, and of a tick after that."""
        self._chooser.now = Fixed(shape)
        self._engine.submit(self._requests(shape, batch, prompt_tokens))
        wait_for(self._policy.model.embed.device)
        started = time.perf_counter()
        self._engine.tick()
        while self._engine.running < batch:
            self._engine.tick()
        wait_for(self._policy.model.embed.device)
        first_s = time.perf_counter() - started
        for _ in range(_SETTLE):
            self._engine.tick()
        seconds = []
        for _ in range(_TICKS[self._gpu]):
            started = time.perf_counter()
            self._engine.tick()
            seconds.append(time.perf_counter() - started)
        self._engine.drain()
        return first_s, median(seconds)

    def _requests(self, shape: Shape, batch: int, prompt_tokens: int) -> Iterator[Request]:
        ticks = 2 * _SETTLE + _TICKS[self._gpu]
        params = SamplingParams(max_tokens=ticks * (1 + shape.depth), ignore_eos=True)
        vocab = self._policy.model.config.vocab
        for _ in range(batch):
            prompt = tuple(self._luck.randrange(vocab) for _ in range(prompt_tokens))
            number = next(self._numbers)
            yield Request(Key(self._config.run.seed, number), prompt, params, f"book {number}")
