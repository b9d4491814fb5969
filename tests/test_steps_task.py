"""The steps task: prompts say what is asked, every phrasing of a solution is right, the reward exact, the tail long."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
from statistics import pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import RunConfig, StepsSettings
from tlt.errors import ConfigError, TaskError
from tlt.tasks import steps as steps_task
from tlt.tasks.choose import task_of
from tlt.tasks.steps import Problem, Rule, StepsTask, draw_problem, is_right, write_solution
from tlt.tasks.task import Task
from tlt.types import Completion, FinishReason, Key, Prompt, Timing

EXAMPLE = Problem(47, (Rule("+", 8), Rule("*", 3), Rule("+", None)), steps=3, modulus=100)
# Words with the space before them, single digits, and every other character: as SmolLM2's tokenizer has it.
TOKENS = re.compile(r" ?[A-Za-z]+|.", re.DOTALL)


def phrasing_nats(steps: int, variety: float = 1.0) -> float:
    """Entropy of the phrasing of a solution with `steps` steps, in nats."""

    def entropy(ways: Any) -> float:
        return -sum(weight * math.log(weight) for weight in steps_task._varied(ways, variety) if weight)

    return steps * sum(map(entropy, steps_task._LINE)) + entropy(steps_task._ENDINGS)


def answered(text: str, reason: FinishReason = "eos") -> Completion:
    return Completion(Key(0, 0), (), (), text, (), (), reason, 0, Timing(0.0, 0.0))


def text_of(prompt: Prompt) -> str:
    return prompt.content if isinstance(prompt.content, str) else prompt.content[-1].content


def result_by_reading(text: str) -> int:
    """What somebody computes who has nothing but the prompt's text."""
    start = int(re.findall(r"(?:Start with|Take the number|Begin at) (\d+)", text)[0])
    steps = int(re.findall(r"(\d+) steps", text)[0])
    modulus = int(re.findall(r"(?i)modulo (\d+)", text)[0])
    rules = re.findall(r"(add|subtract|multiply by) (\d+|the number of the step)", text)
    value = start
    for number in range(1, steps + 1):
        word, operand = rules[(number - 1) % len(rules)]
        by = number if operand.startswith("the") else int(operand)
        value = (value + by if word == "add" else value - by if word == "subtract" else value * by) % modulus
    return value


def test_a_solution_reads_as_documented() -> None:
    assert write_solution(EXAMPLE, random.Random(0), variety=0.0) == "1. 47+8=55\n2. 55*3=65\n3. 65+3=68\nResult: 68"
    assert is_right("1. 47+8=55\n2: 55 times 3 is 65\n3. 65+3 gives 68;\nSo it ends at 68.", EXAMPLE)


def test_the_prompt_says_all_there_is_to_know() -> None:
    for prompt in StepsTask(StepsSettings(max_steps=40)).sample(0, 200):
        assert str(result_by_reading(text_of(prompt))) == prompt.reference


@given(seed=st.integers(), modulus=st.sampled_from((2, 7, 100, 1000)), variety=st.sampled_from((0.0, 0.5, 1.0)))
def test_every_phrasing_of_a_solution_is_right(seed: int, modulus: int, variety: float) -> None:
    draw = random.Random(seed)
    problem = draw_problem(draw, StepsSettings(modulus=modulus, max_steps=30))
    answer = write_solution(problem, draw, variety)
    assert is_right(answer, problem)
    lines = answer.split("\n")
    assert len(lines) == problem.steps + 1
    before = problem.start
    for number, line in enumerate(lines[:-1], start=1):
        found = re.fullmatch(r"(\d+)[.:)] (\d+)(\+|-|\*| plus | minus | times )(\d+)(?:=| is | gives )(\d+)[.;]?", line)
        assert found is not None, line
        assert (int(found[1]), int(found[2])) == (number, before)
        by = int(found[4])
        after = {"+": before + by, "-": before - by, "*": before * by}[_symbol(found[3])] % modulus
        assert int(found[5]) == after
        before = after


def _symbol(operator: str) -> str:
    return {" plus ": "+", " minus ": "-", " times ": "*"}.get(operator, operator)


def test_prompts_are_a_function_of_seed_step_and_index() -> None:
    task = StepsTask(seed=3)
    assert isinstance(task, Task)
    assert task.sample(5, 20) == StepsTask(seed=3).sample(5, 20)
    assert task.sample(5, 20)[:7] == task.sample(5, 7)
    assert task.sample(5, 20) != task.sample(6, 20)
    assert task.sample(5, 20) != StepsTask(seed=4).sample(5, 20)
    (prompt,) = task.sample(5, 1)
    assert task.solution(prompt) == StepsTask(seed=3).solution(prompt)
    longest = max(task.sample(5, 20), key=lambda prompt: len(task.solution(prompt)))
    assert task.solution(longest, random.Random(1)) != task.solution(longest, random.Random(2))


def test_the_reward_is_exact() -> None:
    task = StepsTask(StepsSettings(max_steps=40))
    for prompt in task.sample(0, 50):
        right = task.solution(prompt)
        lines = right.split("\n")
        result = str(prompt.reference)
        other = str((int(result) + 1) % 100)
        assert task.reward(prompt, answered(right)) == 1.0
        assert task.reward(prompt, answered(right, "length")) == 0.0
        wrong = (
            lines[-1].replace(result, other),  # guessed, and wrong
            "\n".join([*lines[:-1], lines[-1].replace(result, other)]),
            lines[-1],  # guessed, and right by luck
            "\n".join(lines[:-1]),
            "\n".join([*lines[1:]]),
            "\n".join([lines[0], *lines]),
            right + "\n",
            right + "\n" + lines[-1],
            right + other,
            "",
        )
        for answer in wrong:
            assert task.reward(prompt, answered(answer)) == 0.0, answer


def test_a_slip_that_leaves_the_result_right_is_forgiven() -> None:
    assert is_right("1. 47+8=54\n2. 55*3=65\n3. 65+3=68\nResult: 68", EXAMPLE)
    assert not is_right("1. 47+8=55\n2. 55*3=65\n4. 65+3=68\nResult: 68", EXAMPLE)


def test_a_foreign_prompt_is_an_error() -> None:
    with pytest.raises(TaskError, match="not one of the steps task's"):
        StepsTask().reward(Prompt("x", "what is 3+4?"), answered("7"))


# ---- what it is for: long tails, and something left open in every line


def test_lengths_are_long_tailed_and_peaked() -> None:
    task, nats = StepsTask(seed=9), 0.0
    lengths = []
    for prompt in task.sample(0, 1500):
        lengths.append(len(TOKENS.findall(task.solution(prompt))) + 1)  # and the end token
        nats += phrasing_nats(prompt.extra["problem"].steps)
    lengths.sort()
    assert pstdev([math.log(length) for length in lengths]) >= 1.05
    assert 150 <= lengths[750] <= 250
    assert 2000 <= lengths[1485] <= 4096
    assert lengths[-1] <= 4096
    assert 0.2 <= nats / sum(lengths) <= 0.3


def test_the_entropy_is_that_of_what_is_written() -> None:
    draw, drawn = random.Random(0), 20_000
    problem = replace(EXAMPLE, steps=1)
    for variety, ways in ((1.0, 3 * 2 * 3 * 3 * 3), (0.0, 1)):
        counts = Counter(write_solution(problem, draw, variety) for _ in range(drawn))
        measured = -sum(count / drawn * math.log(count / drawn) for count in counts.values())
        assert len(counts) == ways
        assert measured == pytest.approx(phrasing_nats(1, variety), abs=0.02)
    assert phrasing_nats(10) - phrasing_nats(9) == pytest.approx(phrasing_nats(2) - phrasing_nats(1))
    assert 0 < phrasing_nats(1, 0.3) < phrasing_nats(1, 0.6) < phrasing_nats(1)


def test_numbers_do_not_run_in_a_small_circle() -> None:
    """A drafter that copies what it saw sixty lines ago must not know the arithmetic."""
    problems = [draw_problem(random.Random(seed), StepsSettings(median_steps=250, spread=0)) for seed in range(40)]
    repeats = 0
    for problem in problems:
        values = problem.values()
        repeats += any(values[-60:] == values[-60 - back : -back] for back in range(1, 60))
    assert repeats == 0


# ---- settings


def test_the_knobs_turn() -> None:
    def problems(**settings: object) -> list[Problem]:
        drawn = StepsTask(StepsSettings(**settings)).sample(0, 100)  # type: ignore[arg-type]
        return [prompt.extra["problem"] for prompt in drawn]

    assert {problem.steps for problem in problems(median_steps=4, spread=0)} == {4}
    assert max(problem.steps for problem in problems(median_steps=20, max_steps=5)) == 5
    assert {len(problem.rules) for problem in problems(rules=4)} == {2, 3, 4}
    assert {len(problem.rules) for problem in problems(rules=2)} == {2}
    with_products = problems(products=1.0)
    assert {rule.operator for problem in with_products for rule in problem.rules if rule.operand} == {"*"}
    without = problems(products=0.0, largest=5)
    numbers = {rule.operand for problem in without for rule in problem.rules if rule.operand}
    assert numbers == {2, 3, 4, 5}
    assert max(max(problem.values()) for problem in problems(modulus=7)) == 6
    assert all(sum(rule.operand is None for rule in problem.rules) == 1 for problem in with_products)
    plain = StepsTask(StepsSettings(chat=False)).sample(0, 1)[0]
    assert isinstance(plain.content, str)
    assert plain.content.endswith("\n")


@pytest.mark.parametrize("wrong", [{"rules": 1}, {"variety": 1.5}, {"median_steps": 0.5}, {"modulus": 1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StepsSettings(**wrong)  # type: ignore[arg-type]


def test_a_configuration_can_name_it() -> None:
    config = RunConfig()
    steps = StepsSettings(median_steps=3)
    task = task_of(replace(config, task=replace(config.task, name="steps", steps=steps)))
    assert isinstance(task, StepsTask)
    assert (task.settings, task.seed) == (steps, config.run.seed)
