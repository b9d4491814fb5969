"""The engine: requests in, completions out, continuously batched.

Always holds: each request is completed exactly once, or its failure raises. The tokens of a request depend only on the
policy, its key and its settings; not on the batch, the time of admission or preemptions. On a GPU in bfloat16 this
holds up to rounding; with `engine.exact` it holds bit for bit.
On a GPU each tick is launched before the tokens of the previous tick are read: the device does not wait for the host.
Knows no kernels and no trainer.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tlt.config import EngineSettings
from tlt.engine.admission import ADMISSIONS
from tlt.engine.exact import check_policy
from tlt.engine.features import Features
from tlt.engine.graphs import PoolReport
from tlt.engine.memory import cache_pages
from tlt.engine.output import InFlightTick, TickOutput
from tlt.engine.pages import PageAllocator, PageStats
from tlt.engine.request import Limits, PartialOutput, Request, RequestState, check, check_keys, check_text
from tlt.engine.runner import Runner
from tlt.engine.scheduler import Plan, RunningRequest, Scheduler
from tlt.engine.scoring import Scores, score
from tlt.errors import RequestError
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer
from tlt.spec.acceptance import Alarm
from tlt.spec.costs import POLICY, Measured
from tlt.spec.shape import MOST_NODES, OFF, Draft, Shape
from tlt.spec.speculation import Speculation, SpeculationReport
from tlt.text import StopWatch, Tokenizer
from tlt.types import Completion, FinishReason, Key, Timing

_NONE_DRAWN = -1  # the sampler's token where the logits are NaN or infinite
# tokens that a row emits in a tick → origin of each: 1 accepted draft, 2 accepted and written ahead, 0 neither
_DRAFTED = tuple(b"\1" * (tokens - 1) + b"\0" for tokens in range(1, MOST_NODES + 2))
_WRITTEN_AHEAD = tuple(b"\2" * (tokens - 1) + b"\0" for tokens in range(1, MOST_NODES + 2))
_CONTEXT_TICKS = 16  # ticks between two updates of the mean context length


@dataclass(frozen=True, slots=True)
class EngineReport:
    ticks: int
    tokens: int  # handed out in completions
    dropped: int  # rows computed for requests that were already over
    preemptions: int
    pages: PageStats
    graphs: PoolReport | None  # None without a graph pool
    speculation: SpeculationReport | None  # None without speculation


@dataclass(frozen=True, slots=True)
class SleepReport:
    """The KV cache's memory was released during an update."""

    bytes: int
    sleep_s: float  # seconds to release it
    wake_s: float  # seconds to allocate it again


class EngineCore:
    """Call `submit`, then `drain`. Or `tick` until `idle`, for completions as they end, then `drain` for failures."""

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
            cache_tokens=(pages - 1) * settings.page_size - beyond,  # a prompt's partial page may exist twice
        )
        kept_in = pages, settings.page_size, model.embed.dtype, model.embed.device
        self._cache = KVCache.allocate(model.local, *kept_in, sleeps=settings.sleep == "always")
        self._admission = admission = ADMISSIONS[settings.admission]()
        self._scheduler = Scheduler(
            PageAllocator(pages), settings.page_size, settings.rows, settings.prefill_tokens, admission
        )
        self._runner = Runner(
            model,
            self._cache,
            rows=settings.rows,
            graphs=settings.graphs,
            taps=taps,
            on_features=on_features,
            state_sink=self._speculation.state_sink,
            exact=settings.exact,
        )
        self._speculation.state_sink.attach(self._runner)
        self._speculation.attach(lambda: self._scheduler.remaining_ticks, lambda: self._scheduler.written)
        self._ahead = model.embed.is_cuda  # a tick is launched before the previous one is read
        self._hands_out = on_features is not None
        self._unread_tick: InFlightTick | None = None
        self._endings = tokenizer.eos_ids | {_NONE_DRAWN}  # tokens at which a completion may end
        self._watches: dict[Key, StopWatch] = {}  # of requests with stop texts
        self._in_flight: dict[Key, RequestState] = {}
        self._failures: dict[Key, str] = {}
        self._interrupted = False  # a tick has begun and not ended; stays True after an exception
        self._sleep_s: float | None = None  # seconds that `sleep` took; None: awake
        self.slept: SleepReport | None = None  # of the last sleep
        self._positions, self._context_due = 0.0, 0  # mean position of a row; tick of its next update
        self._ticks = self._tokens = self._dropped = self._preemptions = self._submitted = 0
        self._idle_ticks = 0  # ticks when the engine was idle last
        # time of the first token and tokens of each request that ended since; None: some were submitted during ticks
        self._lengths: list[tuple[float, int]] | None = []

    @property
    def version(self) -> int:
        """Version of the policy."""
        return self._version

    @property
    def idle(self) -> bool:
        return not self._in_flight

    @property
    def running(self) -> int:
        """Requests that decode."""
        return self._scheduler.running

    @property
    def in_flight(self) -> int:
        """Requests that decode or wait for a row."""
        return len(self._in_flight)

    def holds(self, key: Key) -> bool:
        """Whether the request of this key is in flight."""
        return key in self._in_flight

    def expected(self, request: Request) -> float:
        """Expected tokens of its completion, from finished completions of its prompt."""
        return self._admission.expected(request)

    @property
    def turn_rate(self) -> float:
        """Fraction of written-ahead tokens that differ from the policy's, among those whose predecessors all agree."""
        return self._speculation.turn_rate

    @property
    def alarms(self) -> Sequence[Alarm]:
        """Every collapse of a drafter so far, oldest first."""
        return self._speculation.alarms

    def submit(self, requests: Iterable[Request]) -> None:
        """Accepts all of the requests, or raises RequestError and accepts none. Running requests are not affected."""
        batch = list(requests)
        for request in batch:
            check(request, self._limits)
        check_keys(batch, self._in_flight)
        now = time.perf_counter()
        for request in batch:
            state = RequestState(request, self._submitted, now)
            self._in_flight[request.key] = state
            asked = request.prompt_id, request.prompt, request.params, request.draft_tokens
            self._speculation.begin(request.key, *asked)
            self._scheduler.submit(state)
            self._submitted += 1
        if batch and self._ticks > self._idle_ticks:
            self._lengths = None

    def tick(self) -> list[Completion]:
        """Runs one tick: decodes every running request. Returns the completions that ended."""
        if self._interrupted:
            raise RuntimeError(
                "an exception cut an earlier tick short, rows and pages may disagree: build a new engine"
            )
        self._interrupted = True
        shape, completions = self._next_shape()
        plan = self._plan(shape)
        drafts = self._draft(plan, shape)
        launched = self._forward(plan, drafts, shape)
        completions += self._accept(launched, shape)
        if self.idle:
            self._on_idle()
        self._interrupted = False
        return completions

    def _next_shape(self) -> tuple[Shape, list[Completion]]:
        """The shape of this tick, and the completions of the tick in flight if it must be read first."""
        shape = self._speculation.choose(self._scheduler.running)
        completions = [] if self._may_stay_unread(shape) else self._read_in_flight()
        if not self._scheduler.running:  # all requests to draft for have ended
            shape = OFF
            completions += [] if self._may_stay_unread(shape) else self._read_in_flight()
        return shape, completions

    def _may_stay_unread(self, shape: Shape) -> bool:
        """Whether the tick in flight may be read behind the launch of a tick in this shape.

        Drafts need the newest tokens, and pages the newest positions. A plain tick runs behind a plain one. A
        verification runs behind another if its trees are drafted on the device, and if there are pages for all
        positions that either may write.
        """
        tick = self._unread_tick
        if tick is None or shape.off or tick.shape.off:
            return tick is not None and shape.off and tick.shape.off
        fits = (
            tick.steps + shape.verify + self._speculation.deepest <= MOST_NODES
        )  # the next trees are drafted behind both
        return fits and self._speculation.needs_no_tokens(shape)

    def _plan(self, shape: Shape) -> Plan:
        if shape.off:
            plan = self._scheduler.plan()
        else:
            unread = self._unread_tick.steps if self._unread_tick else 0
            plan = self._scheduler.plan(nodes=shape.verify, unread=unread)
        if not plan.empty:
            self._runner.prepare(plan)
        elif self._unread_tick is None and not self.idle:
            raise AssertionError(
                f"nothing to run, yet {len(self._in_flight)} requests wait: {self._scheduler.page_stats}"
            )
        return plan

    def _draft(self, plan: Plan, shape: Shape) -> Sequence[Draft] | None:
        """A draft per row; None: the tick is plain, or the drafts lie on the device."""
        if shape.off:
            return None
        return self._speculation.propose(_keys(plan), [req.state.tokens for req in plan.reqs], shape)

    def _forward(self, plan: Plan, drafts: Sequence[Draft] | None, shape: Shape) -> InFlightTick | None:
        """Launches the tick and, behind a verification, the drafts of the next tick. None: nothing runs."""
        if plan.empty:
            return None
        self._ticks += 1
        launched = self._runner.launch(plan, drafts, shape, self._walk(shape))
        if not shape.off:
            self._speculation.prepare(_keys(plan))
        return launched

    def _reads_late(self, shape: Shape) -> bool:
        """Whether a tick in this shape is read after the next one is launched.

        A verification whose features are handed out is read at once: features name the positions of its tokens.
        """
        return self._ahead and (shape.off or not self._hands_out)

    def _accept(self, launched: InFlightTick | None, shape: Shape) -> list[Completion]:
        """Reads the launched tick, or the previous tick if this one is read late."""
        if self._reads_late(shape):
            launched, self._unread_tick = self._unread_tick, launched
        return self._read_tick(launched)

    def _read_tick(self, tick: InFlightTick | None) -> list[Completion]:
        if tick is None:
            return []
        plan, (drawn, times) = tick.plan, self._runner.drawn(tick)
        if plan.chunks:  # prefill is not part of a tick's cost
            times = replace(times, seconds=None)
        if tick.shape.off:
            completions = self._read(plan, drawn)
            if plan.reqs:
                self._speculation.decoded(len(plan.reqs), times, self._context(plan))
            return completions
        emitted = [() if req.over else tokens for req, tokens in zip(plan.reqs, drawn.tokens, strict=True)]
        self._scheduler.advance(plan.reqs, map(len, emitted))
        self._speculation.verified(tick.shape, emitted, times, self._context(plan))
        return self._read(plan, drawn, _WRITTEN_AHEAD if tick.shape.ahead else _DRAFTED)

    def _context(self, plan: Plan) -> float:
        """Mean context length of the plan's rows, in positions; updated every `_CONTEXT_TICKS` ticks."""
        if self._ticks >= self._context_due or not plan.reqs:
            self._context_due = self._ticks + _CONTEXT_TICKS
            self._positions = sum(req.position for req in plan.reqs) / max(1, len(plan.reqs))
        return self._positions

    def _read_in_flight(self) -> list[Completion]:
        """Reads the tick in flight, if there is one."""
        tick, self._unread_tick = self._unread_tick, None
        return self._read_tick(tick)

    def drain(self) -> list[Completion]:
        """Ticks until every request is completed. Failures raise RequestError at the end."""
        completions = []
        while not self.idle:
            completions += self.tick()
        self.raise_failures(completions)
        return completions

    def raise_failures(self, completions: Sequence[Completion] = ()) -> None:
        """Raises RequestError if a request failed since the last call. The error carries these completions."""
        if failures := self.take_failures():
            others = f"{len(completions)} other requests were completed: see the error's `completions`"
            raise RequestError(f"{'; '.join(failures.values())}. {others}", list(completions))

    def take_failures(self) -> dict[Key, str]:
        """Request → reason, for failures since the last call or since `drain` raised."""
        failures, self._failures = self._failures, {}
        return failures

    def written(self, key: Key) -> tuple[int, ...]:
        """The tokens of a request in flight so far."""
        return tuple(self._in_flight[key].tokens)

    def written_since(self, key: Key, start: int) -> PartialOutput:
        """The output of a request in flight so far, from token number `start` on."""
        state = self._in_flight[key]
        return PartialOutput(
            tuple(state.tokens[start:]), tuple(state.logprobs[start:]), tuple(state.policy_logprobs[start:])
        )

    def abort(self, key: Key) -> Completion:
        """Ends a request in any state and frees its row and pages.

        Returns the tokens read so far, with finish reason "abort".
        """
        state = self._in_flight.get(key)
        if state is None:
            raise RequestError(f"key (seed {key.seed}, request {key.request}) is not in flight; nothing to abort")
        self._scheduler.abort(state)
        now = time.perf_counter()
        state.first_token_s = state.first_token_s or now
        completion = self._complete(state, "abort", now)
        if self.idle:
            self._on_idle()
        return completion

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]], top: int = 0) -> list[Scores]:
        """Log-probabilities of all tokens of these texts but the first, from one forward of the current policy.

        Each position also has its `top` likeliest tokens. Requests in flight are not affected.
        """
        for text in texts:
            self.check(text)
        return score(self._runner.model, texts, top)

    def check(self, text: Sequence[int]) -> None:
        """Raises RequestError if the text cannot be scored."""
        check_text(text, self._limits)

    def drop_prefixes(self) -> None:
        """Empties the prefix cache: the KV cache of prompts and kept completions is computed again when needed."""
        self._scheduler.drop_prefixes()

    def load_policy(self, version: int) -> None:
        """Registers new weights in the policy's tensors. Nothing computed with the old weights is used again.

        Requests in flight continue with the new policy. Their completions name the version of their last token.
        """
        self._wake()
        self._scheduler.forget_cache()
        self._speculation.policy_changed()
        self._version = version

    def sleep(self) -> None:
        """Releases the KV cache's memory until `load_policy`, if `engine.sleep` is "always".

        Requests in flight lose their KV cache, which the next version of the policy would invalidate anyway.
        """
        if self._cache.memory:
            started = time.perf_counter()
            self._cache.give_back()
            self._sleep_s = time.perf_counter() - started

    def _wake(self) -> None:
        if self._sleep_s is not None:
            started = time.perf_counter()
            self._cache.take()
            self.slept = SleepReport(self._cache.bytes, self._sleep_s, time.perf_counter() - started)
            self._sleep_s = None

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads another version of the learned drafter. Called between two ticks."""
        self._speculation.load_drafter(weights, version)

    def rest(self) -> None:
        """Releases the follower ranks of this engine, until they follow again."""
        self._runner.rest()

    def compile(self, *, filtered: bool = False, chunks: bool = False) -> None:
        """Compiles the policy's kernels and captures the decode graphs.

        `filtered`: requests will use top-k, top-p or min-p. `chunks`: requests will have `draft_tokens`.
        """
        self._runner.compile(self._speculation.widest, self._speculation.deepest + 1, filtered=filtered)
        if chunks:
            self._runner.compile(MOST_NODES, MOST_NODES, filtered=filtered)
        self._runner.ready_to_decode(filtered)

    def warm_up(self, sizes: Sequence[int]) -> dict[int, float]:
        """Captures decode graphs for these batch sizes before the first request. Returns size → seconds of a run."""
        return self._runner.capture(sizes)

    def measure(self) -> list[Measured]:
        """Measures the cost of policy and drafter runs: the initial data of the cost model."""
        sizes, speculation = self._runner.measured_sizes(), self._speculation
        runs = [*self.warm_up(sizes).items(), *self._runner.time_trees(speculation.widest, speculation.deepest + 1)]
        return [Measured(POLICY, *run) for run in runs] + speculation.measure(sizes)

    def ready(self, shape: Shape, requests: int, *, filtered: bool = False) -> None:
        """Captures the graphs for ticks of this shape before a request needs them."""
        if self._runner.report() is not None:
            self._runner.ready_to_verify(shape, requests, self._walk(shape), filtered)
            self._speculation.ready(shape, requests)

    def _walk(self, shape: Shape) -> int:
        """Most tokens that a tick of this shape may emit per row, with room for the walks of any shape."""
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

    def _read(self, plan: Plan, drawn: TickOutput, marks: Sequence[bytes] = _DRAFTED) -> list[Completion]:
        """`marks`: number of tokens of a row → origin of each (`RequestState.drafted`)."""
        now = time.perf_counter()
        completions = []
        columns = (drawn.tokens, drawn.logprobs, drawn.policy_logprobs)
        for req, tokens, logprobs, policy_logprobs in zip(plan.reqs, *columns, strict=True):
            if req.over:
                self._dropped += 1
                continue
            state = req.state
            state.drafted += marks[len(tokens) - 1]  # `_complete` cuts it to the completion's length
            if not state.tokens:
                state.first_token_s = now
            if req.left > 0 and not state.request.params.stops and self._endings.isdisjoint(tokens):
                state.tokens.extend(tokens)  # the common case: the request cannot end in this tick
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
        """Appends a row's tokens up to the end of the completion. Returns the finish reason; None: it goes on."""
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
        if token in params.stop_token_ids or (params.stop and self._stopped(state, token)):
            return "stop"
        return "length" if len(state.tokens) == params.max_tokens else None

    def _stopped(self, state: RequestState, token: int) -> bool:
        """Whether this token completes a stop text."""
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
            drafted=bytes(state.drafted[: len(state.tokens)]),
        )

    def _fail(self, req: RunningRequest) -> None:
        """Ends a request whose logits are NaN or infinite. All other requests go on."""
        state = req.state
        self._scheduler.finish(req, keep=False)
        self._forget(state)
        self._failures[state.request.key] = (
            f"request {state.request.key.request}: the policy's logits at position "
            f"{len(state.request.prompt) + len(state.tokens)} are NaN or infinite; check its weights"
        )

    def _forget(self, state: RequestState) -> None:
        del self._in_flight[state.request.key]
        self._speculation.end(state.request.key, state.tokens)
        if self._lengths is not None:
            self._lengths.append((state.first_token_s, len(state.tokens)))
        self._watches.pop(state.request.key, None)
        self._preemptions += state.preemptions

    def _on_idle(self) -> None:
        """Called when idle: reads the tick in flight, which has no request left, and checks for leaked pages."""
        self._read_in_flight()
        lengths = None if self._lengths is None else [tokens for _, tokens in sorted(self._lengths)]
        self._speculation.rollout_ended(lengths)
        self._lengths, self._idle_ticks = [], self._ticks
        self._runner.timer.restart()  # idle time does not count as tick time
        self._scheduler.check_integrity()


def _keys(plan: Plan) -> list[Key]:
    return [req.state.request.key for req in plan.reqs]
