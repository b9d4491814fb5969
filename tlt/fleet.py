"""Worker: what one processor owns. LocalFleet: one worker, called directly.

Always holds: engine and trainer share the policy's tensors, so an update copies nothing and publishes only a version
number. Drafter weights reach the engine between ticks. A worker is a plain object and decides nothing: it returns the
same results in this process and in an actor. Does not know Ray.
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
from tlt.plan import kv_bytes_beside_training, plan_or_refuse, settled
from tlt.policy import Policy, base_name, open_policy
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
_MOMENT_S = 0.05  # seconds that a last verdict may arrive after its completion
ADAPTER, DRAFTER = "adapter", "drafter"  # directories in a checkpoint
ACCOUNT = "account"  # name of a file in it


@dataclass(frozen=True, slots=True)
class Peers:
    """The other workers, as one worker's trainers use them."""

    rank: int = 0  # of this worker; part of the seed of its drafter's training data
    add_up: SumOverWorkers | None = None  # sums tensors over all workers
    average: Averaging | None = None  # averages over the workers that train the drafter together
    make_trainer: Callable[[Transformer, Transformer | None], PolicyTrainer] | None = None  # from policy and reference
    open_policy: Callable[[ModelSettings], Policy] | None = (
        None  # opens the policy without values, which the trainer fills in
    )
    parallel: Alone = ONE_RANK  # the ranks that form one engine with this worker
    files: PolicyFiles = field(default_factory=WholePolicyFiles)


ALONE = Peers()


class Worker:
    """Policy, engine, policy trainer and drafter trainer of one worker."""

    def __init__(self, config: RunConfig, peers: Peers = ALONE, emit: Emit = lambda event: None) -> None:
        self.config = config = settled(config)
        emit(StartupPhase(f"opening the policy {config.model.path}"))
        self.policy = (peers.open_policy or open_policy)(config.model)
        copied = config.grpo.kl and not config.train.lora_rank  # LoRA: the base policy is the reference
        reference = open_policy(config.model).model if copied else None
        make = peers.make_trainer or partial(self._trainer, peers)
        self.trainer = make(self.policy.model, reference)
        self._files = peers.files
        self._host = HostCopy()
        self._drafter_copied = self._policy_copied = self._host.begin({})  # of the last snapshot
        self._waited_s = 0.0  # seconds that the last update waited for a snapshot
        self._part = slice_of(self.policy.model, peers.parallel)  # the engine's slice of the policy
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
        self._states_wanted: bool | None = (
            None  # whether to keep hidden states after the evaluation; None: no evaluation
        )
        self._step = -1  # of the last rollout
        self._before: SpeculationReport | None = None  # the engine's report when the first rollout of that step began
        forget = keeper.collect if keeper else lambda completion: None
        self.ahead = AheadWriter(self.engine, buckets(config.engine.rows), self.tuner, forget)
        self._written_before = 0  # tokens written ahead when the first rollout of that step began
        self._prompt_ids: dict[Key, str] = {}  # of requests in flight
        self._spans: list[RequestSpan] = []  # of the step's completions

    def _trainer(self, peers: Peers, model: Transformer, reference: Transformer | None) -> PolicyTrainer:
        train, grpo, sampling = self.config.train, self.config.grpo, self.config.sampling
        return PolicyTrainer(model, train, grpo, reference=reference, sampling=sampling, sum_over_workers=peers.add_up)

    def _with_room(self, taken: bool = False) -> RunConfig:
        """The configuration with `engine.kv_gib` set, on a GPU: the free memory without the trainers' share.

        `taken`: the trainers have allocated their memory; memory that torch only caches counts as free.
        """
        model, config = self.policy.model, self.config
        if config.engine.kv_gib or not model.embed.is_cuda:
            return config
        free = free_bytes(model.embed.device)
        if taken:
            kv_gib = gib_of_what_is_free(free)
        else:
            kv_gib = kv_bytes_beside_training(plan_or_refuse(config), free) / GIB
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
            drafter.warm_up()  # now: in a session the other workers would wait for this one to compile
        return drafter

    def keep_states(self, wanted: bool) -> None:
        """Whether the engine keeps hidden states for drafter training from now on. No effect if they are recomputed."""
        if self._keeper:
            self._keeper.wanted = wanted

    @property
    def account(self) -> Budget | None:
        """The account of the seconds that speculation cost and saved on this worker; None: there is no tuner."""
        return self.tuner.budget if self.tuner else None

    @property
    def learned_name(self) -> str:
        """The learned drafter's name in shapes and reports; "" if there is none."""
        return self._learned.name

    @property
    def drafts_with(self) -> Eagle | None:
        """The engine's learned drafter, if there is one. New versions are copied into its tensors."""
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
        """Whether no request of this step is in flight."""
        return self._writer.in_flight == self.ahead.running

    def tick(self) -> list[Completion]:
        """Runs a tick. Returns the completions that ended: training data, except in replays and evaluations."""
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
        """Called before each rollout. `report` covers the rollouts from the first one of a step on."""
        if step != self._step:
            self._step, self._before, self._spans = step, self.speculation(), []
            self._written_before = self.ahead.written

    def report(self) -> RolloutReport:
        """The report on the rollouts of the last step."""
        after, before = self.speculation(), self._before
        spent = after.since(before) if after and before else after
        expected = self.tuner.expected if self.tuner else None
        device = self.policy.model.embed.device
        trace = worker_trace(spent, self._spans, expected, device_bytes=most_reserved(device))
        ahead_tokens = self.ahead.written - self._written_before
        return replace(rollout_report(spent), ahead_tokens=ahead_tokens, traces=(trace,))

    def begin_replay(self) -> None:
        """Until `end_replay` an engine without speculation decodes the requests. It shares only the policy."""
        self._plain = self.plain_engine()

    def end_replay(self) -> None:
        self._plain = None

    def begin_evaluation(self) -> None:
        """Until `end_evaluation` completions are no training data, and no hidden states are kept."""
        self._states_wanted = self._keeper is not None and self._keeper.wanted
        self.keep_states(False)

    def end_evaluation(self) -> None:
        """Also valid for a worker that joined during the evaluation."""
        if self._states_wanted is not None:
            self.keep_states(self._states_wanted)
        self._states_wanted = None

    def plain_engine(self) -> EngineCore:
        """A second engine for the same policy, without speculation."""
        settings = replace(self._with_room(taken=True).engine, sleep="never")
        plain = EngineCore(self._part, self.policy.tokenizer, settings, version=self.engine.version)
        plain.compile(filtered=self.config.sampling.filtered)
        plain.measure()  # first runs take longer; the other engine was measured too when it was built
        plain.rest()
        return plain

    # ---- learning

    def update(self, experiences: Sequence[Experience], observer: RowObserver | None = None) -> UpdateResult:
        """Updates the policy once the last snapshot is copied. An engine that sleeps does so until `publish`."""
        self._sleep()
        self._waited_s = 0.0
        update = self.trainer.update(experiences, observer, before_change=self.wait_for_copies)
        return replace(update, checkpoint_s=self._waited_s)

    def _sleep(self) -> None:
        self.engine.sleep()

    def publish(self, version: int) -> None:
        """Publishes this version, which the policy's tensors hold already, to the engine's slice and state."""
        refresh(self._part, self.policy.model.named_parameters())
        self._load_policy(version)

    def _load_policy(self, version: int) -> None:
        self.engine.load_policy(version)

    @property
    def version(self) -> int:
        """Version of the engine's policy."""
        return self.engine.version

    @property
    def slept(self) -> SleepReport | None:
        """The engine's sleep during the last update; None: it did not sleep."""
        return self.engine.slept

    def rest(self) -> None:
        """Releases the follower ranks of this worker's engine."""
        self._writer.rest()

    def swap_drafter(self) -> int | None:
        """Loads the newest drafter into the engine. Returns its version; None: the engine had it already."""
        return self.take_drafter(self.drafter.weights(), self.drafter.version) if self.drafter else None

    def take_drafter(self, weights: Mapping[str, Tensor], version: int) -> int | None:
        """Loads a drafter into the engine, between ticks. Returns its version; None: the engine had it already."""
        if not self._learned.learned or self._learned.version == version:
            return None
        self.engine.load_drafter(weights, version)
        return version

    # ---- snapshots

    def snapshot(self, rest: bool = True) -> Callable[[Path], None]:
        """Begins a host copy of this worker's part of policy and optimizer and, with `rest`, of a trained drafter.

        The returned function writes the copy. Work that changes one of them waits for its copy.
        """
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
        self._drafter_copied = drafter = self._host.begin(learned)  # first: it is small, and may change earlier
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
        """Waits until no snapshot reads policy, optimizer or drafter. Raises the error of a failed copy."""
        started = time.perf_counter()
        self._drafter_copied.result()
        self._policy_copied.result()
        self._waited_s += time.perf_counter() - started

    def _drafter_is_saved(self, drafter: OnlineDrafter) -> bool:
        return bool(drafter.steps_taken or self.config.spec.path != NEW or self.config.checkpoint.buffer)

    def restore(self, directory: Path, version: int) -> None:
        """Restores a checkpoint in place: tensors keep their address. An unsaved drafter starts as configured."""
        self.wait_for_copies()
        if not (directory / ADAPTER).is_dir():  # an adapter's base is the policy at model.path, loaded already
            self.trainer.restore_weights(self.policy.model, directory / POLICY)
        state = self._files.read_state(directory, self.policy.model.embed.device)
        with reading(directory / OPTIMIZER):
            self.trainer.restore(state)
        if self.drafter and (directory / DRAFTER).is_dir():
            read_checkpoint(self.drafter, directory / DRAFTER)
        self.publish(version)
        self.swap_drafter()


def _soon(until: Callable[[], bool]) -> bool:
    """Whether `until` becomes true within `_MOMENT_S`: a last verdict comes shortly after its completion."""
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
    """The speculation accounts of all workers in a checkpoint, and the planner's state."""
    written = (directory / f"{ACCOUNT}.json").exists()  # older checkpoints lack it
    return read_words(directory, ACCOUNT) if written else {"accounts": []}


class LocalFleet:
    """One worker, called directly."""

    def __init__(self, config: RunConfig, emit: Emit) -> None:
        self.worker = Worker(config, emit=emit)
        self._emit = emit
        self._step = self._told = 0  # _told: number of alarms emitted
        self._planner = _planner_of(self.worker) if self.worker.drafter else None
        if self.worker.drafter:
            emit(StartupPhase("timing drafter training"))
            self.worker.drafter.warm_up()
        self._verdicts: set[bool] = set()  # verdicts emitted so far: True, training pays; False, it does not
        self._lengths: list[int] = []  # of the step's rollouts, in tokens
        self._rollout_s = self._saved_s = 0.0  # of the step's rollouts
        self._since, self._apart_s = (
            0.0,
            0.0,
        )  # end of the last rollout; later seconds that are charged already or excluded
        self._update_s = 0.0  # seconds of drafter training allowed inside the next update
        self._texts = WrittenTexts()
        self._next: Callable[[], Sequence[Request]] | None = (
            None  # returns the next step's requests; None after the call
        )

    @property
    def account(self) -> Budget | None:
        """The account of the seconds that speculation cost and saved; None: there is none. Read-only."""
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
        """Gets the requests of the next step when rows first become free for them."""
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
        """Trains the drafter while rewards are awaited, and for the seconds that the planner grants beyond."""
        self._train_drafter(step, until)
        while self.worker.ahead.open and not until():
            self.worker.tick()
        self._stop_writing_ahead()

    def _train_drafter(self, step: int, until: Callable[[], bool]) -> None:
        drafter, planner = self.worker.drafter, self._planner
        if drafter is None or planner is None:
            return
        drafter.sort_arrived()  # always: memory of arrived samples is not bounded
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
        """Fraction of the learned drafter's first tokens accepted in the last rollout; 0: none were drafted."""
        by_depth = dict(self.report().by_depth)
        return next(iter(by_depth.get(self.worker.learned_name, ())), 0.0)

    def _tell(self, step: int, decision: Decision) -> None:
        """Emits whether drafter training pays: each of the two verdicts once."""
        found = decision.forecast
        if found is not None and found.steps_left and found.pays not in self._verdicts:
            self._verdicts.add(found.pays)
            self._emit(training_forecast(step, found))
        self.worker.keep_states(found is None or found.pays or decision.trains)

    def _charge(self, kind: CostKind, work: Callable[[], T]) -> T:
        """Runs work that blocks the step, and charges its seconds."""
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
        if self.account:
            self._emit(account_updated(step, self.account, rollouts_only=self._planner is None))

    def replay(self, requests: Sequence[Request], replies: Replies | None = None) -> tuple[list[Completion], float]:
        begun = time.perf_counter()
        self.worker.begin_replay()
        started = time.perf_counter()
        completions = list(self._write(requests, replies))
        seconds = time.perf_counter() - started
        self.worker.end_replay()
        self._apart_s += time.perf_counter() - begun
        if self._planner and len(requests) == len(self._lengths):  # a full replay, not a sample
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
        self._texts = WrittenTexts()  # the old texts belong to another policy

    def close(self) -> None:
        pass
