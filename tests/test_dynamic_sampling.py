"""Dynamic sampling: which places ask again is a function of their own rewards; a stopped run asks the same; and prompts
that are too long are left out or cut where that was chosen."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tlt
from tests.test_loop import TOKENIZER, Scripted
from tests.training import LEARNED, numbers, small
from tlt.config import RunConfig, TaskSettings
from tlt.errors import ConfigError, TaskError
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Loop, Step, ask
from tlt.tasks.context import fit_prompts
from tlt.tasks.judge import DirectJudge
from tlt.tasks.toy import ToyTask
from tlt.train.policy import UpdateResult
from tlt.train.signal import Places, has_signal
from tlt.types import Completion, Experience, Prompt
from tlt.watch.console import notice
from tlt.watch.events import Evaluated, PhaseStarted, PromptsFitted, StepFinished
from tlt.watch.history import events_of, steps_of

# ---- decisions


def test_a_group_has_a_signal_if_its_rewards_differ() -> None:
    assert has_signal([0.0, 0.0, 0.1])
    assert not has_signal([0.7, 0.7])


def test_places_without_a_signal_ask_again_until_they_have_one_or_may_not() -> None:
    places = Places(more=2)
    assert (places.open, places.turn, places.last_turn, places.done) == (None, 0, False, False)
    places.see([0, 1, 2, 3], [[0, 1], [1, 1], [0, 0], [0, 0]])
    assert (places.open, places.last_turn, places.done) == ([1, 2, 3], False, False)
    places.see([1, 2, 3], [[0, 0], [0, 1], [1, 1]])
    assert (places.open, places.last_turn, places.done) == ([1, 3], True, False)
    places.see([1, 3], [[1, 0], [1, 1]])
    assert places.done
    assert places.learned == {0, 5, 7}  # of 4 + 3 + 2 groups: place 0 at once, place 2 then, place 1 at last


def test_a_step_whose_places_all_have_a_signal_asks_no_more() -> None:
    places = Places(more=5)
    places.see([0, 1], [[0, 1], [1, 0]])
    assert (places.done, places.learned) == (True, {0, 1})


def test_without_dynamic_sampling_everything_is_learned_from() -> None:
    places = Places(more=0)
    assert places.last_turn
    places.see([0, 1], [[1, 1], [1, 0]])
    assert (places.done, places.learned) == (True, {0, 1})


def test_where_there_is_no_signal_at_all_everything_is_learned_from() -> None:
    """It changes no weight, and all means stay what they are."""
    places = Places(more=1)
    places.see([0, 1], [[1, 1], [0, 0]])
    places.see([0, 1], [[1, 1], [1, 1]])
    assert (places.done, places.learned) == (True, {0, 1, 2, 3})


# ---- a step


class Lottery(ToyTask):
    """The rewards of a prompt are all the same for four prompts in five, whatever is answered."""

    def __init__(self, has: Callable[[str], bool] | None = None) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self._has = has or (lambda name: random.Random(name).random() < 0.2)

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        self.asked.append((step, count))
        return [Prompt(f"{step}/{place}", "1+1=") for place in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.key.request % 2) if self._has(prompt.id) else 0.5


def taken(tmp_path: Path, task: Lottery, seed: int, *flags: str) -> tuple[Step, Scripted, list[Any]]:
    config = small(tmp_path, "--task.prompts=6", "--task.group=2", *flags)
    fleet, events = Scripted(seed), list[Any]()
    step = Loop(config, task, TOKENIZER, DirectJudge(task), fleet, events.append).step(7)
    return step, fleet, events


def test_a_step_asks_and_learns_the_same_whatever_the_order_of_answers(tmp_path: Path) -> None:
    seen = []
    for seed in range(3):
        task = Lottery()
        step, fleet, events = taken(tmp_path, task, seed, "--grpo.dynamic_sampling=3")
        told = dict(fleet.told)
        assert [what for what, _ in fleet.told] == ["draft", "update", "publish"]
        learned = [step.judged[index] for index in sorted(step.learned)]
        keys = [rollout.completion.key for one in learned for rollout in one.group.rollouts]
        assert [key for key, _, _ in told["update"]] == keys  # type: ignore[attr-defined]
        assert all(gain for _, _, gain in told["update"])  # type: ignore[attr-defined]
        everyone = [rollout.completion.key for one in step.judged for rollout in one.group.rollouts]
        assert len(set(everyone)) == len(everyone) > len(keys)
        assert task.asked == [(7 * 4 + turn, 6) for turn in range(4)], "a step has prompts of its own"
        assert [event.phase for event in events if isinstance(event, PhaseStarted)] == [
            *["rollout"] * 4,
            "drafting",
            "update",
        ]
        seen.append(told["update"])
    assert seen[0] == seen[1] == seen[2]


def test_each_place_is_learned_from_once_at_most(tmp_path: Path) -> None:
    step, _, _ = taken(tmp_path, Lottery(), 0, "--grpo.dynamic_sampling=20")
    places = [one.group.prompt.id.partition("/")[2] for one in (step.judged[index] for index in sorted(step.learned))]
    assert sorted(places) == [str(place) for place in range(6)]
    asked = [one.group.prompt.id for one in step.judged]
    for place in "012345":  # in its place, a group with a signal is the last one
        mine = [name for name in asked if name.endswith(f"/{place}")]
        assert [random.Random(name).random() < 0.2 for name in mine] == [False] * (len(mine) - 1) + [True]


def test_there_are_no_turns_without_need(tmp_path: Path) -> None:
    task = Lottery(has=lambda name: True)
    step, fleet, _ = taken(tmp_path, task, 0, "--grpo.dynamic_sampling=3")
    assert (len(step.judged), len(task.asked)) == (6, 1)
    assert [what for what, _ in fleet.told] == ["draft", "update", "publish"]
    assert all(part >= 0 for part in (step.times.rollout, step.times.reward, step.times.drafting, step.times.update))


class EndsEarly(Lottery):
    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        return super().sample(step, count)[: 4 if step % 4 == 0 else 1 if step % 4 == 1 else 0]


def test_a_task_that_has_no_further_prompts_is_left_in_peace(tmp_path: Path) -> None:
    step, _, _ = taken(tmp_path, EndsEarly(has=lambda name: False), 0, "--grpo.dynamic_sampling=3")
    assert [one.group.prompt.id for one in step.judged] == ["28/0", "28/1", "28/2", "28/3", "29/0"]
    assert len(step.learned) == 5


def test_turns_add_up(tmp_path: Path) -> None:
    """Of one turn and of four, where nobody ever waits for a reward."""
    for flags, turns in (((), 1), (("--grpo.dynamic_sampling=3",), 4)):
        step, _, _ = taken(tmp_path, Lottery(has=lambda name: False), 0, *flags)
        assert len(step.judged) == 6 * turns
        assert step.report.verifies == 10, "a fleet reports of a step"


# ---- whole runs

DYNAMIC = ["--grpo.dynamic_sampling=2", "--run.steps=2", "--checkpoint.every=1", "--sampling.max_tokens=16"]


def test_a_run_tells_what_it_asked_and_learned(tmp_path: Path) -> None:
    steps = steps_of(tlt.train(small(tmp_path, *DYNAMIC)))
    assert any(step.groups > 4 for step in steps)
    for step in steps:
        assert step.groups_learned <= 4 <= step.groups <= 12
        assert step.no_signal == pytest.approx(1 - step.groups_learned / step.groups)
        parts = step.rollout_s + step.reward_s + step.update_s + step.drafting_s + step.checkpoint_s
        assert parts <= step.step_s


def test_speculation_and_its_drafter_change_nothing(tmp_path: Path) -> None:
    flags = [*LEARNED, "--drafting.forced_share=0.5", "--run.name=both"]
    runs = [tlt.train(small(tmp_path, *DYNAMIC, *more)) for more in (["--run.name=plain"], flags)]
    assert numbers(runs[0]) == numbers(runs[1])


class Stopped(BaseException):
    pass


def stopping(config: RunConfig, emit: Emit) -> LocalFleet:
    """Ends in the second turn of step 2, if it has more than one, else with its update."""
    fleet = LocalFleet(config, emit)
    rollout, update, turns = fleet.rollout, fleet.update, 0

    def stopped_rollout(step: int, requests: Sequence[Any], replies: Any) -> Iterator[Completion]:
        nonlocal turns
        turns += step == 2
        if turns == 2:
            raise Stopped
        return rollout(step, requests, replies)

    def stopped_update(experiences: Sequence[Experience]) -> UpdateResult:
        if turns:
            raise Stopped
        return update(experiences)

    fleet.rollout, fleet.update = stopped_rollout, stopped_update  # type: ignore[method-assign]
    return fleet


def test_a_stopped_run_asks_the_same_when_it_is_resumed(tmp_path: Path) -> None:
    whole = tlt.train(small(tmp_path / "whole", *DYNAMIC))
    with pytest.raises(Stopped):
        tlt.train(small(tmp_path, *DYNAMIC), open_fleet=stopping)
    run = tlt.train(small(tmp_path, *DYNAMIC), resume=True)
    assert numbers(run) == numbers(whole)

    def counts(steps: Sequence[StepFinished]) -> list[tuple[int, int]]:
        return [(step.groups, step.groups_learned) for step in steps]

    assert counts(steps_of(run)) == counts(steps_of(whole))


def test_the_account_knows_a_step_of_several_rollouts_as_one(tmp_path: Path) -> None:
    fleet = LocalFleet(small(tmp_path, *LEARNED), lambda _: None)
    config, told = fleet.worker.config, []
    assert fleet._planner is not None
    rolled_out = fleet._planner.rolled_out

    def noted(lengths: Sequence[int], rollout_s: float, *given: Any, **named: Any) -> None:
        told.append((len(lengths), rollout_s, named["first"]))
        rolled_out(lengths, rollout_s, *given, **named)

    fleet._planner.rolled_out = noted  # type: ignore[method-assign]
    for step, first in ((1, 0), (1, 2), (2, 4)):
        requests = [request for one in ask(first, config, ToyTask(), TOKENIZER) for request in one.requests]
        assert len(list(fleet.rollout(step, requests))) == 16
        verified = fleet.report().verifies
    assert [(count, first) for count, _, first in told] == [(16, True), (32, False), (16, True)]
    assert told[1][1] > told[0][1]
    assert verified <= fleet.worker.speculation().verifies  # type: ignore[union-attr]


# ---- prompts that are too long

ROWS = ["1+1=", "2+" * 500 + "2=", "3+" * 1200 + "3=", "4+" * 1500 + "4=", "5+5="]


def files(tmp_path: Path, *flags: str) -> RunConfig:
    lines = [json.dumps({"prompt": text, "answer": "4"}) for text in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    named = ["--task.name=files", f"--task.path={tmp_path}/rows.jsonl", "--task.reward=length", "--run.steps=1"]
    return small(tmp_path, *named, "--sampling.max_tokens=4", *flags)


def sizes(prompts: Sequence[str]) -> list[int]:
    return [len(TOKENIZER.encode_prompt(text)) for text in prompts]


def test_long_prompts_are_left_out_or_cut_where_that_was_chosen() -> None:
    prompts = [Prompt(str(index), text) for index, text in enumerate(ROWS)]
    limit = sizes(ROWS)[1]
    settings = TaskSettings(prompt_tokens=limit, long_prompts="filter")
    filtered = fit_prompts(prompts, TOKENIZER, settings, 2048, 40)
    assert ([prompt.id for prompt in filtered.prompts], filtered.long, filtered.limit) == (["0", "1", "4"], 2, limit)
    cut = fit_prompts(prompts, TOKENIZER, replace(settings, long_prompts="truncate"), 2048, 40)
    assert (len(cut.prompts), cut.long) == (5, 2)
    for text, size in zip(ROWS, sizes(ROWS), strict=True):
        tokens = cut.tokenizer.encode_prompt(text)
        assert tokens == TOKENIZER.encode_prompt(text)[-min(size, limit) :]
    assert sizes(ROWS) == [len(TOKENIZER.encode_prompt(text)) for text in ROWS], "the tokenizer itself cuts nothing"


def test_the_context_bounds_what_is_allowed() -> None:
    prompts = [Prompt(str(index), text) for index, text in enumerate(ROWS)]
    context = sizes(ROWS)[1] + 40
    settings = TaskSettings(prompt_tokens=100_000, long_prompts="filter")
    assert fit_prompts(prompts, TOKENIZER, settings, context, 40).limit == context - 40
    with pytest.raises(TaskError, match=r"task.prompt_tokens allows 3; 5 of 5 prompts are too long; leave them out"):
        fit_prompts(prompts, TOKENIZER, TaskSettings(prompt_tokens=3), 2048, 40)
    with pytest.raises(TaskError, match="all 5 prompts have more than 3 tokens"):
        fit_prompts(prompts, TOKENIZER, replace(settings, prompt_tokens=3), 2048, 40)
    with pytest.raises(ConfigError, match=r"sampling.max_tokens is 40, and the policy's context 40"):
        fit_prompts(prompts, TOKENIZER, settings, 40, 40)


@pytest.mark.parametrize("choice", ["filter", "truncate"])
def test_a_run_says_how_many_prompts_are_too_long(tmp_path: Path, choice: str) -> None:
    flags = ["--task.prompt_tokens=100", f"--task.long_prompts={choice}", "--task.prompts=5", "--task.group=2"]
    config = files(tmp_path, *flags, "--eval.every=1", f"--eval.paths={tmp_path}/rows.jsonl")
    run = tlt.train(config)
    told = events_of(run, PromptsFitted)
    assert [(one.name, one.long, one.prompts, one.limit) for one in told] == [
        ("rows", 3, 5, 100),
        ("training", 3, 5, 100),
    ]
    said = notice(told[0])
    assert said is not None
    what = "lose their beginning" if choice == "truncate" else "are left out"
    assert said[0] == f"3 of 5 prompts (rows) have more than 100 tokens: they {what}"
    (evaluated, *_) = events_of(run, Evaluated)
    assert evaluated.prompts == (5 if choice == "truncate" else 2)
    (step,) = steps_of(run)
    assert step.groups == 5


def test_prompts_that_nobody_knows_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"long_prompts is \"filter\", and the prompts of this task are not known"):
        tlt.train(small(tmp_path, "--task.long_prompts=filter"))
