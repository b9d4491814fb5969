"""The runner: executes plans on the device. Owns the KV cache, the rows and the CUDA graphs; decides nothing.

One tick runs the prefill chunks (KV cache only, no sampling), the page copies and the row changes. Then it runs all
rows at once: a forward over each row's newest token or draft tree, sampling, and the advance of the row state. Always
holds: the host reads back nothing but the drawn tokens and their log-probabilities.
In a tensor-parallel engine the leader's runner announces each run of the policy. The runners of the other ranks
(`tlt.engine.follower`) run the same with their own weights and KV cache, and receive all inputs from the leader.
"""
# R rows, T tokens, D hidden, S steps of a walk

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise, product
from math import inf
from typing import Any

import torch
from torch import Tensor

from tlt.engine.chunks import Packed, copied_slots, idle_chunks
from tlt.engine.exact import head_chain
from tlt.engine.features import Features
from tlt.engine.graphs import GraphPool, Key, PoolReport, Waste, bucket, buckets
from tlt.engine.output import InFlightTick, OutputBuffer, PendingOutput, TickOutput
from tlt.engine.rows import Rows, send
from tlt.engine.sampler import Sampled, SamplingRows, sample_slices
from tlt.engine.scheduler import Chunk, Copy, Plan
from tlt.engine.timer import TickTimer
from tlt.kernels import compiling
from tlt.kernels.attention import reference as attention_kernels
from tlt.kernels.batch_state.reference import StatePlaces
from tlt.kernels.dispatch import dispatch
from tlt.model.attention import PagedLayout, kv_splits_of
from tlt.model.kv import KVCache
from tlt.model.transformer import Output, Transformer
from tlt.spec.costs import DECODE, POLICY, VERIFY, CostTable, TickTimes
from tlt.spec.drafter import Entered, HiddenStateSink, Piece, RowView, Segment
from tlt.spec.shape import MOST_NODES, OFF, Draft, Shape
from tlt.spec.tree import Trees

Role = tuple[Any, ...]  # of a run of the policy: its kind, and the settings that its tensor shapes depend on
# commands that the leader announces to the follower ranks
RUN, RECORD, REPLAY, READ, COPY = "run", "record", "replay", "read", "copy"
COMPILE, REST = "compile", "rest"
_TIMED_RUNS = 5  # runs per timing; the fastest counts
_DEAREST = {"cpu": 256, "cuda": 2048}  # tokens of the largest forward that `time_trees` times
_DEAR_S = 0.1  # seconds of a forward beyond which `time_trees` stops: a large policy on a CPU
_TOKEN_S = 1e-5  # seconds per token of a forward, until one was timed
_LITTLE_S = 5e-5  # seconds that a drafter's run wastes in a graph of at most twice its size


@dataclass(frozen=True, slots=True)
class _Result:
    packed: Tensor  # int32 [R, 3·S + 1]: token, bits of logprob and of policy logprob of each step; number of steps
    taps: tuple[Tensor, ...]
    hidden: Tensor
    steps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Packed prefill chunks on the device. `tlt.engine.chunks.Packed` explains the fields."""

    token_T: Tensor  # int64
    position_T: Tensor  # int64
    slot_T: Tensor  # int32, as the following ones
    start_R1: Tensor
    context_R: Tensor
    pages_RP: Tensor

    @classmethod
    def empty(cls, tokens: int, pieces: int, pages: int, device: torch.device) -> "PrefillInputs":
        def int32s(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        token_T, position_T = torch.empty((2, tokens), dtype=torch.int64, device=device)
        slot_T, start_R1, context_R = int32s(tokens), int32s(pieces + 1), int32s(pieces)
        return cls(token_T, position_T, slot_T, start_R1, context_R, int32s(pieces, pages))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return self.token_T, self.position_T, self.slot_T, self.start_R1, self.context_R, self.pages_RP


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
        state_sink: HiddenStateSink | None = None,
        exact: bool = False,
    ) -> None:
        self._model = model
        self._exact = exact  # a row's bits do not depend on other rows
        self._cache = cache
        self._page_size = cache.k.shape[2]
        self._device = model.embed.device
        pages = -(-(model.config.max_positions + MOST_NODES) // self._page_size)
        self._max_rows = rows
        self._parallel = model.parallel
        self._rows = Rows(rows, min(pages, cache.k.shape[1]), self._page_size, self._device, model.parallel)
        self._trees: dict[int, Trees] = {}  # by number of nodes; graphs hold these pointers
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        self._taps = tuple(taps) if on_features else ()
        self._on_features = on_features
        self._state_sink = state_sink or HiddenStateSink()
        self._all_taps = (*self._state_sink.taps, *self._taps)
        self._sizes = buckets(rows)
        captures = graphs and model.embed.is_cuda
        self._pool: GraphPool[Any] | None = GraphPool(self._device, self._announce_replay) if captures else None
        self._output_buffer = OutputBuffer(rows, self._device)
        self.timer = TickTimer(self._device, lambda: self.capture_s)
        self._costs = CostTable()  # seconds of forwards, timed at startup

    @torch.no_grad()
    def prepare(self, plan: Plan) -> None:
        """Executes the plan up to its decode: prefill, page copies, row changes."""
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.copies:
            self._copy(plan.copies)
        self._rows.apply(plan)
        if plan.moves or plan.entries:
            entered = [Entered(entry.row, entry.position, entry.token, entry.prefix) for entry in plan.entries]
            self._state_sink.rearrange(plan.moves, entered)

    @torch.no_grad()
    def launch(
        self, plan: Plan, drafts: Sequence[Draft] | None = None, shape: Shape = OFF, steps: int = 1
    ) -> InFlightTick:
        """Launches the prepared tick. Returns before the device has finished it: `drawn` waits.

        `shape`: the shape of the plan's draft trees. `drafts`: one per row; None: they lie in `trees`. `steps`: most
        tokens of a walk.
        """
        count = len(plan.reqs)
        if not count:
            return self._in_flight(plan, torch.empty((0, 3), dtype=torch.int32), shape, steps)
        if plan.nodes == 1:
            role, forward = self._decoding(plan.filtered)
            with self.timer.part(DECODE):
                result = self._run(role, count, forward)
        else:
            if drafts is not None:
                self.trees(plan.nodes).fill(drafts)
            role, forward = self._verification(shape, min(steps, plan.nodes), plan.filtered)
            with self.timer.part(VERIFY):
                result = self._run(role, count, forward, shape.tokens)
        self._state_sink.computed(shape.depth + 1, shape.most_tokens)
        self._hand_out(plan, result)
        return self._in_flight(plan, result.packed[:count], shape, steps)

    def _in_flight(self, plan: Plan, packed: Tensor, shape: Shape, steps: int) -> InFlightTick:
        pending = self._output_buffer.fetch(packed) if len(packed) else PendingOutput(packed, None)
        return InFlightTick(plan, pending, self.timer.launched(pending.ready), shape, steps)

    def drawn(self, tick: InFlightTick) -> tuple[TickOutput, TickTimes]:
        """What a launched tick drew, and its times. Waits for the device."""
        return tick.pending.drawn(), self.timer.read(tick.marks)

    # ---- the GraphRunner of drafters

    @property
    def model(self) -> Transformer:
        return self._model

    def view(self) -> RowView:
        return self._rows.view()

    def padded(self, rows: int) -> int:
        return rows if self._pool is None else bucket(rows, self._sizes) or rows

    def trees(self, nodes: int) -> Trees:
        if nodes not in self._trees:
            self._trees[nodes] = Trees.empty(self._max_rows, nodes, self._device)
        return self._trees[nodes]

    def run_segments(self, parts: Sequence[Segment]) -> None:
        served: dict[Hashable, Key | None] = {}
        for part in parts if self._pool is not None else ():
            if part.role not in served:  # capture before the first run: a capture may run the work, with side effects
                waste = None if part.exactly else partial(_little, part.rows)
                served[part.role] = self._served((part.role, part.rows), part.work, waste)
        for timed_as, alike in groupby(parts, lambda part: part.timed_as):
            with self.timer.part(timed_as):
                for part in alike:
                    self._run_segment(part, served.get(part.role))

    def _run_segment(self, part: Segment, graph: Key | None) -> None:
        if self._pool is None:
            part.work(part.rows)
        else:
            self._replay(graph, (part.role, part.rows), part.work)

    def time(self, part: Segment) -> float:
        self.ready([part])
        work = partial(part.work, part.rows)
        live = self._rows.set_count(0)
        if self._pool is not None:
            seconds = self._pool.seconds((part.role, part.rows))
        else:
            work()
            seconds = min(_seconds_of(work) for _ in range(_TIMED_RUNS))  # a busy machine slows some of the runs
        self._rows.set_count(live)
        return seconds

    def ready(self, parts: Sequence[Segment]) -> None:
        for part in parts if self._pool is not None else ():
            self._captured((part.role, part.rows), partial(part.work, part.rows))

    def _served(self, key: Key, function: Callable[[int], Any], waste: Waste | None) -> Key | None:
        """The graph for a run of this role and size, captured now if that pays; None: it runs eagerly."""
        assert self._pool is not None
        graph = self._pool.serve(key, waste)
        if graph is not None:
            self._captured(graph, partial(function, graph[1]))
        return graph

    def _replay(self, graph: Key | None, key: Key, function: Callable[[int], Any]) -> Any:
        assert self._pool is not None
        return self._pool.replay(graph) if graph else self._pool.run_first(key, partial(function, key[1]))

    def _captured(self, key: Key, work: Callable[[], Any]) -> None:
        """Captures the graph if it does not exist. All rows are idle meanwhile, so trial runs change nothing."""
        assert self._pool is not None
        if not self._pool.has(key):
            live = self._rows.set_count(0)
            self._pool.capture(key, work)
            self._rows.set_count(live)

    def report(self) -> PoolReport | None:
        return self._pool.report() if self._pool else None

    @property
    def capture_s(self) -> float:
        """Seconds spent on graph captures so far."""
        return self._pool.capture_s if self._pool else 0.0

    def measured_sizes(self) -> list[int]:
        """Batch sizes to time; the cost model interpolates between them. Few on a CPU, where a run is expensive."""
        steps = (1, 4, 16, 64) if self._device.type == "cpu" else (1, 8, 32, 64, 128, 256, 512)
        return [size for size in steps if size <= self._max_rows] or [self._max_rows]

    @torch.no_grad()
    def capture(self, sizes: Sequence[int]) -> dict[int, float]:
        """Captures the decode graphs of these batch sizes.

        Returns the seconds of a run of each size over an empty KV cache: the fastest of `_TIMED_RUNS`. Each round times
        all sizes, so a short load on the machine does not slow down one size alone.
        """
        rounds = [[self._timed_decode(size) for size in sizes] for _ in range(_TIMED_RUNS)]
        return self._noted(dict(zip(sizes, map(min, zip(*rounds, strict=True)), strict=True)))

    @torch.no_grad()
    def time_trees(self, widest: int, steps: int) -> list[tuple[int, float]]:
        """(tokens, seconds) of forwards that verify trees of 2, 4, … nodes in all rows.

        Stops beyond `_DEAREST` tokens or `_DEAR_S` seconds: there every further token costs the same.
        """
        found, nodes = list[tuple[int, float]](), 2
        while nodes <= widest and self._max_rows * nodes <= _DEAREST[self._device.type]:
            if found and found[-1][1] > _DEAR_S:
                break
            role, work = self._verification(Shape(verify=nodes), min(steps, nodes), filtered=False)
            found.append((self._max_rows * nodes, self.time(Segment(role, self._max_rows, work))))
            nodes *= 2
        self._noted(dict(found))
        return found

    @torch.no_grad()
    def compile(self, widest: int, steps: int, *, filtered: bool = False) -> None:
        """Compiles the kernels of prefill, decode and verify for many sizes, on all ranks at once.

        Otherwise the first tick of each size would wait a second and more for the compiler.
        """
        self._parallel.announce((COMPILE, widest, steps, filtered))
        live = self._rows.set_count(0)
        try:
            with self._parallel.apart(), self._model.one_layer_of_each_kind(self._all_taps):
                dispatch(compiling.compile_ahead, self._cache.k.is_cuda)(
                    partial(self._run_idle, widest, steps, filtered)
                )
        finally:
            self._rows.set_count(live)

    def _run_idle(self, widest: int, steps: int, filtered: bool) -> None:
        for chunks in idle_chunks(self._page_size, self._model.config.max_positions):
            self.read(self._sent(Packed.of(chunks, self._page_size)), max(len(chunk.tokens) for chunk in chunks))
        for size, choosy in product(self._sizes, sorted({False, filtered})):
            self.run(("decode", choosy), size)
        trees = [Shape(verify=2**power) for power in range(1, 1 + (widest - 1).bit_length())]
        sharing = [Shape(verify=nodes, share=1.5) for nodes in (2, 4) if nodes <= widest]
        for shape, halved in product(trees + sharing, range(self._max_rows.bit_length())):
            rows = self.padded(self._max_rows >> halved)
            if shape.tokens(rows) > _DEAREST[self._device.type]:
                shape = replace(shape, share=1.5)  # batches this large only verify with a shared budget
            self.run(_verify(shape, min(steps, shape.verify), filtered), rows)

    @torch.no_grad()
    def ready_to_decode(self, filtered: bool) -> None:
        role, decode = self._decoding(filtered)
        self.ready([Segment(role, size, decode) for size in self._sizes])

    @torch.no_grad()
    def ready_to_verify(self, shape: Shape, rows: int, steps: int, filtered: bool) -> None:
        role, work = self._verification(shape, min(steps, shape.verify), filtered)
        self.ready([Segment(role, self.padded(rows), work)])

    def _noted(self, seconds: dict[int, float]) -> dict[int, float]:
        for tokens, took in seconds.items():
            self._costs.record(POLICY, tokens, took)
        return seconds

    def _timed_decode(self, size: int) -> float:
        """Seconds of a decode run with all rows idle, which changes nothing."""
        self._rows.set_count(0)
        captured, started = self.capture_s, time.perf_counter()
        role, decode = self._decoding(False)
        self._run(role, size, decode)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started - (self.capture_s - captured)

    # ---- decode

    def _run(
        self, role: Hashable, count: int, function: Callable[[int], _Result], tokens: Callable[[int], int] | None = None
    ) -> _Result:
        """Runs the function over `count` rows, by the graph of their padded size or eagerly.

        Without `tokens` a missing graph is always captured. `tokens`: rows → tokens of the forward; with it a missing
        graph is captured only if that pays.
        """
        if self._pool is None:
            return function(count)
        size = bucket(count, self._sizes)
        if size is None:
            self._pool.count_eager()
            return function(count)
        key: Key = (role, size)
        if tokens is None:
            self._captured(key, partial(function, size))
            graph: Key | None = key
        else:
            needed_s, tokens_of = self._policy_s(tokens(size)), tokens
            graph = self._served(key, function, lambda larger: self._policy_s(tokens_of(larger)) - needed_s)
        result: _Result = self._replay(graph, key, function)
        return result

    def _policy_s(self, tokens: int) -> float:
        """Estimated seconds of a forward over this many tokens."""
        return self._costs.estimate(POLICY, tokens) or tokens * _TOKEN_S

    def _hand_out(self, plan: Plan, result: _Result) -> None:
        if self._on_features:
            rows, lag = len(plan.reqs), 1 if plan.nodes == 1 else 0  # plain plans have advanced the positions already
            first = tuple(req.position - lag for req in plan.reqs)
            taps = tuple(tap[:rows] for tap in result.taps)
            steps = None if result.steps is None else result.steps[:rows]
            self._on_features(Features(plan.reqs, first, taps, result.hidden[:rows], steps))

    def _forward(self, rows: int, filtered: bool) -> _Result:
        """Decodes one token for each of the first `rows` rows."""
        inputs = self._rows.inputs(rows, filtered)
        layout = PagedLayout(
            cache=self._cache,
            positions_T=inputs.position_R,
            slots_T=inputs.slot_R,
            query_start_R1=self._starts[: rows + 1],
            context_R=inputs.context_R,
            pages_RP=inputs.pages_RP,
            max_query=1,
            exact=self._exact,
            kv_splits_S=self._shares(inputs.context_R, 1),
        )
        out = self._model(inputs.token_R, layout, self._all_taps)
        sampled = self._sample(out.hidden_TD, inputs.sampling)
        kept, taps = self._split(out.taps)
        if kept:
            self._state_sink.keep(kept, StatePlaces(inputs.position_R, inputs.slot_R, sampled.token_R[:, None]))
        taps = tuple(tap[:, None] for tap in taps)
        return _Result(self._rows.finish(rows, sampled), taps, out.hidden_TD[:, None])

    def _shares(self, context_R: Tensor, max_query: int) -> Tensor | None:
        return None if self._exact else kv_splits_of(context_R, self._model.local, max_query)

    def _sample(self, hidden_TD: Tensor, rows: SamplingRows) -> Sampled:
        logits_Tv, vocab = self._model.logit_slice(hidden_TD, exact=self._exact), self._model.config.vocab
        return sample_slices(logits_Tv, rows, self._parallel, vocab, exact=self._exact)

    # ---- verify

    def _split(self, taps: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Splits the taps into those of the hidden-state sink and those of `on_features`."""
        own = len(self._state_sink.taps)
        return taps[:own], taps[own:]

    def _verification(self, shape: Shape, steps: int, filtered: bool) -> tuple[Hashable, Callable[[int], _Result]]:
        """Its role, and the work for so many rows."""
        role = _verify(shape, steps, filtered)
        return role, partial(self._announced, role)

    def _forward_trees(self, trees: Trees, tokens: int, steps: int, filtered: bool) -> _Result:
        """Verifies the trees: draws the policy's token at every node, and walks each tree."""
        nodes = trees.token_RQ.shape[1]
        inputs = self._rows.tree_inputs(trees, tokens, filtered)
        layout = PagedLayout(
            cache=self._cache,
            positions_T=inputs.position_T,
            slots_T=inputs.slot_T,
            query_start_R1=inputs.start_R1,
            context_R=inputs.context_R,
            pages_RP=inputs.pages_RP,
            max_query=nodes,
            tree_mask_TW=None if self._exact else inputs.mask_TW,
            exact=self._exact,
            kv_splits_S=self._shares(inputs.context_R, nodes),
        )
        out = self._model(inputs.token_T, layout, self._all_taps)
        sampled = self._sample(out.hidden_TD, inputs.sampling)
        walked = self._rows.finish_trees(head_chain(trees) if self._exact else trees, inputs, sampled, steps)
        if steps > 1:  # moves accepted keys and values to where plain decoding puts them
            dispatch(attention_kernels.copy_kv, self._cache.k.is_cuda)(
                self._cache.k, self._cache.v, walked.moves_RS, walked.places_RS
            )
        kept, taps = self._split(out.taps)
        if kept:
            where = inputs.position_T, inputs.slot_T
            self._state_sink.keep(kept, StatePlaces(*where, walked.packed[:, :steps], walked.at_RS, walked.steps_R))
        if not self._on_features:
            return _Result(walked.packed, (), out.hidden_TD[:0], walked.steps_R)
        taps, hidden = tuple(tap[walked.at_RS] for tap in taps), out.hidden_TD[walked.at_RS]
        return _Result(walked.packed, taps, hidden, walked.steps_R)

    # ---- the ranks of an engine

    def _decoding(self, filtered: bool) -> tuple[Hashable, Callable[[int], _Result]]:
        """Its role, and the work for so many rows."""
        role = ("decode", filtered)
        return role, partial(self._announced, role)

    def _announced(self, role: Role, rows: int) -> _Result:
        """Runs the policy on all ranks. During a capture the other ranks capture too."""
        recorded = self._pool is not None and self._pool.recording
        self._parallel.announce((RECORD if recorded else RUN, role, rows))
        return self.run(role, rows)

    def _announce_replay(self, key: Key) -> None:
        role, rows = key
        if isinstance(role, tuple) and role[0] in ("decode", "verify"):  # the others are a drafter's, on this rank
            self._parallel.announce((REPLAY, role, rows))

    def run(self, role: Role, rows: int) -> _Result:
        """Runs the policy in this role over `rows` rows."""
        match role:
            case ("decode", filtered):
                return self._forward(rows, filtered)
            case ("verify", nodes, share, steps, filtered):
                tokens = Shape(verify=nodes, share=share).tokens(rows)
                return self._forward_trees(self.trees(nodes).first(rows), tokens, steps, filtered)
        raise AssertionError(f"no run of the policy is called {role}")

    def record(self, role: Role, rows: int) -> None:
        """Follower: captures the graph of a run that the leader captures."""
        assert self._pool is not None
        self._pool.capture((role, rows), partial(self.run, role, rows), settled=True)

    def replay(self, role: Role, rows: int) -> None:
        """Follower: replays the graph that the leader replays."""
        assert self._pool is not None
        self._pool.replay((role, rows))

    def rest(self) -> None:
        self._parallel.announce((REST,))

    # ---- prefill and copies

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Computes the KV cache of the chunks' tokens, without sampling."""
        if self._pool is not None:
            self._pool.count_eager()  # sizes rarely repeat, so a graph would be used once
        taps, starts = self._read(chunks)
        if taps:
            pieces = zip(chunks, pairwise(starts), strict=True)
            self._state_sink.prefilled([Piece(chunk.prefix, chunk.start, *span) for chunk, span in pieces], taps)

    def _read(self, chunks: Sequence[Chunk]) -> tuple[tuple[Tensor, ...], list[int]]:
        """The hidden states for the sink, and the index of each chunk's first state."""
        packed = Packed.of(chunks, self._page_size)
        most = max(len(chunk.tokens) for chunk in chunks)
        self._parallel.announce((READ, len(packed.tokens), len(chunks), len(packed.pages[0]), most))
        return self.read(self._sent(packed), most), packed.starts

    def _sent(self, packed: Packed) -> PrefillInputs:
        token_T, position_T = self._send([packed.tokens, packed.positions], torch.int64)
        slot_T, start_R1, context_R, pages_RP = (
            self._send(column, torch.int32) for column in (packed.slots, packed.starts, packed.contexts, packed.pages)
        )
        return PrefillInputs(token_T, position_T, slot_T, start_R1, context_R, pages_RP)

    def read(self, inputs: PrefillInputs, most: int) -> tuple[Tensor, ...]:
        """Computes the KV cache of packed chunks of at most `most` tokens. Returns the hidden states for the sink."""
        self._parallel.share(*inputs.parts)
        layout = PagedLayout(
            cache=self._cache,
            positions_T=inputs.position_T,
            slots_T=inputs.slot_T,
            query_start_R1=inputs.start_R1,
            context_R=inputs.context_R,
            pages_RP=inputs.pages_RP,
            max_query=most,
            exact=self._exact,
            kv_splits_S=self._shares(inputs.context_R, most),
        )
        out: Output = self._model(inputs.token_T, layout, self._state_sink.taps)
        return out.taps

    def _copy(self, copies: Sequence[Copy]) -> None:
        source, target = (self._send(slots, torch.int32) for slots in copied_slots(copies, self._page_size))
        self._parallel.announce((COPY, *source.shape))
        self.copy(source, target)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies keys and values between slots. Both tensors are int32; −1 is skipped."""
        self._parallel.share(source, target)
        dispatch(attention_kernels.copy_kv, self._cache.k.is_cuda)(self._cache.k, self._cache.v, source, target)

    def _send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _verify(shape: Shape, steps: int, filtered: bool) -> Role:
    return "verify", shape.verify, shape.share, steps, filtered


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _little(rows: int, larger: int) -> float:
    return _LITTLE_S if larger <= 2 * rows else inf
