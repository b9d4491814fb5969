"""Many workers do what one does: the same tokens, rewards and policy, whoever trains the drafter, whoever dies."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")

import ray

from tests.clocks import Clock
from tests.fleets import CONFIG, DEAD_S, Letters, TinyHost, open_tiny, wait_for_everyone, with_workers
from tests.tiny import letters
from tlt.cluster import actors as crew_module
from tlt.cluster import checkpoint_files, ray_fleet
from tlt.cluster.actors import ActorGroup
from tlt.cluster.epoch import Epoch
from tlt.cluster.liveness import RayLiveness
from tlt.cluster.messages import StatusUpdate, WorkerRolloutReport
from tlt.cluster.ray_fleet import RayFleet
from tlt.cluster.timeline import TimelineSpan
from tlt.config import RunConfig
from tlt.dispatch import Dispatch
from tlt.engine.request import Request
from tlt.errors import CheckpointError, StateLost
from tlt.event_builders import account_updated
from tlt.fleet import LocalFleet, read_accounts
from tlt.loop import Fleet, Loop, RolloutReport, ask
from tlt.spec.budget import Budget
from tlt.tasks.judge import DirectJudge
from tlt.types import Completion, Key, Prompt, SamplingParams
from tlt.watch.events import AccountUpdated, DrafterTrained, EngineSlept, Event, ReplayCompared
from tlt.watch.workers import FleetPublished, FleetRolledOut, WorkerLost, WorkerReturned, WorkerSpans

STEPS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@dataclass
class Story:
    """What a run told."""

    tokens: list[dict[Any, tuple[int, ...]]] = field(default_factory=list)  # by step and key
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def run(
    config: RunConfig, fleet: Fleet, story: Story, steps: int = STEPS, first: int = 0, task: Letters | None = None
) -> Story:
    task = task or Letters()
    loop = Loop(config, task, letters(), DirectJudge(task), fleet, story.events.append)
    for number in range(first, steps):
        step = loop.step(number)
        rollouts = [rollout for one in step.judged for rollout in one.group.rollouts]
        story.tokens.append({rollout.completion.key: rollout.completion.tokens for rollout in rollouts})
        story.rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
        story.losses.append(step.update.loss)
        story.norms.append(step.update.grad_norm)
    return story


@pytest.fixture(scope="module")
def alone() -> Story:
    """The undisturbed run of one worker in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.fleet.open_policy", open_tiny)
        story = Story()
        return run(CONFIG, LocalFleet(CONFIG, story.events.append), story)


def same(story: Story, alone: Story) -> None:
    assert story.tokens == alone.tokens
    assert story.rewards == alone.rewards
    assert story.losses == pytest.approx(alone.losses, rel=1e-9, abs=1e-12)
    assert story.norms == pytest.approx(alone.norms, rel=1e-9)


class Crowd:
    """One fleet for many stories: each begins from the first policy."""

    def __init__(self, workers: int, **cluster: Any) -> None:
        self.config = with_workers(workers, **cluster)
        self.story = Story()
        self.fleet = RayFleet(self.config, self.tell, host=TinyHost)
        self._first = self.actor(0).state.remote()
        ray.get(self._first)

    def tell(self, event: Event) -> None:
        self.story.events.append(event)
        if isinstance(event, WorkerLost):
            for member in self.fleet._actors.members.values():
                member.actor.let_go.remote()

    def actor(self, rank: int) -> Any:
        return self.fleet._actors.members[self.fleet._actors.ranks[rank]].actor

    def begin(self) -> None:
        wait_for_everyone(self.fleet, self.config.cluster.workers)
        self.story = Story()
        self.fleet._actors.losses = 0
        for rank in range(self.config.cluster.workers):
            actor = self.actor(rank)
            ray.get([actor.load_state.remote(self._first), actor.be_usual.remote()])

    def begin_again(self) -> None:
        """The same story, with everyone."""
        wait_for_everyone(self.fleet, self.config.cluster.workers)

    def hold(self, rank: int, *, until_learned: bool = False) -> None:
        ray.get(self.actor(rank).hold.remote(until_learned))

    def arm(self, rank: int, *trap: Any) -> None:
        ray.get(self.actor(rank).arm.remote(*trap))

    def run(self, steps: int = STEPS) -> Story:
        return run(self.config, self.fleet, self.story, steps)

    def prints(self) -> list[tuple[int, int | None]]:
        return list(self.fleet._actors.ask_all("fingerprint").answers.values())


@pytest.fixture(scope="module")
def everyone(cluster: None) -> Iterator[Crowd]:
    crowd = Crowd(3)
    yield crowd
    crowd.fleet.close()


@pytest.fixture
def crowd(everyone: Crowd) -> Crowd:
    everyone.begin()
    return everyone


def test_three_workers_do_what_one_does(crowd: Crowd, alone: Story) -> None:
    crowd.hold(1, until_learned=True)
    story = crowd.run()
    same(story, alone)
    prints = crowd.prints()
    assert len(prints) == 3
    assert len(set(prints)) == 1  # one version of policy and drafter
    assert not story.of(WorkerLost)
    published = story.of(FleetPublished)
    assert [event.version for event in published] == [1, 2]
    assert {event.gathered_gb for event in published} == {0.0}  # engines read the trainers' tensors
    assert [event.step for event in story.of(EngineSlept)] == [1, 2]  # engines sleep during updates
    assert len({event.fingerprint for event in published}) == STEPS
    names = {span[0] for event in story.of(WorkerSpans) for span in event.spans}
    assert {"rolling", "drafting", "updating", "publishing"} <= names
    assert story.of(DrafterTrained)
    rolled = story.of(FleetRolledOut)
    assert [event.step for event in rolled] == list(range(1, STEPS + 1))
    assert sum(event.joins for event in rolled) > 0  # two were dry, and trained the drafter together
    assert sum(event.swaps for event in rolled) > 0  # and the third took what they had learned while it wrote
    assert sum(event.drafting_s for event in rolled) > 0
    told = [event for event in story.events if isinstance(event, AccountUpdated | FleetRolledOut)]
    assert [type(event) for event in told] == STEPS * [FleetRolledOut, AccountUpdated]
    kept = crowd.fleet._actors.ask_all("account").answers.values()  # nothing was written since the last rollout
    assert story.of(AccountUpdated)[-1] == account_updated(STEPS, Budget.mean(list(kept)), rollouts_only=True)
    assert len({account["plain_s"] for account in kept}) == 3
    assert min(event.plain_s for event in story.of(AccountUpdated)) > 0


class TalkingLetters(Letters):
    """Replies up to four times to a completion, depending on its length."""

    def reply(self, prompt: Prompt, completion: Completion) -> str | None:
        said = completion.loss_mask.count(0) // 3
        return "XYZ" if said < len(completion.tokens) % 5 else None


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_completions_of_several_turns_are_those_of_one_worker(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """In rollout, update and replay; also where a worker is lost between turns."""
    monkeypatch.setattr("tlt.fleet.open_policy", open_tiny)
    config = replace(crowd.config, sampling=SamplingParams(max_tokens=48, stop=tuple("BHNT")))
    config = replace(config, run=replace(config.run, replay_every=1))
    story = Story()
    expected = run(config, LocalFleet(config, story.events.append), story, task=TalkingLetters())
    if killed:
        crowd.arm(0, "rollout", 8)
    found = run(config, crowd.fleet, crowd.story, task=TalkingLetters())
    same(found, expected)
    assert len(found.of(WorkerLost)) == killed
    assert max(len(tokens) for tokens in found.tokens[0].values()) > 3 * 4
    replays = found.of(ReplayCompared)
    assert len(replays) == STEPS
    assert all(replay.identical for replay in replays)


def test_a_replay_is_timed_as_the_rollout_is(crowd: Crowd, alone: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver's clock that counts answers, and to which preparing and stopping a worker is very slow."""
    now = 0.0

    def slower(owner: type, method: str, seconds: float) -> None:
        original = getattr(owner, method)

        def call(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return original(*given)

        monkeypatch.setattr(owner, method, call)

    slower(ActorGroup, "ask_all", 1000.0)
    slower(RayFleet, "_recover", 1000.0)
    slower(Epoch, "end", 1000.0)
    slower(Dispatch, "completed", 1.0)
    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr("tlt.cluster.ray_fleet.time", clock)
    monkeypatch.setattr("tlt.loop.time", clock)
    config = replace(crowd.config, run=replace(crowd.config.run, replay_every=1))
    (replay,) = run(config, crowd.fleet, crowd.story, 1).of(ReplayCompared)
    assert replay.identical
    assert replay.plain_s == len(alone.tokens[0])
    assert replay.tlt_s == replay.plain_s + 1000.0  # stopping those who train is part of what speculation costs


def test_some_requests_of_a_replay_are_decoded_again(crowd: Crowd, alone: Story) -> None:
    """As where tokens differ: fewer requests, and shorter ones."""
    asked = ask(0, crowd.config, Letters(), letters())
    requests = [request for one in asked for request in one.requests]
    some = [replace(request, params=replace(request.params, max_tokens=5)) for request in requests[::4]]
    for given, most in ((requests, None), (some, 5)):
        completions, seconds = crowd.fleet.replay(given)
        assert {one.key: one.tokens for one in completions} == {
            request.key: alone.tokens[0][request.key][:most] for request in given
        }
        assert seconds > 0


def test_a_worker_that_is_killed_in_a_replay_is_done_without(crowd: Crowd, alone: Story) -> None:
    asked = ask(0, crowd.config, Letters(), letters())
    expected = crowd.fleet._dispatch._expected.copy()
    crowd.arm(0, "rollout", 5)
    completions, _ = crowd.fleet.replay([request for one in asked for request in one.requests])
    assert {completion.key: completion.tokens for completion in completions} == alone.tokens[0]
    assert [event.phase for event in crowd.story.of(WorkerLost)] == ["replay"]
    assert crowd.fleet._dispatch._expected == expected


def test_an_evaluation_is_answered_by_all_and_learned_from_by_nobody(crowd: Crowd, alone: Story) -> None:
    asked = ask(0, crowd.config, Letters(), letters())
    actors = [member.actor for member in crowd.fleet._actors.members.values()]
    before = sum(ray.get([actor.micro_steps.remote() for actor in actors]))
    completions = list(crowd.fleet.evaluate(1, [request for one in asked for request in one.requests]))
    assert {completion.key: completion.tokens for completion in completions} == alone.tokens[0]
    assert sum(ray.get([actor.micro_steps.remote() for actor in actors])) == before


def test_a_report_is_of_all_rollouts_of_a_step(crowd: Crowd) -> None:
    """As with dynamic sampling, which takes several."""
    requests = [request for one in ask(0, crowd.config, Letters(), letters()) for request in one.requests]
    verified = []
    for step, some in ((101, requests[:12]), (101, requests[12:]), (102, requests[12:])):
        assert len(list(crowd.fleet.rollout(step, some))) == 12
        verified.append([len(trace.requests) for trace in crowd.fleet.report().traces])
    assert [sum(counts) for counts in verified] == [12, 24, 12]


def test_after_the_rollout_all_draft_while_nobody_waits(crowd: Crowd) -> None:
    story = crowd.run(1)
    before = len(story.of(DrafterTrained))
    actors = [member.actor for member in crowd.fleet._actors.members.values()]
    given_up = time.monotonic() + DEAD_S

    def micro_steps() -> int:
        return sum(ray.get([actor.micro_steps.remote() for actor in actors]))

    begun = micro_steps()
    crowd.fleet.draft(0, lambda: micro_steps() > begun or time.monotonic() > given_up)
    trained = story.of(DrafterTrained)[before:]
    assert sum(event.micro_steps for event in trained) > 0
    crowd.fleet.publish(0, 1)
    assert len(set(crowd.prints())) == 1


def test_a_writer_takes_the_same_ticks_beside_those_who_train(crowd: Crowd) -> None:
    crowd.run(1)
    requests = [Request(Key(9, number), (3, 4, 5), SamplingParams(max_tokens=24)) for number in range(4)]
    found = crowd.fleet.slowdown(requests, 2)
    assert (len(found.training), len(found.counting)) == (2, 2)
    assert len({len(run.ticks.wall_s) for run in (*found.training, *found.counting)}) == 1
    for rollout in (*found.training, *found.counting):
        assert len(rollout.active) == len(crowd.fleet._actors.members) - 1
        for spans in rollout.active:
            assert all(began < ended for began, ended in spans)


def share_disk(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """`shared`: whether the workers find out that they see the driver's directories."""
    if not shared:
        monkeypatch.setattr(checkpoint_files, "probe_file", lambda directory: nullcontext(directory / "elsewhere"))


@pytest.mark.parametrize("same_machine", [True, False])
def test_a_checkpoint_is_gone_on_from(
    crowd: Crowd, alone: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_machine: bool
) -> None:
    monkeypatch.setattr(crowd.fleet._actors, "on_this_machine", lambda worker_id: same_machine)
    crowd.run(1)
    crowd.fleet.snapshot()(tmp_path)
    accounts = read_accounts(tmp_path)["accounts"]
    run(crowd.config, crowd.fleet, Story(), 2, first=1)  # what is to be forgotten
    crowd.fleet.restore(tmp_path, 1)
    mean_s = sum(account["plain_s"] for account in accounts) / len(crowd.fleet._actors.members)
    restored = ray.get([member.actor.account.remote() for member in crowd.fleet._actors.members.values()])
    assert [account["plain_s"] for account in restored] == [pytest.approx(mean_s)] * len(restored)
    assert mean_s > 0.0
    again = run(crowd.config, crowd.fleet, Story(), 2, first=1)
    assert again.tokens == alone.tokens[1:2]
    assert again.losses == pytest.approx(alone.losses[1:2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("same_machine", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_checkpoint_may_take_long_as_long_as_it_goes_on(
    crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_machine: bool
) -> None:
    """On a clock that goes on by a third of the limit whenever it is asked how far the checkpoint is."""
    actors, clock, looks = crowd.fleet._actors, Clock(), 12
    wait_while_it_moves = crew_module.wait_while_it_moves

    def wait(awaited: Any, ask: Callable[[], Any], limit_s: float, liveness: RayLiveness) -> None:
        def asked() -> Any:
            nonlocal looks
            looks -= 1
            clock.now += limit_s / 3 * (looks >= 0)
            return ask()

        wait_while_it_moves(awaited, asked, limit_s, liveness)

    clock.used_by(monkeypatch, crew_module)
    monkeypatch.setattr(ray_fleet, "wait_while_it_moves", wait)
    monkeypatch.setattr(actors, "on_this_machine", lambda worker_id: same_machine)
    ray.get([member.actor.write_slowly.remote(12) for member in actors.members.values()])
    write = crowd.fleet.snapshot()
    write(tmp_path)
    assert len(list(tmp_path.glob("*.piece"))) == 12
    assert looks <= 0, "four times the limit has passed"
    crowd.fleet.restore(tmp_path, 1)  # it is whole
    looks = 10**6
    ray.get([member.actor.write_slowly.remote(1, alone=True) for member in actors.members.values()])
    (tmp_path / "next").mkdir()
    with pytest.raises(CheckpointError, match="was lost or hung"):
        crowd.fleet.snapshot()(tmp_path / "next")


@pytest.mark.parametrize(
    ("ranks", "trap", "phase"),
    [
        ((0,), ("rollout", 10), "rollout"),
        ((0, 2), ("leading", 3), "rollout"),
        pytest.param((0, 2), ("following", 2), "rollout", marks=pytest.mark.slow),
        ((2,), ("update",), "update"),
        pytest.param((0,), ("after the update",), "update", marks=pytest.mark.slow),
        ((2,), ("publish",), "publish"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_a_worker_that_is_killed_changes_nothing(
    crowd: Crowd, alone: Story, ranks: tuple[int, ...], trap: tuple[Any, ...], phase: str
) -> None:
    if phase == "rollout":
        crowd.hold(1)  # so that the rollout goes on until one is lost
    for rank in ranks:
        crowd.arm(rank, *trap)
    story = crowd.run()
    same(story, alone)
    lost = story.of(WorkerLost)
    assert lost
    assert {event.phase for event in lost} == {phase}
    wait_for_everyone(crowd.fleet, 3)
    assert {event.worker for event in story.of(WorkerReturned)} == {event.worker for event in lost}
    assert len(set(crowd.prints())) == 1  # who returned is as those who stayed
    assert min(event.seconds for event in lost) > 0
    if trap[0] == "rollout":
        assert lost[0].requests > 0


@pytest.mark.parametrize(
    "traps",
    [{}, {1: (0, "writing ahead", 3)}, {2: (2, "rollout", 2)}],
    ids=["", "killed while it writes ahead", "killed beside its texts"],
)
def test_workers_without_requests_write_ahead(
    crowd: Crowd, alone: Story, monkeypatch: pytest.MonkeyPatch, traps: dict[int, tuple[Any, ...]]
) -> None:
    """One worker writes nothing until others have written a completion of the next step. `traps`: by step."""
    config = replace(crowd.config, spec=replace(crowd.config.spec, ahead="auto"))
    monkeypatch.setattr(crowd.fleet, "_config", config)
    monkeypatch.setattr(crowd.fleet, "_training_share", 0.0)  # a text that is cut short by training lets nobody go
    task, passing_on = Letters(), Epoch._pass_on
    loop = Loop(config, task, letters(), DirectJudge(task), crowd.fleet, crowd.tell)
    ray.get([crowd.actor(rank).take_chunks.remote() for rank in range(3)])

    def pass_on(epoch: Epoch, update: StatusUpdate) -> None:
        if update.texts and 1 not in traps:  # else the loss lets it go
            ray.get([member.actor.let_go.remote() for member in crowd.fleet._actors.members.values()])
        passing_on(epoch, update)

    monkeypatch.setattr(Epoch, "_pass_on", pass_on)
    crowd.hold(1)
    found = []
    for taken in range(STEPS):
        if taken + 1 in traps:
            crowd.arm(*traps[taken + 1])
        completions = [rollout.completion for rollout in loop.step(taken).rollouts]
        assert {one.key: one.tokens for one in completions} == alone.tokens[taken]
        found.append(b"".join(one.drafted for one in completions).count(2))
    assert found[0] == 0
    assert found[1] > 50
    assert len(crowd.story.of(WorkerLost)) == len(traps)
    assert len(set(crowd.prints())) == 1
    names = {span[0] for event in crowd.story.of(WorkerSpans) for span in event.spans}
    assert "writing ahead" in names


class Steady:
    """A clock of the crew that goes on by a second whenever all others than one have been seen to move. So the one is
    late after a while, and on no machine the others are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
        self.clock, self._others, self._seen = Clock(), others, set[object]()
        self.clock.now = time.monotonic()  # of which members tell when they came
        self.clock.used_by(monkeypatch, crew_module)
        monkeypatch.setattr(crew_module, "_HEARTBEAT_S", 0.1)

    def moved(self, one: object) -> None:
        self._seen.add(one)
        if len(self._seen) == self._others:
            self._seen.clear()
            self.clock.now += 1.0


def test_a_worker_that_hangs_is_lost_too(crowd: Crowd, alone: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    actors, steady = crowd.fleet._actors, Steady(monkeypatch, others=2)
    hung, heard = actors.ranks[0], actors._heard

    def hearing(worker_id: int, call: Any) -> Iterator[tuple[int, StatusUpdate]]:
        before = actors.members[worker_id].progress
        yield from heard(worker_id, call)
        if worker_id != hung and worker_id in actors.members and actors.members[worker_id].progress != before:
            steady.moved(worker_id)

    monkeypatch.setattr(actors, "_heard", hearing)
    monkeypatch.setattr(actors, "_config", with_workers(3, hang_s=3.0))
    crowd.arm(0, "rollout", 5, signal.SIGSTOP)
    story = crowd.run(1)
    assert story.tokens == alone.tokens[:1]
    assert [event.reason for event in story.of(WorkerLost)] == ["hung during rollout: no progress for 3 s"]


def test_what_takes_long_is_waited_for_as_long_as_it_moves(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update may take longer than a worker may hang; whoever stands still for so long is lost, the others not."""
    actors, steady = crowd.fleet._actors, Steady(monkeypatch, others=2)
    stalled_s, began_s = crew_module._ProgressProbe.stalled_s, steady.clock.now

    def looked(pulse: Any) -> float:
        seen = pulse._seen
        found = stalled_s(pulse)
        if seen is not None and pulse._seen != seen:
            steady.moved(pulse)
        return found

    monkeypatch.setattr(crew_module._ProgressProbe, "stalled_s", looked)
    monkeypatch.setattr(crew_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(crew_module, "_HEARTBEAT_S", -1.0)  # it is always time to ask how far they are
    monkeypatch.setattr(actors, "_config", with_workers(3, hang_s=3.0))
    worker_ids = list(actors.members)
    toiling = {
        worker_id: actors.members[worker_id].actor.toil.remote(moving=worker_id != worker_ids[1])
        for worker_id in worker_ids
    }
    found = actors.ask(toiling, "update")
    assert steady.clock.now > began_s + 3.0
    assert sorted(found.answers) == [worker_ids[0], *worker_ids[2:]]
    assert found.lost == (worker_ids[1],)
    assert worker_ids[1] not in actors.members


def test_a_policy_in_shards_learns_the_same(
    cluster: None, alone: Story, everyone: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from a checkpoint after a worker is lost: with new ones, and with one that holds everything."""
    wait_for_everyone(everyone.fleet, 3)  # or its successors would take our place
    config, story = with_workers(2, shard=True, cpus_per_worker=0.1), Story()
    fleet = RayFleet(config, story.events.append, host=TinyHost)
    try:
        run(config, fleet, story, steps=1)
        (tmp_path / "saved").mkdir()
        with ThreadPoolExecutor() as background:  # while the workers go on
            writing = background.submit(fleet.snapshot(), tmp_path / "saved")
            same(run(config, fleet, story, first=1), alone)
            writing.result()
        prints = fleet._actors.ask_all("fingerprint").answers.values()
        assert len(set(prints)) == 1
        weights = sum(weight.nbytes for weight in open_tiny().model.parameters())
        assert {event.gathered_gb for event in story.of(FleetPublished)} == {weights / 1e9}
        assert min(event.gather_s for event in story.of(FleetPublished)) > 0
        ray.get(fleet._actors.members[fleet._actors.ranks[1]].actor.arm.remote("publish"))
        with pytest.raises(StateLost, match="its part of the policy"):
            run(config, fleet, Story(), steps=1)
    finally:
        fleet.close()
    share_disk(monkeypatch, False)
    monkeypatch.setattr("tlt.fleet.open_policy", open_tiny)
    for successor in (RayFleet(config, story.events.append, host=TinyHost), LocalFleet(CONFIG, story.events.append)):
        try:
            successor.restore(tmp_path / "saved", 1)
            again = run(config, successor, Story(), first=1)
        finally:
            successor.close()
        assert again.tokens == alone.tokens[1:]
        assert again.norms == pytest.approx(alone.norms[1:], rel=1e-9)


def test_reports_of_all_workers_become_one() -> None:
    """What was accepted and what switching cost is told of all; what was saved, of the one that wrote longest."""
    own = [
        RolloutReport(30, 12, 5.0, ((4, "off", 3),), (("eagle", (0.8, 0.5)),), switches=2, one_off_s=0.25),
        RolloutReport(10, 4, 2.0, ((4, "off", 4),), (("eagle", (0.4,)),), switches=1, one_off_s=0.5),
    ]
    spans = [(TimelineSpan("rolling", 0.0, 3.0), TimelineSpan("idle", 3.0, 6.0)), (TimelineSpan("rolling", 0.0, 9.0),)]
    fleet = RayFleet.__new__(RayFleet)
    ranks = {number: SimpleNamespace(rank=number) for number in (0, 1)}
    fleet._actors = SimpleNamespace(members=ranks)  # type: ignore[assignment]
    fleet._reports = {
        worker_id: WorkerRolloutReport(spans[worker_id], own[worker_id], (), 0, 0.0, 0.0, 0.0, 0)
        for worker_id in (0, 1)
    }
    told = fleet.report()
    assert told.saved_s == 2.0
    assert dict(told.by_depth) == {"eagle": (pytest.approx(0.7), 0.5)}
    assert (told.verifies, told.accepted, told.chosen) == (40, 16, ((4, "off", 7),))
    assert (told.switches, told.one_off_s) == (3, 0.75)
