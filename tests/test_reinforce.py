"""What `tlt train` refuses before it costs anything, and what it says of a run that goes on otherwise than it began."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tlt
from tests.training import numbers, small
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.errors import ConfigError, ModelError, TaskError
from tlt.fleet import LocalFleet
from tlt.loop import Emit
from tlt.multi_turn import Replies
from tlt.policy import TINY_POLICY
from tlt.tasks.context import refuse_long_prompts
from tlt.text import Tokenizer
from tlt.types import Completion, Prompt
from tlt.watch.events import CheckpointSaved, RunFailed, RunResumed, ShapesChosen, read_run
from tlt.watch.history import events_of, steps_of


def nobody(config: RunConfig, emit: Emit) -> LocalFleet:
    raise AssertionError("nothing should have been loaded")


def test_a_group_of_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.group is 1.*set task.group to 2 or more"):
        tlt.train(small(tmp_path, "--task.group=1"), open_fleet=nobody)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written to \(.*give another with --run.out"):
        tlt.train(small(tmp_path / out), open_fleet=nobody)


def test_a_policy_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model at .*nosuch: expected a directory"):
        tlt.train(small(tmp_path, f"--model.path={tmp_path}/nosuch"), open_fleet=nobody)


def test_prompts_without_room_for_an_answer_are_named_before_the_first_step(tmp_path: Path) -> None:
    rows = ["1+1=", "2+" * 500 + "2=", "3+" * 1200 + "3=", "4+" * 1500 + "4=", "5+5="]
    lines = [json.dumps({"prompt": text, "answer": "4"}) for text in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    files = ["--task.name=files", f"--task.path={tmp_path}/rows.jsonl", "--task.reward=gsm8k"]
    config = small(tmp_path, *files, "--run.steps=1")
    with pytest.raises(TaskError, match=r"prompt rows.jsonl:4 has \d+ tokens; with sampling.max_tokens 40.*2 of 5"):
        tlt.train(config, open_fleet=nobody)
    assert [event.kind for event in events_of(read_run(tmp_path / "run"), RunFailed)] == ["TaskError"]


def test_a_prompt_that_just_fits_is_asked() -> None:
    tokenizer = Tokenizer.load(TINY_POLICY)
    prompts = [Prompt("short", "1+1="), Prompt("long", "1+" * 50 + "1="), Prompt("chars", "é" * 60)]
    longest = max(len(tokenizer.encode_prompt(prompt.content)) for prompt in prompts)
    refuse_long_prompts(prompts, tokenizer, context=longest + 8, max_tokens=8)
    with pytest.raises(TaskError, match=rf"has {longest} tokens; with sampling.max_tokens 9 .* of {longest + 8}; "):
        refuse_long_prompts(prompts, tokenizer, context=longest + 8, max_tokens=9)


def test_a_run_that_goes_on_otherwise_says_so(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", "--sampling.max_tokens=4")
    run = tlt.train(config)
    assert [event.step for event in events_of(run, CheckpointSaved)] == [1]
    longer = replace(config, run=replace(config.run, steps=2, seed=5))
    (resumed,) = events_of(tlt.train(longer, resume=True), RunResumed)
    assert resumed.changed == ("run.seed 0 → 5", "run.steps 1 → 2")
    (_, unchanged) = events_of(tlt.train(longer, resume=True), RunResumed)
    assert unchanged.changed == ()


class Rounding(LocalFleet):
    """Its engine's log-probabilities differ by a rounding from those of the usual one, on any CPU."""

    def rollout(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        for completion in super().rollout(step, requests, replies):
            off = tuple(logprob - 1e-6 for logprob in completion.policy_logprobs)
            yield replace(completion, policy_logprobs=off)


def test_in_float32_too_curves_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    """Though the engine's log-probabilities are not: in which batch a token is written depends on drafts and clock."""
    flags = ["--model.dtype=float32", "--run.steps=2", "--train.minibatches=2"]
    runs = {
        "plain": tlt.train(small(tmp_path, *flags, "--run.name=plain")),
        "suffix": tlt.train(
            small(tmp_path, *flags, "--spec.drafter=suffix", "--engine.rows=5", "--run.name=suffix"),
            open_fleet=Rounding,
        ),
    }
    assert numbers(runs["plain"]) == numbers(runs["suffix"])
    weights = {(tmp_path / name / "checkpoints/step_2/policy/model.safetensors").read_bytes() for name in runs}
    assert len(weights) == 1
    off = [[step.mismatch_mean for step in steps_of(run)] for run in runs.values()]
    assert off[0] != off[1]  # there was something to settle
    assert events_of(runs["plain"], ShapesChosen) == ()
    told = events_of(runs["suffix"], ShapesChosen)
    assert [event.step for event in told] == [1, 2]
    for event in told:
        assert {requests for requests, _, _ in event.ticks} <= {1, 2, 4, 8}
        assert sum(ticks for _, _, ticks in event.ticks) > 0
