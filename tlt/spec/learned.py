"""The learned drafter at work: keeps the policy's newest states of every row, and grows draft trees from them.

What always holds: states are kept whether or not anybody speculates, so that drafting can start in the middle of an
answer without touching the policy's cache; nothing here is read by the policy. All of it lies on the device by row of
the batch and moves with the row; how far a row was taken in is known there too, so that trees for the next tick can be
grown behind a verification whose tokens nobody has read yet.
"""
# R rows, W window, S positions, F = 3·D states, w width of the trees, L nodes grown, v draft tokens

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
from tlt.model.device import upload_columns
from tlt.model.linear import in_gpu_rollout, reads_quantized
from tlt.model.transformer import Transformer
from tlt.policy import Policy
from tlt.spec.backlog import ROOM, TAKEN_IN, Backlog
from tlt.spec.candidates import MOST_ROWS, BetaProbe, DrawKeys, fetch
from tlt.spec.costs import CATCH_UP, DRAFT, EXTEND, INGEST, KEEP, PRUNE, Measured
from tlt.spec.drafter import Drafter, Entered, GraphRunner, HiddenStateSink, Piece, RowView, Segment, StartedTrees
from tlt.spec.eagle import Eagle, gather_taps
from tlt.spec.eagle_files import open_drafter
from tlt.spec.prompt_states import PromptStates, Recalled
from tlt.spec.record import DraftRecord, read_record
from tlt.spec.shape import MAX_REMAINING_BIAS, Draft, Shape
from tlt.spec.tree_builder import BuiltTrees, DraftInputs, TreeBuilder
from tlt.types import Key

_MOST_NODES = 2048  # of a level, of all rows together: so many nobody grows


class LearnedDrafting(Drafter):
    """An Eagle as a drafter, and the sink of the hidden states that it reads."""

    name = "eagle"
    on_device = learned = True

    def __init__(
        self, drafter: Eagle, policy: Transformer, rows: int, deepest: int = 8, *, quantized: bool = False
    ) -> None:
        """`quantized`: what drafts are computed with is read in 8 bits, on a GPU that can."""
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
        head_is_light = self._quantized and ever_quantized(self._head_vD.shape[0], hidden, gated=False)
        self._quantized_head = QuantizedMatrix.of(self._head_vD.detach()) if head_is_light else None
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
        self._keys: Sequence[Key] = ()  # whom trees were grown for last, row by row …
        self._row_of: Mapping[Key, int] = {}  # … and in which row
        self._row = torch.arange(rows, device=device)
        self._runner: GraphRunner | None = None
        self._view: RowView | None = None
        self._backlog = Backlog(window, at_once=deepest + 1)
        self._ingested: tuple[int, float] | None = None  # since last asked: tick, prompt positions per row
        self._ticks = 0
        self._started_trees: BuiltTrees | None = None
        self._entered: list[int] = []  # rows that requests came into since these trees were grown
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
        """The weight of its own opinion against the shared noise, fitted to what was verified."""
        return self._beta_probe.beta_calibrator.beta

    def late(self, rows: int) -> bool:
        """Whether it must extend first; a few positions are ingested with the first level of the trees."""
        return self._backlog.late(rows)

    def lag(self, rows: int) -> int:
        return self._backlog.before(rows)

    @property
    def arrived(self) -> int:
        return self._backlog.arrived

    @property
    def capture_s(self) -> float:
        return self._attached_runner().capture_s

    # ---- weights that change

    @torch.no_grad()
    def policy_changed(self) -> None:
        """States of the old policy are of no use, and its head moved."""
        self._prompts.clear()
        self._copy_head()

    def _copy_head(self) -> None:
        """What names a reduced vocabulary is copied afresh, where graphs look for it."""
        if self._head_vD is not self._policy.head_weight and self.drafter.own_head_vD is None:
            self.drafter.head_rows(self._policy.head_weight, out=self._head_vD)
        if self._quantized_head is not None:
            self._quantized_head.requantize()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Another version of the drafter, between two ticks. Touches only its own tensors; the same version again is
        nothing. What it had taken in with the old weights is taken in again from the states kept."""
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
        """Ingests what plain ticks wrote, as far back as the window reaches."""
        if self.late(len(keys)):
            self._take_in(len(keys))

    def ingested(self) -> float:
        ingested, self._ingested = self._ingested, None
        return ingested[1] if ingested is not None and ingested[0] == self._ticks else 0.0

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        trees = self.start_trees(keys, shape)
        return [trees.draft(key) for key in keys]

    @torch.no_grad()
    def start_trees(self, keys: Sequence[Key], shape: Shape) -> StartedTrees:
        """Those grown behind the last verification, if they were grown for this shape."""
        started_trees = self._started_trees
        if started_trees is None or started_trees.shape != shape or started_trees.tick != self._ticks:
            started_trees = self._started_trees = self._grow(keys, shape)
        started_trees.cleared.update(keys[row] for row in self._entered)
        return started_trees

    # ---- the sink of hidden states

    def attach(self, runner: GraphRunner) -> None:
        self._runner, self._view = runner, runner.view()

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
        self._backlog.wrote(steps, each)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        source_E, target_E = upload_columns([*np.array(moves).T], self._row.device)
        ring = self._inputs.ring
        rows = [*self._memory.rows, ring.k_RKWd, ring.v_RKWd, self._inputs.g_RD]
        if self._started_trees is not None and self._started_trees.tick == self._ticks:
            rows += self._attached_runner().trees(self._started_trees.shape.verify).parts
        dispatch(batch_state.move_rows, self._row.is_cuda)(rows, source_E, target_E)

    def _enter(self, entered: Sequence[Entered]) -> None:
        """Of each is known what was kept of its prefix, at best; no tree was grown. All at once: hundreds enter when a
        rollout begins, and what is launched for each of them would hold the first ticks up."""
        recalled = Recalled.of(entered, self._prompts)
        new = recalled.sent(self._row.device)
        dispatch(batch_state.enter_rows, self._row.is_cuda)(self._memory, new)
        for positions, rows in recalled.rows_by_positions.items():
            self._backlog.came(rows, positions)
        if self._started_trees is not None and self._started_trees.tick == self._ticks:
            self._attached_runner().trees(self._started_trees.shape.verify).clear(new.columns_7E[0])
            self._entered += [entry.row for entry in entered]

    # ---- growing

    def _attached_runner(self) -> GraphRunner:
        if self._runner is None:
            raise AssertionError("a learned drafter draws on the states an engine keeps: attach it to one")
        return self._runner

    @property
    def _rows(self) -> RowView:
        assert self._view is not None
        return self._view

    def _grow(self, keys: Sequence[Key], shape: Shape) -> BuiltTrees:
        """Takes in what is new, grows `depth` levels of `width` nodes for every row, and prunes them to the shape."""
        if shape.depth > self._deepest:
            raise ValueError(f"a tree {shape.depth} deep; this drafter was made for at most {self._deepest}")
        runner, rows = self._attached_runner(), self._attached_runner().padded(len(keys))
        self._calibrate_beta(len(keys))
        self._entered = []
        if self._backlog.most > TAKEN_IN[-1]:
            self._take_in(len(keys))
        builder = self._builder(min(shape.width, self.drafter.config.draft_vocab))
        parts = self._parts(len(keys), builder, shape.depth, self._backlog)
        runner.run_segments([*parts, self._pruning(rows, builder, shape)])
        packed_R3L = builder.packed(rows, shape.depth)
        self._backlog.clear()
        if self._beta_probe.wants_roots():
            draws = self._draws(min(len(keys), MOST_ROWS))
            self._beta_probe.root(builder.root_logits_Rv, draws, self._memory.ready_R, self._ticks)
        return self._fetch(packed_R3L[: len(keys)], keys, shape)

    def _pruning(self, rows: int, builder: TreeBuilder, shape: Shape) -> Segment:
        trees = self._attached_runner().trees(shape.verify)

        def prune(rows: int) -> None:
            view, ready_R, shared = self._rows, self._memory.ready_R[:rows], None
            if shape.share:  # idle rows must take nothing of it
                ready_R = ready_R & (self._row[:rows] < view.count)
                left_R = view.end_R[:rows] - view.position_R[:rows]
                shared = VerifyBudget(shape.tokens(rows) - rows, left_R, view.remaining_bias, MAX_REMAINING_BIAS)
            builder.prune(rows, shape.depth, ready_R, trees, shared)
            builder.pack(rows, shape.depth, self._memory.ready_R)

        # where requests share, more rows would share more than there is room for when they are verified
        role = ("prune", builder.width, shape.depth, shape.verify, shape.share)
        return Segment(role, rows, prune, exactly=shape.share > 0, timed_as=PRUNE)

    def _parts(self, count: int, builder: TreeBuilder, depth: int, backlog: Backlog) -> list[Segment]:
        parts, rows = list[Segment](), self._attached_runner().padded(count)
        if backlog.most:
            new = next(new for new in TAKEN_IN if new >= backlog.most)
            parts.append(self._taking_in(rows, new, backlog.room(count, new)))
        roots, level = self._levels(rows, builder)
        return [*parts, roots, *[level] * (depth - 1)]

    def _levels(self, rows: int, builder: TreeBuilder) -> tuple[Segment, Segment]:
        """The first level, and any other."""
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
        if width not in self._builders:
            self._builders[width] = TreeBuilder(self._inputs, width, self._deepest)
        return self._builders[width]

    def _draws(self, rows: int) -> DrawKeys:
        """Keys of the roots. Nothing is computed: every level would do it again."""
        view = self._rows
        parts = (view.seed_R, view.request_R, view.position_R, view.temperature_R)
        return DrawKeys(*(part[:rows] for part in parts))

    def _fetch(self, packed_R3L: Tensor, keys: Sequence[Key], shape: Shape) -> BuiltTrees:
        """What was grown, on its way to the host, which learns from it which guesses were right."""
        landed, arrived = fetch(packed_R3L)
        if keys != self._keys:  # mostly they are those of the tick before
            self._keys, self._row_of = keys, {key: row for row, key in enumerate(keys)}
        return BuiltTrees(shape, self._ticks, self._row_of, landed.numpy(), arrived)

    # ---- taking in what was written

    def _take_in(self, count: int) -> None:
        """All rows, many positions at a time, as far back as the window reaches."""
        runner, rows, most = self._attached_runner(), self._attached_runner().padded(count), TAKEN_IN[-1]
        for room in self._backlog.rooms(count):
            runner.run_segments([self._taking_in(rows, most, room, INGEST)])
        self._ingested = self._ticks, self._backlog.newly(count)
        self._backlog.clear()

    def _taking_in(self, rows: int, most: int, room: float, timed_as: str = EXTEND) -> Segment:
        """At most so many positions of a row, and `room` on average. Where these are many, no row must be idle."""
        many = room == TAKEN_IN[-1]
        return Segment(
            ("extend", most, room), rows, lambda rows: self._extend(rows, most, math.ceil(room * rows)), many, timed_as
        )

    def _extend(self, rows: int, most: int, tokens: int) -> None:
        """Runs the drafter over the next positions that have become certain, at most so many of each row, and of all
        rows: where there are more, as is possible when others have just left, the last rows have no drafts for once."""
        view, memory, inputs = self._rows, self._memory, self._inputs.first(rows)
        in_triton = in_gpu_rollout(inputs.g_RD)
        state = ExtendState(view.position_R[:rows], view.count, memory.taken_R[:rows], memory.ready_R[:rows])
        new, source_T = dispatch(layer_kernels.plan_extend, in_triton)(state, most, tokens, self._window)
        states_TF = memory.states_RWF.flatten(0, 1).index_select(0, source_T)
        next_T = memory.tokens_RW.flatten().index_select(0, source_T)
        newest_RD = self.drafter.extend(inputs.ring, next_T, states_TF, new, inputs.embed_VD)
        dispatch(layer_kernels.finish_extend, in_triton)(state, new, newest_RD, inputs.g_RD, pdl=True)

    # ---- what it costs

    @torch.no_grad()
    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        """Captured now: what a tuner wants to know beforehand."""
        self._enter([Entered(row=0, position=0, token=0, prefix=())])  # nobody, into an empty row: that compiles it
        runner, builder = self._attached_runner(), self._builder(1)
        measured = []
        for size in sizes:
            rows, new = runner.padded(size), TAKEN_IN[0 if size < sizes[-1] else 2]
            roots, level = self._levels(rows, builder)
            begun = runner.time(self._taking_in(rows, new, new)) + runner.time(roots)
            measured += [Measured(EXTEND, rows * new, begun), Measured(DRAFT, rows, runner.time(level))]
        found = [self._measure_catching_up(size) for size in {sizes[0], sizes[-1]}]
        if self._row.is_cuda:  # elsewhere it counts as a part of plain ticks
            found += [self._measure_keeping(size) for size in {sizes[0], sizes[-1]}]
        return measured + found

    def _measure_keeping(self, size: int) -> Measured:
        """States of all rows, at a position of requests that are not there yet."""
        rows, width = self._attached_runner().padded(size), self._memory.states_RWF.shape[2] // len(self.taps)
        row_R = self._row[:rows]
        taps = [torch.zeros((rows, width), dtype=self._policy.embed.dtype, device=row_R.device) for _ in self.taps]
        kept = StatePlaces(torch.zeros_like(row_R), torch.zeros_like(row_R, dtype=torch.int32), row_R[:, None])
        return Measured(
            KEEP, rows, self._attached_runner().time(Segment("keep", rows, lambda _: self.keep(taps, kept)))
        )

    def _measure_catching_up(self, size: int) -> Measured:
        """The cost of batches in between lies in between."""
        rows, most = self._attached_runner().padded(size), TAKEN_IN[-1]
        seconds = self._attached_runner().time(self._taking_in(rows, most, most))
        return Measured(CATCH_UP, rows, seconds / most)

    @torch.no_grad()
    def compile(self, shapes: Sequence[Shape]) -> None:
        """Before any request comes, so that no rollout waits for a compiler, half a second for a kernel. Which ones
        run depends on how many rows there are; pruning only where they share."""
        dispatch(compiling.compile_ahead, self._row.is_cuda)(partial(self._run_idle, shapes))

    def _run_idle(self, shapes: Iterable[Shape]) -> None:
        """Takes nothing in, grows and prunes nothing, moves a row to where it is."""
        runner, most = self._attached_runner(), len(self._row)
        shapes = [shape for shape in shapes if self.name in shape.drafters]
        grove_of = {shape: self._builder(min(shape.width, self.drafter.config.draft_vocab)) for shape in shapes}
        for rows in sorted({runner.padded(rows) for rows in range(1, most + 1)}):
            self._taking_in(rows, TAKEN_IN[0], ROOM[0]).work(rows)
            for builder in {builder for builder in grove_of.values() if rows * builder.width <= _MOST_NODES}:
                for level in self._levels(rows, builder):
                    level.work(rows)
        self._move([(0, 0)])
        roots_Rv, vocab = self._builder(1).root_logits_Rv, self.drafter.token_of_draft_v
        self._beta_probe.run_idle(roots_Rv, self._draws(1), self._memory.ready_R, vocab)
        for shape, builder in grove_of.items():
            for halved in range(most.bit_length() if shape.share else 1):
                part = self._pruning(runner.padded(most >> halved), builder, shape)
                part.work(part.rows)

    @torch.no_grad()
    def ready(self, shape: Shape, rows: int) -> None:
        """As in a tick that comes after one of the same shape."""
        if self.name in shape.drafters:
            builder = self._builder(min(shape.width, self.drafter.config.draft_vocab))
            before = Backlog(self._window, self._deepest + 1)
            before.wrote(shape.depth + 1, shape.most_tokens)
            padded = self._attached_runner().padded(rows)
            self._attached_runner().ready(
                [*self._parts(rows, builder, shape.depth, before), self._pruning(padded, builder, shape)]
            )

    # ---- sharpness

    def _calibrate_beta(self, count: int) -> None:
        self._beta_probe.read()
        roots = self._beta_probe.roots
        if roots is not None and roots.tick < self._ticks and len(roots.logits_Nv) <= count:
            position_N = roots.draws.position_N - 1  # of the states their successors were drawn from
            token_N = self._memory.tokens_RW[self._row[: len(position_N)], position_N % self._window]
            self._beta_probe.look(token_N, self.drafter.token_of_draft_v)
        self._beta.fill_(self.beta)
