"""Rows from every format: the same rows come out of all of them, and what cannot be read is named.

`data/saved_dataset` was written by `Dataset.save_to_disk` of datasets 5.2, in two shards. Its `ground_truth` holds a
text, a number and a list, which `datasets` keeps as JSON text.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tlt
from tlt.config import TaskSettings
from tlt.errors import TaskError
from tlt.recipe import load_config
from tlt.tasks.choose import task_of
from tlt.tasks.files import FileTask
from tlt.tasks.rows import read_rows
from tlt.types import Message

SAVED = Path(__file__).parent / "data" / "saved_dataset"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
ROWS = [{"prompt": CHAT, "answer": "4", "tags": ["a", "b"]}, {"prompt": CHAT[1:], "answer": "five", "tags": []}]


def columns(path: Path) -> list[dict[str, Any]]:
    return [dict(row.columns) for row in read_rows(path)]


def file_task(path: Path, **knobs: Any) -> FileTask:
    return FileTask(TaskSettings(name="files", path=str(path), **knobs))


# ---- one writer per format


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)


def write_arrow(path: Path, rows: list[dict[str, Any]], as_file: bool = False) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


WRITERS: list[tuple[str, Callable[[Path, list[dict[str, Any]]], None]]] = [
    ("rows.json", write_json),
    ("lines.json", write_lines),
    ("rows.jsonl", write_lines),
    ("rows.parquet", write_parquet),
    ("stream.arrow", write_arrow),
    ("file.arrow", lambda path, rows: write_arrow(path, rows, as_file=True)),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
def test_every_format_gives_the_same_rows(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    path = tmp_path / name
    write(path, ROWS)
    assert columns(path) == ROWS
    first = 1 if write is write_lines else 0
    assert [row.id for row in read_rows(path)] == [f"{name}:{first}", f"{name}:{first + 1}"]
    assert file_task(path).prompts[0].content == (Message("system", "Be brief."), Message("user", "2+2?"))


def test_a_csv_file_holds_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    long = "x" * 200_000  # more than csv takes by itself
    path.write_bytes(
        b'\xef\xbb\xbfprompt,answer,level\r\n"2+2,\n""quickly""?",4,\r\n\r\n' + long.encode() + b",5,1\r\n"
    )
    assert columns(path) == [
        {"prompt": '2+2,\n"quickly"?', "answer": "4", "level": None},
        {"prompt": long, "answer": "5", "level": "1"},
    ]
    assert [row.id for row in read_rows(path)] == ["rows.csv:0", "rows.csv:1"]


# ---- what `datasets` saves


def test_a_saved_dataset_is_read_in_order_with_its_own_types() -> None:
    pytest.importorskip("pyarrow")
    rows = columns(SAVED)
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": "four"},
        {"style": "rule", "ground_truth": 6},
        {"style": "rule", "ground_truth": [2, 3, 5]},
    ]
    assert [row["extra_info"] for row in rows] == [{"index": 0}, {"index": 1}, {"index": None}]
    prompts = file_task(SAVED).prompts
    assert [prompt.id for prompt in prompts] == ["saved_dataset:0", "saved_dataset:1", "saved_dataset:2"]
    assert prompts[2].content == (Message("system", "Be brief."), Message("user", "Primes below 6?"))
    assert prompts[2].reference == [2, 3, 5]


def test_a_shard_of_a_saved_dataset_is_a_file() -> None:
    pytest.importorskip("pyarrow")
    shards = sorted(SAVED.glob("*.arrow"))
    assert [row for shard in shards for row in columns(shard)] == columns(SAVED)
    assert len(shards) == 2


def test_shards_come_in_the_order_of_the_state_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    saved = shutil.copytree(SAVED, tmp_path / "saved")
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"].reverse()
    (saved / "state.json").write_text(json.dumps(state))
    assert columns(saved) == [columns(SAVED)[index] for index in (2, 0, 1)]


def test_a_dictionary_of_datasets_names_its_splits(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    shutil.copytree(SAVED, tmp_path / "train")
    with pytest.raises(TaskError, match=r"holds the splits \['train', 'test'\]; name one: .*/SPLIT"):
        file_task(tmp_path)
    assert len(file_task(tmp_path / "train").prompts) == 3


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, r"is a directory without state\.json; expected a file, or a directory that save_to_disk"),
        ("{", r"state\.json is not valid JSON .*; save the dataset again"),
        ("[]", r"state\.json holds \[\]; expected an object"),
        ("{}", r"state\.json: its _data_files are \[None\]; expected names of files"),
        ('{"_data_files": 3}', r"its _data_files are \[3\]"),
        ('{"_data_files": [{"filename": 3}]}', r"its _data_files are \[\{'filename': 3\}\]"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', r"expected names of files beside it"),
        ('{"_data_files": [{"filename": "state.json"}]}', r"state\.json: cannot be read as Arrow"),
    ],
)
def test_a_directory_that_is_no_dataset(tmp_path: Path, state: str | None, expected: str) -> None:
    pytest.importorskip("pyarrow")
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(TaskError, match=expected):
        file_task(tmp_path)


# ---- files that are wrong


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.json", b"[", r"rows\.json: is not valid JSON .*; expected a list of objects, or one object per line"),
        ("rows.json", b"7", r"rows\.json: is 7; expected a list of objects"),
        ("rows.json", b'[{"prompt": "p", "answer": "a"}, 7]', r"rows\.json, row 1: is 7; expected an object"),
        ("rows.json", b'{"prompt": "p", "answer": "a"}\n7', r"rows\.json:2: is 7; expected an object"),
        ("rows.json", b"[]", "holds no rows"),
        ("rows.csv", b"", "holds no rows"),
        ("rows.csv", b"prompt,answer\n", "holds no rows"),
        ("rows.csv", b"prompt,prompt\np,a\n", r"its first line is \['prompt', 'prompt'\]; expected the names"),
        ("rows.csv", b"prompt,answer\np,a\np\n", r"rows\.csv, row 1: has 1 values; expected 2: prompt, answer"),
        ("rows.csv", b"prompt,answer\n,a\n", r"rows\.csv, row 0: the prompt is None; expected text"),
        ("rows.csv", b"prompt,answer\np,\n", r"rows\.csv, row 0: has no reference"),
        ("rows.csv", b'prompt,answer\n"p"x,a\n', r"rows\.csv: cannot be read as CSV"),
        ("rows.csv", b"prompt,answer\ncaf\xe9,a\n", r"rows\.csv: is not UTF-8 text"),
        ("rows.arrow", b"", r"rows\.arrow: cannot be read as Arrow"),
        ("rows.arrow", b"ARROW1 or not", r"rows\.arrow: cannot be read as Arrow"),
        ("rows.arrow", b"not Arrow at all", r"rows\.arrow: cannot be read as Arrow"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskError, match=expected):
        file_task(path)


def test_arrow_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"Arrow needs pyarrow, which is not installed; pip install 'tlt-rl\[data\]'"):
        file_task(SAVED)


# ---- the page about data

PAGE = (Path(tlt.__file__).parents[1] / "docs" / "your_task.md").read_text("utf-8")


def block(language: str) -> str:
    """The first one of the language on the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[0]


@pytest.mark.parametrize(("language", "rows"), [("jsonl", 1), ("json", 2), ("csv", 2)])
def test_the_rows_that_the_page_shows_are_read(tmp_path: Path, language: str, rows: int) -> None:
    path = tmp_path / f"rows.{language}"
    path.write_text(block(language), encoding="utf-8")
    prompts = file_task(path).prompts
    assert len(prompts) == rows
    assert prompts[0].reference == "Paris"
    assert "Capital of France?" in str(prompts[0].content)


def test_the_system_prompt_that_the_page_shows_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text(block("csv"), encoding="utf-8")
    Path("recipe.toml").write_text(block("toml"), encoding="utf-8")
    (france, _) = sorted(task_of(load_config("recipe.toml")).sample(0, 2), key=lambda prompt: prompt.id)
    asked = re.search(r"gives `(\[.*?\])`", PAGE, flags=re.DOTALL)
    assert asked
    assert france.content == tuple(Message(**message) for message in json.loads(asked[1].replace("\n", " ")))
