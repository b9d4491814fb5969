"""The record format of all benchmarks, and its writer.

A record is a JSON object. Its `machine` has the hardware, the versions, the commit (with `-dirty` if files differ) and
the command; the other keys belong to the benchmark. A file on disk is always a complete record.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tlt.errors import TltError
from tlt.machine import describe


def new_record(device: torch.device | str, commit: str | None = None, **about: Any) -> dict[str, Any]:
    """A new record. `commit` is used only if git does not know the commit."""
    return {"machine": asdict(describe(torch.device(device), commit)), **about}


def write_record(file: Path, record: dict[str, Any]) -> None:
    if "machine" not in record:
        raise ValueError("the record has no machine; expected one that new_record began")
    text = json.dumps(record, indent=1, ensure_ascii=False, default=str)
    aside = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(file)  # after an error the earlier record is still there
    except OSError as error:
        raise TltError(f"--json {file} cannot be written ({error.strerror}); make room") from error
