"""`tlt bench compare OLD NEW`: the numbers of two records that moved beyond a tolerance.

Numbers are compared by their path in the record. An item of a list is named by its position. Numbers that only one of
the records has are counted, not listed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, shown
from tlt.strict_json import read_object

TOLERANCE = 3.0  # percent
_CURE = "expected a record of tlt bench"


@dataclass(frozen=True, slots=True)
class MovedNumber:
    path: str
    old: float
    new: float
    change: float  # relative to the old number; infinite if that is 0

    def __str__(self) -> str:
        return f"{self.path}: {self.old:g} → {self.new:g} ({self.change:+.1%})"


def bench_compare(old: Path, new: Path, tolerance: float) -> Iterator[str]:
    """A line per number that moved by more than `tolerance` percent, the largest change first."""
    before, after = (dict(_numbers(read_object(file, ConfigError, _CURE))) for file in (old, new))
    common = before.keys() & after.keys()
    if not common:
        raise ConfigError(f"{old} and {new} have no number in common; expected two records of the same benchmark")
    moved = moved_numbers(before, after, tolerance / 100)
    yield from map(str, moved)
    yield f"{len(moved)} of {len(common)} numbers moved by more than {tolerance:g} %"
    for file, own in ((old, before), (new, after)):
        if left := len(own.keys() - common):
            yield f"{left} numbers are only in {file}"


def moved_numbers(old: dict[str, float], new: dict[str, float], tolerance: float) -> list[MovedNumber]:
    found = [MovedNumber(path, old[path], new[path], _change(old[path], new[path])) for path in old if path in new]
    return sorted((number for number in found if abs(number.change) > tolerance), key=lambda one: -abs(one.change))


def read_tolerance(word: str | None) -> float:
    """From the command line, in percent."""
    try:
        tolerance = TOLERANCE if word is None else float(word)
    except ValueError:
        tolerance = -1.0
    if not 0.0 <= tolerance < inf:
        raise ConfigError(f"--tolerance is {shown(word)}; expected a number of percent, 0 or more")
    return tolerance


def _change(old: float, new: float) -> float:
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else inf if new > 0 else -inf


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _numbers(item, f"{path}[{position}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
