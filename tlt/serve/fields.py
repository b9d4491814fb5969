"""Fields of a JSON body, each read once with its kind and bounds. A value of another kind is refused by name.

null means absent, as clients send it. Fields that nobody reads are ignored, as vLLM does; those that would change the
answer and are not supported must be refused (`only`).
"""

from collections.abc import Mapping
from typing import Any

from tlt.errors import shown
from tlt.serve.errors import refused

_INT64 = 2**63


class Fields:
    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix  # of names in messages

    def name(self, name: str) -> str:
        return self._prefix + name

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: int, low: int = 0, high: int = _INT64 - 1) -> int:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise refused(self.name(name), f"{shown(value)} is no integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise refused(self.name(name), f"{shown(value)} is no number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise refused(self.name(name), f"{shown(value)} is neither true nor false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise refused(self.name(name), f"{shown(value)} is no text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts."""
        value = self._body.get(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise refused(self.name(name), f"{shown(value)} is neither a text nor a list of texts")
        return tuple(found)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._body.get(name)
        if value is None:
            return ()
        if not is_tokens(value):
            raise refused(self.name(name), f"{shown(value)} is no list of token ids")
        return tuple(value)

    def object(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise refused(self.name(name), f"{shown(value)} is no object")
        return value

    def objects(self, name: str) -> list[dict[str, Any]]:
        value = self._body.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise refused(self.name(name), f"{shown(value)} is no list of objects")
        return value

    def only(self, name: str, *accepted: Any, why: str = "it would change the answer") -> None:
        """Refuses a field that is not supported, unless its value asks for nothing."""
        value = self._body.get(name)
        if value is not None and value not in accepted:
            raise refused(self.name(name), f"{shown(value)} is not supported, and {why}; leave it out")


def is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _INT64 for item in value)
