"""Tasks from files: every layout people bring, prompts that follow from (seed, step, count), errors that name rows."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import RunConfig, TaskSettings
from tlt.errors import ConfigError, TaskError
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.files import FileTask
from tlt.tasks.judge import DirectJudge, ProcessJudge
from tlt.tasks.task import Task
from tlt.types import Message, Prompt

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}
GSM8K_ROW = {"question": "Eggs?", "answer": "16 - 3 = <<16-3=13>>13 eggs, and so on.\n#### 1,300"}


def jsonl(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task(path: str, seed: int = 0, **knobs: Any) -> FileTask:
    return FileTask(TaskSettings(name="files", path=path, **knobs), seed=seed)


def only_prompt(path: str, **knobs: Any) -> Prompt:
    (prompt,) = task(path, **knobs).sample(0, 1)
    return prompt


def ids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


# ---- layouts


def test_verl_rows(tmp_path: Path) -> None:
    prompt = only_prompt(jsonl(tmp_path, VERL_ROW))
    assert prompt.content == (Message("system", "Be brief."), Message("user", "2+2?"))
    assert prompt.reference == "4"
    assert prompt.extra == {name: value for name, value in VERL_ROW.items() if name != "prompt"}
    assert prompt.id == "rows.jsonl:1"


def test_gsm8k_rows(tmp_path: Path) -> None:
    prompt = only_prompt(jsonl(tmp_path, GSM8K_ROW))
    assert (prompt.content, prompt.reference) == ("Eggs?", "1300")
    assert prompt.extra == {"answer": GSM8K_ROW["answer"]}


@pytest.mark.parametrize("asked", ["prompt", "question"])
@pytest.mark.parametrize("answered", ["answer", "label", "ground_truth"])
def test_prompts_with_an_answer(tmp_path: Path, asked: str, answered: str) -> None:
    prompt = only_prompt(jsonl(tmp_path, {asked: "Capital of France?", answered: "Paris", "level": 3}))
    assert (prompt.content, prompt.reference) == ("Capital of France?", "Paris")
    assert prompt.extra == {answered: "Paris", "level": 3}


def test_trl_rows_need_no_reference(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": CHAT, "solution": "4", "level": 1})
    prompt = only_prompt(path, reward="mine.py:reward")
    assert prompt.reference is None
    assert prompt.extra == {"solution": "4", "level": 1}


def test_columns_by_knob(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "no", "answer": "no", "problem": "1+1?", "solution": 2})
    prompt = only_prompt(path, prompt_column="problem", reference_column="solution")
    assert (prompt.content, prompt.reference) == ("1+1?", 2)


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [VERL_ROW, {**VERL_ROW, "reward_model": {"style": "rule", "ground_truth": "5"}}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    from_parquet, from_lines = task(str(path)).prompts, task(jsonl(tmp_path, *rows)).prompts
    assert ids(from_parquet) == ["rows.parquet:0", "rows.parquet:1"]
    for one, other in zip(from_parquet, from_lines, strict=True):
        assert (one.content, one.reference, one.extra) == (other.content, other.reference, other.extra)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "rows.parquet"
    path.touch()
    with pytest.raises(TaskError, match=r"rows\.parquet: parquet needs pyarrow.*tlt-rl\[data\]"):
        task(str(path))


# ---- what is put around a prompt


def test_template_chat_and_system(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": r"What is \frac{1}{2}?", "answer": "x"})
    asked = r"What is \frac{1}{2}? Box it: \boxed{}"
    template = r"{prompt} Box it: \boxed{}"
    assert only_prompt(path, template=template).content == asked
    assert only_prompt(path, template=template, chat=True).content == (Message("user", asked),)
    chat = only_prompt(path, chat=True, system="Be kind.").content
    assert chat == (Message("system", "Be kind."), Message("user", r"What is \frac{1}{2}?"))


def test_a_chat_keeps_its_own_system_message_and_takes_no_template(tmp_path: Path) -> None:
    bare = {"prompt": CHAT[1:], "answer": "4"}
    knobs = {"system": "Be kind.", "template": "Q: {prompt}"}
    prompts = task(jsonl(tmp_path, {"prompt": CHAT, "answer": "4"}, bare), **knobs).prompts
    systems = [prompt.content[0] for prompt in prompts]
    assert systems == [Message("system", "Be brief."), Message("system", "Be kind.")]
    assert [prompt.content[-1] for prompt in prompts] == [Message("user", "2+2?")] * 2


# ---- order


def many(tmp_path: Path, count: int) -> str:
    return jsonl(tmp_path, *({"prompt": f"p{number}", "answer": number} for number in range(count)))


def test_a_resumed_run_asks_what_the_undisturbed_run_would_have(tmp_path: Path) -> None:
    path = many(tmp_path, 10)
    through = task(path)
    undisturbed = [ids(through.sample(step, 4)) for step in range(8)]
    assert [ids(task(path).sample(step, 4)) for step in reversed(range(8))] == undisturbed[::-1]
    assert [ids(task(path, seed=1).sample(step, 4)) for step in range(8)] != undisturbed


@given(rows=st.integers(1, 12), count=st.integers(1, 30), seed=st.integers())
def test_every_epoch_asks_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, count: int, seed: int
) -> None:
    """Also where an epoch ends in the middle of a step, and where a step holds several."""
    asked_of = task(many(tmp_path_factory.mktemp("rows"), rows), seed=seed)
    steps = 3 * rows // count + 1
    stream = [prompt_id for step in range(steps) for prompt_id in ids(asked_of.sample(step, count))]
    epochs = [stream[start : start + rows] for start in range(0, len(stream) - rows + 1, rows)]
    everything = sorted(ids(asked_of.prompts))
    assert len(epochs) >= 3
    assert all(sorted(epoch) == everything for epoch in epochs)


def test_epochs_differ_in_order(tmp_path: Path) -> None:
    asked_of = task(many(tmp_path, 20))
    first, second = (ids(asked_of.sample(step, 20)) for step in range(2))
    assert first != second
    assert first != sorted(first)


# ---- rows that are wrong

GOOD = {"prompt": "2+2?", "answer": "4"}


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels > 1 else []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([GOOD, "{\n"], r"rows\.jsonl:2: is not valid JSON \(Expecting .*, column 2\); expected one object per line"),
        (["[" * 100_000 + "\n"], r"rows\.jsonl:1: is nested deeper than 64 levels; expected one object per line"),
        ([{**GOOD, "extra": nested(64)}], r"rows\.jsonl:1: is nested deeper than 64 levels"),
        (['{"prompt": ' + "1" * 5000 + "}"], r"rows\.jsonl:1: holds an integer with too many digits"),
        ([{**GOOD, "prompt": "\ud800"}], r"rows\.jsonl:1: holds half of a surrogate pair"),
        (["[" + "7," * 500 + "7]\n"], r"rows\.jsonl:1: is \[[7, ]{119}…; expected an object"),
        ([GOOD, {"a\nb": "4"}], r"rows\.jsonl:2: its columns are 'a\\nb'; expected prompt"),
        ([GOOD, "\n", "[1]\n"], r"rows\.jsonl:3: is \[1\]; expected an object"),
        ([GOOD, {"answer": "4"}], r"rows\.jsonl:2: its columns are answer; expected prompt"),
        ([GOOD, {"prompt": "2+2?"}], r"rows\.jsonl:2: its columns are prompt; expected answer"),
        ([GOOD, {"prompt": "2+2?", "answer": None}], r"rows\.jsonl:2: has no reference, which the reward exact"),
        ([{"text": "2+2?"}], r"rows\.jsonl:1: its columns are text; expected prompt or question.*task\.prompt_column"),
        ([{"prompt": "2+2?", "solution": "4"}], r"rows\.jsonl:1: has no reference.*set task\.reference_column"),
        ([{**GOOD, "question": "?"}], r"rows\.jsonl:1: has the columns prompt and question; say which"),
        ([{**GOOD, "label": "4"}], r"rows\.jsonl:1: has the columns answer and label; .*task\.reference_column"),
        ([{**GOOD, "prompt": " "}], r"rows\.jsonl:1: the prompt is ' '; expected text, or a list of messages"),
        ([{**GOOD, "prompt": []}], r"the prompt is \[\]; expected text"),
        ([{**GOOD, "prompt": [{"role": "user"}]}], r"a message is .*expected an object with text `role` and `content`"),
        ([VERL_ROW, {**VERL_ROW, "reward_model": {}}], r"rows\.jsonl:2: reward_model is \{\}; .*`ground_truth`"),
        ([GSM8K_ROW, {**GSM8K_ROW, "answer": "13"}], r"rows\.jsonl:2: the answer is '13'; expected GSM8K's form"),
        ([], r"rows\.jsonl: holds no rows; expected at least one prompt"),
        (["\n\n"], r"holds no rows"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, rows: list[Any], expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        task(jsonl(tmp_path, *rows))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.jsonl: no such file"):
        task(str(tmp_path / "none.jsonl"))
    with pytest.raises(TaskError, match=r"ends in '\.txt'; expected a file that ends in \.jsonl"):
        task(str(tmp_path / "rows.txt"))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "caf\xe9", "answer": "x"}\n')
    with pytest.raises(TaskError, match=r"latin\.jsonl:1: is not UTF-8"):
        task(str(latin))


def test_json_that_is_unusual_is_read(tmp_path: Path) -> None:
    row = '\ufeff{"prompt": "\\ud83d\\ude00", "answer": ' + "9" * 400 + ', "extra": ' + json.dumps(nested(63)) + "}\n"
    prompt = only_prompt(jsonl(tmp_path, row))
    assert (prompt.content, prompt.reference, prompt.extra["extra"]) == ("😀", int("9" * 400), nested(63))


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 or not")
    with pytest.raises(TaskError, match=r"rows\.parquet: cannot be read as parquet"):
        task(str(path))


def test_a_system_message_for_a_plain_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: is a plain prompt.*task\.chat = true"):
        task(jsonl(tmp_path, GOOD), system="Be kind.")


# ---- configuration


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"name": "files"}, "path is ''; expected a file of prompts"),
        ({"path": "x.jsonl"}, 'set name = "files"'),
        ({"template": "Q:"}, r"template is 'Q:'; expected a text with \{prompt\}"),
        ({"reward": "exakt"}, r"reward is 'exakt'; expected exact, gsm8k, math, .* FILE\.py:FUNCTION"),
        ({"reward": "mine.py"}, "reward is 'mine.py'"),
        ({"reward_timeout_s": 0.0}, "reward_timeout_s is 0.0"),
        ({"reward_processes": 0}, "reward_processes is 0"),
    ],
)
def test_wrong_knobs(knobs: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TaskSettings(**knobs)


def test_the_task_a_configuration_names(tmp_path: Path) -> None:
    files = task_of(RunConfig(task=TaskSettings(name="files", path=jsonl(tmp_path, GOOD))))
    assert isinstance(files, Task)
    assert isinstance(judge_of(files, RunConfig()), ProcessJudge)
    assert isinstance(judge_of(task_of(RunConfig()), RunConfig()), DirectJudge)
