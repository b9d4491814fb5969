"""The base class of events, and reading one from JSON with type checks.

Invariant: every field of an event that was read has the type that its class declares, so readers can compute with it.
"""

from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tlt.errors import shown


@dataclass(frozen=True, slots=True)
class Event:
    """Base class: a frozen record of plain values."""


E = TypeVar("E", bound=Event)
_KNOWN: dict[type[Event], dict[str, Any]] = {}  # types of the fields of a class, by their names
_LARGEST = 1e300  # of a number in a record: sums and multiples of such numbers are finite


class WrongField(ValueError):
    """A field has a value of another type. The message follows the name of the line."""


def has_fields(kind: type[Event], names: set[str]) -> bool:
    """Whether all names are known and every field without a default is present."""
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return needed <= names <= set(_types(kind))


def event_of(kind: type[E], values: dict[str, Any]) -> E:
    """The event with these values; lists become tuples. WrongField unless each value has the type of its field."""
    found = {name: _frozen(value) for name, value in values.items()}
    for name, value in found.items():
        if not _is(value, _types(kind)[name]):
            raise WrongField(f"`{name}` of {kind.__name__} is {shown(value)}; expected {_named(_types(kind)[name])}")
    return kind(**found)


def _types(kind: type[Event]) -> dict[str, Any]:
    if kind not in _KNOWN:
        hints = get_type_hints(kind)
        _KNOWN[kind] = {f.name: hints[f.name] for f in fields(kind)}
    return _KNOWN[kind]


def _frozen(value: Any) -> Any:
    """Converts lists to tuples at every depth."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is(value: Any, wanted: Any) -> bool:
    parts = get_args(wanted)
    match get_origin(wanted):
        case None:
            return wanted is Any or _is_plain(value, wanted)
        case origin if origin is Literal:
            return isinstance(value, str)  # a newer version may know more of them
        case origin if origin is UnionType:
            return any(_is(value, part) for part in parts)
        case origin if origin is dict:
            return isinstance(value, dict) and all(_is(item, parts[1]) for item in value.values())
        case _ if not isinstance(value, tuple):
            return False
        case _ if parts[-1] is Ellipsis:
            return all(_is(item, parts[0]) for item in value)
        case _:
            return len(value) == len(parts) and all(map(_is, value, parts))


def _is_plain(value: Any, wanted: type) -> bool:
    """Floats are finite, a bool is no number, and an integer is accepted where JSON dropped the fraction of a float."""
    if wanted is float:
        return type(value) in (float, int) and -_LARGEST < value < _LARGEST
    return type(value) is int and -_LARGEST < value < _LARGEST if wanted is int else isinstance(value, wanted)


def _named(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) and not get_args(wanted) else str(wanted)
