"""The acceptance record of a drafter: its measured acceptance table, kept beside its weights as a prior for tuners.

What always holds: a record that was read is complete and in range, or reading raises; a missing record is no error. A
record belongs to the weights beside it: writing other weights replaces or removes it. Does not know tensors or tuners.
"""

import json
import os
from dataclasses import asdict, dataclass
from math import inf
from os.path import isfile
from pathlib import Path
from typing import Any

from tlt.errors import ModelError, shown
from tlt.strict_json import InvalidJson, parse

FILE = "acceptance.json"
_FIELDS = {"ranks", "places", "temperature"}
_ROUNDING = 1e-6  # by which the probabilities of one depth may sum to more than 1
_CURE = "train the drafter again, or remove the file: tuners then start without it"


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """Measured on held-out completions, with the noise they were drawn with and the fitted β."""

    ranks: tuple[tuple[float, ...], ...]  # p_d(r), see `tlt.spec.acceptance`: a row per depth from 1, its ranks from 1
    places: int  # positions of the completions from which a draft was followed
    temperature: float  # of the completions

    def __post_init__(self) -> None:
        problem = _problem(self.ranks, self.places, self.temperature)
        if problem:
            raise ModelError(f"no record of a drafter: {problem}")


def record_text(record: DraftRecord) -> str:
    return json.dumps(asdict(record)) + "\n"


def parse_record(text: str) -> DraftRecord:
    """Reads the text of `record_text`. Raises ModelError if something does not fit."""
    try:
        words = parse(text.encode())
    except InvalidJson as error:
        raise ModelError(f"it {error}") from None
    if not isinstance(words, dict) or set(words) != _FIELDS:
        found = f"the names {shown(sorted(words))}" if isinstance(words, dict) else f"a {type(words).__name__}"
        raise ModelError(f"it holds {found}; expected an object with {sorted(_FIELDS)}")
    problem = _problem(**words)
    if problem:
        raise ModelError(problem)
    return DraftRecord(tuple(tuple(map(float, row)) for row in words["ranks"]), words["places"], words["temperature"])


def read_record(directory: Path | str) -> DraftRecord | None:
    """The record of the drafter in this directory; None if there is none."""
    file = Path(directory) / FILE
    if not isfile(file):
        return None
    try:
        return parse_record(file.read_text(encoding="utf-8"))
    except (ModelError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{file} is no record of a drafter: {error}; {_CURE}") from error


def write_record(record: DraftRecord | None, directory: Path) -> None:
    """Writes the record. None: the weights there are not measured, so an older record is removed."""
    file = directory / FILE
    if record is None:
        file.unlink(missing_ok=True)
    else:
        beside = file.with_name(f".{FILE}.{os.getpid()}")
        beside.write_text(record_text(record), encoding="utf-8")
        beside.replace(file)


def keep_better(record: DraftRecord, directory: Path) -> DraftRecord:
    """Writes the record unless the existing one was measured on more positions. Returns the one that is kept.

    For unchanged weights. A damaged record is replaced.
    """
    try:
        known = read_record(directory)
    except ModelError:
        known = None
    if known is not None and known.places > record.places:
        return known
    write_record(record, directory)
    return record


def _problem(ranks: Any, places: Any, temperature: Any) -> str:
    """What was found and expected; "" if the values are in range."""
    if not isinstance(places, int) or isinstance(places, bool) or places < 1:
        return f"places is {shown(places)}; expected a whole number ≥ 1"
    if not _is_number(temperature) or temperature < 0.0:
        return f"temperature is {shown(temperature)}; expected a finite number ≥ 0"
    if not isinstance(ranks, list | tuple) or not ranks:
        return f"ranks is {shown(ranks)}; expected a row of chances per depth"
    for depth, row in enumerate(ranks, 1):
        if not isinstance(row, list | tuple) or not row:
            return f"ranks at depth {depth} is {shown(row)}; expected a row of chances"
        if len(row) != len(ranks[0]):
            return f"ranks has {len(row)} chances at depth {depth} and {len(ranks[0])} at depth 1; expected as many"
        for rank, chance in enumerate(row, 1):
            if not _is_number(chance) or not 0.0 <= chance <= 1.0:
                return f"ranks at depth {depth}, rank {rank} is {shown(chance)}; expected a number from 0 to 1"
        if sum(row) > 1.0 + _ROUNDING:
            return f"ranks at depth {depth} add up to {sum(row):.6g}; expected at most 1"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf
