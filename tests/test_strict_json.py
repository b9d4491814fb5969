"""JSON that anybody may have written: parsed into what can be walked, printed and encoded, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.errors import ModelError, shown
from tlt.strict_json import MAX_DEPTH, InvalidJson, parse, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(value=VALUES, ascii_only=st.booleans(), mark=st.sampled_from(["", "\ufeff"]))
def test_what_json_writes_is_read(value: Any, ascii_only: bool, mark: str) -> None:
    assert parse((mark + json.dumps(value, ensure_ascii=ascii_only)).encode()) == value


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=60) | st.text('[]{}":,0123456789.eE-\\udDn ', max_size=60).map(str.encode))
def test_anything_else_is_refused_in_one_line(text: bytes) -> None:
    refusal, value = "", None
    try:
        value = parse(text)
    except InvalidJson as error:
        refusal = str(error)
    assert "\n" not in refusal
    json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{", "is not valid JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b"{\n1", "is not valid JSON (Expecting property name enclosed in double quotes, line 2, column 1)"),
        (b'"caf\xe9"', "is not UTF-8 text"),
        ("[1]".encode("utf-16"), "is not UTF-8 text"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "is nested deeper than 64 levels"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "is nested deeper than 64 levels"),
        (b"9" * 5000, "holds an integer with too many digits"),
        (rb'["\uDC00"]', r"holds half of a surrogate pair, such as \ud800, which is no text"),
        (rb'{"\ud83d": 1}', r"holds half of a surrogate pair, such as \ud800, which is no text"),
    ],
)
def test_what_is_refused_says_why(text: bytes, expected: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse(text)
    assert str(caught.value) == expected


def test_what_is_only_long_is_read() -> None:
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    assert parse(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001
    assert parse(rb'"\ud83d\ude00 [[["') == "😀 [[["


def test_a_file_holds_an_object_or_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}')
    assert read_object(file, ModelError, "copy it again") == {"a": 1}
    for text, expected in (
        ("[1]", r"config\.json holds \[1\]; expected an object; copy it again"),
        ("", r"config\.json is not valid JSON \(Expecting value, column 1\); copy it again"),
    ):
        file.write_text(text)
        with pytest.raises(ModelError, match=expected):
            read_object(file, ModelError, "copy it again")
    with pytest.raises(ModelError, match=r"cannot be read \(Is a directory\); copy it again"):
        read_object(tmp_path, ModelError, "copy it again")


def test_a_value_is_shown_on_one_short_line() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown("a\nb") == r"'a\nb'"
    assert shown([1] * 1000) == "[" + "1, " * 39 + "1,…"
    assert shown(deep) == "a value of type list, too large to show"
    assert shown(16**5000) == "a value of type int, too large to show"
