"""`tlt bench compare`: what moved between two records, by path and relative change."""

import json
from pathlib import Path
from typing import Any

import pytest

from tlt.bench.compare import read_tolerance
from tlt.cli import main
from tlt.errors import ConfigError


def record(directory: Path, name: str, **changes: Any) -> str:
    content = {
        "machine": {"device": "CPU", "commit": "0123456789ab"},
        "sections": {"step": {"records": [{"batch": 1, "step_ms": 2.0}, {"batch": 8, "step_ms": 4.0}]}},
        "rewards": [0.0, 0.5],
        "exact": True,
    }
    (directory / name).write_text(json.dumps(content | changes), "utf-8")
    return str(directory / name)


def test_numbers_that_moved_are_printed_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"batch": 1, "step_ms": 2.05}, {"batch": 8, "step_ms": 3.0}]
    newer = {"sections": {"step": {"records": steps}}, "rewards": [0.25, 0.5], "exact": False, "more": 7}
    old, new = record(tmp_path, "old.json"), record(tmp_path, "new.json", **newer)
    assert main(["bench", "compare", old, new]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rewards[0]: 0 → 0.25 (+inf%)",
        "sections.step.records[1].step_ms: 4 → 3 (-25.0%)",
        "2 of 6 numbers moved by more than 3 %",
        f"1 numbers are only in {new}",
    ]
    assert main(["bench", "compare", old, new, "--tolerance", "2"]) == 0
    assert "sections.step.records[0].step_ms: 2 → 2.05 (+2.5%)" in capsys.readouterr().out
    assert main(["bench", "compare", old, old]) == 0
    assert capsys.readouterr().out == "0 of 6 numbers moved by more than 3 %\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "OLD"], "needs two records"),
        (["compare", "OLD", "OLD", "--run.seed", "1"], "takes no settings"),
        (["compare", "OLD", "none.json"], "none.json cannot be read"),
        (["compare", "OLD", "EMPTY"], "no number in common"),
        (["engine", "tiny", "OLD"], "is only for tlt bench compare"),
        (["engine", "tiny", "--tolerance", "2"], "is only for tlt bench compare"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text("{}", "utf-8")
    files = {"OLD": record(tmp_path, "old.json"), "EMPTY": str(tmp_path / "empty.json")}
    assert main(["bench", *(files.get(word, word) for word in arguments)]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-1", "three", "nan", "inf"])
def test_a_tolerance_is_a_percentage(word: str) -> None:
    with pytest.raises(ConfigError, match="--tolerance"):
        read_tolerance(word)
