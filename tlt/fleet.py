"""Worker: what one processor owns. LocalFleet: one worker, called directly.

What always holds: engine and trainer hold the very same policy tensors, so that an update reaches the engine by its
version alone and nothing is copied; drafter weights reach the engine between ticks. A worker is a plain object that is
told what to do: whoever drives it, in this process or another, gets the same answers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tlt.config import NEW, ModelSettings, RunConfig
from tlt.drafting.planner import Decision, DraftShapes, TrainingPlanner
from tlt.drafting.saving import contents_of, read_checkpoint, write_contents
from tlt.drafting.session import DraftingResult
from tlt.drafting.states import StateKeeper, keeper_of
from tlt.drafting.trainer import OnlineDrafter
from tlt.engine.build import build_engine, shape_policy_of, shapes_of
from tlt.engine.engine import EngineCore, SleepReport
from tlt.engine.graphs import buckets, padding
from tlt.engine.memory import GIB, gib_of_what_is_free
from tlt.engine.request import Request
from tlt.event_builders import (
    acceptance_collapsed,
    account_updated,
    drafter_trained,
    engine_slept,
    rollout_report,
    training_forecast,
    worker_trace,
)
from tlt.loop import Emit, RolloutReport
from tlt.model.device import free_bytes, most_reserved
from tlt.model.parallel import ALONE as ONE_RANK
from tlt.model.parallel import Alone
from tlt.model.slices import refresh, slice_of
from tlt.model.transformer import Transformer
from tlt.multi_turn import MultiTurn, Replies
from tlt.plan import kv_bytes_beside_training, plan_or_refuse
from tlt.policy import Policy, base_name, device_of, open_policy
from tlt.spec.budget import Budget, CostKind
from tlt.spec.drafter import Drafter, build_drafters
from tlt.spec.eagle import Eagle
from tlt.spec.eagle_files import Origin
from tlt.spec.speculation import SpeculationReport
from tlt.spec.tuner import Tuner
from tlt.train.adapter import AdapterWords, write_adapter
from tlt.train.checkpoint import read_words, write_words
from tlt.train.drafter import Averaging
from tlt.train.host_copy import HostCopy
from tlt.train.policy import PolicyTrainer, RowObserver, SumOverWorkers, UpdateResult
from tlt.train.policy_files import OPTIMIZER, POLICY, PolicyFiles, WholePolicyFiles
from tlt.train.restore import reading
from tlt.types import Completion, Experience, Key
from tlt.watch.events import DrafterSwapped, StartupPhase
from tlt.watch.trace import RequestSpan, request_spans
from tlt.writing_ahead import AheadWriter, WrittenTexts, longest_first

T = TypeVar("T")
_MOMENT_S = 0.05
ADAPTER, DRAFTER = "adapter", "drafter"  # directories in a checkpoint
ACCOUNT = "account"  # name of a file in it


@dataclass(frozen=True, slots=True)
class Peers:
    """The other workers, as the trainers of one see them."""

    rank: int = 0  # of this one: each draws other answers to learn drafting from
    add_up: SumOverWorkers | None = None
    average: Averaging | None = None  # over those who train the drafter together
    make_trainer: Callable[[Transformer, Transformer | None], PolicyTrainer] | None = None  # of policy and reference
    open_policy: Callable[[ModelSettings], Policy] | None = None  # without values, which the trainer brings
    parallel: Alone = ONE_RANK  # those that form one engine with this worker
    files: PolicyFiles = field(default_factory=WholePolicyFiles)


ALONE = Peers()


class Worker:
    """Policy, engine, policy trainer, and whoever keeps the drafter sharp."""

    def __init__(self, config: RunConfig, peers: Peers = ALONE, emit: Emit = lambda event: None) -> None:
        self.config = config
        sleeps = config.engine.sleep == "always"
        if device_of(config.model.device).type == "cuda":
            sleeps = plan_or_refuse(config).sleeps
        self._engine_settings = replace(config.engine, sleep="always" if sleeps else "never")
        emit(StartupPhase(f"opening the policy {config.model.path}"))
        self.policy = (peers.open_policy or open_policy)(config.model)
        copied = (
            config.grpo.kl and not config.train.lora_rank
        )  # with adapters, the policy without them is the reference
        reference = open_policy(config.model).model if copied else None
        make = peers.make_trainer or partial(self._trainer, peers)
        self.trainer = make(self.policy.model, reference)
        self._files = peers.files
        self._host = HostCopy()
        self._drafter_copied = self._policy_copied = self._host.begin({})  # of the last snapshot
        self._waited_s = 0.0  # of the last update, for a snapshot
        self._part = slice_of(self.policy.model, peers.parallel)  # that the engine computes with
        self._open_engine(peers, emit)

    def _open_engine(self, peers: Peers, emit: Emit) -> None:
        config = self.config
        on_gpu = self.policy.model.embed.is_cuda
        shape_policy = shape_policy_of(config.spec, config.engine.rows, exact=config.engine.exact, on_gpu=on_gpu)
        self.tuner = shape_policy if isinstance(shape_policy, Tuner) else None
        drafters = build_drafters(self.policy, config)
        self._learned = next((drafter for drafter in drafters if drafter.learned), Drafter())
        trained = self._learned.model if not config.drafting.frozen else None
        keeper = keeper_of(self.policy.model, trained.config.taps, config) if trained else None
        self.engine = build_engine(
            *(replace(self.policy, model=self._part), self._with_room(), shape_policy, drafters, keeper),
            on_phase=lambda it: emit(StartupPhase(it)),
        )
        self._keeper = keeper
        self.drafter = self._online_drafter(trained, keeper, peers) if trained else None
        self.engine.rest()
        self._plain: EngineCore | None = None  # writes instead of `engine` during a replay
        self._states_wanted: bool | None = None  # whether states are kept after an evaluation; None: there is none
        self._step = -1  # of the last rollout
        self._before: SpeculationReport | None = None  # of the engine, when the first rollout of that step began
        forget = keeper.collect if keeper else lambda completion: None
        self.ahead = AheadWriter(self.engine, buckets(config.engine.rows), self.tuner, forget)
        self._written_before = 0  # tokens written ahead, when the first rollout of that step began
        self._prompt_ids: dict[Key, str] = {}  # of requests under way
        self._spans: list[RequestSpan] = []  # of the completions of a rollout

    def _trainer(self, peers: Peers, model: Transformer, reference: Transformer | None) -> PolicyTrainer:
        train, grpo, sampling = self.config.train, self.config.grpo, self.config.sampling
        return PolicyTrainer(model, train, grpo, reference=reference, sampling=sampling, sum_over_workers=peers.add_up)

    def _with_room(self, taken: bool = False) -> RunConfig:
        """The engine takes what is free on a GPU unless `engine.kv_gib` is set: the trainers need some of it, too.

        `taken`: the trainers have what they need, and what torch only keeps for later is as good as free.
        """
        model, config = self.policy.model, replace(self.config, engine=self._engine_settings)
        if config.engine.kv_gib or not model.embed.is_cuda:
            return config
        free = free_bytes(model.embed.device)
        if taken:
            kv_gib = gib_of_what_is_free(free)
        else:
            kv_gib = kv_bytes_beside_training(plan_or_refuse(self.config), free) / GIB
        return replace(config, engine=replace(config.engine, kv_gib=kv_gib))

    def _online_drafter(self, trained: Eagle, keeper: StateKeeper | None, peers: Peers) -> OnlineDrafter:
        own = replace(self.config, run=replace(self.config.run, seed=self.config.run.seed ^ (peers.rank << 32)))
        drafter = OnlineDrafter.of(
            *(self.policy, trained, own),
            keeper=keeper,
            average=peers.average,
            before_change=lambda: self._drafter_copied.result(),
        )
        if self.policy.model.embed.is_cuda and self.config.cluster.workers > 1:
            drafter.warm_up()  # in idle time of a rollout, others would wait until this worker has compiled
        return drafter

    def keep_states(self, wanted: bool) -> None:
        """Whether states of the policy are kept for the drafter from now on, where they are not computed again."""
        if self._keeper:
            self._keeper.wanted = wanted

    @property
    def account(self) -> Budget | None:
        """Seconds that this worker's rollouts speculated for, and what came of it; None: nothing counts them."""
        return self.tuner.budget if self.tuner else None

    @property
    def learned_name(self) -> str:
        """The learned drafter's name in shapes and reports; "" if there is none."""
        return self._learned.name

    @property
    def drafts_with(self) -> Eagle | None:
        """The learned drafter at work, if there is one. Another version is copied into its tensors."""
        return self._learned.model

    # ---- rollout

    @property
    def _writer(self) -> EngineCore:
        return self._plain or self.engine

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self.ahead.give_way()
        self._writer.submit(requests)
        self._prompt_ids.update((request.key, request.prompt_id) for request in requests)

    @property
    def idle(self) -> bool:
        """Whether no request is under way that is waited for."""
        return self._writer.in_flight == self.ahead.running

    def tick(self) -> list[Completion]:
        """The answers that ended in one tick. The drafter learns from them, but not in a replay or an evaluation."""
        completions = self._writer.tick() if self._plain else self.ahead.tick()
        ids = [self._prompt_ids.pop(completion.key) for completion in completions]
        if completions and self._plain is None and self._states_wanted is None:
            self._spans += request_spans(completions)
            if self.drafter:
                self.drafter.learn_from(completions, self.engine.version, ids)
        return completions

    def finish(self) -> None:
        """Raises if a request failed."""
        self._writer.raise_failures()

    def speculation(self) -> SpeculationReport | None:
        return self.engine.report().speculation

    def begin_rollout(self, step: int) -> None:
        """What `report` tells begins with the first rollout of a step."""
        if step != self._step:
            self._step, self._before, self._spans = step, self.speculation(), []
            self._written_before = self.ahead.written

    def report(self) -> RolloutReport:
        """Of the rollouts of the last step."""
        after, before = self.speculation(), self._before
        spent = after.since(before) if after and before else after
        expected = self.tuner.expected if self.tuner else None
        device = self.policy.model.embed.device
        trace = worker_trace(spent, self._spans, expected, device_bytes=most_reserved(device))
        ahead_tokens = self.ahead.written - self._written_before
        return replace(rollout_report(spent), ahead_tokens=ahead_tokens, traces=(trace,))

    def begin_replay(self) -> None:
        """Until `end_replay`, requests are written by an engine without speculation that shares only the policy."""
        self._plain = self.plain_engine()

    def end_replay(self) -> None:
        self._plain = None

    def begin_evaluation(self) -> None:
        """Until `end_evaluation`, nobody learns from what is written, and no states are kept for it."""
        self._states_wanted = self._keeper is not None and self._keeper.wanted
        self.keep_states(False)

    def end_evaluation(self) -> None:
        """Also of a worker that came while the others evaluated."""
        if self._states_wanted is not None:
            self.keep_states(self._states_wanted)
        self._states_wanted = None

    def plain_engine(self) -> EngineCore:
        """Another engine for the same policy, that does not speculate."""
        settings = replace(self._with_room(taken=True).engine, sleep="never")
        plain = EngineCore(self._part, self.policy.tokenizer, settings, version=self.engine.version)
        plain.compile(filtered=self.config.sampling.filtered)
        plain.measure()  # as the engine was when it was built: what runs first takes longer
        plain.rest()
        return plain

    # ---- learning

    def update(self, experiences: Sequence[Experience], observer: RowObserver | None = None) -> UpdateResult:
        """The engine sleeps from here to `publish`, if it is configured to. Weights change when the last snapshot is
        copied."""
        self._sleep()
        self._waited_s = 0.0
        update = self.trainer.update(experiences, observer, before_change=self.wait_for_copies)
        return replace(update, checkpoint_s=self._waited_s)

    def _sleep(self) -> None:
        self.engine.sleep()

    def publish(self, version: int) -> None:
        """The tensors already hold this version of the policy: whoever has derived something from them is told."""
        refresh(self._part, self.policy.model.named_parameters())
        self._load_policy(version)

    def _load_policy(self, version: int) -> None:
        self.engine.load_policy(version)

    @property
    def version(self) -> int:
        """Of the policy that the engine computes with."""
        return self.engine.version

    @property
    def slept(self) -> SleepReport | None:
        """How the engine slept during the last update, if it did."""
        return self.engine.slept

    def rest(self) -> None:
        """Lets the workers go that form one engine with this one. Until it is called they follow this one."""
        self._writer.rest()

    def swap_drafter(self) -> int | None:
        """Hands the newest drafter to the engine; its version, if the engine had another."""
        return self.take_drafter(self.drafter.weights(), self.drafter.version) if self.drafter else None

    def take_drafter(self, weights: Mapping[str, Tensor], version: int) -> int | None:
        """Hands a drafter to the engine, between ticks; its version, if the engine had another."""
        if not self._learned.learned or self._learned.version == version:
            return None
        self.engine.load_drafter(weights, version)
        return version

    # ---- going on later

    def snapshot(self, rest: bool = True) -> Callable[[Path], None]:
        """Begins a copy on the host of this worker's part of policy and optimizer and, as the `rest`, of the drafter,
        to be written whenever there is time. What is about to change one of them waits for its copy. A drafter that has
        learned nothing yet is left out: a resumed run begins with the same one."""
        config, source = self.policy.model.config, self.policy.source
        live: dict[str, Any] = {OPTIMIZER: self.trainer.state()}
        adapters = self.trainer.adapters
        if adapters:
            live[ADAPTER] = adapters.peft_tensors()
            words = AdapterWords(*base_name(self.config.model), adapters.rank, adapters.scale)
        if not adapters or self.config.checkpoint.merge:
            live[POLICY] = self.trainer.weights()
        learned: dict[str, Any] = {}
        if rest and self.drafter and self._drafter_is_saved(self.drafter):
            origin = Origin(self.config.model.path, tuple(config.source.get("architectures") or ()))
            learned[DRAFTER] = contents_of(self.drafter, origin, self.config.checkpoint.buffer)
        self._drafter_copied = drafter = self._host.begin(learned)  # first: it is small, and may change first
        self._policy_copied = policy = self._host.begin(live)

        def write(directory: Path) -> None:
            learned, copied = drafter.result(), policy.result()
            if ADAPTER in copied:
                write_adapter(copied[ADAPTER], words, directory / ADAPTER)
            self._files.write(copied, config, source, directory)
            if DRAFTER in learned:
                write_contents(learned[DRAFTER], directory / DRAFTER)

        return write

    def wait_for_copies(self) -> None:
        """Until no snapshot reads policy, optimizer or drafter any more. Raises what a copy failed with."""
        started = time.perf_counter()
        self._drafter_copied.result()
        self._policy_copied.result()
        self._waited_s += time.perf_counter() - started

    def _drafter_is_saved(self, drafter: OnlineDrafter) -> bool:
        return bool(drafter.steps_taken or self.config.spec.path != NEW or self.config.checkpoint.buffer)

    def restore(self, directory: Path, version: int) -> None:
        """In place: the engine keeps its tensors. A drafter that the checkpoint has none of begins as configured."""
        self.wait_for_copies()
        if not (directory / ADAPTER).is_dir():  # which is learned on the policy that model.path names
            self.trainer.restore_weights(self.policy.model, directory / POLICY)
        state = self._files.read_state(directory, self.policy.model.embed.device)
        with reading(directory / OPTIMIZER):
            self.trainer.restore(state)
        if self.drafter and (directory / DRAFTER).is_dir():
            read_checkpoint(self.drafter, directory / DRAFTER)
        self.publish(version)
        self.swap_drafter()


def _soon(until: Callable[[], bool]) -> bool:
    """Whether what others wait for is there, or about to be: the last verdict is a moment later than its answer."""
    patience = time.perf_counter() + _MOMENT_S
    while not until():
        if time.perf_counter() > patience:
            return False
        time.sleep(_MOMENT_S / 50)
    return True


def _planner_of(worker: Worker) -> TrainingPlanner:
    config, tuner = worker.config, worker.tuner
    shapes = shapes_of(config.spec, exact=config.engine.exact)
    known = DraftShapes(shapes, worker.learned_name, tuner.expected) if tuner else None
    rows = config.engine.rows
    sizes = config.run.steps, config.draft.unroll, rows, padding(rows)
    return TrainingPlanner(config.drafting, *sizes, known, worker.account)


def read_accounts(directory: Path) -> dict[str, Any]:
    """What a checkpoint knows of the cost of speculation: the account of every worker, and the planner's state."""
    written = (directory / f"{ACCOUNT}.json").exists()  # by this version of tlt
    return read_words(directory, ACCOUNT) if written else {"accounts": []}


class LocalFleet:
    """One worker, called directly."""

    def __init__(self, config: RunConfig, emit: Emit) -> None:
        self.worker = Worker(config, emit=emit)
        self._emit = emit
        self._step = self._told = 0  # _told: alarms
        self._planner = _planner_of(self.worker) if self.worker.drafter else None
        if self.worker.drafter:
            emit(StartupPhase("timing drafter training"))
            self.worker.drafter.warm_up()
        self._verdicts: set[bool] = set()  # told so far: that drafter training pays, that it does not
        self._lengths: list[int] = []  # of the step's rollouts, in tokens
        self._rollout_s = self._saved_s = 0.0  # of the step's rollouts
        self._since, self._apart_s = 0.0, 0.0  # the last rollout's end; seconds since that the account knows or ignores
        self._update_s = 0.0  # that the next update may take longer, for drafter training inside it
        self._texts = WrittenTexts()
        self._next: Callable[[], Sequence[Request]] | None = None  # requests of the next step, until they are asked for

    @property
    def account(self) -> Budget | None:
        """Seconds that speculation cost and saved so far; None where nothing counts them. To be read only."""
        return self._planner.account if self._planner else self.worker.account

    def leave_out(self, seconds: float) -> None:
        if self._since:
            self._apart_s += seconds

    def rollout(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        first = step != self._step or not self._lengths
        if first:
            self._lengths, self._rollout_s, self._saved_s = [], 0.0, 0.0
        self._step = step
        self.worker.begin_rollout(step)
        return self._rolled_out(self._texts.given(step, requests), replies, first)

    def write_ahead(self, step: int, upcoming: Callable[[], Sequence[Request]]) -> None:
        self._next = upcoming

    def _offer_ahead(self) -> None:
        """Asks for the requests of the next step when there first is room for them."""
        if self._next is not None and self.worker.ahead.has_room:
            upcoming, self._next = self._next(), None
            self._texts.begin(self._step, upcoming)
            self.worker.ahead.offer(longest_first(upcoming, self.worker.engine.expected))

    def _stop_writing_ahead(self) -> None:
        self._next = None
        self._texts.put(self.worker.ahead.end())

    def _rolled_out(self, requests: Sequence[Request], replies: Replies | None, first: bool) -> Iterator[Completion]:
        started = time.perf_counter()
        for completion in self._write(requests, replies):
            self._lengths.append(len(completion.tokens))
            yield completion
        ended = time.perf_counter()
        self._rollout_s += ended - started
        if self._planner:
            step_s, before_s = ended - (self._since or started) - self._apart_s, self._saved_s
            self._saved_s = self.report().saved_s
            saved_s = self._saved_s - before_s
            self._planner.rolled_out(self._lengths, self._rollout_s, step_s, saved_s, first=first)
        self._since, self._apart_s = ended, 0.0

    def _write(self, requests: Sequence[Request], replies: Replies | None) -> Iterator[Completion]:
        with MultiTurn(requests, replies) as turns:
            self.worker.submit(requests)
            while turns.waiting or not self.worker.idle:
                self._offer_ahead()
                waits = self.worker.idle and not self.worker.ahead.open
                if not waits:
                    for completion in self.worker.tick():
                        turns.hand_in(completion)
                    self._sound()
                complete, further = turns.take(None if waits else 0.0)
                self.worker.submit(further)
                yield from complete
        self.worker.finish()

    def _sound(self) -> None:
        alarms = self.worker.engine.alarms
        while self._told < len(alarms):
            self._emit(acceptance_collapsed(self._step, alarms[self._told]))
            self._told += 1

    def report(self) -> RolloutReport:
        return self.worker.report()

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        """As long as a step may wait for it, and in the time in which others are waited for."""
        self._train_drafter(step, until)
        while self.worker.ahead.open and not until():
            self.worker.tick()
        self._stop_writing_ahead()

    def _train_drafter(self, step: int, until: Callable[[], bool]) -> None:
        drafter, planner = self.worker.drafter, self._planner
        if drafter is None or planner is None:
            return
        drafter.sort_arrived()  # also if it does not train now: arrived samples are not bounded
        status = drafter.status(self._survival())
        decision = self._charge(CostKind.MEASURING, partial(planner.decide, step, status))
        self._tell(step, decision)
        self._update_s = decision.seconds if drafter.learns_in_updates else 0.0
        extra_s = 0.0 if drafter.learns_in_updates else decision.seconds
        if extra_s or (planner.account.affords(decision.worst_s) and not _soon(until)):
            self._trained(step, drafter.train(until, extra_s=extra_s))

    def _trained(self, step: int, result: DraftingResult) -> None:
        measuring_s = min(result.measuring_s, result.waited_s)
        self._spent(CostKind.MEASURING, measuring_s)
        self._spent(CostKind.TRAINING, result.waited_s - measuring_s)
        if result.micro_steps:
            if self._planner and result.after.tokens:
                self._planner.trained(result.before.accept_length, result.tokens, result.after.accept_length)
            self._emit(drafter_trained(step, result))

    def _survival(self) -> float:
        """Share of the learned drafter's first tokens accepted in the last rollout; 0: none were drafted."""
        by_depth = dict(self.report().by_depth)
        return next(iter(by_depth.get(self.worker.learned_name, ())), 0.0)

    def _tell(self, step: int, decision: Decision) -> None:
        """Whether drafter training pays: each of the two verdicts once."""
        found = decision.forecast
        if found is not None and found.steps_left and found.pays not in self._verdicts:
            self._verdicts.add(found.pays)
            self._emit(training_forecast(step, found))
        self.worker.keep_states(found is None or found.pays or decision.trains)

    def _charge(self, kind: CostKind, work: Callable[[], T]) -> T:
        """Does something that everything else waits for."""
        started = time.perf_counter()
        result = work()
        self._spent(kind, time.perf_counter() - started)
        return result

    def _spent(self, kind: CostKind, seconds: float) -> None:
        if self._planner:
            self._planner.account.charge(kind, seconds)
            self._apart_s += seconds

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        drafter, seconds = self.worker.drafter, self._update_s
        if drafter is None or not seconds:
            return self.worker.update(experiences)
        training, self._update_s = drafter.in_update(seconds), 0.0
        update = self.worker.update(experiences, training)
        result = training.finish()
        self._trained(self._step, result)
        return replace(update, drafting_s=result.waited_s)

    def publish(self, step: int, version: int) -> None:
        self.worker.publish(version)
        if self.worker.engine.slept:
            self._emit(engine_slept(step, [self.worker.engine.slept]))
        started = time.perf_counter()
        swapped = self._charge(CostKind.SWAPPING, self.worker.swap_drafter)
        if swapped is not None:
            self._emit(DrafterSwapped(step, swapped, time.perf_counter() - started))
        if self._planner:
            self._emit(account_updated(step, self._planner.account))

    def replay(self, requests: Sequence[Request], replies: Replies | None = None) -> tuple[list[Completion], float]:
        begun = time.perf_counter()
        self.worker.begin_replay()
        started = time.perf_counter()
        completions = list(self._write(requests, replies))
        seconds = time.perf_counter() - started
        self.worker.end_replay()
        self._apart_s += time.perf_counter() - begun
        if self._planner and len(requests) == len(self._lengths):  # not the sample that is decoded to compare
            self._planner.replayed(seconds)
        return completions, seconds

    def evaluate(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        self._step = step
        self.worker.begin_evaluation()
        yield from self._write(requests, replies)
        self.worker.end_evaluation()

    def snapshot(self) -> Callable[[Path], None]:
        write = self.worker.snapshot()
        account, planner = self.account, self._planner
        words = {"accounts": [account.state()] if account else [], "planner": planner.state() if planner else None}

        def write_all(directory: Path) -> None:
            write(directory)
            write_words(words, directory, ACCOUNT)

        return write_all

    def restore(self, directory: Path, version: int) -> None:
        self.worker.restore(directory, version)
        saved = read_accounts(directory)
        if self.account and saved["accounts"]:
            self.account.restore(saved["accounts"])
            if self._planner and saved.get("planner"):
                self._planner.restore(saved["planner"])
        self._texts = WrittenTexts()  # of another policy

    def close(self) -> None:
        pass
