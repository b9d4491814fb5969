"""The loop: the same step whatever the order, the worker or the drafter; and a policy that learns."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tlt
from tests.clocks import Clock
from tests.training import LEARNED, numbers, small
from tlt import loop
from tlt.drafting import deadline, planner, trainer
from tlt.drafting.forecast import Forecast
from tlt.drafting.states import Recompute
from tlt.drafting.trainer import OnlineDrafter
from tlt.engine.engine import EngineCore
from tlt.errors import ConfigError, TaskError
from tlt.fleet import LocalFleet, Worker
from tlt.loop import Fleet, Loop, ProgressPace, RolloutReport, ask, experiences, is_replayed
from tlt.policy import TINY_POLICY
from tlt.spec.budget import CostKind
from tlt.spec.learned import LearnedDrafting
from tlt.tasks.judge import DirectJudge, PromptedCompletion, Verdict
from tlt.tasks.judging import Judging
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.train.drafter import DrafterTrainer
from tlt.train.policy import UpdateResult
from tlt.types import Completion, Experience, Key, Prompt, Timing
from tlt.watch.events import (
    AccountUpdated,
    DrafterSwapped,
    DrafterTrained,
    Event,
    PhaseStarted,
    ReplayCompared,
    RewardsFailed,
    RunFailed,
    RunFinished,
    StepFinished,
    TrainingForecast,
    read_run,
)
from tlt.watch.history import events_of, steps_of

TOKENIZER = Tokenizer.load(TINY_POLICY)


def completion(key: Key, text: str = "7", version: int = 0) -> Completion:
    tokens = (*TOKENIZER.encode_text(text), TOKENIZER.eos_id)
    logprobs = (-0.5,) * len(tokens)
    return Completion(key, (5,), tokens, text, logprobs, logprobs, "eos", version, Timing(0.0, 0.0))


def test_progress_of_a_long_rollout_takes_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of it: once a second at first, and later every fiftieth of the time."""
    clock = Clock()
    clock.used_by(monkeypatch, loop)
    pace, told = ProgressPace(), [0]
    for second in range(1, 24 * 3600):
        clock.now += 1.0
        if pace.due():
            told.append(second)
    assert told[1:5] == [2, 4, 6, 8]
    assert all(later - earlier <= max(2, 0.021 * later + 1) for earlier, later in pairwise(told))
    assert len(told) < 450


# ---- judging beside the rollout


class Watching:
    """A judge that remembers what it was asked, and fails where it is told to."""

    def __init__(self, fails_on: str = "") -> None:
        self.asked: list[list[str]] = []
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self._fails_on = fails_on

    def judge(self, answers: Sequence[PromptedCompletion]) -> list[Verdict]:
        self.began.set()
        self.may_end.wait()
        self.asked.append([answer.text for _, answer in answers])
        if any(answer.text == self._fails_on for _, answer in answers):
            raise TaskError("the reward raised")
        return [Verdict(float(answer.text)) for _, answer in answers]

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *failure: object) -> None:
        pass


def asked(groups: int = 3, size: int = 2) -> list[tuple[Prompt, list[Key]]]:
    return [(Prompt(str(g), f"{g}="), [Key(0, g * size + i) for i in range(size)]) for g in range(groups)]


def test_a_group_is_judged_when_its_last_answer_is_in() -> None:
    judge = Watching()
    with Judging(judge, asked()) as judging:
        for number in (4, 1, 5, 0):
            judging.hand_in(completion(Key(0, number), str(number)))
            while not judging.all_in():
                pass
        assert judge.asked == [["4", "5"], ["0", "1"]]  # in the order asked, before the rollout is over
        for number in (2, 3):
            judging.hand_in(completion(Key(0, number), str(number)))
        judged = judging.judged()
    assert [one.group.prompt.id for one in judged] == ["0", "1", "2"]
    assert [[rollout.reward for rollout in one.group.rollouts] for one in judged] == [[0, 1], [2, 3], [4, 5]]


def test_groups_that_arrive_while_the_judge_is_busy_are_judged_together() -> None:
    """But not two of the same prompt: a judge would take them for one group."""
    judge = Watching()
    judge.may_end.clear()
    prompts = [Prompt(name, name) for name in ("a", "b", "c", "b", "a")]
    with Judging(judge, [(prompt, [Key(0, place)]) for place, prompt in enumerate(prompts)]) as judging:
        judging.hand_in(completion(Key(0, 0), "0"))
        judge.began.wait()
        for number in (4, 3, 2, 1):
            judging.hand_in(completion(Key(0, number), str(number)))
        assert not judging.all_in()
        judge.may_end.set()
        judged = judging.judged()
    assert judge.asked == [["0"], ["4", "3", "2"], ["1"]]
    assert [one.group.rollouts[0].reward for one in judged] == [0, 1, 2, 3, 4]


def test_a_reward_that_stops_the_run_stops_it_before_the_rollout_ends() -> None:
    with Judging(Watching(fails_on="1"), asked()) as judging:
        for number in (0, 1):
            judging.hand_in(completion(Key(0, number), str(number)))
        while not judging.all_in():
            pass
        with pytest.raises(TaskError, match="the reward raised"):
            judging.hand_in(completion(Key(0, 2)))


# ---- one step


class Scripted:
    """A fleet by shape: canned answers in any order, and a record of what it was told."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.told: list[tuple[str, object]] = []

    def rollout(self, step: int, requests: Sequence[object], replies: object = None) -> Iterator[Completion]:
        shuffled = list(requests)
        self._draw.shuffle(shuffled)
        for request in shuffled:
            yield completion(request.key, "7" if request.key.request % 3 else "13")  # type: ignore[attr-defined]

    def report(self) -> RolloutReport:
        return RolloutReport(verifies=10, accepted=15, saved_s=1.0)

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        self.told.append(("draft", step))

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        self.told.append(("update", [(e.rollout.completion.key, e.rollout.reward, e.advantage) for e in experiences]))
        return UpdateResult(0.0, 1.0, 1e-3, 10, 5, 1, 0.0, 0.0, 0.1, 0.0, 0.0, 1.0)

    def publish(self, step: int, version: int) -> None:
        self.told.append(("publish", version))

    def replay(self, requests: Sequence[object], replies: object = None) -> tuple[list[Completion], float]:
        return list(Scripted(99).rollout(0, requests)), 2.0

    def snapshot(self) -> Callable[[Path], None]:
        return lambda directory: None

    def restore(self, directory: Path, version: int) -> None: ...

    def close(self) -> None: ...


def test_a_step_is_the_same_whatever_the_order_of_answers(tmp_path: Path) -> None:
    config = small(tmp_path, "--task.group=3", "--run.replay_every=2")
    task, seen = ToyTask(config.task.toy), []
    for seed in range(3):
        fleet, events = Scripted(seed), list[Event]()
        loop = Loop(config, task, TOKENIZER, DirectJudge(task), fleet, events.append)
        step = loop.step(5)
        assert step.report.accept_length == 2.5
        assert [what for what, _ in fleet.told] == ["draft", "update", "publish"]
        assert fleet.told[2] == ("publish", 6)
        assert [event.phase for event in events if isinstance(event, PhaseStarted)] == [
            "rollout",
            "drafting",
            "replay",
            "update",
        ]
        assert [event.identical for event in events if isinstance(event, ReplayCompared)] == [True]
        seen.append(fleet.told)
    assert seen[0] == seen[1] == seen[2]


def test_the_middle_one_of_so_many_steps_is_replayed() -> None:
    assert [step for step in range(28) if is_replayed(step, 7)] == [3, 10, 17, 24]
    assert [step for step in range(4) if is_replayed(step, 1)] == [0, 1, 2, 3]
    assert not any(is_replayed(step, 0) for step in range(28))


def test_off_against_off_takes_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts ticks, and to which everything before the first one is very slow."""
    now = 0.0

    def slower(owner: type, method: str, seconds: float) -> None:
        original = getattr(owner, method)

        def call(*given: object, **named: object) -> object:
            nonlocal now
            now += seconds
            return original(*given, **named)

        monkeypatch.setattr(owner, method, call)

    slower(EngineCore, "tick", 1.0)
    slower(Worker, "plain_engine", 1000.0)
    slower(ToyTask, "sample", 1000.0)
    for module in ("tlt.loop", "tlt.fleet"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: now, sleep=time.sleep))
    config, events = small(tmp_path, "--run.replay_every=1", "--engine.rows=3"), list[Event]()
    task, fleet = ToyTask(config.task.toy), LocalFleet(config, events.append)
    Loop(config, task, TOKENIZER, DirectJudge(task), fleet, events.append).step(0)
    (replay,) = [event for event in events if isinstance(event, ReplayCompared)]
    assert replay.identical
    assert replay.tlt_s == replay.plain_s > 0


def test_no_key_comes_twice_in_a_run(tmp_path: Path) -> None:
    config = small(tmp_path)
    keys = [r.key for step in (0, 1, 70000) for one in ask(step, config, ToyTask(), TOKENIZER) for r in one.requests]
    assert len(set(keys)) == len(keys) == 3 * 16
    assert all(-(2**63) <= key.request < 2**63 for key in keys)


def test_experiences_hold_each_rollout_with_its_advantage(tmp_path: Path) -> None:
    with Judging(Watching(), asked(2, 2)) as judging:
        for number in (3, 0, 1, 2):
            judging.hand_in(completion(Key(0, number), str(5 if number == 3 else 1)))
        found = experiences(judging.judged(), small(tmp_path).grpo)
    assert [e.rollout.completion.key.request for e in found] == [0, 1, 2, 3]
    assert [round(e.advantage, 3) for e in found] == [0.0, 0.0, -0.707, 0.707]


# ---- whole runs


def test_curves_are_the_same_with_and_without_speculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of drafter training a tick takes a second and a micro-step two: there is time for a few."""
    clock = Clock()
    clock.used_by(monkeypatch, deadline, trainer, tlt.fleet)
    clock.passes_in(monkeypatch, EngineCore, "tick", 1.0)
    clock.passes_in(monkeypatch, DrafterTrainer, "launch", 2.0)
    variants = {
        "plain": [],
        "suffix": ["--spec.drafter=suffix", "--spec.shape_policy=fixed"],
        "learned": [*LEARNED, "--drafting.forced_share=1", "--drafting.check=2"],
        "kept": [*LEARNED, "--drafting.forced_share=1", "--drafting.states=keep"],
    }
    runs = {
        name: tlt.train(small(tmp_path, f"--run.name={name}", "--run.steps=2", "--run.replay_every=2", *flags))
        for name, flags in variants.items()
    }
    assert len(numbers(runs["plain"])) == 2
    assert all(numbers(run) == numbers(runs["plain"]) for run in runs.values())
    weights = {name: (tmp_path / name / "checkpoints/step_2/policy/model.safetensors").read_bytes() for name in runs}
    assert set(weights.values()) == {weights["plain"]} != {(TINY_POLICY / "model.safetensors").read_bytes()}
    assert max(step.accept_length for step in steps_of(runs["suffix"])) > 1.2  # of one shape for ever: no clock says no
    for name, least in (("learned", 1), ("kept", 4)):  # an update as small as this one has few micro-steps
        assert min(event.micro_steps for event in events_of(runs[name], DrafterTrained)) >= least
        assert events_of(runs[name], DrafterSwapped)
    assert all(event.identical for run in runs.values() for event in events_of(run, ReplayCompared))


class SamePrompts(ToyTask):
    """A user's own task. It asks the same in every step, so that few steps suffice to learn it."""

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        return super().sample(0, count)


class Ending(ToyTask):
    """Has three prompts."""

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        return super().sample(0, 3)[step * count : (step + 1) * count]


def test_a_task_may_ask_less_than_it_was_to_but_not_nothing(tmp_path: Path) -> None:
    config = small(tmp_path, "--task.prompts=2", "--task.group=2", "--run.steps=3", "--train.minibatches=8")
    with pytest.raises(TaskError, match=r"Ending\.sample\(2, 2\) returned no prompts; expected 2, one at least"):
        tlt.train(config, Ending())
    assert len(steps_of(read_run(tmp_path / config.run.name))) == 2


def test_reward_rises_and_a_users_task_is_asked(tmp_path: Path) -> None:
    flags = ["--run.steps=6", "--task.group=16", "--engine.rows=64", "--model.dtype=float32"]
    config = small(tmp_path, *flags, "--sampling.temperature=1.5")
    run = tlt.train(config, SamePrompts(config.task.toy, seed=4))
    rewards = [step.mean_reward for step in steps_of(run)]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.15
    assert isinstance(run.events[-1].event, RunFinished)
    times = [(s.rollout_s + s.reward_s + s.update_s + s.drafting_s + s.checkpoint_s, s.step_s) for s in steps_of(run)]
    assert all(parts <= whole for parts, whole in times)


REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "bad":
        raise ValueError("cannot judge this")
    return float(len(solution_str))
"""


def test_a_reward_that_fails_ends_the_run_or_is_counted(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [f'{{"prompt": "{n}+1=", "answer": "{"bad" if n == 2 else n + 1}"}}' for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = ["--task.name=files", f"--task.path={tmp_path}/rows.jsonl", f"--task.reward={tmp_path}/reward.py:reward"]
    flags = [*files, "--run.steps=1", "--sampling.max_tokens=6", "--task.group=2", "--task.reward_timeout_s=600"]
    with pytest.raises(TaskError, match=r"(?s)raised.*cannot judge this.*the completion begins"):
        tlt.train(small(tmp_path, "--run.name=stops", *flags))
    run = read_run(tmp_path / "stops")
    assert [event.kind for event in events_of(run, RunFailed)] == ["TaskError"]
    assert not events_of(run, StepFinished)
    run = tlt.train(small(tmp_path, "--run.name=counts", "--task.reward_errors=count", *flags))
    assert [(event.kind, event.count) for event in events_of(run, RewardsFailed)] == [("raised", 2)]
    assert len(steps_of(run)) == 1


def test_states_are_kept_where_a_configuration_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter then learns from what the engine has computed while it speculated, and computes none of it again."""
    fleet = LocalFleet(
        small(tmp_path, *LEARNED, "--drafting.states=keep", "--drafting.forced_share=1"), lambda event: None
    )
    config, task = fleet.worker.config, ToyTask()
    requests = [request for one in ask(0, config, task, TOKENIZER) for request in one.requests]
    assert len(list(fleet.rollout(0, requests))) == 16
    monkeypatch.setattr(Recompute, "batch", None)
    fleet.draft(0, iter([False] * 3 + [True] * 99).__next__)
    assert fleet.worker.drafter is not None
    assert fleet.worker.drafter.steps_taken >= 3


def test_no_drafter_is_trained_where_that_cannot_pay(tmp_path: Path) -> None:
    """Answers of at most 40 tokens, and three steps. Why is said once, and no states are kept for nothing."""
    events: list[Event] = []
    fleet = LocalFleet(small(tmp_path, *LEARNED, "--run.steps=3", "--drafting.states=keep"), events.append)
    task = ToyTask()
    for taken in range(3):
        requests = [request for one in ask(taken, fleet.worker.config, task, TOKENIZER) for request in one.requests]
        assert len(list(fleet.rollout(taken + 1, requests))) == 16
        fleet.draft(taken + 1, lambda: True)
        assert fleet.worker._keeper is not None
        assert not fleet.worker._keeper.wanted
    (told,) = [event for event in events if isinstance(event, TrainingForecast)]
    assert (told.step, told.pays, told.steps_left) == (1, False, 2)
    assert told.gain < 0
    assert not [event for event in events if isinstance(event, DrafterTrained)]
    assert fleet.worker.drafter is not None
    assert fleet.worker.drafter.steps_taken == 0
    assert fleet.worker._keeper.bytes == 0
    fleet.snapshot()(tmp_path / "saved")
    assert not (tmp_path / "saved" / "drafter").exists(), "there is nothing to save"


def test_what_training_takes_is_charged_and_what_is_left_is_all_that_the_next_one_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock: a tick takes 2 s, a micro-step and a look 100 ms, and a forecast wants as much as there is."""
    clock = Clock()
    clock.used_by(monkeypatch, deadline, trainer, tlt.fleet)
    clock.passes_in(monkeypatch, EngineCore, "tick", 2.0)
    clock.passes_in(monkeypatch, DrafterTrainer, "launch", 0.1)
    clock.passes_in(monkeypatch, OnlineDrafter, "_measure", 0.1)
    clock.passes_in(monkeypatch, Worker, "swap_drafter", 0.05)
    wanted = Forecast(micro_steps=64, cost_s=1e6, returns_s=1e9, gain=1.0, steps_left=99)
    monkeypatch.setattr(planner, "forecast", lambda now, curve: wanted)
    flags = ["--run.steps=1000", "--drafting.check=2", "--drafting.gain=0", "--drafting.states=recompute"]
    events: list[Event] = []
    fleet, task = LocalFleet(small(tmp_path, *LEARNED, *flags), events.append), ToyTask()
    assert fleet._planner is not None
    account, begun = fleet._planner.account, clock.now
    for taken in range(3):
        requests = [request for one in ask(taken, fleet.worker.config, task, TOKENIZER) for request in one.requests]
        list(fleet.rollout(taken + 1, requests))
        before = sum(account.spent.values())
        balance_s, started = account.balance_s, clock.now
        fleet.draft(taken + 1, lambda: True)
        fleet.publish(taken + 1, taken + 1)
        assert sum(account.spent.values()) - before == pytest.approx(clock.now - started)
        assert clock.now - started <= max(0.0, balance_s) + 0.05 + 1e-6, "handing it over comes on top"
    trained = [event for event in events if isinstance(event, DrafterTrained)]
    assert trained
    assert all(account.spent[kind] > 0 for kind in (CostKind.TRAINING, CostKind.MEASURING, CostKind.SWAPPING))
    plain_s = account.plain_s - account.saved_s
    assert plain_s == pytest.approx(clock.now - begun - sum(account.spent.values())), "all other time is the steps' own"


def test_engine_and_trainer_share_the_policy(tmp_path: Path) -> None:
    fleet = LocalFleet(small(tmp_path, *LEARNED), lambda event: None)
    worker = fleet.worker
    before = {name: weight.data_ptr() for name, weight in worker.policy.model.named_parameters()}
    held: Fleet = fleet  # satisfies the loop's protocol by its shape
    held.publish(0, 3)
    assert worker.engine.version == 3
    assert {name: weight.data_ptr() for name, weight in worker.policy.model.named_parameters()} == before
    held.snapshot()(tmp_path / "saved")
    with torch.no_grad():
        worker.policy.model.embed.zero_()
    held.restore(tmp_path / "saved", 3)
    assert worker.policy.model.embed.abs().max() > 0
    assert {name: weight.data_ptr() for name, weight in worker.policy.model.named_parameters()} == before


def test_other_weights_are_told_to_the_drafter_once_even_under_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LocalFleet(small(tmp_path, *LEARNED), lambda event: None).worker
    told: list[int] = []
    monkeypatch.setattr(LearnedDrafting, "policy_changed", lambda self: told.append(worker.engine.version))
    for count, version in enumerate((1, 1, 2), start=1):  # a state taken over from another worker keeps its version
        worker.publish(version)
        assert len(told) == count


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")
    tlt.train(config)
    with pytest.raises(
        ConfigError, match=r"run holds a run of `tlt train` that took 1 step \(.*checkpoints\).*go on with --resume"
    ):
        tlt.train(config)
    assert [
        step.step for step in steps_of(tlt.train(replace(config, run=replace(config.run, steps=2)), resume=True))
    ] == [1, 2]


def test_a_run_without_a_drafter_in_training_tells_the_account_of_its_rollouts(tmp_path: Path) -> None:
    run = tlt.train(small(tmp_path, "--run.steps=2", "--spec.drafter=suffix"))
    told = events_of(run, AccountUpdated)
    assert [event.step for event in told] == [1, 2]
    assert all(event.rollouts_only for event in told)
    assert 0.0 < told[0].plain_s < told[1].plain_s
