"""RayFleet: many workers on one machine or several, behind the same methods as one.

What always holds: every answer is given once, whichever worker wrote it and however many were lost on the way; after
`publish` all workers hold the same policy and the same drafter, bit by bit. Workers whose requests are answered train
the drafter until the last answer is in, and nobody waits for them longer than a micro-step. A worker that is lost is
replaced between two phases of a step, from the state of one that is not. Knows nothing of tasks and rewards.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tlt.cluster.actors import ActorGroup, CallOutcome, wait_while_it_moves
from tlt.cluster.epoch import Epoch
from tlt.cluster.host import Host
from tlt.cluster.interference import InterferenceRuns, TimedRollout
from tlt.cluster.lifeline import Lifeline
from tlt.cluster.messages import Published, RollReport
from tlt.cluster.placement import check_room, connect, share_of
from tlt.cluster.timeline import seconds_of
from tlt.cluster.transfer import append_piece, read_files
from tlt.config import RunConfig
from tlt.dispatch import Dispatch, deal
from tlt.drafting.idle import Coordinator
from tlt.engine.request import Request
from tlt.errors import CheckpointError, ClusterError, ConfigError, StateLost
from tlt.event_builders import drafter_trained, together
from tlt.loop import Emit, RolloutReport
from tlt.train.policy import UpdateResult
from tlt.types import Completion, Experience
from tlt.watch.events import DrafterSwapped, StartupPhase
from tlt.watch.workers import FleetPublished, FleetRolledOut, FleetWaits, WorkerLost, WorkerReturned, WorkerSpans

_TURN_S = 0.15  # of those who work beside one that is measured


class RayFleet:
    """`host` is what an actor is made of."""

    def __init__(self, config: RunConfig, emit: Emit, *, host: type[Host] = Host) -> None:
        self._config, self._emit = config, emit
        self._step, self._phase, self._since = 0, "start", time.monotonic()
        self._desk = Coordinator(())
        self._dispatch = Dispatch(config.engine.rows)
        self._dispatch_before = self._dispatch.copy()  # as it was before the last rollout
        self._reports: dict[int, RollReport] = {}
        self._rollout_s = 0.0
        self._whole, self._meetings = False, 0  # a ring of all; rings that were tried
        self._ours = connect(config.cluster)
        with ExitStack() as undo:  # whatever goes wrong here, nothing of ours stays behind
            undo.callback(self.close)
            self._lifeline = Lifeline.of_this_driver(ours=self._ours)
            self._share = share_of(config.cluster, config.model.device)
            check_room(config.cluster.workers, self._share)
            if config.cluster.shard and 0 < self._share.gpus < 1:
                raise ConfigError(
                    f"cluster.shard needs whole GPUs, and cluster.gpus_per_worker is {self._share.gpus:g}; set it to 1"
                )
            device = "cuda" if self._share.gpus else "cpu"
            theirs = replace(config, model=replace(config.model, device=device))
            emit(StartupPhase(f"starting {config.cluster.workers} workers"))
            self._actors = ActorGroup(theirs, self._share, host, self._lifeline, told=self._lost, waits=self._waits)
            for seat in self._actors.hire(range(config.cluster.workers)):
                self._desk.came(seat)
            self._form_ring()
            undo.pop_all()

    @property
    def _drafts(self) -> bool:
        return self._config.cluster.drafting and not self._config.drafting.frozen

    # ---- rollout

    def rollout(self, step: int, requests: Sequence[Request]) -> Iterator[Completion]:
        self._step = step
        self._heal("rollout")
        self._dispatch_before = self._dispatch.copy()
        return self._rolled_out(requests)

    def _rolled_out(self, requests: Sequence[Request]) -> Iterator[Completion]:
        started = time.perf_counter()
        answered, self._reports = yield from self._write(requests, drafting=self._drafts)
        self._rollout_s = answered - started
        self._tell_rollout(time.perf_counter() - answered)

    def _write(
        self, requests: Sequence[Request], *, drafting: bool
    ) -> Generator[Completion, None, tuple[float, dict[int, RollReport]]]:
        """Yields the answers; returns when the last was in, and the workers' reports."""
        self._dispatch.begin(requests, self._actors.members)
        epoch = Epoch(self._actors, self._desk, self._dispatch, self._emit, self._step)
        epoch.begin(drafting=drafting)
        yield from epoch.answers()
        return time.perf_counter(), epoch.end()

    def report(self) -> RolloutReport:
        reports = self._reports.values()
        last = max(reports, key=lambda report: seconds_of(report.spans, "rolling"), default=None)
        saved_s = last.rollout.saved_s if last else 0.0  # the others' savings were saved from waiting
        return together([report.rollout for report in reports], saved_s)

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        """Together, while rewards are judged. Idle workers have had their turn: nobody is kept waiting for more."""
        if until() or not self._drafts:
            return
        self._enter("drafting")
        epoch = Epoch(self._actors, self._desk, self._dispatch, self._emit, step)
        self._dispatch.begin((), self._actors.members)
        epoch.begin(drafting=True)
        epoch.draft(until)
        self._tell_drafting(epoch.end())

    def replay(self, requests: Sequence[Request]) -> tuple[list[Completion], float]:
        """Dispatched like the rollout, with what was known of the prompts then: only the engines differ."""
        self._enter("replay")
        self._actors.ask_all("begin_replay")
        after, self._dispatch = self._dispatch, self._dispatch_before
        started = time.perf_counter()
        completions = list(self._write(requests, drafting=False))
        seconds = time.perf_counter() - started
        self._dispatch = after
        self._actors.ask_all("end_replay")
        return completions, seconds

    def slowdown(self, requests: Sequence[Request], repeats: int) -> InterferenceRuns:
        """The ticks of the first worker that writes these plainly, so often while the others on its machine train in
        turns, so often while they count in turns."""
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
            ray.get([actor.leave_off.remote() for actor in others])
        told = ray.get(at_work)
        return TimedRollout(ticks, tuple(tuple(spans) for spans, _ in told)), sum(taken for _, taken in told)

    # ---- learning

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        """A worker that is lost on the way costs the time of an update: it is made again with the same numbers."""
        while True:
            self._heal("update")
            seats = list(self._actors.members)
            shares = deal(experiences, len(seats), self._config.train.minibatches)
            members = self._actors.members
            calls = {s: members[s].actor.update.remote(share) for s, share in zip(seats, shares, strict=True)}
            outcome = self._actors.ask(calls, "update")
            self._whole = self._whole and not outcome.lost and not outcome.parted
            if outcome.answers:
                self._align(outcome)
                return _merged(list(outcome.answers.values()))

    def _align(self, outcome: CallOutcome) -> None:
        """Those who were left alone in the last moment take over what those who were done have."""
        self._copy_state(next(iter(outcome.answers)), outcome.parted)

    def publish(self, step: int, version: int) -> None:
        started = time.perf_counter()
        while True:
            self._heal("publish")
            calls = self._publishing(version)
            outcome = self._actors.ask(calls, "publish")
            if not outcome.lost:
                break
        published: list[Published] = list(outcome.answers.values())
        fingerprints = {one.fingerprint for one in published}
        if len(fingerprints) > 1:
            raise ClusterError(
                f"after step {step} the workers hold {len(fingerprints)} different policies or drafters; this should "
                "not happen: go on with --resume, and report it with the versions and devices of the nodes"
            )
        swapped = max((one.swapped for one in published if one.swapped is not None), default=None)
        if swapped is not None:
            self._emit(DrafterSwapped(step, swapped))
        self._emit(FleetPublished(step, version, fingerprints.pop(), time.perf_counter() - started))
        self._tell_other_spans(step)

    def _publishing(self, version: int) -> dict[int, Any]:
        """The drafter that learned most goes to everyone who holds another."""
        stamps = {seat: stamp for seat, stamp in self._actors.ask_all("stamp").answers.items() if stamp}
        best = max(stamps, key=lambda seat: stamps[seat], default=None)
        behind = {seat for seat in stamps if best is not None and stamps[seat] != stamps[best]}
        newest = self._actors.keep(best, "drafter_state") if best is not None and behind else None
        return {
            seat: member.actor.publish.remote(version, newest if seat in behind else None)
            for seat, member in self._actors.members.items()
        }

    # ---- going on later

    def snapshot(self) -> Callable[[Path], None]:
        self._enter("checkpoint")
        seat = min(self._actors.members, key=lambda seat: (not self._actors.on_this_machine(seat), seat))
        keepers = list(self._actors.members) if self._config.cluster.shard else [seat]
        calls = {one: self._actors.members[one].actor.snapshot.remote(one == seat) for one in keepers}
        if self._actors.ask(calls, "checkpoint").lost:
            self._heal("checkpoint")
            return self.snapshot()
        wait = partial(wait_while_it_moves, limit_s=self._config.cluster.hang_s, lifeline=self._lifeline)
        return partial(_write, self._actors.members[seat].actor, self._actors.on_this_machine(seat), wait)

    def restore(self, directory: Path, version: int) -> None:
        files = None
        calls = {}
        for seat, member in self._actors.members.items():
            if self._actors.on_this_machine(seat):
                calls[seat] = member.actor.restore.remote(directory.absolute(), version)
            else:
                files = files or ray.put(read_files(directory))
                calls[seat] = member.actor.restore_files.remote(files, version)
        if self._actors.ask(calls, "restore").lost:
            raise ClusterError("a worker was lost while it read the checkpoint; go on with --resume")

    def close(self) -> None:
        torn = False
        if hasattr(self, "_actors"):
            self._actors.dismiss()
            torn = self._lifeline.torn
        if self._ours and not torn:  # of a cluster that is gone, Ray would end this process: it may when all is told
            ray.shutdown()

    # ---- the lost and their successors

    def _heal(self, phase: str) -> None:
        """All who are there have one state, and one ring. A successor of a lost one takes part as soon as it is there:
        nobody waits for it, and if the cluster has no room for one (its machine is gone), it comes when there is."""
        self._enter(phase)
        if self._config.cluster.shard and self._actors.losses:
            raise StateLost("a worker was lost, and its part of the policy with it; go on with --resume")
        self._actors.apply(self._actors.wanting)
        donor = next(iter(self._actors.members))
        arrived = self._actors.arrivals()
        if arrived:
            self._whole = False
            self._copy_state(donor, arrived)
        for seat in arrived:
            if seat in self._actors.members:
                self._desk.came(seat)
                member = self._actors.members[seat]
                seconds = time.monotonic() - member.asked
                self._emit(WorkerReturned(self._step, member.rank, member.environment.host, seconds))
        if not self._whole:
            self._form_ring()

    def _copy_state(self, donor: int, seats: Sequence[int]) -> None:
        there = [seat for seat in seats if seat in self._actors.members]
        state = self._actors.keep(donor, "state") if there else None
        if state is not None:
            self._actors.ask({seat: self._actors.members[seat].actor.take.remote(state) for seat in there}, "copying")
        elif there:
            raise StateLost("the worker whose state was to be copied was lost too; go on with --resume")

    def _form_ring(self) -> None:
        while not self._whole:
            members = self._actors.members
            seats = sorted(members, key=lambda seat: members[seat].rank)
            self._meetings += 1
            meeting = self._actors.one(seats[0], "meeting", f"ring-{self._meetings}")
            if meeting is None:
                continue
            calls = {s: members[s].actor.join.remote(meeting, i, len(seats)) for i, s in enumerate(seats)}
            outcome = self._actors.ask(calls, "meeting")
            self._whole = not outcome.lost and not outcome.parted
            if self._config.cluster.shard and not self._whole:
                raise StateLost("a worker was lost before its shard was cut; go on with --resume")

    def _lost(self, rank: int, reason: str) -> None:
        """Told by the crew, whenever it happens."""
        self._whole = False
        gone = [seat for seat in self._desk.workers if seat not in self._actors.members]
        requests = sum(self._dispatch.lost(seat) for seat in gone)
        for seat in gone if self._actors.members else ():
            self._desk.lost(seat)
        self._emit(WorkerLost(self._step, rank, self._phase, reason, requests, time.monotonic() - self._since))

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _waits(self, phase: str, ranks: Sequence[int], seconds: float) -> None:
        self._emit(FleetWaits(self._step, phase, tuple(ranks), seconds))

    # ---- telling

    def _tell_rollout(self, stop_s: float) -> None:
        spans = [span for report in self._reports.values() for span in report.spans]
        workers, rolling_s = len(self._reports), seconds_of(spans, "rolling")
        self._emit(
            FleetRolledOut(
                step=self._step,
                workers=workers,
                seconds=self._rollout_s,
                rolling_s=rolling_s,
                idle_s=seconds_of(spans, "idle"),
                drafting_s=seconds_of(spans, "drafting"),
                straggler_share=max(0.0, 1 - rolling_s / max(1e-9, workers * self._rollout_s)),
                joins=sum(report.joins for report in self._reports.values()),
                join_s=sum(report.join_s for report in self._reports.values()),
                waited_s=sum(report.waited_s for report in self._reports.values()),
                swaps=sum(report.swaps for report in self._reports.values()),
                stop_s=stop_s,
            )
        )
        self._tell_drafting(self._reports)

    def _tell_drafting(self, reports: dict[int, RollReport]) -> None:
        for seat, report in reports.items():
            self._tell_span(self._step, seat, report.spans)
            for result in report.drafted:
                self._emit(drafter_trained(self._step, result))

    def _tell_other_spans(self, step: int) -> None:
        for seat, spans in self._actors.ask_all("spans").answers.items():
            self._tell_span(step, seat, spans)

    def _tell_span(self, step: int, seat: int, spans: Sequence[Any]) -> None:
        if seat in self._actors.members and spans:
            member = self._actors.members[seat]
            told = tuple((span.name, span.start, span.seconds) for span in spans)
            self._emit(WorkerSpans(step, member.rank, member.environment.host, told))


def _merged(results: Sequence[UpdateResult]) -> UpdateResult:
    """Means are over all workers already; what was counted here and there is added up."""
    return replace(
        results[0],
        tokens=sum(result.tokens for result in results),
        answer_tokens=sum(result.answer_tokens for result in results),
        mismatch_max=max(result.mismatch_max for result in results),
    )


def _moving(stream: Any, ask: Callable[[], Any], wait: Callable[[Any, Callable[[], Any]], None]) -> Iterator[Any]:
    while True:
        wait(stream, ask)
        try:
            piece = next(stream)
        except StopIteration:
            return
        yield piece


def _write(actor: Any, same_machine: bool, wait: Callable[[Any, Callable[[], Any]], None], directory: Path) -> None:
    """Takes as long as it takes while it goes on: a large policy on a slow disk is no hang."""
    try:
        if same_machine:
            call = actor.write.remote(directory.absolute())
            wait(call, actor.extent.remote)
            ray.get(call)
        else:
            for piece in _moving(actor.written.remote(), actor.extent.remote, wait):
                name, content = ray.get(piece)
                append_piece(name, content, directory)
    except RayTaskError as error:
        raise CheckpointError(
            f"the worker could not write the checkpoint ({error.cause}); the one before is intact"
        ) from error
    except RayError as error:
        raise CheckpointError(
            "the worker that wrote the checkpoint was lost or hung; the one before it is intact"
        ) from error
