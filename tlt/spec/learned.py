"""The learned drafter in a rollout: keeps the policy's newest hidden states of every row, and drafts trees from them.

Always holds: hidden states are kept in plain ticks too, so drafting can start in the middle of a completion without the
policy's KV cache. The policy reads nothing of this module. All state lies on the device, by row of the batch, and moves
with the row. It includes the number of positions processed, so the trees of the next tick can be built behind a
verification whose tokens are not read yet.
"""
# R rows, W window, S positions, F = 3·D states, w width of the trees, L nodes built, v draft tokens

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tlt.config import NEW, RunConfig, SpecSettings
from tlt.kernels import compiling
from tlt.kernels.batch_state import reference as batch_state
from tlt.kernels.batch_state.reference import StatePlaces
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import layer as layer_kernels
from tlt.kernels.draft_tree.layer import ExtendState
from tlt.kernels.draft_tree.pruning import VerifyBudget
from tlt.kernels.linear.plan import ever_quantized
from tlt.kernels.linear.reference import QuantizedMatrix
from tlt.model.device import Reading, upload_columns
from tlt.model.linear import in_gpu_rollout, reads_quantized
from tlt.model.transformer import Transformer
from tlt.policy import Policy
from tlt.spec.backlog import MEAN_SIZES, PASS_SIZES, Backlog
from tlt.spec.candidates import MOST_ROWS, BetaProbe, DrawKeys
from tlt.spec.costs import CATCH_UP, DRAFT, EXTEND, INGEST, KEEP, PRUNE, Measured
from tlt.spec.drafter import Drafter, Entered, GraphRunner, HiddenStateSink, Piece, RowView, Segment, StartedTrees
from tlt.spec.eagle import Eagle, gather_taps
from tlt.spec.eagle_files import open_drafter
from tlt.spec.prompt_states import EnteringRows, PromptStates
from tlt.spec.record import DraftRecord, read_record
from tlt.spec.shape import MAX_REMAINING_BIAS, Draft, Shape
from tlt.spec.tree_builder import BuiltTrees, DraftInputs, TreeBuilder
from tlt.types import Key

_MOST_NODES = 2048  # nodes of a level over all rows; larger levels are not compiled ahead


class LearnedDrafting(Drafter, HiddenStateSink):
    """An Eagle as a drafter, and the sink of the hidden states that it reads."""

    name = "eagle"
    on_device = learned = True

    def __init__(
        self, drafter: Eagle, policy: Transformer, rows: int, deepest: int = 8, *, quantized: bool = False
    ) -> None:
        """`quantized`: the drafter's matrices are read in 8 bits, on a GPU that supports it."""
        device, dtype, hidden = drafter.fc.device, drafter.fc.dtype, drafter.config.layer.hidden
        self.drafter = drafter
        self.taps: tuple[int, ...] = drafter.config.taps
        self.version = 0
        self._policy = policy
        self._deepest = deepest
        self._window = window = drafter.config.window
        self._beta = torch.ones((), dtype=torch.float32, device=device)
        self._head_vD = drafter.head_rows(policy.head_weight)
        self._quantized = quantized and reads_quantized(drafter.fc)
        head_quantized = self._quantized and ever_quantized(self._head_vD.shape[0], hidden, gated=False)
        self._quantized_head = QuantizedMatrix.of(self._head_vD.detach()) if head_quantized else None
        drafter.quantize(self._quantized)
        self._inputs = DraftInputs(
            drafter,
            drafter.new_ring(rows),
            torch.zeros((rows, hidden), dtype=dtype, device=device),
            policy.embed.detach(),
            self._quantized_head or self._head_vD.detach(),
        )
        self._memory = batch_state.Memory.empty(self._inputs.ring.position_RW, len(self.taps) * hidden, dtype)
        self._builders: dict[int, TreeBuilder] = {}  # by width
        self._keys: Sequence[Key] = ()  # requests of the trees built last, by row
        self._row_of: Mapping[Key, int] = {}  # the same: request → row
        self._row = torch.arange(rows, device=device)
        self._attached: tuple[GraphRunner, RowView] | None = None
        self._backlog = Backlog(window, at_once=deepest + 1)
        self._ingested: tuple[int, float] | None = None  # last draft-extend: tick, prompt positions per row
        self._ticks = 0
        self._started_trees: BuiltTrees | None = None
        self._entered: list[int] = []  # rows that requests entered since these trees were built
        self._prompts = PromptStates(window, self._memory.states_RWF[0, :0])
        self._beta_probe = BetaProbe()

    @classmethod
    def build(cls, policy: Policy, config: RunConfig) -> Self:
        drafter, deepest = open_drafter(policy, config), max(config.spec.depths)
        return cls(drafter, policy.model, config.engine.rows, deepest, quantized=config.spec.quantized)

    @classmethod
    def prior(cls, spec: SpecSettings) -> DraftRecord | None:
        return read_record(spec.path) if spec.path != NEW else None

    @property
    def model(self) -> Eagle:
        return self.drafter

    @property
    def beta(self) -> float:
        """The draft β: weight of the drafter's logits against the shared noise, fitted to verified tokens."""
        return self._beta_probe.beta_calibrator.beta

    def lag(self, rows: int) -> int:
        return self._backlog.lag(rows)

    @property
    def arrived(self) -> int:
        return self._backlog.arrived

    # ---- weights that change

    @torch.no_grad()
    def policy_changed(self) -> None:
        """Drops the old policy's hidden states, and copies its new LM head."""
        self._prompts.clear()
        self._copy_head()

    def _copy_head(self) -> None:
        """Copies the head rows of a reduced vocabulary in place: graphs hold this pointer."""
        if self._head_vD is not self._policy.head_weight and self.drafter.own_head_vD is None:
            self.drafter.head_rows(self._policy.head_weight, out=self._head_vD)
        if self._quantized_head is not None:
            self._quantized_head.requantize()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads another version of the drafter. Called between two ticks; the same version again changes nothing.

        Changes only the drafter's own tensors. The kept hidden states are processed again with the new weights.
        """
        if version == self.version:
            return
        own = dict(self.drafter.named_parameters()) | dict(self.drafter.named_buffers())
        missing = dict(self.drafter.named_parameters()).keys() - weights.keys()
        if missing:
            raise ValueError(f"drafter tensors {sorted(missing)} are missing; expected all of {sorted(own)}")
        for name, value in weights.items():
            if name not in own or own[name].shape != value.shape:
                found = tuple(value.shape)
                expected = tuple(own[name].shape) if name in own else "no such tensor"
                raise ValueError(f"drafter tensor {name} has shape {found}; expected {expected}")
        for name, value in weights.items():
            own[name].copy_(value)
        if self._quantized:
            self.drafter.quantize()
        self.version = version
        self._memory.taken_R.copy_(self._memory.held_R)
        self._memory.ready_R.zero_()
        self._backlog.fill()
        self._started_trees = None
        self._copy_head()

    # ---- the drafter

    @property
    def state_sink(self) -> HiddenStateSink:
        return self

    @torch.no_grad()
    def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        """Processes the tokens that plain ticks wrote, as far back as the window reaches."""
        if self._backlog.needs_passes(len(keys)):
            self._extend_rows(len(keys))

    def ingested(self) -> float:
        ingested, self._ingested = self._ingested, None
        return ingested[1] if ingested is not None and ingested[0] == self._ticks else 0.0

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        trees = self.start_trees(keys, shape)
        return [trees.draft(key) for key in keys]

    @torch.no_grad()
    def start_trees(self, keys: Sequence[Key], shape: Shape) -> StartedTrees:
        """The trees built behind the last verification if they have this shape; otherwise new ones."""
        trees = self._trees_of_next_tick
        if trees is None or trees.shape != shape:
            trees = self._started_trees = self._build_trees(keys, shape)
        trees.cleared.update(keys[row] for row in self._entered)
        return trees

    @property
    def _trees_of_next_tick(self) -> BuiltTrees | None:
        trees = self._started_trees
        return trees if trees is not None and trees.tick == self._ticks else None

    # ---- the sink of hidden states

    def attach(self, runner: GraphRunner) -> None:
        self._attached = runner, runner.view()

    def keep(self, taps: Sequence[Tensor], kept: StatePlaces) -> None:
        dispatch(batch_state.keep_states, self._row.is_cuda)(
            self._memory.states_RWF, self._memory.tokens_RW, taps, kept, pdl=True
        )

    @torch.no_grad()
    def prefilled(self, pieces: Sequence[Piece], taps: Sequence[Tensor]) -> None:
        states_TF = gather_taps(taps).to(self._memory.states_RWF.dtype)  # all at once: there may be many prompts
        for piece in pieces:
            self._prompts.add(piece.prefix, piece.start, states_TF[piece.first : piece.last])

    @torch.no_grad()
    def rearrange(self, moves: Sequence[tuple[int, int]], entered: Sequence[Entered]) -> None:
        if moves:
            self._move(moves)
        if entered:
            self._enter(entered)
        if moves or entered:
            self._beta_probe.forget()

    def computed(self, steps: int, each: float) -> None:
        self._ticks += 1
        self._backlog.add_written(steps, each)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        source_E, target_E = upload_columns([*np.array(moves).T], self._row.device)
        ring = self._inputs.ring
        rows = [*self._memory.rows, ring.k_RKWd, ring.v_RKWd, self._inputs.g_RD]
        if trees := self._trees_of_next_tick:
            rows += self._runner.trees(trees.shape.verify).parts
        dispatch(batch_state.move_rows, self._row.is_cuda)(rows, source_E, target_E)

    def _enter(self, entered: Sequence[Entered]) -> None:
        """Fills the rows of new requests with the kept hidden states of their prefixes, and clears their trees.

        One launch for all of them: hundreds enter when a rollout begins, and one launch each would delay the first
        ticks.
        """
        entering = EnteringRows.of(entered, self._prompts)
        new = entering.sent(self._row.device)
        dispatch(batch_state.enter_rows, self._row.is_cuda)(self._memory, new)
        for positions, rows in entering.rows_by_positions.items():
            self._backlog.add_prompts(rows, positions)
        if trees := self._trees_of_next_tick:
            self._runner.trees(trees.shape.verify).clear(new.columns_7E[0])
            self._entered += [entry.row for entry in entered]

    # ---- building trees

    @property
    def _runner(self) -> GraphRunner:
        if self._attached is None:
            raise AssertionError("a learned drafter draws on the states an engine keeps: attach it to one")
        return self._attached[0]

    @property
    def _rows(self) -> RowView:
        assert self._attached is not None
        return self._attached[1]

    def _build_trees(self, keys: Sequence[Key], shape: Shape) -> BuiltTrees:
        """Processes new tokens, builds `depth` levels of `width` nodes for every row, and prunes them to the shape."""
        if shape.depth > self._deepest:
            raise ValueError(f"a tree {shape.depth} deep; this drafter was made for at most {self._deepest}")
        count, builder = len(keys), self._builder(shape.width)
        self._calibrate_beta(count)
        self._entered = []
        if self._backlog.most > PASS_SIZES[-1]:
            self._extend_rows(count)
        self._runner.run_segments(self._segments(count, shape, self._backlog))
        self._backlog.clear()
        if self._beta_probe.wants_roots():
            draws = self._draws(min(count, MOST_ROWS))
            self._beta_probe.root(builder.root_logits_Rv, draws, self._memory.ready_R, self._ticks)
        return self._fetch(builder.packed(count, shape.depth), keys, shape)

    def _segments(self, count: int, shape: Shape, backlog: Backlog) -> list[Segment]:
        """The work for `count` rows: draft-extend of the backlog, the levels of the trees, pruning."""
        segments, rows, builder = list[Segment](), self._runner.padded(count), self._builder(shape.width)
        if backlog.most:
            new = next(new for new in PASS_SIZES if new >= backlog.most)
            segments.append(self._extend_segment(rows, new, backlog.pass_size(count, new)))
        roots, level = self._levels(rows, builder)
        return [*segments, roots, *[level] * (shape.depth - 1), self._pruning(rows, builder, shape)]

    def _pruning(self, rows: int, builder: TreeBuilder, shape: Shape) -> Segment:
        trees = self._runner.trees(shape.verify)

        def prune(rows: int) -> None:
            view, ready_R, shared = self._rows, self._memory.ready_R[:rows], None
            if shape.share:  # idle rows must get no part of the verify budget
                ready_R = ready_R & (self._row[:rows] < view.count)
                left_R = view.end_R[:rows] - view.position_R[:rows]
                shared = VerifyBudget(shape.tokens(rows) - rows, left_R, view.remaining_bias, MAX_REMAINING_BIAS)
            builder.prune(rows, shape.depth, ready_R, trees, shared)
            builder.pack(rows, shape.depth, self._memory.ready_R)

        # with a shared budget, padding rows would exceed the room for verification
        role = ("prune", builder.width, shape.depth, shape.verify, shape.share)
        return Segment(role, rows, prune, exactly=shape.share > 0, timed_as=PRUNE)

    def _levels(self, rows: int, builder: TreeBuilder) -> tuple[Segment, Segment]:
        """The segments of the first level and of any other level."""
        roots = Segment(
            ("roots", builder.width),
            rows,
            lambda rows: builder.roots(rows, self._draws(rows), self._beta),
            timed_as=EXTEND,
        )
        level = Segment(
            ("expand", builder.width), rows, lambda rows: builder.expand(rows, self._draws(rows), self._beta)
        )
        return roots, level

    def _builder(self, width: int) -> TreeBuilder:
        width = min(width, self.drafter.config.draft_vocab)
        if width not in self._builders:
            self._builders[width] = TreeBuilder(self._inputs, width, self._deepest)
        return self._builders[width]

    def _draws(self, rows: int) -> DrawKeys:
        """Keys of the roots, as views: work here would repeat at every level."""
        view = self._rows
        parts = (view.seed_R, view.request_R, view.position_R, view.temperature_R)
        return DrawKeys(*(part[:rows] for part in parts))

    def _fetch(self, packed_R3L: Tensor, keys: Sequence[Key], shape: Shape) -> BuiltTrees:
        """Starts the copy of the built trees to the host, which compares them with the verified tokens."""
        if keys != self._keys:  # usually equal to those of the tick before
            self._keys, self._row_of = keys, {key: row for row, key in enumerate(keys)}
        # a copy: on a CPU the next trees are written to the same place
        packed_R3L = packed_R3L if packed_R3L.is_cuda else packed_R3L.clone()
        return BuiltTrees(shape, self._ticks, self._row_of, Reading(packed_R3L))

    # ---- draft-extend

    def _extend_rows(self, count: int) -> None:
        """Draft-extend over all rows in passes of the largest size, as far back as the window reaches."""
        rows, most = self._runner.padded(count), PASS_SIZES[-1]
        for room in self._backlog.pass_sizes(count):
            self._runner.run_segments([self._extend_segment(rows, most, room, INGEST)])
        self._ingested = self._ticks, self._backlog.prompt_positions(count)
        self._backlog.clear()

    def _extend_segment(self, rows: int, most: int, room: float, timed_as: str = EXTEND) -> Segment:
        """A draft-extend pass of at most `most` positions per row, and `room` on average. The largest runs unpadded."""
        many = room == PASS_SIZES[-1]
        return Segment(
            ("extend", most, room), rows, lambda rows: self._extend(rows, most, math.ceil(room * rows)), many, timed_as
        )

    def _extend(self, rows: int, most: int, tokens: int) -> None:
        """Runs the drafter over the next verified positions: at most `most` per row, at most `tokens` in total.

        If more are due, which is possible after requests have left, the last rows get no drafts in this tick.
        """
        view, memory, inputs = self._rows, self._memory, self._inputs.first(rows)
        in_triton = in_gpu_rollout(inputs.g_RD)
        state = ExtendState(view.position_R[:rows], view.count, memory.taken_R[:rows], memory.ready_R[:rows])
        new, source_T = dispatch(layer_kernels.plan_extend, in_triton)(state, most, tokens, self._window)
        states_TF = memory.states_RWF.flatten(0, 1).index_select(0, source_T)
        next_T = memory.tokens_RW.flatten().index_select(0, source_T)
        newest_RD = self.drafter.extend(inputs.ring, next_T, states_TF, new, inputs.embed_VD)
        dispatch(layer_kernels.finish_extend, in_triton)(state, new, newest_RD, inputs.g_RD, pdl=True)

    # ---- costs

    @torch.no_grad()
    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        """Captures and times the drafter's graphs: the initial data of the cost model."""
        self._enter([Entered(row=0, position=0, token=0, prefix=())])  # a dummy entry compiles the kernel
        runner, builder = self._runner, self._builder(1)
        measured = []
        for size in sizes:
            rows, new = runner.padded(size), PASS_SIZES[0 if size < sizes[-1] else 2]
            roots, level = self._levels(rows, builder)
            begun = runner.time(self._extend_segment(rows, new, new)) + runner.time(roots)
            measured += [Measured(EXTEND, rows * new, begun), Measured(DRAFT, rows, runner.time(level))]
        found = [self._measure_extend(size) for size in {sizes[0], sizes[-1]}]
        if self._row.is_cuda:  # on a CPU it counts as part of plain ticks
            found += [self._measure_keeping(size) for size in {sizes[0], sizes[-1]}]
        return measured + found

    def _measure_keeping(self, size: int) -> Measured:
        """The cost of keeping hidden states of all rows. Writes at position 0, before any request."""
        rows, width = self._runner.padded(size), self._memory.states_RWF.shape[2] // len(self.taps)
        row_R = self._row[:rows]
        taps = [torch.zeros((rows, width), dtype=self._policy.embed.dtype, device=row_R.device) for _ in self.taps]
        kept = StatePlaces(torch.zeros_like(row_R), torch.zeros_like(row_R, dtype=torch.int32), row_R[:, None])
        return Measured(KEEP, rows, self._runner.time(Segment("keep", rows, lambda _: self.keep(taps, kept))))

    def _measure_extend(self, size: int) -> Measured:
        """The cost of a draft-extend pass per position. Costs of other batch sizes are interpolated."""
        rows, most = self._runner.padded(size), PASS_SIZES[-1]
        seconds = self._runner.time(self._extend_segment(rows, most, most))
        return Measured(CATCH_UP, rows, seconds / most)

    @torch.no_grad()
    def compile(self, shapes: Sequence[Shape]) -> None:
        """Compiles the kernels before the first request: each takes half a second.

        Kernels depend on the number of rows. Pruning depends on it only with a shared verify budget.
        """
        dispatch(compiling.compile_ahead, self._row.is_cuda)(partial(self._run_idle, shapes))

    def _run_idle(self, shapes: Iterable[Shape]) -> None:
        """Launches all kernels over idle rows, without effect."""
        runner, most = self._runner, len(self._row)
        shapes = [shape for shape in shapes if self.name in shape.drafters]
        builder_of = {shape: self._builder(shape.width) for shape in shapes}
        for rows in sorted({runner.padded(rows) for rows in range(1, most + 1)}):
            self._extend_segment(rows, PASS_SIZES[0], MEAN_SIZES[0]).work(rows)
            for builder in {builder for builder in builder_of.values() if rows * builder.width <= _MOST_NODES}:
                for level in self._levels(rows, builder):
                    level.work(rows)
        self._move([(0, 0)])
        roots_Rv, vocab = self._builder(1).root_logits_Rv, self.drafter.token_of_draft_v
        self._beta_probe.run_idle(roots_Rv, self._draws(1), self._memory.ready_R, vocab)
        for shape, builder in builder_of.items():
            for halved in range(most.bit_length() if shape.share else 1):
                part = self._pruning(runner.padded(most >> halved), builder, shape)
                part.work(part.rows)

    @torch.no_grad()
    def ready(self, shape: Shape, rows: int) -> None:
        """Captures the graphs of a tick that follows a tick of the same shape."""
        if self.name in shape.drafters:
            before = Backlog(self._window, self._deepest + 1)
            before.add_written(shape.depth + 1, shape.most_tokens)
            self._runner.ready(self._segments(rows, shape, before))

    # ---- draft β

    def _calibrate_beta(self, count: int) -> None:
        self._beta_probe.read()
        roots = self._beta_probe.roots
        if roots is not None and roots.tick < self._ticks and len(roots.logits_Nv) <= count:
            position_N = roots.draws.position_N - 1  # positions of the hidden states that the tokens were drawn from
            token_N = self._memory.tokens_RW[self._row[: len(position_N)], position_N % self._window]
            self._beta_probe.look(token_N, self.drafter.token_of_draft_v)
        self._beta.fill_(self.beta)
