"""RayFleet: workers on one or several machines, with the methods that `LocalFleet` has for one.

What always holds: each request is completed once, however many workers are lost; after `publish` all workers hold the
same policy and drafter, bit by bit. Workers without requests train the drafter until the last completion has arrived,
and are waited for by at most one micro-step. A lost worker is replaced between two phases of a step, from the state of
another worker. Does not know tasks and rewards.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from tlt.cluster.actors import ActorGroup, CallOutcome, wait_while_it_moves
from tlt.cluster.checkpoint_files import CheckpointWriter, restore_workers
from tlt.cluster.epoch import Epoch
from tlt.cluster.host import Host
from tlt.cluster.interference import InterferenceRuns, TimedRollout
from tlt.cluster.liveness import RayLiveness
from tlt.cluster.messages import DrafterProgress, NewestDrafter, Published, WorkerRolloutReport
from tlt.cluster.placement import check_room, connect, resources_per_worker
from tlt.cluster.timeline import TimelineSpan, longest_spans, seconds_of
from tlt.config import RunConfig
from tlt.dispatch import Dispatch, deal
from tlt.drafting.idle import Coordinator, IdleSplit
from tlt.engine.request import Request
from tlt.errors import ClusterError, ConfigError, StateLost
from tlt.event_builders import account_updated, drafter_trained, engine_slept, together
from tlt.fleet import ACCOUNT, read_accounts
from tlt.loop import Emit, RolloutReport
from tlt.model.parallel import check_divisible
from tlt.multi_turn import MultiTurn, Replies
from tlt.policy import config_of
from tlt.spec.budget import Budget
from tlt.train.checkpoint import write_words
from tlt.train.policy import UpdateResult
from tlt.train.policy_files import merge_policy
from tlt.types import Completion, Experience
from tlt.watch.events import DrafterSwapped, StartupPhase
from tlt.watch.workers import FleetPublished, FleetRolledOut, FleetWaits, WorkerLost, WorkerReturned, WorkerSpans
from tlt.writing_ahead import AheadQueue, AheadWork, WrittenTexts, longest_first

_TURN_S = 0.15  # seconds of a turn of the other workers, while one worker's ticks are timed


@dataclass(frozen=True, slots=True)
class _Written:
    """The times of the requests written last."""

    seconds: float = 0.0  # to the last completion
    stop_s: float = 0.0  # from there until every worker had stopped
    reports: Mapping[int, WorkerRolloutReport] = field(default_factory=dict)


class RayFleet:
    """`host`: the class of the actors."""

    def __init__(self, config: RunConfig, emit: Emit, *, host: type[Host] = Host) -> None:
        self._config, self._emit = config, emit
        self._step, self._phase, self._since = 0, "start", time.monotonic()
        self._coordinator = Coordinator(())
        self._dispatch = Dispatch(config.engine.rows)
        self._dispatch_before = self._dispatch.copy()  # as it was before the last rollout
        self._reports: Mapping[int, WorkerRolloutReport] = {}  # of the last rollout
        self._written = _Written()
        self._texts = WrittenTexts()
        self._training_share = 0.5  # of the time of workers without requests, while there is anything to write ahead
        self._next: Callable[[], Sequence[Request]] | None = None  # requests of the next step
        self._epoch: Epoch | None = None  # the one under way
        self._group_complete, self._rendezvous_count = False, 0  # all workers are in one all-reduce group; attempts
        self._ours = connect(config.cluster)
        with ExitStack() as undo:  # on an error, stops what was started
            undo.callback(self.close)
            self._liveness = RayLiveness.of_this_driver(ours=self._ours)
            self._resources = resources_per_worker(config.cluster, config.model.device)
            check_room(config.cluster.workers, self._resources, config.cluster.tensor_parallel)
            self._check_division()
            device = "cuda" if self._resources.gpus else "cpu"
            theirs = replace(config, model=replace(config.model, device=device))
            emit(StartupPhase(f"starting {config.cluster.workers} workers"))
            self._actors = ActorGroup(
                theirs, self._resources, host, self._liveness, on_lost=self._lost, on_long_wait=self._waits
            )
            self._join(self._actors.start(range(config.cluster.workers)))
            self._form_group()
            undo.pop_all()

    def _check_division(self) -> None:
        """Raises where the slices of an engine cannot be had."""
        config, gpus = self._config, self._resources.gpus
        if config.cluster.tensor_parallel > 1 and 0 < gpus < 1:
            raise ConfigError(
                f"cluster.tensor_parallel needs whole GPUs, and cluster.gpus_per_worker is {gpus:g}; set it to 1"
            )
        if config.cluster.shard and config.cluster.tensor_parallel > 1 and config.grpo.kl:
            raise ConfigError(
                f"grpo.kl is {config.grpo.kl:g}, cluster.shard and cluster.tensor_parallel are on; expected one of the "
                "three off: the reference policy is whole on every worker, and with both no worker has room for it"
            )
        check_divisible(config_of(config.model), config.cluster.tensor_parallel)

    def _join(self, worker_ids: Sequence[int]) -> None:
        """Those of them that lead an engine are given requests from now on."""
        for worker_id in worker_ids:
            if worker_id in self._actors.leaders:
                self._coordinator.join(worker_id)

    def _new_epoch(self, ahead: Callable[[], AheadWork] | None) -> Epoch:
        there = self._actors, self._coordinator, self._dispatch, self._emit
        self._epoch = Epoch(*there, self._step, ahead if self._writes_ahead else None)
        return self._epoch

    @property
    def _writes_ahead(self) -> bool:
        return self._config.spec.ahead != "off"

    @property
    def _drafts(self) -> bool:
        return self._config.cluster.drafting and not self._config.drafting.frozen

    # ---- rollout

    def rollout(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        first = step != self._step
        self._step = step
        self._recover("rollout")
        if first:
            self._dispatch_before = self._dispatch.copy()
        return self._rolled_out(self._texts.given(step, requests), replies)

    def write_ahead(self, step: int, upcoming: Callable[[], Sequence[Request]]) -> None:
        self._next = upcoming

    def _ahead(self) -> AheadWork:
        """What the workers write ahead from now on, longest expected first; of requests begun before in this step, the
        rest."""
        if self._next is not None:
            upcoming, self._next = self._next(), None
            self._texts.begin(self._step, longest_first(upcoming, self._dispatch.expected))
        rows = self._config.engine.rows
        queue = AheadQueue(self._texts.unfinished(self._step), len(self._actors.leaders), rows)
        return AheadWork(queue, self._texts, IdleSplit(self._training_share))

    def _rolled_out(self, requests: Sequence[Request], replies: Replies | None) -> Iterator[Completion]:
        yield from self._write(requests, replies, drafting=self._drafts, ahead=self._ahead)
        self._reports = self._written.reports
        self._tell_rollout()

    def _write(
        self,
        requests: Sequence[Request],
        replies: Replies | None,
        *,
        drafting: bool,
        ahead: Callable[[], AheadWork] | None = None,
    ) -> Iterator[Completion]:
        """Yields completions, and then sets `_written`."""
        started = time.perf_counter()
        self._dispatch.begin(requests, self._actors.leaders)
        epoch = self._new_epoch(ahead)
        epoch.begin(drafting=drafting)
        with MultiTurn(requests, replies) as turns:
            yield from epoch.completions(turns)
        answered = time.perf_counter()
        reports = epoch.end()
        self._written = _Written(answered - started, time.perf_counter() - answered, reports)

    def report(self) -> RolloutReport:
        reports = self._reports.values()
        ranks = {worker_id: member.rank for worker_id, member in self._actors.members.items()}
        last = max(reports, key=lambda report: seconds_of(report.spans, "rolling"), default=None)
        saved_s = last.rollout.saved_s if last else 0.0  # of the slowest worker: the others would have waited for it
        return together([_of_worker(report.rollout, ranks.get(w, w)) for w, report in self._reports.items()], saved_s)

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        """All workers train the drafter together, and write ahead, while rewards are computed. They stop as soon as
        `until` is True."""
        if until() or not (self._drafts or self._writes_ahead):
            return
        self._enter("drafting")
        epoch = self._new_epoch(self._ahead)
        self._dispatch.begin((), self._actors.leaders)
        epoch.begin(drafting=self._drafts)
        epoch.draft(until)
        self._tell_drafting(epoch.end())

    def replay(self, requests: Sequence[Request], replies: Replies | None = None) -> tuple[list[Completion], float]:
        """Dispatches the requests as the rollout did, with its expected lengths: only the engines differ."""
        self._enter("replay")
        self._actors.ask_all("begin_replay")
        after, self._dispatch = self._dispatch, self._dispatch_before
        completions = list(self._write(requests, replies, drafting=False))
        self._dispatch = after
        self._actors.ask_all("end_replay")
        return completions, self._written.seconds

    def evaluate(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        self._step = step
        self._recover("evaluation")
        self._actors.ask_all("begin_evaluation")
        yield from self._write(requests, replies, drafting=False)
        self._actors.ask_all("end_evaluation")

    def leave_out(self, seconds: float) -> None:
        """Its account knows rollouts only."""

    def slowdown(self, requests: Sequence[Request], repeats: int) -> InterferenceRuns:
        """Times the ticks of the first worker while it decodes the requests plainly, `repeats` times each while the
        other workers of its machine train in turns and while they count in turns."""
        if self._actors.followers:
            raise ConfigError("cluster.tensor_parallel is above 1; workers that disturb each other are engines of one")
        rollouts: dict[str, list[TimedRollout]] = {"draft_in_turns": [], "count_in_turns": []}
        micro_steps = 0
        for _ in range(repeats):
            for way, runs in rollouts.items():
                rollout, taken = self._beside_others(requests, way)
                runs.append(rollout)
                micro_steps += taken
        training, counting = (tuple(runs) for runs in rollouts.values())
        return InterferenceRuns(training, counting, micro_steps)

    def _beside_others(self, requests: Sequence[Request], way: str) -> tuple[TimedRollout, int]:
        first, *rest = self._actors.members.values()
        others = [member.actor for member in rest if member.environment.node == first.environment.node]  # one clock
        at_work = [getattr(actor, way).remote(_TURN_S) for actor in others]
        try:
            ticks = ray.get(first.actor.timed_ticks.remote(requests))
        finally:
            ray.get([actor.end_turns.remote() for actor in others])
        told = ray.get(at_work)
        return TimedRollout(ticks, tuple(tuple(spans) for spans, _ in told)), sum(taken for _, taken in told)

    # ---- learning

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        """If a worker is lost, the update is repeated without it, with the same result."""
        while True:
            self._recover("update")
            worker_ids = list(self._actors.members)
            shares = deal(experiences, len(worker_ids), self._config.train.minibatches)
            members = self._actors.members
            calls = {s: members[s].actor.update.remote(share) for s, share in zip(worker_ids, shares, strict=True)}
            outcome = self._actors.ask(calls, "update")
            self._group_complete = self._group_complete and not outcome.lost and not outcome.aborted
            if outcome.answers:
                self._align(outcome)
                return _merged(list(outcome.answers.values()))

    def _align(self, outcome: CallOutcome) -> None:
        """Workers whose all-reduce broke after others had finished the update copy the state of one that finished."""
        if outcome.aborted and self._config.cluster.shard:
            raise StateLost("an update broke on some workers after others had finished it; go on with --resume")
        self._copy_state(next(iter(outcome.answers)), outcome.aborted)

    def publish(self, step: int, version: int) -> None:
        started = time.perf_counter()
        while True:
            self._recover("publish")
            newest = self._newest_drafter()
            if not self._group_complete:  # a worker was lost while it was asked
                continue
            outcome = self._actors.ask_all("publish", version, newest)
            if not outcome.lost and not outcome.aborted:
                break
            self._group_complete = False
        published: list[Published] = list(outcome.answers.values())
        fingerprints = self._fingerprints(outcome.answers)
        drafters = {one.drafter for one in published if one.drafter is not None}
        if len(fingerprints) > 1 or len(drafters) > 1:
            raise ClusterError(
                f"after step {step} the workers hold {len(fingerprints)} different policies and {len(drafters)} "
                "different drafters; this should not happen: go on with --resume, and report it with the versions and "
                "devices of the nodes"
            )
        swapped = max((one.swapped for one in published if one.swapped is not None), default=None)
        if swapped is not None:
            self._emit(DrafterSwapped(step, swapped))
        if slept := [one.slept for one in published if one.slept]:
            self._emit(engine_slept(step, slept))
        gathered, gather_s = max(((one.gathered, one.gather_s) for one in published), key=lambda each: each[1])
        seconds = time.perf_counter() - started
        self._emit(FleetPublished(step, version, fingerprints.pop(), seconds, gathered / 1e9, gather_s))
        self._tell_other_spans(step)

    def _fingerprints(self, published: Mapping[int, Published]) -> set[int]:
        """One, if all workers hold the same policy. Workers that hold only slices are compared with those that hold the
        same slice."""
        cluster = self._config.cluster
        slices = cluster.tensor_parallel if cluster.shard else 1
        found: list[set[int]] = [set() for _ in range(slices)]
        for worker_id, one in published.items():
            found[self._actors.members[worker_id].rank % slices].add(one.fingerprint)
        return max(found, key=len)

    def _newest_drafter(self) -> NewestDrafter | None:
        """The most trained drafter, if some workers hold another."""
        progress: Mapping[int, DrafterProgress | None] = self._actors.ask_all("drafter_progress").answers
        found = {worker_id: one for worker_id, one in progress.items() if one}
        best = max(found, key=lambda worker_id: found[worker_id], default=None)
        behind = frozenset(worker_id for worker_id in found if best is not None and found[worker_id] != found[best])
        drafter = self._actors.ask_one(best, "describe_drafter") if best is not None and behind else None
        if best is None or drafter is None or best not in self._actors.members:
            return None
        members = self._actors.members
        ranks = sorted(members, key=lambda worker_id: members[worker_id].rank)  # as when the group was formed
        return NewestDrafter(drafter, ranks.index(best), behind)

    # ---- checkpoints

    def snapshot(self) -> Callable[[Path], None]:
        """One worker writes the checkpoint, one on this machine if possible; with shards, every worker its own."""
        self._enter("checkpoint")
        members = self._actors.members
        first = min(
            self._actors.leaders, key=lambda worker_id: (not self._actors.on_this_machine(worker_id), worker_id)
        )
        sharded = self._config.cluster.shard
        writers = {worker_id: members[worker_id].actor for worker_id in (members if sharded else [first])}
        calls = {worker_id: actor.snapshot.remote(worker_id == first) for worker_id, actor in writers.items()}
        if self._actors.ask(calls, "checkpoint").lost:
            self._recover("checkpoint")
            return self.snapshot()
        wait = partial(wait_while_it_moves, limit_s=self._config.cluster.hang_s, liveness=self._liveness)
        accounts = [one for one in self._actors.ask_all("account").answers.values() if one]

        def finish(directory: Path) -> None:
            if sharded:
                merge_policy(directory)
            write_words({"accounts": accounts}, directory, ACCOUNT)

        return CheckpointWriter(list(writers.values()), wait, finish)

    def restore(self, directory: Path, version: int) -> None:
        def ask(calls: Mapping[int, Any]) -> Mapping[int, Any]:
            outcome = self._actors.ask(calls, "restore")
            if outcome.lost:
                raise ClusterError("a worker was lost while it read the checkpoint; go on with --resume")
            return outcome.answers

        actors = {worker_id: member.actor for worker_id, member in self._actors.members.items()}
        restore_workers(actors, directory, version, ask)
        self._actors.ask_all("restore_account", read_accounts(directory)["accounts"])

    def close(self) -> None:
        dead = False
        if hasattr(self, "_actors"):
            self._actors.stop()
            dead = self._liveness.dead
        if self._ours and not dead:  # if the cluster is gone, `ray.shutdown` would end this process before its report
            ray.shutdown()

    # ---- lost workers and their replacements

    def _recover(self, phase: str) -> None:
        """Brings all present workers to one state and one all-reduce group, and requests replacements of lost workers.

        A replacement takes part as soon as it has started. It is not waited for: the cluster may have no room for it.
        """
        self._enter(phase)
        if self._config.cluster.shard and self._actors.losses:
            raise StateLost("a worker was lost, and its part of the policy with it; go on with --resume")
        self._actors.request(self._actors.missing_ranks)
        donor = next(iter(self._actors.leaders))
        arrived = self._actors.take_started()
        if arrived:
            self._group_complete = False
            self._copy_state(donor, arrived)
        self._join(arrived)
        for worker_id in arrived:
            if worker_id in self._actors.members:
                member = self._actors.members[worker_id]
                seconds = time.monotonic() - member.asked
                self._emit(WorkerReturned(self._step, member.rank, member.environment.host, seconds))
        if not self._group_complete:
            self._form_group()

    def _copy_state(self, donor: int, worker_ids: Sequence[int]) -> None:
        there = [worker_id for worker_id in worker_ids if worker_id in self._actors.members]
        state = self._actors.ask_for_reference(donor, "state") if there else None
        if state is not None:
            self._actors.ask(
                {worker_id: self._actors.members[worker_id].actor.load_state.remote(state) for worker_id in there},
                "copying",
            )
        elif there:
            raise StateLost("the worker whose state was to be copied was lost too; go on with --resume")

    def _form_group(self) -> None:
        while not self._group_complete:
            members = self._actors.members
            worker_ids = sorted(members, key=lambda worker_id: members[worker_id].rank)
            self._rendezvous_count += 1
            rendezvous = self._actors.ask_one(worker_ids[0], "rendezvous", f"group-{self._rendezvous_count}")
            if rendezvous is None:
                continue
            calls = {s: members[s].actor.join.remote(rendezvous, i, len(worker_ids)) for i, s in enumerate(worker_ids)}
            outcome = self._actors.ask(calls, "rendezvous")
            self._group_complete = not outcome.lost and not outcome.aborted
            if self._config.cluster.shard and not self._group_complete:
                raise StateLost("a worker was lost before its shard was cut; go on with --resume")

    def _lost(self, rank: int, reason: str) -> None:
        """Called by the actor group, at any time."""
        self._group_complete = False
        gone = [worker_id for worker_id in self._coordinator.workers if worker_id not in self._actors.members]
        requests = sum(self._dispatch.lost(worker_id) for worker_id in gone)
        if self._epoch:
            for worker_id in gone:
                self._epoch.lost(worker_id)
        for worker_id in gone if self._actors.leaders else ():
            self._coordinator.lost(worker_id)
        self._emit(WorkerLost(self._step, rank, self._phase, reason, requests, time.monotonic() - self._since))

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _waits(self, phase: str, ranks: Sequence[int], seconds: float) -> None:
        self._emit(FleetWaits(self._step, phase, tuple(ranks), seconds))

    # ---- events

    def _tell_rollout(self) -> None:
        spans = [span for report in self._reports.values() for span in report.spans]
        workers, rolling_s, seconds = len(self._reports), seconds_of(spans, "rolling"), self._written.seconds
        self._emit(
            FleetRolledOut(
                step=self._step,
                workers=workers,
                seconds=seconds,
                rolling_s=rolling_s,
                idle_s=seconds_of(spans, "idle"),
                drafting_s=seconds_of(spans, "drafting"),
                ahead_s=seconds_of(spans, "writing ahead"),
                straggler_share=max(0.0, 1 - rolling_s / max(1e-9, workers * seconds)),
                joins=sum(report.joins for report in self._reports.values()),
                join_s=sum(report.join_s for report in self._reports.values()),
                waited_s=sum(report.waited_s for report in self._reports.values()),
                averaging_s=sum(report.averaging_s for report in self._reports.values()),
                swaps=sum(report.swaps for report in self._reports.values()),
                stop_s=self._written.stop_s,
            )
        )
        if accounts := [report.account for report in self._reports.values() if report.account]:
            self._emit(account_updated(self._step, Budget.mean(accounts), rollouts_only=True))
        self._tell_drafting(self._reports)

    def _tell_drafting(self, reports: Mapping[int, WorkerRolloutReport]) -> None:
        for worker_id, report in reports.items():
            self._tell_span(self._step, worker_id, report.spans)
            if worker_id in self._actors.members:
                for follower in self._actors.followers_of(worker_id):
                    self._tell_span(self._step, follower, [_of_follower(span) for span in report.spans])
            for result in report.drafted:
                self._emit(drafter_trained(self._step, result))

    def _tell_other_spans(self, step: int) -> None:
        for worker_id, spans in self._actors.ask_all("spans").answers.items():
            self._tell_span(step, worker_id, spans)

    def _tell_span(self, step: int, worker_id: int, spans: Sequence[TimelineSpan]) -> None:
        if worker_id in self._actors.members and spans:
            member = self._actors.members[worker_id]
            told = tuple((span.name, span.start, span.seconds) for span in longest_spans(spans))
            self._emit(WorkerSpans(step, member.rank, member.environment.host, told))


def _of_follower(span: TimelineSpan) -> TimelineSpan:
    """It computes while the leader decodes; the leader alone trains the drafter."""
    return replace(span, name="idle") if span.name == "drafting" else span


def _of_worker(report: RolloutReport, rank: int) -> RolloutReport:
    return replace(report, traces=tuple(replace(trace, worker=rank) for trace in report.traces))


def _merged(results: Sequence[UpdateResult]) -> UpdateResult:
    """Means are already over all workers; counts are summed."""
    return replace(
        results[0],
        tokens=sum(result.tokens for result in results),
        answer_tokens=sum(result.answer_tokens for result in results),
        entropies=tuple(found for result in results for found in result.entropies),
        mismatch_max=max(result.mismatch_max for result in results),
        checkpoint_s=max(result.checkpoint_s for result in results),
    )
