"""Rewards: both conventions, the built-in ones, and what a function may return."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import BUILT_IN_REWARDS, TaskSettings
from tlt.errors import TaskError
from tlt.tasks.math import exact, gsm8k, gsm8k_reference, last_boxed, last_number, math_reward
from tlt.tasks.rewards import COMPARING, Case, Failed, Opening, Scored, open_reward, score

CASE = Case(
    prompt_id="rows.jsonl:1",
    prompt="2+2?",
    completion="It is 4",
    tokens=(7, 8),
    reference="4",
    source="sums",
    columns={"level": 3},
)


@pytest.fixture
def reward_file(tmp_path: Path) -> Any:
    """Writes the user's file; gives FILE.py:reward."""

    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        return f"{tmp_path}/mine.py:reward"

    return write


# ---- conventions


def call(name: str, *cases: Case, convention: str = "auto") -> list[Any]:
    """The rewards alone where nothing was told beside them."""
    scores = score(open_reward(Opening(name, convention)), cases or (CASE,))
    return [one.reward if isinstance(one, Scored) and not one.metrics else one for one in scores]


def test_verl_gets_its_four_arguments(reward_file: Any) -> None:
    name = reward_file(
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, solution_str, ground_truth) == ('sums', 'It is 4', '4')\n"
        "    return extra_info['level'] / 2\n"
    )
    assert call(name) == [1.5]
    with_info = replace(CASE, columns={"extra_info": {"level": 5}, "level": 3})
    assert call(name, with_info) == [2.5]


@pytest.mark.parametrize(
    ("signature", "result", "expected"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "{'score': 0.5, 'why': 'so'}", 0.5),
        ("solution_str, ground_truth", "solution_str.endswith(ground_truth)", 1.0),
        ("solution_str, ground_truth, **kwargs", "len(kwargs)", 2.0),
        ("data_source, solution_str, ground_truth, extra_info, strict=True", "strict", 1.0),
    ],
)
def test_verl_signatures_and_results(reward_file: Any, signature: str, result: str, expected: float) -> None:
    assert call(reward_file(f"def reward({signature}):\n    return {result}\n")) == [expected]


def test_trl_gets_lists_of_text_or_of_messages(reward_file: Any) -> None:
    name = reward_file(
        "def reward(prompts, completions, level, **columns):\n"
        "    if isinstance(prompts[0], str):\n"
        "        return [len(p) + len(c) + l for p, c, l in zip(prompts, completions, level)]\n"
        "    assert [m[-1]['role'] for m in prompts + completions] == ['user', 'assistant']\n"
        "    assert columns == {'completion_ids': [[7, 8]]}\n"
        "    return [len(completions[0][0]['content'])]\n"
    )
    assert call(name, CASE, replace(CASE, completion="4", columns={"level": 10})) == [4 + 7 + 3, 4 + 1 + 10]
    assert call(name, replace(CASE, prompt=[{"role": "user", "content": "2+2?"}])) == [7]


def test_trl_functions_without_keywords_get_what_they_name(reward_file: Any) -> None:
    assert call(reward_file("def reward(completions):\n    return [1 for _ in completions]\n")) == [1.0]


def test_a_convention_can_be_demanded(reward_file: Any) -> None:
    both = reward_file(
        "def reward(solution_str=None, completions=None, **rest):\n    return 1 if solution_str else [2]\n"
    )
    with pytest.raises(TaskError, match=r"\(verl\), or reward_func"):
        call(both)
    assert call(both, convention="verl") == [1.0]
    assert call(both, convention="trl") == [2.0]


@pytest.mark.parametrize(
    ("source", "convention", "expected"),
    [
        ("def reward(text, truth): ...", "auto", r"signature \(text, truth\); expected compute_score.*or reward_func"),
        ("def reward(text, truth): ...", "verl", r"signature \(text, truth\); expected compute_score"),
        ("def reward(solution_str, ground_truth): ...", "trl", r"expected reward_func\(prompts, completions"),
        ("def reward(solution_str, truth): ...", "auto", "asks for truth; expected compute_score"),
        ("def other(): ...", "auto", "no function reward in .*its functions are: other"),
        ("reward = 3", "auto", "no function reward"),
    ],
)
def test_a_wrong_function_is_refused(reward_file: Any, source: str, convention: str, expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        open_reward(Opening(reward_file(source), convention))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(TaskError, match=r"task\.reward none\.py:reward: no file none\.py"):
        open_reward(Opening("none.py:reward"))


def test_the_file_may_import_its_neighbours(reward_file: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 0.25\n")
    name = reward_file("from neighbour_of_mine import VALUE\ndef reward(completions): return [VALUE]\n")
    assert call(name) == [0.25]


# ---- what a reward may return


@pytest.mark.parametrize(
    "value", ["1", "True", "0.5", "-2", "__import__('numpy').float32(0.5)", "__import__('fractions').Fraction(1, 2)"]
)
def test_numbers(reward_file: Any, value: str) -> None:
    (result,) = call(reward_file(f"def reward(solution_str, ground_truth): return {value}"))
    assert type(result) is float


NO_NUMBERS = [
    "None",
    "'1.0'",
    "float('nan')",
    "float('inf')",
    "10**400",
    "1e200",
    "[1.0]",
    "{'acc': 1}",
    "{'score': None}",
    "1j",
    "object",
]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("signature", ["solution_str, ground_truth", "completions"])
def test_what_is_no_number_is_said_to_be_none(reward_file: Any, signature: str, value: str) -> None:
    returned = f"[{value}]" if signature == "completions" else value
    (result,) = call(reward_file(f"def reward({signature}): return {returned}"))
    assert isinstance(result, Failed)
    assert result.kind == "no number"
    assert "the reward returned" in result.message


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[1.0]", "returned 1 values for 2 completions"),
        ("[1.0] * 3", "returned 3 values for 2 completions"),
        ("1.0", "returned 1.0; expected a list with one number per completion"),
        ("None", "returned None; expected a list"),
        ("{'score': 1}", "expected a list"),
        ("'11'", "expected a list"),
    ],
)
def test_trl_must_return_one_number_per_answer(reward_file: Any, returned: str, expected: str) -> None:
    results = call(reward_file(f"def reward(completions): return {returned}"), CASE, CASE)
    assert [result.kind for result in results] == ["no number"] * 2
    assert all(expected in result.message for result in results)


def test_one_bad_value_in_a_list_spoils_no_other(reward_file: Any) -> None:
    good, bad = call(reward_file("def reward(completions): return [1, None]"), CASE, CASE)
    assert good == 1.0
    assert isinstance(bad, Failed)


# ---- what it may tell beside its reward


@pytest.mark.parametrize("signature", ["solution_str, ground_truth", "completions"])
def test_other_numbers_are_metrics(reward_file: Any, signature: str) -> None:
    told = "{'score': 0.5, 'acc': True, 'steps': 3, 'why': 'so', 'odd': float('nan')}"
    returned = f"[{told}]" if signature == "completions" else told
    assert call(reward_file(f"def reward({signature}): return {returned}")) == [Scored(0.5, {"acc": 1.0, "steps": 3.0})]


# ---- async

MEETING = """
import asyncio
met = None
here = 0
async def meet(count):  # nobody goes on until all are here
    global met, here
    met = met or asyncio.Event()
    here += 1
    if here == count:
        met.set()
    await met.wait()
"""


def test_calls_of_an_async_function_run_beside_each_other(reward_file: Any) -> None:
    name = reward_file(
        MEETING + "async def reward(solution_str, ground_truth):\n"
        "    await meet(3)\n"
        "    if solution_str == 'bad':\n"
        "        raise ValueError('cannot judge this')\n"
        "    return {'score': len(solution_str), 'loop': id(asyncio.get_running_loop()) % 1000}\n"
    )
    reward = open_reward(Opening(name))
    assert reward.ready.takes_groups
    first, bad, last = score(reward, [replace(CASE, completion=answer) for answer in ("a", "bad", "abc")])
    assert [one.reward for one in (first, last) if isinstance(one, Scored)] == [1.0, 3.0]
    assert isinstance(bad, Failed)
    assert (bad.kind, "cannot judge this" in bad.message, "asyncio/" in bad.message) == ("raised", True, False)
    (again,) = score(reward, [replace(CASE, completion="a")])
    assert again == first, "the same loop: what the function keeps stays usable"


def test_an_async_function_may_take_all_answers(reward_file: Any) -> None:
    assert call(reward_file("async def reward(completions): return [len(text) for text in completions]")) == [7.0]


# ---- built in


@pytest.mark.parametrize(
    ("answer", "expected"), [("<think>hm</think> 4", 1.0), ("<think>hm</think> ", 0.0), ("4", 0.0), ("<think>4", 0.0)]
)
def test_the_format_of_an_answer(answer: str, expected: float) -> None:
    pattern = TaskSettings().reward_format
    (found,) = score(open_reward(Opening("format", pattern=pattern)), [replace(CASE, completion=answer)])
    assert found == Scored(expected)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("so $1,234.50.", "1234.5"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("3,4", "4"),
        ("about .5", "0.5"),
        ("−7", "-7"),
        ("50%", "50"),
        ("none", "None"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert str(last_number(text)).rstrip("0") == number.rstrip("0")


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    last_number(text)
    last_boxed(text)
    assert exact(text, text) == 1.0
    assert exact(text + " 17", 18) == gsm8k(text + " 17", 18) == 0.0


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("The answer is 42.", "42", True),
        ("42 is the answer to 7", "42", False),
        ("$42.00", 42, True),
        (" paris ", "Paris", True),
        ("It is Paris", "Paris", False),
        ("4", "4 apples", False),
        ("", "4", False),
    ],
)
def test_exact(text: str, reference: Any, right: bool) -> None:
    assert exact(text, reference) == float(right)


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("… #### 1,300 (not 5)", "1300", True),
        ("#### 7\n#### 8", "8", True),
        ("#### 7\n#### 8", "7", False),
        ("it is 13", "16 - 3\n#### 13", True),
        ("13 #### none", "13", True),
        ("no idea", "13", False),
    ],
)
def test_gsm8k(text: str, reference: Any, right: bool) -> None:
    assert gsm8k(text, reference) == float(right)


def test_gsm8k_references() -> None:
    assert gsm8k_reference("a\n#### 1,300 ") == "1300"
    assert gsm8k_reference("a") is gsm8k_reference("a ####") is None
    with pytest.raises(TaskError, match="the reference is 'none'; the reward gsm8k expects a number"):
        gsm8k("13", "none")
    with pytest.raises(TaskError, match=r"the reference is \['13'\]; the built-in rewards expect text or a number"):
        gsm8k("13", ["13"])


def test_last_boxed() -> None:
    assert last_boxed(r"\boxed{1}, then \boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\boxed{3}}") == "3"
    assert last_boxed("}{ none") is None


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"first \boxed{3}, no: \boxed{1+x}", "x+1", True),
        (r"first \boxed{1+x}, no: \boxed{3}", "x+1", False),
        (r"\boxed{(2, 1)}", "(1, 2)", False),
        (r"\boxed{\{2, 1\}}", r"$\{1, 2\}$", True),
        ("the answer is 42.", 42, True),
        ("no idea", "42", False),
        (r"\boxed{{{}", "42", False),
    ],
)
def test_math(text: str, reference: Any, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert math_reward()(text, reference) == float(right)


def test_math_without_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TaskError, match=r"needs math-verify.*tlt-rl\[math\]"):
        open_reward(Opening("math"))


def test_the_built_in_rewards_are_those_of_the_configuration() -> None:
    assert {*COMPARING} <= {*BUILT_IN_REWARDS}
    for name in BUILT_IN_REWARDS:
        TaskSettings(reward=name)
