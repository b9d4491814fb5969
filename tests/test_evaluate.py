"""Evaluation: by hand, within a run that it must not change, kept over a stop, and on its own."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import tlt
from tests.training import LEARNED, numbers, small
from tests.watching import recorded
from tlt.cli import main
from tlt.config import EvalSettings, RunConfig, evaluation_names
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.evaluate import Evaluation, evaluated, pass_at, sampling_of, score_of
from tlt.fleet import LocalFleet
from tlt.loop import Emit, ask
from tlt.multi_turn import Replies
from tlt.policy import TINY_POLICY
from tlt.recipe import to_toml
from tlt.tasks.held_out import held_out_of
from tlt.tasks.judge import Verdict
from tlt.tasks.judging import Judged
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.types import Completion, Group, Key, Prompt, Rollout, Timing
from tlt.watch.console import notice
from tlt.watch.events import CheckpointSaved, Evaluated, PhaseStarted, Run, read_run
from tlt.watch.figures import figures_of
from tlt.watch.history import events_of, steps_of
from tlt.watch.metrics import metrics_of
from tlt.watch.summary import in_words, last_lines, summarise

TOKENIZER = Tokenizer.load(TINY_POLICY)
EVAL = ["--eval.every=2", "--eval.prompts=8", "--sampling.max_tokens=12"]


# ---- by hand


@pytest.mark.parametrize(("k", "answers", "correct"), [(1, 4, 1), (2, 4, 1), (3, 5, 2), (2, 4, 3), (4, 4, 0)])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_answer(k: int, answers: int, correct: int) -> None:
    choices = [any(index < correct for index in chosen) for chosen in combinations(range(answers), k)]
    assert pass_at(k, answers, correct) == pytest.approx(sum(choices) / len(choices))


def judged(name: str, *rewards: float) -> Judged:
    def completion(index: int) -> Completion:
        reason: Any = "length" if index else "eos"
        return Completion(Key(0, index), (1,), (2,) * (index + 1), "", (), (), reason, 0, Timing(0.0, 0.0))

    prompt = Prompt(name, name)
    rollouts = tuple(Rollout(prompt, completion(index), reward) for index, reward in enumerate(rewards))
    return Judged(Group(prompt, rollouts), tuple(Verdict(reward) for reward in rewards))


def test_an_evaluation_is_summed_up() -> None:
    settings = EvalSettings(answers=2, pass_at=(1, 2), temperature=1.0, correct=0.5)
    told = evaluated(3, "test", [judged("a", 1.0, 0.0), judged("b", 0.0, 0.25), judged("c", 1.0, 0.5)], settings, 9.0)
    assert (told.step, told.prompts, told.answers, told.seconds) == (3, 3, 6, 9.0)
    assert told.mean_reward == pytest.approx(2.75 / 6)
    assert told.pass_at == ((1, pytest.approx(0.5)), (2, pytest.approx(2 / 3)))
    assert told.reward_error == pytest.approx(0.314577 / 3**0.5, rel=1e-4)  # of 0.5, 0.125 and 0.75
    assert (told.length_mean, told.truncated) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"answers": 4}, "answers is 4; expected 1, as temperature is 0"),
        ({"pass_at": (2,)}, r"pass_at is \(2,\); expected numbers from 1 to eval.answers, which is 1"),
        ({"paths": ("a/test.jsonl", "b/a/test.parquet")}, "files that differ in their name or directory's name"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EvalSettings(**settings)


def test_files_of_one_name_are_told_apart_by_their_directories() -> None:
    paths = ["gsm8k/test.jsonl", "data/math/test.jsonl", "aime.2024.json"]
    assert evaluation_names(paths) == ["gsm8k-test", "math-test", "aime"]


def scored(wanted: str, name: str = "math-test") -> float | None:
    told = Evaluated(
        step=1,
        name=name,
        prompts=1,
        answers=1,
        mean_reward=0.5,
        reward_error=0.1,
        pass_at=((4, 0.75),),
        length_mean=9.0,
        truncated=0.25,
        seconds=1.0,
        metrics={"tone/acc": 0.125},
    )
    return score_of(told, wanted, ["math-test", "other"])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("reward", 0.5),
        ("math-test/pass@4", 0.75),
        ("tone/acc", 0.125),
        ("math-test/tone/acc", 0.125),
        ("length", -9.0),
        ("math-test/truncated", -0.25),
        ("other/reward", None),
    ],
)
def test_the_best_is_that_of_a_metric_of_one_set(wanted: str, expected: float | None) -> None:
    """The lowest of lengths and of truncation, and the highest of anything else."""
    assert scored(wanted) == expected


@pytest.mark.parametrize("wanted", ["tone", "none/reward", "other/tone"])
def test_a_best_metric_that_nobody_has_is_named(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"eval.best is .*tone/acc; name one of these, or FILE/METRIC for another of"):
        scored(wanted, wanted.partition("/")[0] if wanted.startswith("other") else "math-test")


# ---- within a run


def evaluations(run: Run) -> list[tuple[int, str, float, float]]:
    return [(one.step, one.name, one.mean_reward, one.length_mean) for one in events_of(run, Evaluated)]


def test_an_evaluated_run_learns_what_the_same_run_learns_without(tmp_path: Path) -> None:
    flags = ["--run.steps=2", "--sampling.max_tokens=12", *LEARNED, "--drafting.forced_share=0.3"]
    plain = tlt.train(small(tmp_path, *flags, "--run.name=plain"))
    seen = tlt.train(small(tmp_path, *flags, *EVAL, "--eval.every=1", "--run.name=seen", "--drafting.states=keep"))
    assert numbers(plain) == numbers(seen)
    weights = [
        (tmp_path / name / "checkpoints/step_2/policy/model.safetensors").read_bytes() for name in ("plain", "seen")
    ]
    assert weights[0] == weights[1]
    assert [one.step for one in events_of(seen, Evaluated)] == [0, 1, 2]
    assert not events_of(plain, Evaluated)


def test_no_key_of_training_is_used(tmp_path: Path) -> None:
    config = small(tmp_path, *EVAL, "--eval.answers=2", "--eval.temperature=1", "--sampling.stop_token_ids=7,8")
    asked: list[Request] = []

    def answer(_: int, requests: Sequence[Request], replies: object) -> Iterator[Completion]:
        asked.extend(requests)
        for request in requests:
            yield Completion(request.key, (1,), (2,), "", (), (), "eos", 0, Timing(0.0, 0.0))

    evaluation = Evaluation(config, held_out_of(config), TOKENIZER, lambda _: None)
    evaluation.run(0, answer)
    keys = {request.key for request in asked}
    assert len(keys) == len(asked)
    training = {
        request.key for step in range(9) for one in ask(step, config, ToyTask(), TOKENIZER) for request in one.requests
    }
    assert not keys & training
    assert {request.params for request in asked} == {sampling_of(config)}
    assert sampling_of(config).stop_token_ids == (7, 8), "answers end where training's do"
    first, asked = list(asked), []
    evaluation.run(2, answer)
    assert asked == first, "two policies are compared under the same noise"


def test_nobody_learns_from_held_out_answers(tmp_path: Path) -> None:
    fleet = LocalFleet(small(tmp_path, *LEARNED, "--drafting.states=keep"), lambda _: None)
    drafter, keeper = fleet.worker.drafter, fleet.worker._keeper
    assert drafter is not None
    assert keeper is not None
    learned: list[Completion] = []
    drafter.learn_from = lambda completions, *_: learned.extend(completions)  # type: ignore[method-assign]
    requests = [request for one in ask(0, fleet.worker.config, ToyTask(), TOKENIZER) for request in one.requests]
    assert len(list(fleet.evaluate(1, requests))) == len(requests)
    assert (learned, keeper.bytes, keeper.wanted) == ([], 0, True)
    assert len(list(fleet.rollout(1, requests))) == len(learned) == len(requests)


def test_the_account_of_training_knows_nothing_of_it(tmp_path: Path) -> None:
    left_out: list[float] = []

    def open_fleet(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet = LocalFleet(config, emit)
        leave_out = fleet.leave_out

        def noted(seconds: float) -> None:
            left_out.append(seconds)
            leave_out(seconds)

        fleet.leave_out = noted  # type: ignore[method-assign]
        return fleet

    run = tlt.train(small(tmp_path, "--run.steps=2", *EVAL), open_fleet=open_fleet)
    told = events_of(run, Evaluated)
    assert [seconds > one.seconds for seconds, one in zip(left_out[::2], told, strict=True)] == [True] * 2
    assert all(step.step_s < sum(one.seconds for one in told) + 60 for step in steps_of(run))
    phases = [event.phase for event in events_of(run, PhaseStarted)]
    assert phases.count("evaluation") == 2


class Ended(BaseException):
    pass


def ends_in_evaluation(count: int) -> Callable[[RunConfig, Emit], LocalFleet]:
    def open_fleet(config: RunConfig, emit: Emit) -> LocalFleet:
        fleet, made = LocalFleet(config, emit), 0
        evaluate = fleet.evaluate

        def ends(step: int, requests: Sequence[Request], replies: Replies | None) -> Iterator[Completion]:
            nonlocal made
            made += 1
            if made == count:
                raise Ended
            yield from evaluate(step, requests, replies)

        fleet.evaluate = ends  # type: ignore[method-assign]
        return fleet

    return open_fleet


def test_an_evaluation_that_was_stopped_is_made_by_the_resumed_run(tmp_path: Path) -> None:
    flags = ["--run.steps=2", "--checkpoint.every=1", *EVAL, "--eval.every=1"]
    whole = tlt.train(small(tmp_path / "whole", *flags))
    with pytest.raises(Ended):
        tlt.train(small(tmp_path, *flags), open_fleet=ends_in_evaluation(2))
    told = events_of(read_run(tmp_path / "run"), Evaluated)
    assert [one.step for one in told] == [0]
    run = tlt.train(small(tmp_path, *flags), resume=True)
    assert evaluations(run) == evaluations(whole)
    assert [one.step for one in events_of(run, Evaluated)] == [0, 1, 2]
    assert [one.best for one in events_of(run, Evaluated)] == [one.best for one in events_of(whole, Evaluated)]


class Rising(ToyTask):
    """Rewards that are best after the third step, however the policy answers."""

    version = 0

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return (0.0, 1.0, 2.0, 3.0, 1.0, 1.5)[completion.policy_version]


def test_the_best_checkpoint_is_written_and_kept(tmp_path: Path) -> None:
    flags = ["--run.steps=5", "--checkpoint.every=0", "--checkpoint.keep=1", "--eval.every=1", "--eval.prompts=2"]
    config = small(tmp_path, *flags, "--sampling.max_tokens=6", "--task.prompts=1", "--task.group=2")
    run = tlt.train(config, ToyTask(), eval_task=Rising())
    saved = [event.step for event in events_of(run, CheckpointSaved)]
    assert saved == [1, 2, 3, 5]
    assert [one.step for one in events_of(run, Evaluated) if one.best] == [0, 1, 2, 3]
    assert {one.name for one in events_of(run, Evaluated)} == {"held_out"}
    left = {
        path.name: (path / "optimizer" / "state.json").exists()
        for path in (tmp_path / "run/checkpoints").glob("step_*")
    }
    assert left == {"step_3": False, "step_5": True}
    assert "3.000 ± 0.000 after step 3; the best policy is that after step 3." in in_words(summarise(run))


def test_a_metric_that_is_not_evaluated_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.best is 'acc', and toy has reward, .*pass@1, length, truncated"):
        tlt.train(small(tmp_path, *EVAL, "--eval.best=acc"))


def test_prompts_that_are_held_out_have_to_be_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"eval.paths is empty.*name them in eval.paths, or set"):
        tlt.train(small(tmp_path, *EVAL, "--task.name=files", f"--task.path={rows}"))
    with pytest.raises(ConfigError, match=r"give tlt.train an eval_task"):
        tlt.train(small(tmp_path, *EVAL, "--run.name=other"), ToyTask())


# ---- told


def told_run(tmp_path: Path) -> Any:
    flags = ["--run.steps=2", *EVAL, "--eval.answers=2", "--eval.temperature=1", "--eval.pass_at=1,2"]
    return tlt.train(small(tmp_path, *flags))


def test_an_evaluation_is_told_everywhere(tmp_path: Path) -> None:
    run = told_run(tmp_path)
    first, last = events_of(run, Evaluated)
    metrics = metrics_of(last)
    assert metrics is not None
    assert metrics.step == 2
    assert set(metrics.values) == {
        f"eval/toy/{name}" for name in ("reward", "reward_error", "pass@1", "pass@2", "length", "truncated")
    }
    said = notice(first)
    assert said is not None
    assert said[0].startswith(f"before the first step: toy: reward {first.mean_reward:.3f} ± ")
    assert "pass@2" in said[0]
    assert f"after step 2: toy: reward {last.mean_reward:.3f}" in str(notice(last))
    (figure,) = [figure for figure in figures_of(run) if figure.title == "Evaluation"]
    assert f"toy: reward {last.mean_reward:.3f}" in figure.words
    assert [point[0] for point in figure.series[0].points] == [0.0, 2.0]
    lines = last_lines(summarise(run), "there")
    assert any(line.startswith(f"Reward on held-out toy: {first.mean_reward:.3f} ± ") for line in lines)
    assert recorded(last)[0].event == last


# ---- on its own


def test_a_model_is_evaluated_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(1, 6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [f"--eval.paths={tmp_path}/sums.jsonl", "--task.reward=gsm8k", "--eval.prompts=4"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small(tmp_path, *flags)))
    assert main(["eval", "tiny", str(recipe)]) == 0
    out = capsys.readouterr().out
    (told,) = events_of(read_run(tmp_path / "run-tiny-eval"), Evaluated)
    assert (told.step, told.name, told.answers, told.best) == (0, "sums", 4, False)
    assert f"sums: reward {told.mean_reward:.3f} ± {told.reward_error:.3f}, pass@1 {told.mean_reward:.1%}, 2 tok" in out
    lines = [json.loads(line) for line in (tmp_path / "run-tiny-eval/rollouts.jsonl").read_text().splitlines()]
    right = [float(line["answer"] == str(n + 1)) for n, line in enumerate(lines, start=1)]
    assert [(line["set"], line["reward"]) for line in lines] == [("sums", reward) for reward in right]
    assert told.mean_reward == sum(right) / 4 >= 0.5


def test_training_evaluates_what_the_verb_evaluates(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=1", *EVAL)
    run = tlt.train(config)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config))
    assert main(["eval", str(tmp_path / "run/checkpoints/step_1/policy"), str(recipe), "--model.dtype=float64"]) == 0
    (alone,) = events_of(read_run(tmp_path / "run-run-step_1-eval"), Evaluated)
    after = events_of(run, Evaluated)[-1]
    assert (alone.mean_reward, alone.length_mean) == (after.mean_reward, after.length_mean)
