"""Speculation as the engine calls it: the shape of each tick, its draft trees, and what their verification showed.

Owns the drafters and the shape policy; knows tokens and seconds, computes no tensors. What always holds: the emitted
tokens are those of plain decoding; drafters get begin and end in the order of events, before they draft.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from tlt.errors import ConfigError
from tlt.spec.acceptance import AcceptResult, Alarm, rank_hits_of
from tlt.spec.ahead import MOST_CHUNK_TOKENS, AheadTexts, ChunkPolicy, TurnRate
from tlt.spec.costs import INDEX, LOOKUP, Measured, TickTimes
from tlt.spec.drafter import Drafter, HiddenStateSink, Running, StartedTrees
from tlt.spec.shape import MOST_NODES, OFF, Draft, Shape, merge, share_out, shown
from tlt.spec.shape_policy import Outcome, ShapePolicy, TunerReport, infinite_ticks
from tlt.types import Key, SamplingParams
from tlt.watch.trace import MOST_SPANS

_MAX_DEFERRED = 4096  # notifications that wait: completions of one token may end before any draft is asked for
_COMPARED_ROWS = 8  # rows per tick whose drafts are compared with the emitted tokens, drafter by drafter


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Shapes chosen and tokens accepted since the start."""

    ticks: Mapping[tuple[int, Shape], int]  # (running requests when the shape was chosen, shape) → ticks
    switches: int  # ticks whose shape differs from the tick before
    verifies: int  # of single requests, those of written-ahead text left out
    accepted: int  # draft tokens of these
    drafting_s: float  # host time spent on drafts
    one_off_s: float  # one-off work for speculation: draft-extends and captures
    alarms: tuple[Alarm, ...]
    tuner: TunerReport | None  # None: the shape policy keeps no report
    timed: Mapping[tuple[int, Shape], tuple[int, float]] = field(default_factory=dict)  # timed ticks, seconds
    spans: tuple[tuple[float, int, str], ...] = ()  # from this reading of the clock on: requests, shape; the newest
    accepted_by: Mapping[str, int] = field(default_factory=dict)  # drafters of the shape, joined by "+" → draft tokens
    ahead_compared: int = 0  # written-ahead tokens, up to each request's first difference
    ahead_turned: int = 0  # first differences

    @property
    def accept_length(self) -> float:
        """Tokens per verify, pooled."""
        return 1.0 + self.accepted / max(1, self.verifies)

    @property
    def off_share(self) -> float:
        """Fraction of the ticks that were plain."""
        off = sum(count for (_, shape), count in self.ticks.items() if shape.off)
        return off / max(1, sum(self.ticks.values()))

    def since(self, before: "SpeculationReport") -> "SpeculationReport":
        """The part after an earlier report."""
        return replace(
            self,
            ticks=dict(Counter(self.ticks) - Counter(before.ticks)),
            switches=self.switches - before.switches,
            verifies=self.verifies - before.verifies,
            accepted=self.accepted - before.accepted,
            drafting_s=self.drafting_s - before.drafting_s,
            one_off_s=self.one_off_s - before.one_off_s,
            alarms=self.alarms[len(before.alarms) :],
            tuner=self.tuner.since(before.tuner) if self.tuner and before.tuner else self.tuner,
            timed=_timed_since(self.timed, before.timed),
            spans=tuple(span for span in self.spans if not before.spans or span > before.spans[-1]),
            accepted_by=dict(Counter(self.accepted_by) - Counter(before.accepted_by)),
            ahead_compared=self.ahead_compared - before.ahead_compared,
            ahead_turned=self.ahead_turned - before.ahead_turned,
        )


def _timed_since(
    now: Mapping[tuple[int, Shape], tuple[int, float]], before: Mapping[tuple[int, Shape], tuple[int, float]]
) -> dict[tuple[int, Shape], tuple[int, float]]:
    found = {}
    for which, (ticks, seconds) in now.items():
        earlier, earlier_s = before.get(which, (0, 0.0))
        if ticks > earlier:
            found[which] = (ticks - earlier, seconds - earlier_s)
    return found


class SpeculationCounts:
    """What a report is made of."""

    def __init__(self) -> None:
        self.verifies = self.accepted = 0
        self.drafting_s = self.one_off_s = 0.0
        self.alarms: list[Alarm] = []
        self._last: Shape | None = None  # of the tick before, if requests ran in it
        self._plain: Counter[int] = Counter()  # running requests → plain ticks
        self._ticks: Counter[tuple[int, Shape]] = Counter()  # the others
        self._timed: dict[tuple[int, Shape], tuple[int, float]] = {}
        self._spans: deque[tuple[float, int, str]] = deque(maxlen=MOST_SPANS)
        self._accepted_by: Counter[str] = Counter()
        self._switches = 0

    def begins(self, running: int, shape: Shape) -> None:
        """A tick begins."""
        if not running:
            self._last = None
            return
        if shape.off:
            self._plain[running] += 1
        else:
            self._ticks[running, shown(shape)] += 1
        if shape is not self._last:
            if shape != self._last:
                self._switches += self._last is not None
                self._spans.append((time.perf_counter(), running, str(shown(shape))))
            self._last = shape

    def time(self, running: int, shape: Shape, seconds: float | None) -> None:
        """A tick took this long; None: it was not timed."""
        if seconds is not None:
            which = running, shown(shape)
            ticks, total_s = self._timed.get(which, (0, 0.0))
            self._timed[which] = (ticks + 1, total_s + seconds)

    def verified(self, shape: Shape, verifies: int, accepted: int) -> None:
        self._accepted_by["+".join(shape.drafters)] += accepted
        if not shape.ahead:
            self.verifies += verifies
            self.accepted += accepted

    def report(self, tuner: TunerReport | None, turns: TurnRate) -> SpeculationReport:
        return SpeculationReport(
            ticks={**self._ticks, **{(running, OFF): ticks for running, ticks in self._plain.items()}},
            switches=self._switches,
            verifies=self.verifies,
            accepted=self.accepted,
            drafting_s=self.drafting_s,
            one_off_s=self.one_off_s,
            alarms=tuple(self.alarms),
            tuner=tuner,
            timed=dict(self._timed),
            spans=tuple(self._spans),
            accepted_by=dict(self._accepted_by),
            ahead_compared=turns.tokens,
            ahead_turned=turns.turns,
        )


class Speculation:
    """The interface that the engine calls. The defaults are plain decoding."""

    state_sink: HiddenStateSink = HiddenStateSink()  # receives the policy's hidden states
    deepest = 0  # largest depth of any shape that will be chosen
    widest = 1  # largest tree of any shape that will be chosen, in nodes

    @property
    def alarms(self) -> Sequence[Alarm]:
        """All alarms so far, oldest first."""
        return ()

    @property
    def turn_rate(self) -> float:
        """Fraction of written-ahead tokens that differ from the policy's, among those whose predecessors all agree."""
        return 1.0

    def attach(self, remaining_ticks: Callable[[], float], running: Callable[[], Running]) -> None:
        """Called once, by the engine. `remaining_ticks` bounds the plain ticks left; `running` lists what decodes."""

    def compile(self, shapes: Sequence[Shape]) -> None:
        """Compiles the drafters' kernels for these shapes."""

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        """Measures the drafters' runs on the device for these numbers of rows."""
        return []

    def ready(self, shape: Shape, rows: int) -> None:
        """Captures the drafters' graphs for this shape and so many rows."""

    def policy_changed(self) -> None:
        """The policy's tensors hold another version from the next tick on."""

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Another version of the learned drafter, between two ticks; the same version again changes nothing."""
        raise ValueError("the engine does not speculate; expected a learned drafter to load weights into")

    def begin(
        self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams, written: Sequence[int] = ()
    ) -> None:
        """A request was submitted; `written`: a guess at its completion."""

    def end(self, key: Key, completion: Sequence[int]) -> None:
        """A request is complete, or failed."""

    def rollout_ended(self, lengths: Sequence[int] | None) -> None:
        """No request is left: see `ShapePolicy`."""

    def choose(self, running: int) -> Shape:
        """The shape of the tick that begins now."""
        return OFF

    def propose(
        self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> Sequence[Draft] | None:
        """A draft for each row. None: the drafts lie on the device, in the trees that the policy verifies."""
        raise AssertionError("plain decoding drafts nothing")

    def prepare(self, keys: Sequence[Key]) -> None:
        """Behind a launched verification: chooses the next tick's shape, and drafts where that needs no tokens read."""

    def needs_no_tokens(self, shape: Shape) -> bool:
        """Whether trees of this shape can be drafted before the newest tokens are read."""
        return False

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], times: TickTimes, context: float = 0.0) -> None:
        """The oldest unverified tick emitted these tokens, row by row; none: the row's request was over.

        `context`: mean context length of a row, in positions.
        """

    def decoded(self, running: int, times: TickTimes, context: float = 0.0) -> None:
        """A plain tick took this long."""

    def report(self) -> SpeculationReport | None:
        """None without speculation."""
        return None


def compared_rows(rows: int, verifies: int) -> range:
    """The rows of a tick to compare with their drafts. They rotate: comparing all takes the host too long."""
    stride = -(-rows // _COMPARED_ROWS)
    return range(verifies % stride, rows, stride)


class LifecycleQueue:
    """Deferred begin and end notifications from the engine to the drafters, in the order of events.

    Hundreds of requests come at once when a rollout begins. The notifications wait until `flush`, so that the device
    does not wait for them.
    """

    def __init__(self, drafters: Sequence[Drafter], set_max_len: Callable[[int], None]) -> None:
        """`set_max_len` gets the token limit of each request."""
        self._drafters = drafters
        self._set_max_len = set_max_len
        self._deferred: deque[Callable[[], None]] = deque()
        self._completions: dict[Key, int] = {}  # running → number: a key may come again for another completion
        self._begun = 0  # completions so far

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._deferred.append(partial(self._begin, key, prompt_id, prompt, params))

    def end(self, key: Key, completion: Sequence[int]) -> None:
        """`completion` must not change from now on."""
        self._deferred.append(partial(self._end, key, completion))
        if len(self._deferred) > _MAX_DEFERRED:
            self.flush()

    def flush(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def number(self, key: Key) -> int | None:
        """The number of the running completion; None: it never began."""
        return self._completions.get(key)

    def _begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._completions[key] = self._begun
        self._begun += 1
        self._set_max_len(params.max_tokens)
        for drafter in self._drafters:
            drafter.begin(key, prompt_id, prompt, params)

    def _end(self, key: Key, completion: Sequence[int]) -> None:
        self._completions.pop(key, None)
        for drafter in self._drafters:
            drafter.end(key, completion)


@dataclass(frozen=True, slots=True)
class Proposed:
    """The drafts of a tick, row by row, one per drafter, and their cost."""

    keys: Sequence[Key]
    drafting_s: float  # host seconds of all drafters
    versions: tuple[int, ...]  # of the drafters' weights
    host_parts: Mapping[str, float] = field(default_factory=dict)  # seconds of drafters on the host: `INDEX`, `LOOKUP`
    lag: int = 0  # positions per row that the draft-extend before ingested on the device
    ingested: float = 0.0  # prompt positions per row that it ingested for new requests alone
    parts: Sequence[tuple[Draft, ...]] = ()
    started_trees: StartedTrees | None = None  # instead of `parts`: the trees of one drafter, on the device

    def of(self, row: int) -> tuple[Draft, ...]:
        return (self.started_trees.draft(self.keys[row]),) if self.started_trees else self.parts[row]


@dataclass(frozen=True, slots=True)
class TickFeedback:
    """A verified tick whose drafts are not yet compared with the emitted tokens."""

    shape: Shape
    proposed: Proposed
    emitted: Sequence[Sequence[int]]
    completions: Mapping[int, int | None]  # row to compare → number of its completion; None: it never began
    times: TickTimes
    context: float

    def results(self) -> list[AcceptResult]:
        """One per row that had a request."""
        results = [_NOT_COMPARED[len(tokens)] for tokens in self.emitted]
        for row in self.completions:
            results[row] = self._compared(row)
        return [result for result in results if result.accepted >= 0]

    def _compared(self, row: int) -> AcceptResult:
        tokens = self.emitted[row]
        rank_hits = tuple(rank_hits_of(draft, tokens, self.shape) for draft in self.proposed.of(row))
        return AcceptResult(len(tokens) - 1, rank_hits, self.completions[row])


# results of rows that are not compared, by emitted tokens: there are hundreds in a tick; no tokens: no request
_NOT_COMPARED = tuple(AcceptResult(tokens - 1, ()) for tokens in range(MOST_NODES + 1))


class Speculating(Speculation):
    """Drafters whose branches are merged into one tree per request, in the shape that the shape policy chooses."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        shape_policy: ShapePolicy,
        *,
        deepest: int = 0,
        widest: int = 1,
        most_chunk_tokens: int = MOST_CHUNK_TOKENS,
    ) -> None:
        """`most_chunk_tokens`: nodes of a tick that verifies written-ahead text, at most."""
        on_device = [drafter for drafter in drafters if drafter.on_device]
        if len(on_device) > 1:
            names = sorted(drafter.name for drafter in on_device)
            raise ConfigError(f"drafters {names} run on the device; expected one at most: an engine feeds one sink")
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._on_device = on_device[0] if on_device else Drafter()  # in no shape: its name is empty
        self._chunks = ChunkPolicy(most_chunk_tokens)
        self._texts = AheadTexts(self._chunks.turns)
        self._shape_policy = shape_policy
        self.state_sink = self._on_device.state_sink
        self.deepest, self.widest = deepest, widest
        self._following: Shape | None = None  # of the next tick, where it was chosen behind a launched verification
        self._proposed: deque[Proposed] = deque()  # of the ticks in flight, oldest first
        self._lifecycle = LifecycleQueue(drafters, shape_policy.set_max_len)
        self._feedback: TickFeedback | None = None  # of the newest verified tick, until it is compared
        self._remaining_ticks: Callable[[], float] = infinite_ticks
        self._running: Callable[[], Running] = tuple
        self._arrived = 0  # prompt positions of new requests that the shape policy has observed
        self._counts = SpeculationCounts()

    @property
    def turn_rate(self) -> float:
        return self._chunks.turns.rate

    @property
    def alarms(self) -> Sequence[Alarm]:
        self._learn()
        return self._counts.alarms

    def attach(self, remaining_ticks: Callable[[], float], running: Callable[[], Running]) -> None:
        self._remaining_ticks, self._running = remaining_ticks, running

    def compile(self, shapes: Sequence[Shape]) -> None:
        for drafter in self._drafters.values():
            drafter.compile(shapes)

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        return [measured for drafter in self._drafters.values() for measured in drafter.measure(sizes)]

    def ready(self, shape: Shape, rows: int) -> None:
        for drafter in self._drafters.values():
            drafter.ready(shape, rows)

    def policy_changed(self) -> None:
        self._chunks.turns.policy_changed()
        for drafter in self._drafters.values():
            drafter.policy_changed()

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        learned = [drafter for drafter in self._drafters.values() if drafter.learned]
        if len(learned) != 1:
            raise ValueError(f"drafters are {sorted(self._drafters)}; expected a learned one to load weights into")
        (drafter,) = learned
        if version != drafter.version:
            self._learn()
            drafter.load(weights, version)
            self._shape_policy.drafter_changed(drafter.name)

    def begin(
        self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams, written: Sequence[int] = ()
    ) -> None:
        if written:  # after its first difference it still serves as an earlier completion of the prompt
            self._texts.give(key, written, params.max_tokens)
            self._lifecycle.begin(key, prompt_id, prompt, params)
            self._lifecycle.end(key, written)
        self._lifecycle.begin(key, prompt_id, prompt, params)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        self._texts.end(key, completion)
        self._lifecycle.end(key, completion)

    def rollout_ended(self, lengths: Sequence[int] | None) -> None:
        self._learn()
        self._shape_policy.rollout_ended(lengths)

    # ---- before a tick

    def choose(self, running: int) -> Shape:
        following, self._following = self._following, None
        shape = following if running and following is not None else self._choose(running)
        self._counts.begins(running, shape)
        return shape

    def _choose(self, running: int) -> Shape:
        self._learn()
        if not running:
            return OFF
        self._lifecycle.flush()
        if left := self._texts.left(self._running):
            chunk = self._chunks.choose(running, left, self._shape_policy.prices(running))
            if chunk is not None:
                return chunk
        return self._shape_policy.choose(running, self._on_device.lag(running))

    def needs_no_tokens(self, shape: Shape) -> bool:
        return shape.drafters == (self._on_device.name,)

    def prepare(self, keys: Sequence[Key]) -> None:
        shape = self._following = self._choose(len(keys))
        if self._on_device.name in shape.drafters and not self._on_device.lag(len(keys)):
            self._on_device.start_trees(keys, shape)  # otherwise it extends first, in `propose`, where that is timed

    def propose(
        self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> Sequence[Draft] | None:
        self._lifecycle.flush()
        if shape.ahead:
            started = time.perf_counter()
            drafts = self._texts.draft(keys, completions, shape)
            self._proposed.append(Proposed(keys, time.perf_counter() - started, self._versions))
        else:
            proposed = self._ask(keys, completions, shape)
            self._proposed.append(proposed)
            if proposed.started_trees is not None:
                return None
            drafts = [_joined(row, shape.verify - 1) for row in proposed.parts]
        return share_out(drafts, shape.tokens(len(keys)) - len(keys)) if shape.share else drafts

    def _ask(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> Proposed:
        """The drafts of the shape's drafters. The device extends and drafts while those on the host do."""
        on_host = [self._drafters[name] for name in shape.drafters if name != self._on_device.name]
        device = self._on_device if len(on_host) < len(shape.drafters) else Drafter()
        lag = device.lag(len(keys))
        device.extend(keys, completions, shape)
        started = time.perf_counter()
        for drafter in on_host:
            drafter.extend(keys, completions, shape)
        extended = time.perf_counter()
        trees = device.start_trees(keys, shape)
        looked_up = time.perf_counter()
        drafts = {drafter.name: drafter.draft(keys, completions, shape) for drafter in on_host}
        host_parts = {INDEX: extended - started, LOOKUP: time.perf_counter() - looked_up} if on_host else {}
        parts = list[tuple[Draft, ...]]()
        if trees is None or on_host:
            drafts[device.name] = device.draft(keys, completions, shape)
            parts = list(zip(*(drafts[name] for name in shape.drafters), strict=True))
        took_s = time.perf_counter() - extended
        ingested = 0.0 if lag else device.ingested()
        return Proposed(keys, took_s, self._versions, host_parts, lag, ingested, parts, None if parts else trees)

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(drafter.version for drafter in self._drafters.values())

    # ---- after a tick

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], times: TickTimes, context: float = 0.0) -> None:
        self._learn()
        self._lifecycle.flush()
        proposed = self._proposed.popleft()
        rows = compared_rows(len(emitted), self._counts.verifies) if not shape.ahead else range(0)
        # their requests may have ended when they are compared
        completions = {row: self._lifecycle.number(proposed.keys[row]) for row in rows}
        times = replace(times, parts={**times.parts, **proposed.host_parts})
        self._feedback = TickFeedback(shape, proposed, emitted, completions, times, context)

    def decoded(self, running: int, times: TickTimes, context: float = 0.0) -> None:
        self._learn()
        self._counts.time(running, OFF, times.seconds)
        known = self._newly_arrived(), context, self._remaining_ticks, self._host_extend_s
        self._shape_policy.observe(Outcome(OFF, running, (), times, 0.0, 0.0, *known))

    def _learn(self) -> None:
        """Passes the newest verified tick to the shape policy. By now the device works on the next one."""
        feedback, self._feedback = self._feedback, None
        if feedback is None:
            return
        shape, emitted, proposed, results = feedback.shape, feedback.emitted, feedback.proposed, feedback.results()
        outcome = Outcome(
            shape,
            len(emitted),
            results if proposed.versions == self._versions else [],  # drafts of other weights say nothing about these
            feedback.times,
            proposed.lag,
            proposed.ingested,
            self._newly_arrived(),
            feedback.context,
            self._remaining_ticks,
            self._host_extend_s,
        )
        counts = self._counts
        counts.time(len(emitted), shape, feedback.times.seconds)
        counts.verified(shape, len(results), sum(map(len, emitted)) - len(results))
        counts.drafting_s += proposed.drafting_s
        counts.one_off_s += outcome.one_off_s
        counts.alarms += self._shape_policy.observe(outcome)

    def _newly_arrived(self) -> int:
        before, self._arrived = self._arrived, self._on_device.arrived
        return self._arrived - before

    def _host_extend_s(self) -> float:
        running = self._running()
        return sum(drafter.host_extend_s(running) for drafter in self._drafters.values())

    def report(self) -> SpeculationReport:
        self._learn()
        return self._counts.report(self._shape_policy.report(), self._chunks.turns)


def _joined(parts: Sequence[Draft], budget: int) -> Draft:
    """Merges all drafters' branches into one tree of at most `budget` nodes."""
    return parts[0] if len(parts) == 1 and len(parts[0]) <= budget else merge(parts, budget)
