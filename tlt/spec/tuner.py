"""The tuner: the shape of each tick, from measured costs and acceptance. "Off" is always a candidate.

Always holds: a shape is used if its expected tokens per second are the highest, or for a try; in both cases only if
the budget affords the tick at its worst, when nothing is accepted. Occasional plain ticks measure the cost of plain
decoding. Decisions are deterministic. Knows nothing of tensors, tokens or drafters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, sqrt

from tlt.spec.acceptance import PRIOR_VERIFIES, Acceptance, Alarm, CollapseWatch, Drafters
from tlt.spec.ahead import Prices
from tlt.spec.budget import Budget, CostKind
from tlt.spec.costs import DECODE, INDEX, INGEST, KEEP, CostModel, Measured
from tlt.spec.shape import OFF, Shape, shown
from tlt.spec.shape_policy import Outcome, TunerReport, infinite_ticks, zero_seconds

MARGIN = 0.01  # hysteresis: predicted gain of another shape from which it replaces the one in use
DOUBT = 0.3  # standard error of an accept length, relative, after one verify
COST_DOUBT = 0.03  # standard error of a shape's cost, relative, before its first tick
COMPARE_EVERY, COMPARE_TICKS = 512, 3  # ticks with drafts between two comparisons; plain ticks of a comparison
COMPARE_CHANGE = 1.25  # change of a shape's cost relative to plain ticks, as a factor, that triggers a comparison
COMPILED_S = 0.1  # most seconds of one-off work charged to a tick: longer work compiles kernels, as at start-up
REVIEW_TICKS = (8, 32)  # ticks between two reviews of a batch size: after a change, and later
EXCELLENT = ((0.9, 0.05),)  # chances of a drafter's first and second candidates for which graphs are captured
RETRY_SHARE = 0.001  # fraction of the time that tries of one drafter may lose after it was found slower
RECORD_VERIFIES = 128.0  # weight of an acceptance record
OLD_VERSION_VERIFIES = 3.0  # weight of the estimates of a drafter's previous version: low, so that it is tried again

_OFF = 0  # index of plain decoding among the shapes


@dataclass(slots=True)
class BatchSizeState:
    """The decision at one batch size."""

    shape: Shape = OFF  # in use
    rate: float = 0.0  # its expected tokens per second and request
    gain: float = 0.0  # its expected saving against plain decoding, as a fraction of the time
    dearness: float = 1.0  # its cost relative to a plain tick, as compared last, relative to the same as measured
    # beforehand; 0: not known yet
    worst_s: float = 0.0  # seconds that a tick of it loses if nothing is accepted
    since: int = 0  # tick of the last change
    review_at: int = 0  # tick of the next review
    to_try: Shape | None = None  # the shape of the next try
    try_worst_s: float = 0.0  # seconds that it loses if nothing is accepted, without draft-extends


@dataclass(frozen=True, slots=True)
class Try:
    """A try that was chosen and is not yet observed."""

    shape: Shape
    rate: float  # of the shape it replaces
    tick: int


@dataclass(slots=True)
class Retry:
    """When drafters that were found slower may be tried again."""

    at_s: float = 0.0  # second of the run
    lost_s: float = 0.0  # by the last try


@dataclass(slots=True)
class PlainCredit:
    """Ticks since the engine was idle."""

    tokens: dict[int, float] = field(default_factory=dict)  # padded batch size → tokens of a row, on average
    plain_s: dict[int, float] = field(default_factory=dict)  # the same → time booked as plain decoding's for them
    most_requests: int = 0
    plain_only: bool = True

    def add(self, size: int, requests: int, tokens: float, plain_s: float, *, plain: bool) -> None:
        self.tokens[size] = self.tokens.get(size, 0.0) + tokens
        self.plain_s[size] = self.plain_s.get(size, 0.0) + plain_s
        self.most_requests = max(self.most_requests, requests)
        self.plain_only &= plain


@dataclass(slots=True)
class Tally:
    """Counts for the report."""

    plain: Counter[int] = field(default_factory=Counter)  # padded batch size → plain ticks
    ticks: Counter[tuple[int, Shape]] = field(default_factory=Counter)  # the others
    verifies: int = 0
    accepted: int = 0
    explored: int = 0
    switches: int = 0
    alarms: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0


class Tuner:
    """`choose` a shape for a batch, then `observe` the tick. A tick may be chosen before the last one is observed."""

    def __init__(self, shapes: Sequence[Shape], costs: CostModel) -> None:
        self._shapes = tuple(sorted({OFF, *shapes}))
        self._index = {shape: place for place, shape in enumerate(self._shapes)}
        self._costs, self._acceptance = costs, Acceptance(self._shapes)
        self._places: dict[Drafters, list[int]] = {}  # of each set's shapes
        for place, shape in enumerate(self._shapes):
            if not shape.off:
                self._places.setdefault(shape.drafters, []).append(place)
        self._drafters = sorted({drafter for drafters in self._places for drafter in drafters})
        self._watches = {drafter: CollapseWatch(drafter) for drafter in self._drafters}
        self._retries = {drafters: Retry() for drafters in self._places}
        self._captured: dict[int, set[int]] | None = None  # batch size → shapes with graphs; None: none need graphs
        self._sizes: dict[int, BatchSizeState] = {}
        self.budget = Budget()
        self._trying: Try | None = None
        self._tally, self._credit = Tally(), PlainCredit()
        self._left: Callable[[], float] = infinite_ticks  # upper bound of the remaining plain ticks
        self._index_s: Callable[[], float] = zero_seconds  # visits every request: called once per tick at most
        self._indexing_s: float | None = None  # its result in this tick
        self._last = OFF  # shape of the last observed tick
        self._ticks = 0
        self._drafted = 0  # ticks with drafts since the last comparison
        self._plain_left = 0  # plain ticks of a comparison
        self.evaluations = 0  # of a shape's rate: the host's cost of choosing

    def choose(self, batch: int, lag: int = 0) -> Shape:
        size = self._costs.pad(batch)
        state = self._sizes.get(size)
        if state is None or self._ticks >= state.review_at or self._is_dear(state.shape):
            state = self._review(size, lag)
        if self._plain_left:
            self._plain_left -= 1
            return OFF
        if state.to_try is not None and self._trying is None:
            worst_s = state.try_worst_s + self._catching_up(state.to_try, state.shape, size, lag)
            if self.budget.affords_try(worst_s):
                self._trying, state.to_try = Try(state.to_try, state.rate, self._ticks), None
                state.review_at = self._ticks
                return self._trying.shape
        if state.shape.off or not self._affords(state.worst_s, state.gain):
            return OFF
        if self._drafted >= COMPARE_EVERY:
            self._drafted, self._plain_left, state.dearness = 0, COMPARE_TICKS - 1, 0.0
            return OFF
        return state.shape

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        """Learns from a tick. Returns alarms once, when a collapse shows."""
        shape, size, times = outcome.shape, self._costs.pad(outcome.batch), outcome.times
        self._costs.observe(shape, outcome.batch, times, outcome.context, outcome.ingested)
        if outcome.lag:
            self._costs.caught_up(size, outcome.lag, outcome.draft_extend_s - times.parts.get(INDEX, 0.0))
        self._ticks += 1
        self._left, self._index_s, self._indexing_s = outcome.remaining_ticks, outcome.host_extend_s, None
        self._last = shape if shape in self._index else OFF
        seconds = times.seconds
        if seconds is None:
            ingested_s = times.parts.get(INGEST, 0.0) + times.parts.get(INDEX, 0.0)
            seconds = (self._costs.seconds(shape, outcome.batch) or 0.0) + ingested_s
        self._book(outcome, size, max(0.0, seconds - outcome.draft_extend_s))
        if shape.off or shape not in self._index:
            return ()
        self._drafted += 1
        if not outcome.results:
            return ()
        self._acceptance.see(shape, outcome.results)
        return self._watch(outcome)

    def rollout_ended(self, lengths: Sequence[int] | None) -> None:
        """Books the plain time of a rollout by its lengths, in the order of admission, instead of tick by tick.

        Drafts help some requests more than others: a tick's mean tokens promise more than the slowest request gets.
        """
        credit, self._credit = self._credit, PlainCredit()
        if credit.plain_only or lengths is None:
            return
        ticks = plain_ticks(lengths, credit.most_requests, self._costs.pad)
        true_s = sum(count * self._plain_tick_s(size, credit) for size, count in ticks.items())
        correction_s = true_s - sum(credit.plain_s.values())
        self.budget.correct(correction_s)
        self._tally.saved_s += correction_s

    def _plain_tick_s(self, size: int, credit: PlainCredit) -> float:
        """Mean seconds of a plain tick in this rollout; contexts grow, so that its time is not that of the end."""
        if tokens := credit.tokens.get(size):
            return credit.plain_s[size] / tokens
        return self._costs.plain_s(size)

    def load_costs(self, costs: Iterable[Measured]) -> None:
        for cost in costs:
            self._costs.load_costs(cost)

    def set_max_len(self, ticks: int) -> None:
        self.budget.longest = max(self.budget.longest, ticks)

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        self._acceptance.load_prior(drafter, ranks, RECORD_VERIFIES)

    def precapture(self, sizes: Iterable[int]) -> list[tuple[Shape, int]]:
        """Every shape and batch size at which an excellent drafter would pay. From now on no others are used."""
        excellent = Acceptance(self._shapes)
        for drafter in self._drafters:
            excellent.load_prior(drafter, EXCELLENT, RECORD_VERIFIES)
        lengths, captured = excellent.lengths(), dict[int, set[int]]()
        for size in sizes:
            seconds = self._costs.seconds_of(self._shapes, size)
            captured[size] = {
                place
                for place in range(len(self._shapes))
                if lengths[place] * seconds[_OFF] > (1.0 + MARGIN) * seconds[place]
            }
        self._captured = captured
        return [(self._shapes[place], size) for size, places in captured.items() for place in sorted(places)]

    def drafter_changed(self, drafter: str) -> None:
        """Makes the estimates of the old version a weak prior. The new version may be tried at once."""
        if drafter not in self._drafters:
            raise ValueError(f"no shape uses drafter {drafter!r}; expected one of {self._drafters}")
        self._acceptance.changed(drafter, OLD_VERSION_VERIFIES)
        self._reopen(drafter)

    def expected(self, shape: Shape, batch: int) -> tuple[float, float | None]:
        """Accept length and seconds of a tick, as estimated now; of a chunk nothing is known."""
        if shape not in self._index:
            return 1.0, None
        self._acceptance.refresh()
        return self._acceptance.length(shape), self._costs.seconds(shape, self._costs.pad(batch))

    def prices(self, batch: int) -> Prices | None:
        size = self._costs.pad(batch)
        plain_s, state = self._costs.seconds(OFF, size), self._sizes.get(size)
        if not plain_s:
            return None

        def seconds(shape: Shape) -> float:
            return self._costs.seconds(shape, batch) or inf

        def affords(shape: Shape, gain: float) -> bool:
            return self._affords(max(0.0, seconds(shape) - plain_s), gain)

        return Prices(seconds, max(1.0 / plain_s, state.rate if state else 0.0), affords)

    def report(self) -> TunerReport:
        tally = self._tally
        return TunerReport(
            ticks=self._ticks,
            verifies=tally.verifies,
            accepted=tally.accepted,
            accept_length=1.0 + tally.accepted / max(1, tally.verifies),
            by_depth={drafter: self._acceptance.by_depth(drafter) for drafter in self._drafters},
            ticks_by_shape=dict(tally.ticks + Counter({(size, OFF): ticks for size, ticks in tally.plain.items()})),
            seconds=tally.seconds,
            saved_s=tally.saved_s,
            explored_ticks=tally.explored,
            explored_s=self.budget.tried_s,
            switches=tally.switches,
            alarms=tally.alarms,
        )

    # ---- choosing

    def _review(self, size: int, lag: int) -> BatchSizeState:
        state = self._sizes.setdefault(size, BatchSizeState(since=self._ticks))
        first, later = REVIEW_TICKS
        state.review_at = self._ticks + min(max(first, self._ticks - state.since), later)
        plain_s = self._costs.seconds(OFF, size)
        if not plain_s:
            return state  # nothing was measured: plain ticks are the first measurement
        self.budget.tick_s = plain_s
        self._acceptance.refresh()
        self.evaluations += len(self._shapes)
        seconds, rates = self._expected(size)
        used = self._decide(state, rates, size, lag)
        if used != state.shape:
            self._tally.switches += self._index[used] != self._index[state.shape] and bool(state.rate)
            state.shape, state.since, state.review_at = used, self._ticks, self._ticks + first
            state.dearness = 1.0
        place = self._index[used]
        state.rate, state.gain = rates[place], max(0.0, 1.0 - rates[_OFF] / rates[place])
        state.worst_s = 0.0 if used.off else max(0.0, seconds[place] - plain_s)
        if not used.off:
            measured = self._costs.measured_s(used, size) / (self._costs.measured_s(OFF, size) or plain_s)
            dearness = seconds[place] / plain_s / measured
            state.dearness = state.dearness or dearness
            if not 1 / COMPARE_CHANGE <= dearness / state.dearness <= COMPARE_CHANGE:
                self._drafted = COMPARE_EVERY
        self._plan_try(state, rates, seconds, size)
        return state

    def _expected(self, size: int) -> tuple[list[float], list[float]]:
        """Seconds of a tick, and tokens per second of a request, by shape."""
        lengths, seconds = self._acceptance.lengths(), self._costs.seconds_of(self._shapes, size)
        if per_token := self._costs.arrived_per_token:  # every completion makes room for a prompt to ingest
            costs = zip(self._shapes, seconds, lengths, strict=True)
            seconds = [cost + self._costs.entering(shape, size, length * per_token) for shape, cost, length in costs]
        return seconds, [length / cost for length, cost in zip(lengths, seconds, strict=True)]

    def _decide(self, state: BatchSizeState, rates: Sequence[float], size: int, lag: int) -> Shape:
        """The shape in use, unless another is faster beyond its standard error and pays for the change."""
        known = self._known_places(size)
        used = self._last if self._is_dear(state.shape) else state.shape
        used = used if self._index[used] in known and rates[self._index[used]] >= rates[_OFF] else OFF
        rate = rates[self._index[used]]
        left_s: float | None = None  # computed once, if at all: it visits every request
        for place in sorted(known, key=rates.__getitem__, reverse=True):
            best, gain = self._shapes[place], 1.0 - rate / rates[place]
            if gain <= MARGIN:
                break
            if gain <= MARGIN + self._doubt(used, best, size):
                continue
            draft_extend_s = self._catching_up(best, used, size, lag)
            left_s = self._left() * self.budget.tick_s if left_s is None else left_s
            if draft_extend_s <= gain * left_s and self._affords(draft_extend_s, gain):
                return best
        return used

    def _doubt(self, used: Shape, best: Shape, size: int) -> float:
        """Standard error of the gain. Shapes of the same drafters share an error in their acceptance."""
        evidence = min(self._acceptance.known(shape.drafters) for shape in (used, best) if not shape.off)
        if used.off:
            doubt = _standard_error(evidence)
        else:
            doubt = DOUBT / sqrt(evidence) / (2 if used.drafters == best.drafters else 1)
        return doubt + COST_DOUBT / (1 + self._costs.ticks_of(best, size))

    def _known_places(self, size: int) -> list[int]:
        """Indices of plain decoding, and of usable shapes whose drafters have been observed."""
        known = [drafters for drafters in self._places if self._acceptance.known(drafters) >= 1.0]
        return sorted([_OFF, *(place for drafters in known for place in self._usable(drafters, size))])

    def _usable(self, drafters: Drafters, size: int) -> list[int]:
        """Indices of these drafters' shapes that have graphs; those of up to twice as many requests serve too."""
        places = self._places[drafters]
        if self._captured is None:
            return places
        ready = set[int]().union(*(found for at, found in self._captured.items() if size <= at <= 2 * size))
        return [place for place in places if place in ready]

    def _affords(self, worst_s: float, gain: float) -> bool:
        return worst_s <= 0.0 or self.budget.affords(worst_s, gain)

    def _catching_up(self, shape: Shape, before: Shape, size: int, lag: int) -> float:
        """Seconds of draft-extends before the first draft of drafters that the shape before did not use."""
        return self._indexing(shape, before) + self._costs.catching_up(shape, before, size, lag)

    def _indexing(self, shape: Shape, before: Shape) -> float:
        """The part of these seconds on the host."""
        if not self._costs.indexes(shape, before):
            return 0.0
        if self._indexing_s is None:
            self._indexing_s = self._index_s()
        return self._indexing_s

    def _is_dear(self, shape: Shape) -> bool:
        """Whether the shape needs more than a tick of indexing, because other batch sizes did not use its drafters."""
        return self._indexing(shape, self._last) > self.budget.tick_s

    # ---- tries

    def _plan_try(self, state: BatchSizeState, rates: Sequence[float], seconds: Sequence[float], size: int) -> None:
        """Selects the next try: of the least known drafters that may be faster, the shape with the highest rate."""
        state.to_try = None
        for drafters in sorted(self._places, key=self._acceptance.evidence):
            places = [
                place
                for place in self._usable(drafters, size)
                if self._shapes[place].most_tokens > seconds[place] * state.rate
            ]
            if drafters == state.shape.drafters or not places:
                continue
            if not self._may_try(drafters, max(rates[place] for place in places), state.rate):
                continue
            index_s = self._indexing(self._shapes[places[0]], state.shape)
            worst_s = {place: max(0.0, seconds[place] - 1.0 / state.rate) for place in places}
            fits = [place for place in places if self.budget.affords_try(worst_s[place] + index_s)]
            if fits or not index_s:  # indexing takes ever longer: try other drafters first
                place = max(fits or [min(places, key=worst_s.__getitem__)], key=rates.__getitem__)
                state.to_try, state.try_worst_s = self._shapes[place], worst_s[place]
                return

    def _may_try(self, drafters: Drafters, rate: float, used_rate: float) -> bool:
        """Whether drafters may be tried: until they are known to be slower, then as often as RETRY_SHARE allows."""
        now_s, retry = self.budget.took_s, self._retries[drafters]
        if now_s < retry.at_s:
            return False
        doubt = _standard_error(self._acceptance.evidence(drafters))
        if rate * (1.0 + doubt) > used_rate * (1.0 + MARGIN):
            return True
        if retry.lost_s:  # the last try showed that they are slower
            retry.at_s, retry.lost_s = now_s + retry.lost_s / RETRY_SHARE, 0.0
            return False
        return True

    def _tried(self, shape: Shape) -> Try | None:
        """The try that this tick executed, or None. Its batch size may differ. A try that never ran is dropped."""
        found = self._trying
        if found is None or (found.shape != shape and self._ticks - found.tick < 16):
            return None
        self._trying = None
        return found if found.shape == shape else None

    # ---- accounting

    def _book(self, outcome: Outcome, size: int, seconds: float) -> None:
        tally, budget, times = self._tally, self.budget, outcome.times
        tally.seconds += seconds
        accepted = sum(result.accepted for result in outcome.results)
        self._costs.arrived(outcome.arrived, outcome.batch + accepted)
        keep_s = self._costs.table.estimate(KEEP, size) or 0.0
        captured_s = min(times.one_off_s, COMPILED_S)
        budget.charge(CostKind.STATES, keep_s)
        budget.charge(CostKind.CAPTURES, captured_s)
        budget.charge(CostKind.CATCHING_UP, outcome.draft_extend_s)
        if outcome.shape.off:
            others_s = sum(times.parts.values()) - times.parts.get(DECODE, 0.0)  # trees that were drafted and not used
            plain_s = max(0.0, seconds - keep_s - others_s)
            budget.ran(seconds - keep_s, plain_s)
            self._credit.add(size, outcome.batch, 1.0, plain_s, plain=True)
            tally.plain[size] += 1
            self._tried(OFF)
            return
        per_request = 1.0 + accepted / len(outcome.results) if outcome.results else 1.0
        plain_s = per_request * self._costs.plain_s(outcome.batch)
        budget.ran(seconds - keep_s, max(0.0, plain_s - keep_s))
        self._credit.add(size, outcome.batch, per_request, max(0.0, plain_s - keep_s), plain=False)
        tally.saved_s += plain_s - seconds
        if tried := self._tried(outcome.shape):
            tally.explored += 1
            lost_s = seconds + outcome.draft_extend_s + captured_s - per_request / tried.rate
            budget.tried(lost_s)
            self._retries[outcome.shape.drafters].lost_s = max(0.0, lost_s)
        tally.ticks[(size, shown(outcome.shape))] += 1
        tally.verifies += len(outcome.results)
        tally.accepted += accepted

    def _watch(self, outcome: Outcome) -> tuple[Alarm, ...]:
        seen = [self._watches[drafter].see(outcome.shape, outcome.results) for drafter in outcome.shape.drafters]
        alarms = tuple(alarm for alarm in seen if alarm is not None)
        for alarm in alarms:
            self._tally.alarms += 1
            self._watches[alarm.drafter] = CollapseWatch(alarm.drafter)
            self._acceptance.forget(alarm.drafter)
            self._reopen(alarm.drafter, self.budget.took_s + REVIEW_TICKS[1] * self.budget.tick_s)
        return alarms

    def _reopen(self, drafter: str, at_s: float = 0.0) -> None:
        """Reopens all decisions about this drafter. It may be tried from this second of the run on."""
        for drafters in self._places:
            if drafter in drafters:
                self._retries[drafters] = Retry(at_s)
        for state in self._sizes.values():
            state.review_at = self._ticks


def plain_ticks(lengths: Sequence[int], rows: int, pad: Callable[[int], int]) -> Counter[int]:
    """Ticks of plain decoding at each padded batch size, for requests of these lengths in the order of admission."""
    ticks, ends, now = Counter[int](), list[int](), 0  # ends: of the running requests, the next one first
    for length in lengths:
        if len(ends) == rows:
            now = _until(heappop(ends), now, rows, ticks, pad)
        heappush(ends, now + length)
    while ends:
        now = _until(heappop(ends), now, len(ends) + 1, ticks, pad)
    return ticks


def _until(end: int, now: int, running: int, ticks: Counter[int], pad: Callable[[int], int]) -> int:
    if end > now:
        ticks[pad(running)] += end - now
    return max(end, now)


def _standard_error(evidence: float) -> float:
    """Relative standard error of an accept length; infinite for fewer verifies than the prior's weight."""
    return DOUBT / sqrt(evidence - PRIOR_VERIFIES) if evidence > PRIOR_VERIFIES else inf
