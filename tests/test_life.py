"""The pages that follow a tick and a step through the code name files, classes and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

import tlt

ROOT = Path(tlt.__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("life_of_a_*.md"))
NAMED = re.compile(r"`(tlt/[\w/]+\.py)`\s+`([\w.]+)`")
NUMBERED = re.compile(r"^(\d)\. ", re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Classes, functions, and methods as `Class.method`."""
    found = set[str]()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def missing(text: str) -> list[str]:
    return [
        f"{path} {name}"
        for path, name in NAMED.findall(text)
        if not (ROOT / path).exists() or name not in defined(ROOT / path)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists_and_there_are_eight_sentences(page: Path) -> None:
    text = page.read_text("utf-8")
    assert missing(text) == []
    assert NUMBERED.findall(text) == list("12345678")
    assert all(NAMED.search(sentence) for sentence in NUMBERED.split(text)[2::2])


def test_there_are_pages_and_what_is_missing_is_noticed() -> None:
    assert PAGES
    assert missing("`tlt/loop.py` `Loop.leap` and `tlt/loop.py` `Loop.step`") == ["tlt/loop.py Loop.leap"]
    assert missing("`tlt/lop.py` `Loop`") == ["tlt/lop.py Loop"]
