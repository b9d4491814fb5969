"""A simulated worker: the engine's own scheduler and shape policy on a simulated clock.

What always holds: ticks are planned, shapes chosen and outcomes observed by the engine's own objects; only the device's
results come from `World`. Every request is answered exactly once, with as many tokens as its trace says. Graph captures
and compilation are left out: the simulated worker has used its shapes before.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlt.config import EngineSettings
from tlt.engine.admission import ADMISSIONS
from tlt.engine.pages import PageAllocator
from tlt.engine.request import Request, RequestState
from tlt.engine.scheduler import Plan, RunningRequest, Scheduler
from tlt.sim.world import World
from tlt.spec.acceptance import AcceptResult
from tlt.spec.ahead import ChunkPolicy
from tlt.spec.backlog import Backlog
from tlt.spec.costs import INGEST, TickTimes
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy
from tlt.spec.tuner import Tuner
from tlt.types import Key

_CHUNK_NODES = 32  # per row, of a tick that verifies chunks: what the engine has memory for by default


@dataclass(frozen=True, slots=True)
class SimText:
    """What was written ahead for a request."""

    tokens: int
    differs: int  # tokens that the policy still writes alike, before the first that it does not


@dataclass(frozen=True, slots=True)
class SimCompletion:
    key: Key
    tokens: int
    at_s: float  # on the worker's clock


class SimWorker:
    """`take` requests, `tick` while busy. `shape_policy` None: plain decoding."""

    def __init__(
        self,
        world: World,
        settings: EngineSettings,
        lengths: Mapping[Key, int],
        shape_policy: ShapePolicy | None = None,
        deepest: int = 0,
    ) -> None:
        book = world.book
        self._world, self._lengths, self._shape_policy = world, lengths, shape_policy
        self._scheduler = Scheduler(
            PageAllocator(book.pages),
            book.page_size,
            book.rows,
            settings.prefill_tokens,
            ADMISSIONS[settings.admission](),
        )
        self._backlog = Backlog(max(1, book.window), deepest + 1)
        self._chunks = ChunkPolicy(book.rows * _CHUNK_NODES)
        self._texts: dict[Key, SimText] = {}
        self._compared: dict[Key, int] = {}  # tokens of each text that the request has written, too
        self._arrived = self._taken = 0  # positions newcomers brought; requests ever
        self._states: dict[Key, RequestState] = {}  # unanswered
        self.now = 0.0
        self.shapes: Counter[tuple[int, Shape]] = Counter()  # ticks in which so many requests decoded
        self.ticks = self.verifies = self.accepted = self.ahead = 0  # ahead: tokens accepted that were written ahead

    @property
    def busy(self) -> bool:
        return bool(self._states)

    def begin(self) -> None:
        """Begins another rollout: the clock restarts, and the prefix cache is empty as the policy is another one."""
        self.now = 0.0
        self.shapes.clear()
        self.ticks = self.verifies = self.accepted = self.ahead = 0
        self._scheduler.forget_cache()
        self._chunks.turns.policy_changed()

    def give(self, texts: Mapping[Key, SimText]) -> None:
        """What was written ahead for requests to come."""
        self._texts = dict(texts)
        self._compared = dict.fromkeys(texts, 0)

    def cut(self) -> dict[Key, int]:
        """Ends all requests under way; the tokens that each has."""
        found = {key: len(state.tokens) for key, state in self._states.items()}
        for state in self._states.values():
            self._scheduler.abort(state)
        self._states.clear()
        return found

    def take(self, requests: Iterable[Request], at_s: float) -> None:
        if not self.busy:
            self.now = max(self.now, at_s)  # until then there was nothing to do
        for request in requests:
            state = self._states[request.key] = RequestState(request, self._taken, at_s)
            self._scheduler.submit(state)
            self._taken += 1
            if self._shape_policy is not None:
                self._shape_policy.set_max_len(request.params.max_tokens)

    def free_from(self, at_s: float) -> float:
        """Turns the clock of a worker without requests back to when the last one ended."""
        self.now = at_s
        return at_s

    def tick(self, *, nothing_waits: bool = False) -> list[SimCompletion]:
        """One token or draft for every running request. Returns the requests that were completed. `nothing_waits`: the
        tick is part of no rollout's time."""
        if isinstance(self._shape_policy, Tuner):
            self._shape_policy.budget.nothing_waits = nothing_waits
        shape = self._choose()
        plan = self._scheduler.plan(nodes=shape.verify)
        self._enter(plan)
        self.now += self._world.prefill_s(sum(len(chunk.tokens) for chunk in plan.chunks))
        if plan.empty:
            raise AssertionError(f"nothing to run, yet {len(self._states)} requests wait: {self._scheduler.page_stats}")
        self.ticks += 1
        if not plan.reqs:
            return []
        self.shapes[len(plan.reqs), shape] += 1
        if shape.ahead:
            return self._verify_chunk(plan, shape)
        return self._plain(plan) if shape.off else self._verify(plan, shape)

    def _choose(self) -> Shape:
        running = self._scheduler.running
        if self._shape_policy is None or not running:
            return OFF
        left = [self._left_of_text(key, tokens) for key, tokens in self._scheduler.written] if self._texts else []
        if any(left):
            chunk = self._chunks.choose(
                running, [tokens for tokens in left if tokens], self._shape_policy.prices(running)
            )
            if chunk is not None:
                return chunk
        return self._shape_policy.choose(running, self._backlog.lag(running))

    def _enter(self, plan: Plan) -> None:
        if self._world.book.window:
            for entry in plan.entries:
                self._backlog.add_prompts(1, min(self._world.book.window, len(entry.prefix)))

    def _plain(self, plan: Plan) -> list[SimCompletion]:
        times = self._times(plan, OFF)
        self.now += times.seconds or 0.0
        self._backlog.add_written(1, 1.0)
        self._observe(Outcome(OFF, len(plan.reqs), times=self._told(plan, times)), plan)
        return self._written(plan.reqs, [1] * len(plan.reqs))

    def _verify(self, plan: Plan, shape: Shape) -> list[SimCompletion]:
        count = len(plan.reqs)
        lag = self._backlog.lag(count)
        newly = self._backlog.prompt_positions(count) if not lag else 0.0
        draft_extend_s = self._world.catch_up_s(shape, count, lag) if lag else 0.0
        ingest_s = draft_extend_s + self._world.entering_s(shape, count, newly)
        times = self._times(plan, shape, ingest_s)
        self.now += times.seconds or 0.0
        self._backlog.clear()
        self._backlog.add_written(shape.depth + 1, shape.most_tokens)
        results = self._world.results(shape, (req.state.request.key.request for req in plan.reqs))
        emitted = self._cut(plan.reqs, results)
        self._scheduler.advance(plan.reqs, emitted)
        self.verifies += count
        self.accepted += sum(emitted) - count
        self._observe(Outcome(shape, count, results, self._told(plan, times), lag, newly), plan)
        return self._written(plan.reqs, emitted)

    def _left_of_text(self, key: Key, tokens: Sequence[int]) -> int:
        """Tokens of a request's text that it may still write; compares what it has written since with its text."""
        text = self._texts.get(key)
        if text is None:
            return 0
        before, now = self._compared[key], min(len(tokens), text.tokens, text.differs)
        turned = text.differs < min(len(tokens), text.tokens)
        self._chunks.turns.see(now - before, turned)
        self._compared[key] = now
        if turned or len(tokens) >= text.tokens:
            del self._texts[key]
            return 0
        return text.tokens - len(tokens)

    def _verify_chunk(self, plan: Plan, shape: Shape) -> list[SimCompletion]:
        times = self._times(plan, shape)
        self.now += times.seconds or 0.0
        self._backlog.add_written(shape.depth + 1, shape.most_tokens)
        results = [AcceptResult(self._agreed(req.state, shape), ()) for req in plan.reqs]
        emitted = self._cut(plan.reqs, results)
        self._scheduler.advance(plan.reqs, emitted)
        self.ahead += sum(emitted) - len(emitted)
        self._observe(Outcome(shape, len(plan.reqs), results, self._told(plan, times)), plan)
        return self._written(plan.reqs, emitted)

    def _agreed(self, state: RequestState, shape: Shape) -> int:
        """Drafts of a request's text that it accepts."""
        text, written = self._texts.get(state.request.key), len(state.tokens)
        return max(0, min(text.tokens - written, shape.depth, text.differs - written)) if text else 0

    def _times(self, plan: Plan, shape: Shape, ingest_s: float = 0.0) -> TickTimes:
        looked_back = [req.position for req in plan.reqs]
        times = self._world.times(shape, looked_back, may_draft=self._shape_policy is not None)
        if not ingest_s:
            return times
        return replace(times, parts={**times.parts, INGEST: ingest_s}, seconds=(times.seconds or 0.0) + ingest_s)

    def _told(self, plan: Plan, times: TickTimes) -> TickTimes:
        """As an engine tells it: prefill is no part of what a tick costs."""
        return replace(times, seconds=None) if plan.chunks else times

    def _observe(self, outcome: Outcome, plan: Plan) -> None:
        """With what the engine knows beside the tick."""
        if self._shape_policy is not None:
            context = sum(req.position for req in plan.reqs) / len(plan.reqs)
            known = replace(outcome, arrived=self._newly_arrived(), context=context)
            self._shape_policy.observe(replace(known, remaining_ticks=lambda: self._scheduler.remaining_ticks))

    def _newly_arrived(self) -> int:
        before, self._arrived = self._arrived, self._backlog.arrived
        return self._arrived - before

    def _cut(self, reqs: Sequence[RunningRequest], results: Sequence[AcceptResult]) -> list[int]:
        """Tokens emitted per request: a completion may end within an accepted draft."""
        return [min(walked.accepted + 1, self._left(req)) for req, walked in zip(reqs, results, strict=True)]

    def _left(self, req: RunningRequest) -> int:
        return self._lengths[req.state.request.key] - len(req.state.tokens)

    def _written(self, reqs: Sequence[RunningRequest], emitted: Sequence[int]) -> list[SimCompletion]:
        answered = []
        for req, count in zip(reqs, emitted, strict=True):
            req.state.tokens.extend([0] * count)
            if not self._left(req):
                self._scheduler.finish(req)
                del self._states[req.state.request.key]
                answered.append(SimCompletion(req.state.request.key, len(req.state.tokens), self.now))
        return answered
