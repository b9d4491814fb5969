"""The engine: requests in, completions out, continuously batched.

What always holds: a request is answered exactly once, or its failure raises; the tokens of a request depend on the
policy, its key and its settings alone, not on who else is in the batch, when it entered or how often it was preempted;
on a GPU in bfloat16 up to rounding, or to the bit with `engine.exact`.
On a GPU a tick is launched before the previous one's tokens are read, so that the device never waits for the host.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tlt.config import EngineSettings
from tlt.engine.admission import ADMISSIONS
from tlt.engine.exact import check_policy
from tlt.engine.features import Features
from tlt.engine.graphs import PoolReport
from tlt.engine.memory import cache_pages
from tlt.engine.output import InFlightTick, TickOutput
from tlt.engine.pages import PageAllocator, PageStats
from tlt.engine.request import Limits, Request, RequestState, check, check_keys
from tlt.engine.runner import Runner
from tlt.engine.scheduler import Plan, RunningRequest, Scheduler
from tlt.errors import RequestError
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer
from tlt.spec.alarm import Alarm
from tlt.spec.costs import CAPTURE, POLICY, Measured
from tlt.spec.shape import MOST_NODES, Shape
from tlt.spec.speculation import Speculation, SpeculationReport
from tlt.text import StopWatch, Tokenizer
from tlt.types import Completion, FinishReason, Key, Timing

_NONE_DRAWN = -1  # what the sampler says where the logits were no distribution


@dataclass(frozen=True, slots=True)
class EngineReport:
    ticks: int
    tokens: int  # handed out in completions
    dropped: int  # rows computed for stays that were already over
    preemptions: int
    pages: PageStats
    graphs: PoolReport | None  # None without a graph pool
    speculation: SpeculationReport | None  # None without speculation


class EngineCore:
    """`submit` requests, then `drain`; or `tick` until `idle`, for answers as they end, and `drain` for what failed."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        settings: EngineSettings | None = None,
        *,
        version: int = 0,
        taps: Sequence[int] = (),
        on_features: Callable[[Features], None] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        settings = settings or EngineSettings()
        if settings.exact:
            check_policy(model)
        self._tokenizer = tokenizer
        self._version = version
        self._speculation = speculation or Speculation()
        beyond = MOST_NODES if speculation else 0  # a tree needs room for its branches
        pages = cache_pages(model, settings, beyond, self._speculation.widest)
        self._limits = Limits(
            vocab=model.config.vocab,
            context=model.config.max_positions,
            cache_tokens=(pages - 1) * settings.page_size - beyond,  # a prompt's partial page may lie twice
        )
        cache = KVCache.allocate(model.config, pages, settings.page_size, model.embed.dtype, model.embed.device)
        admission = ADMISSIONS[settings.admission]()
        self._scheduler = Scheduler(
            PageAllocator(pages), settings.page_size, settings.rows, settings.prefill_tokens, admission
        )
        self._runner = Runner(
            model,
            cache,
            rows=settings.rows,
            graphs=settings.graphs,
            taps=taps,
            on_features=on_features,
            state_sink=self._speculation.state_sink,
            exact=settings.exact,
        )
        self._speculation.state_sink.attach(self._runner)
        self._speculation.attach(lambda: self._scheduler.to_come, lambda: self._scheduler.written)
        self._ahead = model.embed.is_cuda  # launch the next tick before reading this one …
        self._hands_out = on_features is not None  # … unless somebody must be told where its tokens stand
        self._unread_tick: InFlightTick | None = None
        self._read_s: float | None = None  # when the last tick was read …
        self._read_capture_s = 0.0  # … and what captures had taken by then
        self._captured = False  # something, or run without a graph, in the last verification's tick
        self._following: Shape | None = None  # chosen, and drafted for, behind the last verification
        self._endings = tokenizer.eos_ids | {_NONE_DRAWN}  # without them and below its limit, an answer goes on …
        self._watches: dict[Key, StopWatch] = {}  # … unless it has stop texts
        self._in_flight: dict[Key, RequestState] = {}
        self._failures: list[str] = []
        self._torn = False  # a tick was begun and not ended
        self._ticks = self._tokens = self._dropped = self._preemptions = self._submitted = 0

    @property
    def version(self) -> int:
        """Of the policy that writes."""
        return self._version

    @property
    def idle(self) -> bool:
        return not self._in_flight

    @property
    def running(self) -> int:
        """Requests that decode."""
        return self._scheduler.running

    @property
    def alarms(self) -> Sequence[Alarm]:
        """Every collapse of a drafter so far, oldest first."""
        return self._speculation.alarms

    def submit(self, requests: Iterable[Request]) -> None:
        """Takes all of the requests, or raises and takes none. Those already running are not disturbed."""
        batch = list(requests)
        for request in batch:
            check(request, self._limits)
        check_keys(batch, self._in_flight)
        now = time.perf_counter()
        for request in batch:
            state = RequestState(request, self._submitted, now)
            self._in_flight[request.key] = state
            self._speculation.begin(request.key, request.prompt_id, request.prompt, request.params)
            self._scheduler.submit(state)
            self._submitted += 1

    def tick(self) -> list[Completion]:
        """One step for every running request; the completions that ended."""
        if self._torn:
            raise RuntimeError(
                "an exception cut an earlier tick short, rows and pages may disagree: build a new engine"
            )
        self._torn = True
        shape = self._next_shape()
        completions = self._plain_tick() if shape.off else self._verify_tick(shape)
        if self.idle:
            self._settle()
        self._torn = False
        return completions

    def _next_shape(self) -> Shape:
        running = self._scheduler.running
        shape, self._following = self._following, None
        if shape is None or not running:
            return self._speculation.choose(running)
        self._speculation.chosen(running, shape)
        return shape

    def _plain_tick(self) -> list[Completion]:
        landed = self._land() if self._unread_tick and not self._unread_tick.shape.off else []
        plan = self._scheduler.plan()
        launched = None
        if not plan.empty:
            self._runner.prepare(plan)
            launched = InFlightTick(plan, self._runner.launch(plan))
        if launched is None and self._unread_tick is None and not self.idle:
            raise AssertionError(
                f"nothing to run, yet {len(self._in_flight)} requests wait: {self._scheduler.page_stats}"
            )
        self._ticks += launched is not None
        if self._ahead:
            launched, self._unread_tick = self._unread_tick, launched
        completions = landed + (self._observe(launched) if launched else [])
        if launched:
            seconds = self._since_last_read(None)
            if seconds is not None and not launched.plan.chunks:  # with prefill in it, it says nothing
                self._speculation.decoded(len(launched.plan.reqs), seconds)
        else:
            self._read_s = None
        return completions

    def _since_last_read(self, begun_s: float | None) -> float | None:
        """Seconds of a tick that was just read, from the reading of the one before or from when it was begun, without
        captures, whoever needed them. None if it was the first and nobody knows when it was begun."""
        now, captured = time.perf_counter(), self._runner.capture_s
        since = self._read_s if self._read_s is not None else begun_s
        one_off_s = captured - self._read_capture_s if self._read_s is not None else 0.0
        self._read_s, self._read_capture_s = now, captured
        return None if since is None else now - since - one_off_s

    def _verify_tick(self, shape: Shape) -> list[Completion]:
        """Drafts need the newest tokens, and pages the newest positions: the tick in flight is read first. Unless the
        trees grow on the device, and pages are there for all it may have written: then it is read afterwards.
        What the device can draft for the tick after this one is launched before any tokens are waited for."""
        unread = self._may_stay_unread(shape)
        completions = [] if unread else self._land()
        begun_s, captured_s = time.perf_counter(), self._runner.capture_s
        if not self._scheduler.running:
            return completions + self._plain_tick()  # those to draft for have just ended
        if self._read_s is None:
            self._read_s, self._read_capture_s = begun_s, self._runner.capture_s
        plan = self._scheduler.plan(nodes=shape.verify, unread=unread.steps if unread else 0)
        keys = [req.state.request.key for req in plan.reqs]
        self._runner.prepare(plan)
        drafts = self._speculation.propose(keys, [req.state.tokens for req in plan.reqs], shape)
        steps = self._walk(shape)
        pending = self._runner.launch(plan, drafts, shape, steps)
        self._ticks += 1
        self._following = self._speculation.choose_next(len(keys))
        self._speculation.prepare(keys, self._following)
        late = self._ahead and not self._hands_out
        # a capture waits for the device: what is read late would seem to take as long as the tick behind it as well,
        # and the tick after it to take next to nothing, for the device has a start; and without a graph it takes longer
        one_off_s = self._runner.capture_s - captured_s
        timed = not one_off_s and not (late and (plan.chunks or self._captured))
        self._captured = one_off_s > 0.0
        if unread:
            completions += self._read_trees(replace(unread, timed=unread.timed and timed))
        launched = InFlightTick(plan, pending, shape, steps, begun_s, timed, one_off_s)
        if not late:
            return completions + self._read_trees(launched)
        self._unread_tick = launched
        return completions

    def _may_stay_unread(self, shape: Shape) -> InFlightTick | None:
        """The verification in flight, if one is and this shape can be verified behind it."""
        tick = self._unread_tick
        if tick is None or tick.shape.off:
            return None
        if tick.steps + shape.verify + self._speculation.deepest > MOST_NODES:  # trees grow behind both
            return None
        return tick if self._speculation.needs_no_tokens(shape) else None

    def _read_trees(self, tick: InFlightTick) -> list[Completion]:
        plan, drawn = tick.plan, tick.pending.drawn()
        emitted = [() if req.over else tokens for req, tokens in zip(plan.reqs, drawn.tokens, strict=True)]
        self._scheduler.advance(plan.reqs, map(len, emitted))
        seconds = self._since_last_read(tick.begun_s)
        alone = tick.timed and not plan.chunks
        self._speculation.verified(tick.shape, emitted, seconds if alone else None, tick.one_off_s)
        return self._read(plan, drawn)

    def _land(self) -> list[Completion]:
        """Reads the tick in flight, if there is one."""
        tick, self._unread_tick = self._unread_tick, None
        if tick is None:
            return []
        if not tick.shape.off:
            return self._read_trees(tick)
        self._read_s = None  # it was waited for at once: neither its own time nor the next one's can be told
        return self._observe(tick)

    def drain(self) -> list[Completion]:
        """Ticks until every request is answered. A request that failed raises then, after all others are done."""
        completions = []
        while not self.idle:
            completions += self.tick()
        if self._failures:
            failures, self._failures = self._failures, []
            others = f"{len(completions)} other requests were answered: see the error's `completions`"
            raise RequestError(f"{'; '.join(failures)}. {others}", completions)
        return completions

    def written(self, key: Key) -> tuple[int, ...]:
        """What a request in flight has been answered so far."""
        return tuple(self._in_flight[key].tokens)

    def load_policy(self, version: int) -> None:
        """The policy's tensors now hold other weights: nothing computed with the old ones is used again.

        Requests under way go on with the new policy; their completions name the version of the last token.
        """
        self._scheduler.forget_cache()
        self._speculation.policy_changed()
        self._version = version

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Another version of the learned drafter, between two ticks."""
        self._speculation.load_drafter(weights, version)

    def compile(self, *, filtered: bool = False) -> None:
        """What the policy's runs need, and graphs that decode; `filtered`: top-k or top-p will be asked for."""
        self._runner.compile(self._speculation.widest, self._speculation.deepest + 1, filtered=filtered)
        self._runner.ready_to_decode(filtered)

    def warm_up(self, sizes: Sequence[int]) -> dict[int, float]:
        """Captures decode graphs for these batch sizes before the first request comes; seconds that a run takes."""
        return self._runner.capture(sizes)

    def measure(self) -> list[Measured]:
        """What runs of the policy and of its drafter cost: what a tuner wants to know beforehand."""
        sizes, speculation = self._runner.measured_sizes(), self._speculation
        runs = [*self.warm_up(sizes).items(), *self._runner.time_trees(speculation.widest, speculation.deepest + 1)]
        measured = [Measured(POLICY, *run) for run in runs] + speculation.measure(sizes)
        graphs = self._runner.report()
        return measured + ([Measured(CAPTURE, 1, graphs.usual_capture_s)] if graphs else [])

    def ready(self, shape: Shape, requests: int, *, filtered: bool = False) -> None:
        """Captures the graphs of ticks in this shape, so that no request will wait for them."""
        if self._runner.report() is not None:
            self._runner.ready_to_verify(shape, requests, self._walk(shape), filtered)
            self._speculation.ready(shape, requests)

    def _walk(self, shape: Shape) -> int:
        """Tokens that a tick may give a row, with room for any shape's walks."""
        return min(max(shape.depth, self._speculation.deepest) + 1, shape.verify)

    def report(self) -> EngineReport:
        return EngineReport(
            ticks=self._ticks,
            tokens=self._tokens,
            dropped=self._dropped,
            preemptions=self._preemptions,
            pages=self._scheduler.page_stats,
            graphs=self._runner.report(),
            speculation=self._speculation.report(),
        )

    # ---- reading a tick

    def _observe(self, tick: InFlightTick) -> list[Completion]:
        return self._read(tick.plan, tick.pending.drawn())

    def _read(self, plan: Plan, drawn: TickOutput) -> list[Completion]:
        now = time.perf_counter()
        completions = []
        columns = (drawn.tokens, drawn.logprobs, drawn.policy_logprobs)
        for req, tokens, logprobs, policy_logprobs in zip(plan.reqs, *columns, strict=True):
            if req.over:
                self._dropped += 1
                continue
            state = req.state
            if not state.tokens:
                state.first_token_s = now
            if req.left > 0 and not state.request.params.stop and self._endings.isdisjoint(tokens):
                state.tokens.extend(tokens)  # nothing can end: as almost always
                state.logprobs.extend(logprobs[: len(tokens)])
                state.policy_logprobs.extend(policy_logprobs[: len(tokens)])
                continue
            reason = self._append(req, tokens, logprobs, policy_logprobs)
            if reason is not None:
                self._scheduler.finish(req)
                completions.append(self._complete(state, reason, now))
        return completions

    def _append(
        self, req: RunningRequest, tokens: list[int], logprobs: list[float], policy_logprobs: list[float]
    ) -> FinishReason | None:
        """Adds a row's tokens up to the end of the answer; says why it ends, if it does."""
        state = req.state
        for token, logprob, policy_logprob in zip(tokens, logprobs, policy_logprobs, strict=False):
            if token < 0:
                self._fail(req)
                return None
            state.tokens.append(token)
            state.logprobs.append(logprob)
            state.policy_logprobs.append(policy_logprob)
            reason = self._ends(state, token)
            if reason is not None:
                return reason
        return None

    def _ends(self, state: RequestState, token: int) -> FinishReason | None:
        params = state.request.params
        if token in self._tokenizer.eos_ids and not params.ignore_eos:
            return "eos"
        if params.stop and self._stopped(state, token):
            return "stop"
        return "length" if len(state.tokens) == params.max_tokens else None

    def _stopped(self, state: RequestState, token: int) -> bool:
        """Whether a stop text has just been completed."""
        key, stops = state.request.key, state.request.params.stop
        if key not in self._watches:
            self._watches[key] = StopWatch(self._tokenizer, stops)
        return self._watches[key].feed(token)

    def _complete(self, state: RequestState, reason: FinishReason, now: float) -> Completion:
        self._forget(state)
        self._tokens += len(state.tokens)
        return Completion(
            key=state.request.key,
            prompt_tokens=state.request.prompt,
            tokens=tuple(state.tokens),
            text=self._tokenizer.decode(state.tokens),
            logprobs=tuple(state.logprobs),
            policy_logprobs=tuple(state.policy_logprobs),
            finish_reason=reason,
            policy_version=self._version,
            timing=Timing(
                first_token_s=state.first_token_s - state.submitted_s,
                finished_s=now - state.submitted_s,
                preemptions=state.preemptions,
            ),
        )

    def _fail(self, req: RunningRequest) -> None:
        """A request whose logits are no distribution ends; everyone else goes on."""
        state = req.state
        self._scheduler.finish(req)
        self._forget(state)
        self._failures.append(
            f"request {state.request.key.request}: the policy's logits at position "
            f"{len(state.request.prompt) + len(state.tokens)} are NaN or infinite; check its weights"
        )

    def _forget(self, state: RequestState) -> None:
        del self._in_flight[state.request.key]
        self._speculation.end(state.request.key, state.tokens)
        self._watches.pop(state.request.key, None)
        self._preemptions += state.preemptions

    def _settle(self) -> None:
        """Idle: the tick that may still be in flight belongs to nobody, and no page may be missing."""
        self._land()
        self._read_s = self._following = None  # the time until the next request is no tick's
        self._scheduler.check_integrity()
