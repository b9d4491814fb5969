"""The runner: carries out plans. Owns the cache, the rows and the graphs; decides nothing.

One tick = prefill chunks (their keys and values only), page copies, row changes, then one decode of all rows: forward,
sample, advance. The only thing read back is the drawn tokens and their log-probabilities, one copy per tick, and it is
waited for only when asked for.
"""
# R rows, T tokens, D hidden

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.engine.graphs import GraphPool, PoolReport, bucket, buckets
from tlt.engine.rows import Rows, send
from tlt.engine.sampler import sample
from tlt.engine.scheduler import Chunk, Copy, Plan, Stay
from tlt.model.attention import PagedLayout, kernels_for
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a tick drew, row by row."""

    tokens: list[int]  # −1 where the logits were no distribution
    logprobs: list[float]
    policy_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the positions a tick decoded, on the device; valid until the next tick starts."""

    stays: tuple[Stay, ...]
    taps: tuple[Tensor, ...]  # [R, D] each: the residual stream after each tapped layer
    hidden: Tensor  # [R, D], after the final norm


@dataclass(frozen=True, slots=True)
class _Result:
    packed_R3: Tensor  # int32: token, and the bits of logprob and policy logprob
    taps: tuple[Tensor, ...]
    hidden: Tensor


class Pending:
    """A launched tick. `drawn()` waits for the device, once."""

    def __init__(self, packed: Tensor, ready: torch.cuda.Event | None) -> None:
        self._packed = packed
        self._ready = ready

    def drawn(self) -> Drawn:
        if self._ready is not None:
            self._ready.synchronize()
        numbers = self._packed[:, 1:].view(torch.float32)
        return Drawn(self._packed[:, 0].tolist(), numbers[:, 0].tolist(), numbers[:, 1].tolist())


class Runner:
    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        rows: int,
        graphs: bool,
        taps: Sequence[int],
        on_features: Callable[[Features], None] | None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._page_size = cache.k.shape[2]
        self._device = model.embed.device
        pages = -(-model.config.max_positions // self._page_size)
        self._rows = Rows(rows, min(pages, cache.k.shape[1]), self._page_size, self._device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        self._taps = tuple(taps) if on_features else ()
        self._on_features = on_features
        self._sizes = buckets(rows)
        self._pool: GraphPool[_Result] | None = GraphPool(self._device) if graphs and model.embed.is_cuda else None
        self._landing = _landing(rows) if model.embed.is_cuda else None
        self._turn = 0

    @torch.no_grad()
    def launch(self, plan: Plan) -> Pending:
        """Starts a tick; returns before the device has done it."""
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.copies:
            self._copy(plan.copies)
        self._rows.apply(plan)
        count = len(plan.stays)
        result = self._decode(count, plan.filtered) if count else None
        if result is None:
            return Pending(torch.empty((0, 3), dtype=torch.int32), None)
        if self._on_features:
            self._on_features(Features(plan.stays, tuple(tap[:count] for tap in result.taps), result.hidden[:count]))
        return self._fetch(result.packed_R3[:count])

    def report(self) -> PoolReport | None:
        return self._pool.report() if self._pool else None

    @torch.no_grad()
    def capture(self, sizes: Sequence[int]) -> None:
        """Captures the graphs of these batch sizes now rather than when they are first met."""
        for size in sizes:
            self._graph(size, filtered=False)

    # ---- decode

    def _decode(self, count: int, filtered: bool) -> _Result:
        if self._pool is None:
            return self._forward(count, filtered)
        key = self._graph(count, filtered)
        if key is None:
            self._pool.count_eager()
            return self._forward(count, filtered)
        return self._pool.replay(key)

    def _graph(self, count: int, filtered: bool) -> tuple[int, bool] | None:
        """The key of the graph for this many rows, captured if it was not; None without a fitting bucket."""
        size = bucket(count, self._sizes)
        if self._pool is None or size is None:
            return None
        key = (size, filtered)
        if not self._pool.has(key):
            self._rows.set_count(0)  # all rows idle: the trial runs change nothing
            self._pool.capture(key, lambda: self._forward(size, filtered))
            self._rows.set_count(count)
        return key

    def _forward(self, rows: int, filtered: bool) -> _Result:
        """One token for each of the first `rows` rows."""
        inputs = self._rows.inputs(rows, filtered)
        layout = PagedLayout(
            cache=self._cache,
            positions_T=inputs.position_R,
            slots_T=inputs.slot_R,
            query_start_R1=self._starts[: rows + 1],
            context_R=inputs.context_R,
            pages_RP=inputs.pages_RP,
            max_query=1,
        )
        out = self._model(inputs.token_R, layout, self._taps)
        sampled = sample(self._model.logits(out.hidden_TD), inputs.sampling)
        return _Result(self._rows.finish(rows, sampled), out.taps, out.hidden_TD)

    def _fetch(self, packed_R3: Tensor) -> Pending:
        if self._landing is None:
            return Pending(packed_R3, None)
        self._turn = (self._turn + 1) % len(self._landing)
        landed = self._landing[self._turn][: len(packed_R3)]
        landed.copy_(packed_R3, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return Pending(landed, ready)

    # ---- prefill and copies

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Keys and values of the chunks' tokens; nothing is sampled from them."""
        size = self._page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for chunk in chunks:
            span = range(chunk.start, chunk.start + len(chunk.tokens))
            tokens += chunk.tokens
            positions += span
            slots += [chunk.pages[position // size] * size + position % size for position in span]
            starts.append(len(tokens))
        width = max(len(chunk.pages) for chunk in chunks)
        tables = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks]
        layout = PagedLayout(
            cache=self._cache,
            positions_T=self._send(positions, torch.int64),
            slots_T=self._send(slots, torch.int32),
            query_start_R1=self._send(starts, torch.int32),
            context_R=self._send([chunk.start + len(chunk.tokens) for chunk in chunks], torch.int32),
            pages_RP=self._send(tables, torch.int32),
            max_query=max(len(chunk.tokens) for chunk in chunks),
        )
        self._model(self._send(tokens, torch.int64), layout)

    def _copy(self, copies: Sequence[Copy]) -> None:
        size = self._page_size

        def slots(page: int, count: int) -> list[int]:
            return [page * size + i if i < count else -1 for i in range(size)]

        source = self._send([slots(copy.source, copy.count) for copy in copies], torch.int32)
        target = self._send([slots(copy.target, copy.count) for copy in copies], torch.int32)
        kernels_for(self._device).copy_kv(self._cache.k, self._cache.v, source, target)

    def _send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _landing(rows: int) -> tuple[Tensor, ...]:
    """Pinned host memory the tokens arrive in: two ticks may be under way, a third place keeps them apart."""
    return tuple(torch.empty((rows, 3), dtype=torch.int32, pin_memory=True) for _ in range(3))
