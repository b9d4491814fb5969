"""The toy task: prompts follow from (seed, step, index), solutions are right, the reward is exact, the tail long."""

import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import ToySettings
from tlt.errors import TaskError
from tlt.tasks.task import Task
from tlt.tasks.toy import ALPHABET, ToyTask, count_ops, is_right, solve, write_expression
from tlt.types import Completion, FinishReason, Key, Prompt, Timing


def answered(text: str, reason: FinishReason = "eos") -> Completion:
    return Completion(
        key=Key(0, 0),
        prompt_tokens=(),
        tokens=(),
        text=text,
        logprobs=(),
        policy_logprobs=(),
        finish_reason=reason,
        policy_version=0,
        timing=Timing(0.0, 0.0),
    )


def value_of(expression: str) -> int:
    """The expression under Python's own rules, unreduced."""
    tree = ast.parse(expression, mode="eval")
    value = eval(compile(tree, "", "eval"))
    assert isinstance(value, int)
    return value


@given(
    seed=st.integers(),
    ops=st.integers(1, 30),
    modulus=st.sampled_from((2, 10, 97)),
    parentheses=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_every_rewriting_keeps_the_value_and_drops_one_operation(
    seed: int, ops: int, modulus: int, parentheses: float
) -> None:
    settings = ToySettings(modulus=modulus, parentheses=parentheses)
    expression = write_expression(random.Random(seed), ops, settings)
    assert count_ops(expression) == ops
    lines = solve(expression, modulus).split("=")
    assert [count_ops(line) for line in lines] == list(range(ops - 1, -1, -1))
    assert {value_of(line) % modulus for line in lines} == {value_of(expression) % modulus}
    assert lines[-1] == str(value_of(expression) % modulus)


def test_a_solution_reads_as_documented() -> None:
    assert solve("(3+4)*2-5") == "7*2-5=4-5=9"
    assert solve("1+2*3*(4-5)") == "1+6*(4-5)=1+6*9=1+4=5"


@pytest.mark.parametrize("broken", ["", "3+", "(3+4", "(5)", "3/4", "a+b"])
def test_what_is_no_expression_is_an_error(broken: str) -> None:
    with pytest.raises(TaskError, match="expected numbers"):
        solve(broken)


def test_prompts_are_a_function_of_seed_step_and_index() -> None:
    task = ToyTask(seed=3)
    assert isinstance(task, Task)
    assert task.sample(5, 20) == ToyTask(seed=3).sample(5, 20)
    assert task.sample(5, 20)[:7] == task.sample(5, 7)
    assert task.sample(5, 20) != task.sample(6, 20)
    assert task.sample(5, 20) != ToyTask(seed=4).sample(5, 20)


def test_equal_ids_mean_equal_prompts() -> None:
    by_id: dict[str, Prompt] = {}
    for prompt in ToyTask(ToySettings(median_ops=1.0, modulus=3)).sample(0, 300):
        assert by_id.setdefault(prompt.id, prompt) == prompt
    assert len(by_id) < 300  # such short prompts do recur, or this test tests nothing


def test_the_reward_is_exact() -> None:
    task = ToyTask()
    for prompt in task.sample(0, 50):
        right = task.solution(prompt)
        wrong_result = right[:-1] + str((int(right[-1]) + 1) % 10)
        assert task.reward(prompt, answered(right)) == 1.0
        assert task.reward(prompt, answered(right, "length")) == 0.0
        for wrong in (wrong_result, right + "=", right + "=" + right[-1], " " + right, right + "\n", "", "=" + right):
            assert task.reward(prompt, answered(wrong)) == 0.0


def test_guessing_the_result_without_rewriting_earns_nothing() -> None:
    assert is_right("7*2-5=4-5=9", "(3+4)*2-5")
    assert not is_right("9", "(3+4)*2-5")
    assert not is_right("4-5=9", "(3+4)*2-5")


def test_a_foreign_prompt_is_an_error() -> None:
    with pytest.raises(TaskError, match="not one of the toy task's"):
        ToyTask().reward(Prompt("x", "what is 3+4?"), answered("7"))


def test_right_answers_have_a_long_tail_within_reach() -> None:
    task = ToyTask()
    prompts = task.sample(0, 3000)
    lengths = sorted(len(task.solution(prompt)) + 1 for prompt in prompts)  # characters and the end token
    p50, p99 = lengths[1500], lengths[2970]
    assert 30 <= p50 <= 70
    assert p99 >= 5 * p50
    assert lengths[-1] <= 1000
    assert all(set(str(prompt.content)) <= set(ALPHABET) for prompt in prompts)


def test_the_knobs_turn() -> None:
    flat = ToyTask(ToySettings(median_ops=4, spread=0.0, parentheses=0.0, products=0.0)).sample(0, 100)
    assert {count_ops(str(prompt.content)) for prompt in flat} == {4}
    assert not any(character in str(prompt.content) for prompt in flat for character in "()*")
    capped = ToyTask(ToySettings(median_ops=20, max_ops=5)).sample(0, 100)
    assert max(count_ops(str(prompt.content)) for prompt in capped) == 5


def test_a_pool_is_asked_over_and_over() -> None:
    task = ToyTask(ToySettings(pool=6))
    asked = [prompt.id for step in range(3) for prompt in task.sample(step, 4)]
    assert asked[:6] == asked[6:]
    assert len(set(asked)) == 6
    assert asked != [prompt.id for step in range(3) for prompt in ToyTask(ToySettings(pool=6), seed=1).sample(step, 4)]
