"""Completions of several turns: the tokens of plain decoding, whatever else runs; replies are not learned from."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt
from tests.test_policy import FREE, LENGTHS, ONE_STEP, assert_same, experiences, gradients_of, plain_logprobs
from tests.tiny import letters, policy
from tlt.config import EngineSettings, RunConfig, SpecSettings, TaskSettings, WatchSettings
from tlt.engine.engine import EngineCore
from tlt.errors import TaskError
from tlt.fleet import LocalFleet
from tlt.loop import Loop, Step, ask
from tlt.multi_turn import MultiTurn, replies_of
from tlt.policy import TINY_POLICY, Policy
from tlt.recipe import load_config
from tlt.tasks.judge import DirectJudge
from tlt.tasks.task import MultiTurnTask
from tlt.train.packing import Example, pack
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Prompt, SamplingParams
from tlt.watch.events import Event, ReplayCompared
from tlt.watch.history import steps_of

MODEL = policy(torch.float64, sharpness=4.0)
REPLY = "XYZXYZ"
LIMIT = 30  # tokens of a completion


class Letters:
    """Continue the letters; the more of them are among the first, the better."""

    def sample(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}:{n}", chr(ord("A") + n) + chr(ord("A") + (n + step) % 20)) for n in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return sum(letter in "ABCDEFG" for letter in completion.text) / max(1, len(completion.text))


class Talks(Letters):
    """Replies to up to `most` turns, in text and in tokens by turns."""

    def __init__(self, most: int = 6) -> None:
        self.most = most
        self.threads: set[int] = set()

    def reply(self, prompt: Prompt, completion: Completion) -> str | Sequence[int] | None:
        self.threads.add(threading.get_ident())
        said = completion.loss_mask.count(0) // len(REPLY)
        if said >= (self.most + len(completion.tokens)) % (self.most + 1):
            return None
        return REPLY if said % 2 else letters().encode_text(REPLY)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tlt.fleet.open_policy", lambda _: Policy(policy(torch.float64, sharpness=4.0), letters(), TINY_POLICY)
    )


def config_of(out: Path | str = "runs", drafter: str = "none", **engine: Any) -> RunConfig:
    config = load_config(overrides={"model.dtype": "float64", "model.device": "cpu", "run.out": str(out)})
    return replace(
        config,
        task=TaskSettings(prompts=4, group=3),
        sampling=SamplingParams(max_tokens=LIMIT, stop=("B", "H", "P")),
        engine=EngineSettings(**{"rows": 8, "kv_gib": 0.02, "page_size": 4, **engine}),
        spec=SpecSettings(drafter=drafter),
        watch=WatchSettings(console="off"),
    )


def stepped(config: RunConfig, task: Letters, events: list[Event] | None = None) -> Step:
    told = [] if events is None else events
    return Loop(config, task, letters(), DirectJudge(task), LocalFleet(config, told.append), told.append).step(0)


def plainly(task: Talks, config: RunConfig) -> dict[Any, tuple[tuple[int, ...], bytes]]:
    """Tokens and loss mask by key: one request at a time, every turn computed from its first token."""
    found = {}
    for one in ask(0, config, task, letters()):
        for request in one.requests:
            engine = EngineCore(MODEL, letters(), EngineSettings(rows=1))
            tokens, mask = tuple[int, ...](), b""
            while True:
                left = config.sampling.max_tokens - len(tokens)
                params = replace(config.sampling, max_tokens=left)
                engine.submit([replace(request, prompt=request.prompt + tokens, params=params, keep=False)])
                (turn,) = engine.drain()
                tokens, mask = tokens + turn.tokens, mask + b"\1" * len(turn.tokens)
                said = task.reply(one.prompt, replace(turn, tokens=tokens, loss_mask=mask))
                if turn.finish_reason == "length" or said is None:
                    break
                reply = letters().encode_text(REPLY)[: config.sampling.max_tokens - len(tokens)]
                tokens, mask = tokens + tuple(reply), mask + bytes(len(reply))
                if len(tokens) == config.sampling.max_tokens:
                    break
            found[request.key] = tokens, mask
    return found


def test_turns_are_those_of_plain_decoding_whatever_else_runs() -> None:
    """With and without drafts, many rows and few, and where pages run out."""
    task = Talks()
    expected = plainly(Talks(), config_of())
    assert max(mask.count(b"\1\0") for _, mask in expected.values()) >= 3, "some completions have several replies"
    assert any(not mask.endswith(b"\1") for _, mask in expected.values()), "some replies are cut"
    preempted = 0
    for knobs in ({}, {"drafter": "suffix"}, {"rows": 2}, {"kv_gib": 2e-5}):
        step = stepped(config_of(**knobs), task)
        for rollout in step.rollouts:
            completion = rollout.completion
            assert (completion.tokens, completion.loss_mask) == expected[completion.key], knobs
            assert completion.text == letters().decode(completion.tokens)
            columns = (completion.logprobs, completion.policy_logprobs, completion.drafted, completion.loss_mask)
            assert {len(column) for column in columns} == {len(completion.tokens)}
            preempted += completion.timing.preemptions
    assert preempted, "pages ran out"
    assert threading.get_ident() not in task.threads, "replies hold no tick up"


def test_a_next_turn_starts_from_the_pages_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = 0
    plan = EngineCore._plan

    def counted(engine: EngineCore, shape: Any) -> Any:
        nonlocal prefilled
        made = plan(engine, shape)
        prefilled += sum(len(chunk.tokens) for chunk in made.chunks)
        return made

    monkeypatch.setattr(EngineCore, "_plan", counted)
    step = stepped(config_of(), Talks())
    masks = [rollout.completion.loss_mask for rollout in step.rollouts]
    new = sum(mask.count(0) for mask in masks)
    replies = sum(mask.count(b"\1\0") for mask in masks)
    prompts = 4 * 1  # a prompt is prefilled without its last token, once for a group
    page = 4
    assert prefilled <= prompts + new + replies * page


def test_a_replay_talks_too(tmp_path: Path) -> None:
    config, events = config_of(tmp_path, drafter="suffix"), list[Event]()
    stepped(replace(config, run=replace(config.run, replay_every=1)), Talks(), events)
    (replay,) = [event for event in events if isinstance(event, ReplayCompared)]
    assert replay.identical
    assert replay.plain_tokens == replay.tokens


def test_replies_are_not_learned_from() -> None:
    """The gradient is that of the drawn tokens alone, as autograd has it; replies count in no mean."""
    model, given = policy(torch.float64), []
    for experience, (_, answer) in zip(experiences(policy(torch.float64)), LENGTHS, strict=True):
        mask = bytes(0 if place % 4 in (1, 2) and place < answer - 1 else 1 for place in range(answer))
        completion = experience.rollout.completion
        kept = [value if drawn else -7.5 for value, drawn in zip(completion.policy_logprobs, mask, strict=True)]
        masked = replace(completion, loss_mask=mask, policy_logprobs=tuple(kept))
        given.append(replace(experience, rollout=replace(experience.rollout, completion=masked), sampled=True))
    drawn = sum(experience.rollout.completion.drawn_tokens for experience in given)
    assert drawn < sum(answer for _, answer in LENGTHS)
    for loss in ("token", "sequence"):
        total = torch.zeros((), dtype=torch.float64)
        model.zero_grad()
        for experience in given:
            completion = experience.rollout.completion
            tokens = torch.tensor(completion.prompt_tokens + completion.tokens)
            now = plain_logprobs(model, tokens, len(completion.prompt_tokens))
            kept_now = now[torch.tensor(list(completion.loss_mask), dtype=torch.bool)]
            share = drawn if loss == "token" else len(given) * completion.drawn_tokens
            total = total - (experience.advantage * (kept_now - kept_now.detach()).exp()).sum() / share
        total.backward()  # type: ignore[no-untyped-call]
        expected = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        trainer = PolicyTrainer(policy(torch.float64), ONE_STEP, replace(FREE, loss=loss))
        result, found = gradients_of(trainer, given)
        assert_same(found, expected)
        assert result.answer_tokens == drawn
        assert result.mismatch_max < 1e-9, "log-probabilities of replies are not compared"
        for key, entropies in result.entropies:
            mask = given[key.request].rollout.completion.loss_mask
            assert [value > 0 for value in entropies] == [bool(mark) for mark in mask]


def test_a_mask_of_another_length_is_refused() -> None:
    (row,) = pack([Example((1, 2, 3, 4), 2, b"\0\1")], 8)
    assert row.mask_T.tolist() == [False, False, False, True]
    with pytest.raises(tlt.errors.TltError, match="loss mask of 1 for an answer of 2"):
        pack([Example((1, 2, 3, 4), 2, b"\1")], 8)


def test_a_task_learns_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tlt.train` with the tiny policy: a wrong answer gets a second chance, and the same run twice is the same."""
    monkeypatch.undo()

    class SecondChance:
        """The sum is asked again where the first answer is wrong."""

        def sample(self, step: int, count: int) -> list[Prompt]:
            pairs = [((step + n) % 9 + 1, n % 9 + 1) for n in range(count)]
            return [Prompt(f"{a}+{b}", f"{a}+{b}=", reference=str((a + b) % 10)) for a, b in pairs]

        def reply(self, prompt: Prompt, completion: Completion) -> str | None:
            wrong = prompt.reference not in completion.text
            return f"+{prompt.content}" if wrong and 0 not in completion.loss_mask else None

        def reward(self, prompt: Prompt, completion: Completion) -> float:
            return 1.0 - 0.5 * (0 in completion.loss_mask) if completion.text.endswith(prompt.reference) else 0.0

    assert isinstance(SecondChance(), MultiTurnTask)
    numbers = []
    for name, drafter in (("one", "none"), ("two", "suffix")):
        overrides = {
            "run": {"out": str(tmp_path), "name": name, "steps": 2},
            "task": {"prompts": 4, "group": 4},
            "sampling": {"max_tokens": 24, "temperature": 1.3},
            "model.device": "cpu",
            "spec.drafter": drafter,
            "engine.kv_gib": 0.05,
            "watch.console": "off",
            "eval.every": 2,
        }
        run = tlt.train("quickstart", SecondChance(), eval_task=SecondChance(), overrides=overrides)
        numbers.append([(step.mean_reward, step.loss, step.grad_norm, step.tokens) for step in steps_of(run)])
    assert numbers[0] == numbers[1]
    assert all(math.isfinite(norm) and norm > 0 for _, _, norm, _ in numbers[0])


class Says(Talks):
    def __init__(self, said: Any) -> None:
        super().__init__()
        self.said = said

    def reply(self, prompt: Prompt, completion: Completion) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.mark.parametrize("said", [7, ["A"], {"role": "user"}, True])
def test_a_reply_of_another_kind_is_refused(said: Any) -> None:
    with pytest.raises(TaskError, match=r"the reply to prompt 0:\d is .*expected text, a sequence of token ids"):
        stepped(config_of(), Says(said))


def test_an_error_in_a_reply_names_its_prompt() -> None:
    with pytest.raises(ZeroDivisionError) as found:
        stepped(config_of(), Says(ZeroDivisionError("tool")))
    assert any("in the reply to prompt 0:" in note for note in found.value.__notes__)


def test_an_endless_task_ends_with_the_limit() -> None:
    step = stepped(config_of(), Says(""))
    assert {len(rollout.completion.tokens) for rollout in step.rollouts} == {LIMIT}
    assert {rollout.completion.finish_reason for rollout in step.rollouts} == {"length"}
    assert all(0 not in rollout.completion.loss_mask for rollout in step.rollouts)


def test_without_replies_completions_pass_untouched() -> None:
    assert replies_of(Letters(), letters(), {}) is None
    completion = stepped(config_of(), Letters()).rollouts[0].completion
    assert completion.loss_mask == b""
    with MultiTurn([], None) as turns:
        turns.hand_in(completion)
        assert turns.take() == ([completion], [])
