"""The book of a machine: what runs of a policy and its drafter were measured to cost, and what the policy accepts.

With it rollouts are foreseen where that machine is not. What always holds: a book is whole and sensible or an error.
Knows nothing of who measures, and no tensors.
"""

import json
from dataclasses import asdict, dataclass, fields
from math import inf
from os.path import isfile
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, ModelError, shown
from tlt.spec.costs import POLICY, Measured
from tlt.spec.record import DraftRecord
from tlt.strict_json import read_object

_KINDS: dict[type, str] = {str: "words", bool: "true or false", int: "a whole number ≥ 0", float: "a number ≥ 0"}


@dataclass(frozen=True, slots=True)
class CostBook:
    device: str  # what it was measured on
    policy: str  # and of what
    gpu: bool  # a tree reads its context once, however many nodes it has; batches are padded
    rows: int  # requests that decode at the same time, at most
    pages: int  # of the key-value cache
    page_size: int  # tokens of a page
    measured: tuple[Measured, ...]  # runs over an empty cache, as an engine measures them
    context_s: float  # that a tick takes longer for every token that is looked back on …
    padded: bool  # … by each request, if it looked back as far as the one that looks back furthest
    prefill_s: float  # of a prompt's token
    plain_tick_s: float  # beside the run of the policy, of an engine that never drafts …
    off_tick_s: float  # … of one that might, but does not now …
    verify_tick_s: float  # … and where drafts are verified, beside all runs
    window: int = 0  # positions a learned drafter looks back; 0: none was measured
    ranks: tuple[tuple[float, ...], ...] = ()  # how often its guesses are right, as in `tlt.spec.record`; (): unknown

    @property
    def drafts(self) -> bool:
        return bool(self.ranks)


def words_of(book: CostBook) -> dict[str, Any]:
    """As it stands in a file."""
    return asdict(book) | {"measured": [[cost.role, cost.size, cost.seconds] for cost in book.measured]}


def write_book(book: CostBook, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(words_of(book), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_book(file: Path) -> CostBook:
    if not isfile(file):
        raise ConfigError(
            f"{file} is not there; expected a book of costs, which `tlt simulate MODEL … --save FILE` writes"
        )
    words = read_object(file, ConfigError, "expected a book of costs")
    try:
        return _book(words)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"{file} is no book of costs: {error}; measure again") from error


def _book(words: dict[str, Any]) -> CostBook:
    names = {field.name for field in fields(CostBook)}
    if set(words) != names:
        found = shown(sorted(set(words) ^ names))
        raise ConfigError(f"these names are missing or too many: {found}; expected {sorted(names)}")
    for field in fields(CostBook):
        if field.type in _KINDS:
            _check(field.name, words[field.name], field.type)
    measured = tuple(_measured(row) for row in _list("measured", words["measured"]))
    if not any(cost.role == POLICY for cost in measured):
        raise ConfigError(f"nothing of the role {POLICY!r} was measured; expected runs of several sizes")
    ranks = tuple(tuple(_list("a row of ranks", row)) for row in _list("ranks", words["ranks"]))
    if ranks:
        DraftRecord(ranks, places=1, temperature=1.0)  # says what does not fit
    book = CostBook(**{**words, "measured": measured, "ranks": ranks})
    for name in ("rows", "pages", "page_size"):
        if getattr(book, name) < 1:
            raise ConfigError(f"{name} is {getattr(book, name)}; expected at least 1")
    return book


def _check(name: str, value: Any, kind: Any) -> None:
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if kind in (int, float):
        fits = fits and not isinstance(value, bool) and 0 <= value < inf
    if not fits:
        raise ConfigError(f"{name} is {shown(value)}; expected {_KINDS[kind]}")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {shown(value)}; expected a list")
    return value


def _measured(row: Any) -> Measured:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        raise ConfigError(f"a cost is {shown(row)}; expected [role, size, seconds]")
    _check("a size", row[1], int)
    _check("seconds", row[2], float)
    if row[1] < 1:
        raise ConfigError(f"a size is {row[1]}; expected at least 1")
    return Measured(*row)
