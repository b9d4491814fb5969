"""Records of benchmarks: one header, one writer."""

import json
import re
from pathlib import Path

import pytest

import tlt
from tlt.bench.record import new_record, write_record
from tlt.errors import TltError

SCRIPTS = sorted((Path(tlt.__file__).parents[1] / "benchmarks").glob("*.py"))
BENCH = sorted((Path(tlt.__file__).parent / "bench").glob("*.py"))
WRITES = re.compile(r"write_text\(\s*json\.dumps|json\.dump\(")
# Not records: the notes of a preparation and the settings of a tokenizer.
NO_RECORD = {"preparing.py": 2}


def test_a_record_says_what_was_measured_where(tmp_path: Path) -> None:
    file = tmp_path / "new" / "record.json"
    write_record(file, new_record("cpu", "0123456", requests=4, figures=[1.5]))
    kept = json.loads(file.read_text("utf-8"))
    assert set(kept) == {"machine", "requests", "figures"}
    assert kept["machine"].keys() >= {"device", "cpu", "torch", "tlt", "commit", "command", "date"}
    assert [path.name for path in file.parent.iterdir()] == ["record.json"]


def test_a_record_without_a_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no machine"):
        write_record(tmp_path / "record.json", {"figures": []})


def test_an_earlier_record_survives_a_failure(tmp_path: Path) -> None:
    (tmp_path / ".record.json.part").mkdir()
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(TltError, match="cannot be written"):
        write_record(tmp_path / "record.json", new_record("cpu"))
    assert (tmp_path / "record.json").read_text() == "{}"


@pytest.mark.parametrize("path", [*SCRIPTS, *BENCH], ids=lambda path: path.name)
def test_no_benchmark_writes_a_record_by_itself(path: Path) -> None:
    assert len(WRITES.findall(path.read_text("utf-8"))) == NO_RECORD.get(path.name, 0)
    assert WRITES.search("out.write_text(json.dumps(record))")
