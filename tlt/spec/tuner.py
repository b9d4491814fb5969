"""The tuner: which shape this tick, from what was measured. "Off" is always a candidate.

What always holds: a shape is used because its expected tokens per second are the best, or to learn about it; either
only if the budget affords the tick at its worst, when nothing is accepted. A shape in use is compared with a few plain
ticks every so many, and at once when its ticks have become clearly slower.
Deterministic: the same outcomes give the same choices. Knows nothing of tensors, tokens or what a drafter is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from operator import itemgetter

from tlt.spec.acceptance import Acceptance, Drafters
from tlt.spec.ahead import Prices, shown
from tlt.spec.alarm import Alarm, CollapseWatch
from tlt.spec.budget import Budget, CostKind
from tlt.spec.costs import CAPTURE, DECODE, INDEX, INGEST, KEEP, CostModel, Measured
from tlt.spec.one_off import Arrivals, FirstRuns
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import SUPPOSED, Outcome, TunerReport, forever, nothing, precapture_plan

_OFF = 0  # where plain decoding stands among the shapes


@dataclass(frozen=True, slots=True)
class TunerSettings:
    margin: float = 0.01  # a shape must promise this much more than the one in use …
    doubt: float = 0.3  # … and doubt / √verifies more on top, as long as little is known of its drafters …
    cost_doubt: float = 0.04  # … and over plain decoding cost_doubt / √ticks, until it has shown what it costs there …
    unused: float = 0.03  # … and this much if it never ran at such a batch size: its graphs are yet to be captured
    least_gain: float = 0.005  # a shape that promises less than this over plain decoding is given up
    settle_ticks: int = 16  # between two switches at one batch size; switching off need not wait
    review_ticks: int = 128  # between two reviews of a batch size; the first come sooner
    spoken_ticks: int = 5  # in which a shape shows what it costs
    compare_ticks: int = 3  # plain ones with which the shape in use is compared
    compare_every: int = 512  # ticks that speculated, until the next such comparison
    slack: float = 0.06  # a tick that differs from the usual one by less than this share says that all is well …
    clip: float = 0.25  # … one that differs by more says no more than this …
    changed: float = 1.5  # … and when what they said adds up to this, the shape is compared at once
    loan: float = 2.0  # plain ticks that may be lost before anything was earned
    probe_pause: int = 64  # ticks until a drafter found wanting, or a shape that seemed dear, is tried again; doubles …
    longest_pause: int = 4096  # … up to this
    tried: tuple[float, float] = (4.0, 256.0)  # verifies below which a drafter may be anything; that decide about it
    horizon: float = 1000.0  # verifies after which an observation counts 1/e
    prior_weight: float = 128.0  # verifies that what was measured of a drafter elsewhere is worth
    swap_worth: float = 3.0  # verifies that the old version's record is worth for a new one: so few that it is tried


@dataclass(slots=True)
class Pause:
    """Ever longer, each time something was found wanting."""

    wait: int
    until: int | None = None  # tick; None: no reason to wait yet

    def again(self, tick: int, longest: int) -> None:
        self.until, self.wait = tick + self.wait, min(2 * self.wait, longest)


@dataclass(slots=True)
class BatchSizeState:
    """What is thought best at one batch size."""

    retry: Pause
    shape: Shape = OFF
    rate: float = 0.0  # tokens per second and request expected of it
    gain: float = 0.0  # promised over plain decoding, as a share of the time
    worst: float = 0.0  # seconds that a tick of it loses if nothing is accepted
    since: int = -(10**9)  # tick of the last change of mind
    reviews: int = 0  # since something changed
    until: int = 0  # tick of the next review
    plain: int = 0  # ticks still to come of a comparison with plain decoding
    speaks: int = 0  # tick from which the shape has shown what it costs
    usual_s: float = inf  # of a tick of the shape, its context left out, when it was last compared
    slower: float = 0.0  # what ticks of late said of it (CUSUM): that it takes longer than that …
    quicker: float = 0.0  # … or that it takes less, and plain ticks may, too
    left: Shape | None = None  # seemed too dear, and will be timed anew
    probe: Shape | None = None  # what would be worth trying …
    probe_worst: float = 0.0  # … and the seconds it loses if nothing is accepted, but for catching up
    spent: float = 0.0  # seconds, with so many requests


@dataclass(frozen=True, slots=True)
class Probe:
    shape: Shape
    rate: float  # of the shape it stood in for
    worst: float
    tick: int


@dataclass(slots=True)
class Tally:
    plain: Counter[int] = field(default_factory=Counter)
    ticks: Counter[tuple[int, Shape]] = field(default_factory=Counter)  # but for the plain ones counted above
    verifies: int = 0
    accepted: int = 0
    explored: int = 0
    switches: int = 0
    alarms: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0  # against plain ticks for the same tokens


class Tuner:
    """`choose` a shape for a batch, `observe` how it went."""

    def __init__(self, shapes: Sequence[Shape], costs: CostModel, settings: TunerSettings | None = None) -> None:
        self._settings = settings or TunerSettings()
        self._shapes = tuple(sorted({OFF, *shapes}))
        self._index = {shape: place for place, shape in enumerate(self._shapes)}
        self._costs = costs
        self._acceptance = Acceptance(self._shapes, self._settings.horizon)
        self._sets = sorted({shape.drafters for shape in self._shapes if not shape.off}, key=lambda s: (-len(s), s))
        self._places = {  # of each set's shapes
            drafters: [place for place, shape in enumerate(self._shapes) if shape.drafters == drafters]
            for drafters in self._sets
        }
        self._drafters = sorted({drafter for drafters in self._sets for drafter in drafters})
        self._watches = {drafter: CollapseWatch(drafter) for drafter in self._drafters}
        self._pauses = {drafters: Pause(self._settings.probe_pause) for drafters in self._sets}
        self._sizes: dict[int, BatchSizeState] = {}
        self.budget = Budget()
        self._open: list[Probe] = []  # chosen, not yet observed
        self._tally = Tally()
        self._firsts = FirstRuns()
        self._arrivals = Arrivals()
        self._to_come: Callable[[], float] = forever  # plain ticks, at most
        self._due_s: Callable[[], float] = nothing  # who answers looks at every request …
        self._due: float | None = None  # … so it is asked once a tick, if at all
        self._last = OFF  # what was observed last
        self._ticks = self._longest = 0  # ticks; tokens of any completion
        self._drafted = 0  # ticks that speculated since the last comparison with plain ones
        self.evaluations = 0  # of a shape's rate: what a choice costs the host

    def choose(self, batch: int, lag: int = 0) -> Shape:
        size = self._costs.pad(batch)
        state = self._sizes.get(size)
        if state is None or self._ticks >= state.until or self._is_dear(state.shape):
            state = self._review(size, lag)
        if state.plain:
            state.plain -= 1
            return OFF
        if state.probe is not None and not self._open and state.slower < self._settings.changed:
            worst = state.probe_worst + self._catching_up(state.probe, state.shape, size, lag)
            if self.budget.affords_try(worst):
                return self._try(state, worst)
        if state.shape.off or not self._affords(state.worst, state.gain):
            return OFF
        return OFF if self._compares(state) else state.shape

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        """Learns from a tick. Alarms are returned once, when the collapse shows."""
        shape, size, times = outcome.shape, self._costs.pad(outcome.batch), outcome.times
        self._costs.observe(shape, outcome.batch, times, outcome.context, outcome.ingested)
        if outcome.lag:
            self._costs.caught_up(size, outcome.lag, outcome.caught_up_s - times.parts.get(INDEX, 0.0))
        self._ticks, self._to_come = self._ticks + 1, outcome.to_come
        self._last, self._due_s, self._due = shape if shape in self._index else OFF, outcome.due_s, None
        seconds = times.seconds
        if seconds is None:
            ingested_s = times.parts.get(INGEST, 0.0) + times.parts.get(INDEX, 0.0)
            seconds = (self._costs.seconds(shape, outcome.batch) or 0.0) + ingested_s
        seconds = max(0.0, seconds - outcome.caught_up_s)
        self._book(outcome, size, seconds)
        if shape.off:
            return ()
        self._drafted += 1
        state = self._sizes.get(size)
        if state is not None and shape == state.shape and times.seconds is not None and not outcome.ingested:
            self._watch_cost(state, seconds - self._costs.context_s(shape, outcome.batch))
        if shape not in self._index:  # a chunk of written-ahead text is no drafter's
            return ()
        self._firsts.see(shape, size, times.one_off_s)
        if not outcome.results:
            return ()
        self._acceptance.see(shape, outcome.results)
        return self._sound(outcome)

    def load_costs(self, costs: Iterable[Measured]) -> None:
        for cost in costs:
            if cost.role == CAPTURE:
                self._firsts.capture_s = cost.seconds
            self._costs.load_costs(cost)

    def set_max_len(self, ticks: int) -> None:
        self._longest = max(self._longest, ticks)  # mostly they are as long as those before

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        self._acceptance.load_prior(drafter, ranks, self._settings.prior_weight)

    def precapture(self, sizes: Iterable[int]) -> list[tuple[Shape, int]]:
        self._acceptance.refresh()
        seconds = {size: self._expected(size)[0] for size in sizes if self._costs.seconds(OFF, size)}
        supposed = [self._acceptance.supposing(share).lengths() for share in SUPPOSED]
        found = precapture_plan(self._shapes, self._known_places(), seconds, [self._acceptance.lengths(), *supposed])
        for shape, size in found:
            self._firsts.made(shape, self._costs.pad(size))
        return found

    def drafter_changed(self, drafter: str) -> None:
        """What was known becomes a weak guess, and the new version is tried at once."""
        if drafter not in self._drafters:
            raise ValueError(f"no shape uses drafter {drafter!r}; expected one of {self._drafters}")
        self._acceptance.changed(drafter, self._settings.swap_worth)
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
        settings = self._settings
        state = self._sizes.get(size)
        if state is None:
            state = self._sizes[size] = BatchSizeState(Pause(settings.probe_pause))
        state.reviews += 1
        state.until = self._ticks + min(settings.review_ticks, 2 << state.reviews)
        if state.left is not None and state.retry.until is not None and self._ticks >= state.retry.until:
            self._costs.forget(state.left)
            state.left = None
        plain_s = self._costs.seconds(OFF, size)
        if not plain_s:
            return state  # nothing was ever measured: plain ticks tell what plain ticks cost
        self.budget.tick_s = plain_s
        self.budget.loan_s = plain_s * min(settings.loan, self._longest / 200)
        self._acceptance.refresh()
        self.evaluations += len(self._shapes)
        seconds, rates = self._expected(size)
        self._decide(state, rates, size, lag)
        place = self._index[state.shape]
        state.rate, state.gain = rates[place], max(0.0, 1.0 - rates[_OFF] / rates[place])
        state.worst = 0.0 if state.shape.off else max(0.0, seconds[place] - plain_s)
        if state.usual_s == inf and self._ticks >= state.speaks and not state.shape.off:
            state.usual_s = seconds[place] - self._costs.context_s(state.shape, size)
        self._plan_probe(state, rates, seconds, size)
        return state

    def _expected(self, size: int) -> tuple[list[float], list[float]]:
        """Of every shape, in their order, the seconds of a tick, and the tokens per second of a request."""
        lengths, seconds = self._acceptance.lengths(), self._costs.seconds_of(self._shapes, size)
        if per_token := self._arrivals.per_token:  # the more are answered, the more come
            costs = zip(self._shapes, seconds, lengths, strict=True)
            seconds = [cost + self._costs.entering(one, size, length * per_token) for one, cost, length in costs]
        return seconds, [length / cost for length, cost in zip(lengths, seconds, strict=True)]

    def _decide(self, state: BatchSizeState, rates: Sequence[float], size: int, lag: int) -> None:
        """Stays with the shape in use unless another is better beyond doubt, and worth the change."""
        known, settings = self._known_places(), self._settings
        used = self._last if self._is_dear(state.shape) else state.shape
        used = used if self._index[used] in known else OFF
        if rates[self._index[used]] < rates[_OFF] * (1.0 + settings.least_gain):
            used = OFF
        if self._ticks - state.since >= settings.settle_ticks:
            used = self._better(used, rates, known, size, lag)
        if used == state.shape:
            return
        self._tally.switches += state.since >= 0
        if not state.shape.off and self._costs.dearness(state.shape, size) > 1.0 + settings.clip:
            state.left = state.shape
            state.retry.again(self._ticks, settings.longest_pause)
        state.shape, state.since, state.reviews, state.plain = used, self._ticks, 1, 0
        self._await(state, 0)

    def _better(self, used: Shape, rates: Sequence[float], known: Sequence[int], size: int, lag: int) -> Shape:
        """The best of those that are better beyond doubt and worth the change; else the one in use."""
        rate = rates[self._index[used]]
        better = [(self._shapes[place], rates[place]) for place in known if rates[place] > rate]
        worth = [(promise * self._readiness(shape, size), shape, promise) for shape, promise in better]
        near_s = sum(other.spent for near, other in self._sizes.items() if size <= 2 * near <= 4 * size)
        to_come_s: float | None = None  # asked for once, if at all: who answers looks at every request
        for counted, best, promise in sorted(worth, key=itemgetter(0), reverse=True):
            if counted <= rate:
                break
            if (promise if used.off else counted) <= rate * (1.0 + self._margin(used, best, size)):
                continue
            caught_up_s, gain = self._catching_up(best, used, size, lag), 1.0 - rate / promise
            first_s = self._firsts.whole_s(best, size)
            to_come_s = self._to_come() * self.budget.tick_s if to_come_s is None else to_come_s
            if (
                caught_up_s <= gain * to_come_s  # in this rollout …
                and first_s <= gain * near_s  # … while a graph may pay in others, if there often are so many requests
                and self._affords(caught_up_s + first_s, gain)
            ):
                return best
        return used

    def _affords(self, worst_s: float, gain: float) -> bool:
        return worst_s <= 0.0 or self.budget.affords(worst_s, gain)

    def _catching_up(self, shape: Shape, before: Shape, size: int, lag: int) -> float:
        """Seconds until drafters can be asked whom the shape before left out."""
        return self._indexing(shape, before) + self._costs.catching_up(shape, before, size, lag)

    def _indexing(self, shape: Shape, before: Shape) -> float:
        """What drafters on the host take of it."""
        if not self._costs.looks_up_anew(shape, before):
            return 0.0
        self._due = self._due_s() if self._due is None else self._due
        return self._due

    def _is_dear(self, shape: Shape) -> bool:
        """Whether much would have to be indexed for it first, for it was chosen when so many requests ran before."""
        return self._indexing(shape, self._last) > self.budget.tick_s

    def _readiness(self, shape: Shape, size: int) -> float:
        return 1.0 if self._firsts.ready(shape, size) else 1.0 - self._settings.unused

    def _margin(self, used: Shape, best: Shape, size: int) -> float:
        evidence = min(self._acceptance.known(shape.drafters) for shape in (used, best) if not shape.off)
        doubt = self._settings.doubt / sqrt(evidence)
        if used.drafters == best.drafters:  # then an error in one estimate is in the other too
            doubt /= 2
        if used.off:
            doubt += self._settings.cost_doubt / sqrt(1 + self._costs.ticks_of(best, size))
        return self._settings.margin + doubt

    def _known_places(self) -> list[int]:
        """Of plain decoding, and of shapes whose drafters something is known about."""
        known = [drafters for drafters in self._sets if self._acceptance.known(drafters) >= 1.0]
        return sorted([_OFF, *(place for drafters in known for place in self._places[drafters])])

    # ---- comparing with plain ticks

    def _compares(self, state: BatchSizeState) -> bool:
        """A promise rests on what was timed a while ago: a few plain ticks show what plain decoding costs now."""
        changed = max(state.slower, state.quicker) >= self._settings.changed
        if not changed and self._drafted < self._settings.compare_every:
            return False
        self._drafted = 0
        state.plain = self._settings.compare_ticks - 1
        self._await(state, self._settings.compare_ticks)
        return True

    def _await(self, state: BatchSizeState, plain: int) -> None:
        """What comes after so many plain ticks is the new measure."""
        state.usual_s, state.slower, state.quicker = inf, 0.0, 0.0
        state.speaks = self._ticks + plain + self._settings.spoken_ticks
        if not state.shape.off:
            state.until = min(state.until, state.speaks) if plain else state.speaks

    def _watch_cost(self, state: BatchSizeState, seconds: float) -> None:
        """A tick of the shape in use. No single one says much: only if most of late were slow has something changed."""
        if state.usual_s < inf:
            said = seconds / state.usual_s - 1.0
            said = min(max(said, -self._settings.clip), self._settings.clip)
            state.slower = max(0.0, state.slower + said - self._settings.slack)
            state.quicker = max(0.0, state.quicker - said - self._settings.slack)

    # ---- trying

    def _plan_probe(self, state: BatchSizeState, rates: Sequence[float], seconds: Sequence[float], size: int) -> None:
        """The drafters least is known about that are worth a try now, in the shape that promises most. That it may have
        no graphs yet is part of what a try costs."""
        state.probe = None
        for drafters in sorted(self._sets, key=self._acceptance.evidence):
            places, shapes = self._places[drafters], self._shapes
            mine = [place for place in places if shapes[place].most_tokens > seconds[place] * state.rate]
            if drafters == state.shape.drafters or not mine:
                continue
            if not self._worth_a_try(drafters, max(map(rates.__getitem__, mine)), state.rate):
                continue
            due_s = self._indexing(self._shapes[mine[0]], state.shape)
            worst = {place: self._worst(place, seconds[place], state, size) for place in mine}
            affordable = [place for place in mine if self.budget.affords_try(worst[place] + due_s)]
            if affordable or not due_s:  # ever more is due: others have their turn
                place = max(affordable or [min(mine, key=worst.__getitem__)], key=rates.__getitem__)
                state.probe, state.probe_worst = self._shapes[place], worst[place]
                return

    def _worst(self, place: int, seconds: float, state: BatchSizeState, size: int) -> float:
        """Seconds that a try loses if nothing is accepted."""
        return max(0.0, seconds - 1.0 / state.rate) + self._firsts.trial_s(self._shapes[place], size)

    def _worth_a_try(self, drafters: Drafters, promised: float, used: float) -> bool:
        """As long as it might be better; then now and then, more rarely every time."""
        pause, (unknown, decided) = self._pauses[drafters], self._settings.tried
        if pause.until is not None and self._ticks < pause.until:
            return False
        evidence = self._acceptance.evidence(drafters)
        doubt = inf if evidence < unknown else self._settings.doubt / sqrt(evidence)
        if evidence < decided and promised * (1.0 + doubt) > used * (1.0 + self._settings.margin):
            pause.until = None
            return True
        if pause.until is None:
            pause.until = self._ticks + pause.wait
            return False
        return True

    def _try(self, state: BatchSizeState, worst: float) -> Shape:
        shape = state.probe or OFF
        self._open.append(Probe(shape, state.rate, worst, self._ticks))
        pause = self._pauses[shape.drafters]
        if pause.until is not None:
            pause.wait = min(2 * pause.wait, self._settings.longest_pause)
            pause.until, state.probe = self._ticks + pause.wait, None
        return shape

    def _probed(self, shape: Shape) -> Probe | None:
        """The probe this tick was, if it was one. One that never ran is dropped."""
        found = next((probe for probe in self._open if probe.shape == shape), None)  # it may run at another size
        self._open = [probe for probe in self._open if probe is not found and self._ticks - probe.tick < 16]
        return found

    # ---- booking

    def _book(self, outcome: Outcome, size: int, seconds: float) -> None:
        tally, budget, times = self._tally, self.budget, outcome.times
        tally.seconds += seconds
        if state := self._sizes.get(size):
            state.spent += seconds
        accepted = sum(walked.accepted for walked in outcome.results)
        self._arrivals.see(outcome.arrived, outcome.batch + accepted)
        keep_s = self._costs.table.estimate(KEEP, size) or 0.0
        captured_s = self._firsts.baseline(times.one_off_s)
        budget.charge(CostKind.STATES, keep_s)
        budget.charge(CostKind.CAPTURES, captured_s)
        budget.charge(CostKind.CATCHING_UP, outcome.caught_up_s)
        if outcome.shape.off:
            others_s = sum(times.parts.values()) - times.parts.get(DECODE, 0.0)  # trees that were drafted in vain
            budget.ran(seconds - keep_s, max(0.0, seconds - keep_s - others_s))
            if not self._open:
                tally.plain[size] += 1  # quickly: this is all that many a tick has to do with speculation
                return
        per_request = 1.0 + accepted / len(outcome.results) if outcome.results else 1.0
        if not outcome.shape.off:
            plain_s = per_request * (self._costs.seconds(OFF, outcome.batch) or 0.0)
            budget.ran(seconds - keep_s, max(0.0, plain_s - keep_s))
            tally.saved_s += plain_s - seconds
        probe = self._probed(outcome.shape)
        if probe is not None:
            tally.explored += 1
            one_off_s = outcome.caught_up_s + self._firsts.tried(captured_s, probe.worst)
            budget.tried(seconds + one_off_s - per_request / probe.rate)
        tally.ticks[(size, shown(outcome.shape))] += 1
        tally.verifies += len(outcome.results)
        tally.accepted += accepted

    def _sound(self, outcome: Outcome) -> tuple[Alarm, ...]:
        seen = [self._watches[drafter].see(outcome.shape, outcome.results) for drafter in outcome.shape.drafters]
        alarms = tuple(alarm for alarm in seen if alarm is not None)
        for alarm in alarms:
            self._tally.alarms += 1
            self._watches[alarm.drafter] = CollapseWatch(alarm.drafter)
            self._acceptance.forget(alarm.drafter)
            self._reopen(alarm.drafter, self._ticks + self._settings.probe_pause)
        return alarms

    def _reopen(self, drafter: str, until: int | None = None) -> None:
        """All that was decided with this drafter is open again; it may be tried from this tick on, or at once."""
        for drafters in self._sets:
            if drafter in drafters:
                self._pauses[drafters] = Pause(self._settings.probe_pause, until)
        for state in self._sizes.values():
            state.until, state.reviews = self._ticks, 0
