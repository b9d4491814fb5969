"""The cost book of a machine: measured seconds of forwards of a policy and its drafter, and the drafter's acceptance.

Rollouts of that machine can be simulated from it elsewhere. What always holds: a book that was read is complete and its
numbers are in range, or reading raises. Does not know how the costs were measured, and no tensors.
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
    device: str  # that was measured
    policy: str  # path of the measured policy
    gpu: bool  # True: a tree's nodes share one read of the context, and batches are padded
    rows: int  # largest batch
    pages: int  # of the KV cache
    page_size: int  # tokens of a page
    measured: tuple[Measured, ...]  # forwards with an empty KV cache, as an engine times them
    context_s: float  # added to a tick per token of context
    padded: bool  # True: every request's context counts as long as the longest in the batch
    prefill_s: float  # per prompt token
    plain_tick_s: float  # of a tick beside its forwards, in an engine without speculation
    off_tick_s: float  # the same, in an engine with speculation, for a tick without drafts
    verify_tick_s: float  # the same, for a tick that verifies drafts
    window: int = 0  # positions of the learned drafter's attention window; 0: no drafter was measured
    ranks: tuple[tuple[float, ...], ...] = ()  # acceptance per depth and rank, as in `tlt.spec.record`; (): unknown

    @property
    def drafts(self) -> bool:
        return bool(self.ranks)


def words_of(book: CostBook) -> dict[str, Any]:
    """The contents of a book's file."""
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
        DraftRecord(ranks, places=1, temperature=1.0)  # raises if they are out of range
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
