"""The tuner: which shape this tick, from what was measured. "Off" is always a candidate.

What always holds: a shape is used because its expected tokens per second are the best, or to learn about it; learning
costs at most a small share of the time so far, counted against the best known shape, and a tick or two on loan: so
nothing is tried at first where answers are short. A shape whose ticks become clearly slower, and stay so, is compared
with a few plain ticks soon, before that is earned if need be: only they tell whether it is the shape. Graphs and a
drafter's catching up are paid for by what was saved, or by as much time to come as has passed.
Deterministic: the same outcomes give the same choices. Knows nothing of tensors, tokens or what a drafter is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf, sqrt
from operator import itemgetter

from tlt.spec.acceptance import Acceptance, Drafters
from tlt.spec.alarm import Alarm, CollapseWatch
from tlt.spec.budget import Arrivals, BatchSizeState, Budget, FirstRuns, Pause, Probe, Tally, TunerReport
from tlt.spec.budget import TunerSettings as TunerSettings
from tlt.spec.costs import CAPTURE, Measured, TickCosts
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import SUPPOSED, Outcome, forever, nothing, precapture_plan

_UNKNOWN, _DECIDED = 4.0, 256.0  # verifies below which a drafter may be anything, above which it has had its chance
_OFF = 0  # where plain decoding stands among the shapes
_SPOKEN, _SPOKEN_ENOUGH = 9, 6  # ticks in which a shape shows what it costs, and nearly so: where time is being lost


class Tuner:
    """`choose` a shape for a batch, `observe` how it went."""

    def __init__(self, shapes: Sequence[Shape], costs: TickCosts, settings: TunerSettings | None = None) -> None:
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
        self._most_tokens = [shape.most_tokens for shape in self._shapes]
        self._drafters = sorted({drafter for drafters in self._sets for drafter in drafters})
        self._watches = {drafter: CollapseWatch(drafter) for drafter in self._drafters}
        self._pauses = {drafters: Pause(self._settings.probe_pause) for drafters in self._sets}
        self._sizes: dict[int, BatchSizeState] = {}
        self._budget = Budget(self._settings.exploration)
        self._tally = Tally()
        self._firsts = FirstRuns()
        self._arrivals = Arrivals()
        self._to_come: Callable[[], float] = forever  # plain ticks, at most
        self._due_s: Callable[[], float] = nothing  # who answers looks at every request …
        self._due: float | None = None  # … so it is asked once a tick, if at all
        self._last = OFF  # what was observed last
        self._ticks = self._longest = 0  # ticks; tokens of any answer
        self.evaluations = 0  # of a shape's rate: what a choice costs the host

    def choose(self, batch: int, lag: int = 0) -> Shape:
        size = self._costs.pad(batch)
        state = self._sizes.get(size)
        if state is None or self._ticks >= state.until or self._is_dear(state.shape):
            state = self._review(size, lag)
        if state.plain or self._check_is_due(state, size):
            state.plain -= 1
            return OFF
        if state.probe is not None and self._may_try(state):
            worst = state.worst + self._catching_up(state.probe, state.shape, size, lag)
            if worst <= self._budget.left:
                return self._try(state, worst)
        return state.shape

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        """Learns from a tick. Alarms are returned once, when the collapse shows."""
        size = self._costs.pad(outcome.batch)
        seconds = outcome.seconds
        if seconds is None:
            newcomers_s = self._costs.entering(outcome.shape, size, outcome.taken_in)
            seconds = (self._costs.seconds(outcome.shape, size) or 0.0) + newcomers_s
        elif outcome.taken_in:
            self._costs.entered(outcome.shape, size, outcome.taken_in, seconds)
        else:
            self._costs.observe(outcome.shape, size, seconds, outcome.drafts_s)
        if outcome.lag:
            self._costs.caught_up(size, outcome.lag, outcome.caught_up_s - outcome.indexed_s)
        self._ticks, self._to_come = self._ticks + 1, outcome.to_come
        self._last, self._due_s, self._due = outcome.shape, outcome.due_s, None
        self._book(outcome, size, seconds)
        if outcome.shape.off:
            return ()
        state = self._sizes.get(size)
        if state is not None and outcome.shape == state.shape and outcome.seconds is not None and not outcome.taken_in:
            state.took(seconds, self._settings)
        self._firsts.see(outcome.shape, size, outcome.one_off_s - outcome.caught_up_s)
        if not outcome.results:
            return ()
        self._acceptance.see(outcome.shape, outcome.results)
        return self._sound(outcome)

    def load_costs(self, costs: Iterable[Measured]) -> None:
        for cost in costs:
            if cost.role == CAPTURE:
                self._firsts.capture_s = cost.seconds
            self._costs.load_costs(cost)

    def set_max_len(self, ticks: int) -> None:
        if ticks > self._longest:  # mostly they are as long as those before
            self._longest = ticks
            self._budget.loan_ticks = min(self._settings.loan, self._settings.exploration * ticks)

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
        """Accept length and seconds of a tick, as estimated now."""
        self._acceptance.refresh()
        return self._acceptance.length(shape), self._costs.seconds(shape, self._costs.pad(batch))

    def report(self) -> TunerReport:
        tally = self._tally
        return TunerReport(
            ticks=self._ticks,
            verifies=tally.verifies,
            accepted=tally.accepted,
            accept_length=1.0 + tally.accepted / max(1, tally.verifies),
            by_depth={drafter: self._acceptance.by_depth(drafter) for drafter in self._drafters},
            ticks_by_shape=dict(tally.ticks + Counter({(size, OFF): ticks for size, ticks in tally.plain.items()})),
            seconds=self._budget.spent,
            saved_s=self._budget.saved,
            explored_ticks=tally.explored,
            explored_s=self._budget.lost,
            switches=tally.switches,
            alarms=tally.alarms,
        )

    # ---- choosing

    def _review(self, size: int, lag: int) -> BatchSizeState:
        state = self._sizes.setdefault(size, BatchSizeState())
        state.reviews += 1
        state.until = max(state.later, self._ticks + min(self._settings.review_ticks, 2 << state.reviews))
        plain_s = self._costs.seconds(OFF, size)
        if not plain_s:
            return state  # nothing was ever measured: plain ticks tell what plain ticks cost
        self._budget.tick_s = plain_s
        self._acceptance.refresh()
        self.evaluations += len(self._shapes)
        seconds, rates = self._expected(size)
        self._settle(state, rates, plain_s)
        self._decide(state, rates, plain_s, size, lag)
        if self._ticks - state.since >= _SPOKEN and not state.plain:
            state.usual_s = min(state.usual_s, self._costs.seconds(state.shape, size) or inf)
        self._plan_probe(state, rates, seconds, size)
        return state

    def _expected(self, size: int) -> tuple[list[float], list[float]]:
        """Of every shape, in their order, the seconds of a tick, and the tokens per second of a request."""
        lengths, seconds = self._acceptance.lengths(), self._costs.seconds_of(self._shapes, self._index, size)
        if per_token := self._arrivals.per_token:  # the more are answered, the more come
            costs = zip(self._shapes, seconds, lengths, strict=True)
            seconds = [cost + self._costs.entering(one, size, length * per_token) for one, cost, length in costs]
        return seconds, [length / cost for length, cost in zip(lengths, seconds, strict=True)]

    def _decide(self, state: BatchSizeState, rates: Sequence[float], plain_s: float, size: int, lag: int) -> None:
        """Stays with the shape in use unless another is better beyond doubt, and worth the change."""
        known, plain = self._known_places(), rates[_OFF]
        used = self._last if self._is_dear(state.shape) else state.shape
        used = used if self._index[used] in known else OFF
        if rates[self._index[used]] < plain * (1.0 + self._settings.least_gain):
            used = OFF
        settled = self._ticks - state.since >= self._settings.settle_ticks
        doubted = state.suspects(self._ticks, self._settings)  # then it is about to be compared, if that is lent
        if settled and not (doubted and self._budget.lends(state.loss(self._settings.slower_check * plain_s))):
            used = self._better(used, rates, known, size, lag)
        if used != state.shape:
            self._tally.switches += state.since >= 0
            state.change(used, self._ticks)
            if not used.off and self._ticks + _SPOKEN < state.until:
                state.look_at(self._ticks + _SPOKEN)
            state.check = self._ticks + state.check_pause(self._settings)
        state.rate = rates[self._index[used]]
        state.gain = state.rate / plain - 1.0

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
            promised = promise if used.off else counted
            if promised <= rate * (1.0 + self._margin(used, best, size)):
                continue
            caught_up_s, gain = self._catching_up(best, used, size, lag), 1.0 - rate / promise
            first_s = self._firsts.whole_s(best, size)
            to_come_s = self._to_come() * self._budget.tick_s if to_come_s is None else to_come_s
            if (
                caught_up_s <= gain * to_come_s  # in this rollout …
                and first_s <= gain * near_s  # … while a graph may pay in others, if there often are so many requests
                and self._budget.affords(caught_up_s + first_s, gain)
            ):
                return best
        return used

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
        return self._indexing(shape, self._last) > self._budget.tick_s

    def _readiness(self, shape: Shape, size: int) -> float:
        return 1.0 if self._firsts.ready(shape, size) else 1.0 - self._settings.unused

    def _margin(self, used: Shape, best: Shape, size: int) -> float:
        evidence = min(self._known(shape) for shape in (used, best) if not shape.off)
        doubt = self._settings.doubt / sqrt(evidence)
        if used.drafters == best.drafters:  # then an error in one estimate is in the other too
            doubt /= 2
        if used.off:
            doubt += self._settings.cost_doubt / sqrt(1 + self._costs.ticks_of(best, size))
        return self._settings.margin + doubt

    def _check_is_due(self, state: BatchSizeState, size: int) -> bool:
        """A promise rests on costs that were learned some time ago, in other conditions: a few plain ticks show what
        plain decoding costs now, and the shape is compared with them when it comes back."""
        slower = state.is_slower(self._ticks, self._settings)
        if state.shape.off or not (slower or state.has_its_turn(self._ticks, self._settings)):
            return False
        ticks = self._settings.slower_check if slower else self._settings.check_ticks
        loss = state.loss(ticks * (self._costs.seconds(OFF, size) or 0.0))
        if not (self._budget.lends(loss) if slower else 2 * loss <= self._budget.left):
            return False  # what has its turn leaves as much for what has a reason
        self._budget.book(loss, slower)
        state.compare(self._ticks, ticks, loss, slower, self._settings)
        state.look_at(self._ticks + ticks + (_SPOKEN_ENOUGH if slower else _SPOKEN))
        return True

    def _settle(self, state: BatchSizeState, rates: Sequence[float], plain_s: float) -> None:
        """What a comparison did lose, or gain, by what is known after it."""
        if state.charged and not state.plain:
            lost = state.looked * (plain_s - 1.0 / rates[self._index[state.shape]])
            self._budget.book(lost - state.charged, state.for_a_reason)
            state.charged = 0.0

    def _known_places(self) -> list[int]:
        """Of plain decoding, and of shapes whose drafters something is known about."""
        known = [drafters for drafters in self._sets if self._acceptance.known(drafters) >= 1.0]
        return sorted([_OFF, *(place for drafters in known for place in self._places[drafters])])

    def _known(self, shape: Shape) -> float:
        return self._acceptance.known(shape.drafters)

    # ---- learning

    def _plan_probe(self, state: BatchSizeState, rates: Sequence[float], seconds: Sequence[float], size: int) -> None:
        """The drafters least is known about that are worth a try now, in the shape that promises most. That it may have
        no graphs yet is part of what a try costs."""
        state.probe = None
        for drafters in sorted(self._sets, key=self._acceptance.evidence):
            if drafters == state.shape.drafters:
                continue
            mine = [place for place in self._places[drafters] if self._most_tokens[place] > seconds[place] * state.rate]
            if not mine:
                continue
            if not self._worth_a_try(drafters, max(map(rates.__getitem__, mine)), state.rate):
                continue
            due_s, left = self._indexing(self._shapes[mine[0]], state.shape), self._budget.left
            worst = {place: self._worst(place, seconds[place], state, size) for place in mine}
            affordable = [place for place in mine if worst[place] + due_s <= left]
            if affordable or not due_s:  # ever more is due: others have their turn
                place = max(affordable or [min(mine, key=worst.__getitem__)], key=rates.__getitem__)
                state.probe, state.worst = self._shapes[place], worst[place]
                return

    def _worst(self, place: int, seconds: float, state: BatchSizeState, size: int) -> float:
        """Seconds that a try loses if nothing is accepted."""
        return max(0.0, seconds - 1.0 / state.rate) + self._firsts.trial_s(self._shapes[place], size)

    def _worth_a_try(self, drafters: Drafters, promised: float, used: float) -> bool:
        """As long as it might be better; then now and then, more rarely every time."""
        pause = self._pauses[drafters]
        if pause.until is not None and self._ticks < pause.until:
            return False
        evidence = self._acceptance.evidence(drafters)
        doubt = inf if evidence < _UNKNOWN else self._settings.doubt / sqrt(evidence)
        if evidence < _DECIDED and promised * (1.0 + doubt) > used * (1.0 + self._settings.margin):
            pause.until = None
            return True
        if pause.until is None:
            pause.until = self._ticks + pause.wait
            return False
        return True

    def _may_try(self, state: BatchSizeState) -> bool:
        """One at a time, and not in a bad moment."""
        return not self._budget.open and state.worst <= self._budget.left and not state.slower

    def _try(self, state: BatchSizeState, worst: float) -> Shape:
        shape = state.probe or OFF
        self._budget.open.append(Probe(shape, state.rate, worst, self._ticks))
        pause = self._pauses[shape.drafters]
        if pause.until is not None:
            pause.wait = min(2 * pause.wait, self._settings.longest_pause)
            pause.until, state.probe = self._ticks + pause.wait, None
        return shape

    # ---- observing

    def _book(self, outcome: Outcome, size: int, seconds: float) -> None:
        tally, budget = self._tally, self._budget
        budget.spent += seconds
        if state := self._sizes.get(size):
            state.spent += seconds
        budget.invested += outcome.caught_up_s + self._firsts.baseline(outcome.one_off_s - outcome.caught_up_s)
        accepted = sum(walked.accepted for walked in outcome.results)
        self._arrivals.see(outcome.arrived, outcome.batch + accepted)
        if outcome.shape.off and not budget.open:
            tally.plain[size] += 1  # quickly: this is all that many a tick has to do with speculation
            return
        per_request = 1.0 + accepted / len(outcome.results) if outcome.results else 1.0
        probe = budget.close(outcome.shape, self._ticks)
        if probe is not None:
            tally.explored += 1
            one_off_s = outcome.caught_up_s + self._firsts.tried(outcome.one_off_s - outcome.caught_up_s, probe.worst)
            budget.lost = max(0.0, budget.lost + seconds + one_off_s - per_request / probe.rate)
        tally.ticks[(size, outcome.shape)] += 1
        tally.verifies += len(outcome.results)
        tally.accepted += accepted
        if not outcome.shape.off:
            budget.saved += per_request * (self._costs.seconds(OFF, size) or 0.0) - seconds

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
            state.until, state.later, state.reviews = self._ticks, 0, 0
