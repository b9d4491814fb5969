"""JSON from files that anybody may have written: parsed into plain values, or refused in one sentence.

What always holds: parsed text can be encoded as UTF-8, and no value is nested deeper than MAX_DEPTH, so walking,
printing or copying the result raises no RecursionError or UnicodeError. Knows nothing of what the values mean.
"""

import json
import re
from pathlib import Path
from typing import Any

from tlt.errors import TltError, shown

MAX_DEPTH = 64  # levels of lists and objects inside each other
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that may leave half a character behind
_HALF = re.compile("[\ud800-\udfff]")


class InvalidJson(ValueError):
    """The message goes behind a file's name: "is not valid JSON …"."""


def parse(text: bytes) -> Any:
    """The value a UTF-8 text holds, a byte order mark aside."""
    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded)
    except UnicodeDecodeError:
        raise InvalidJson("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in decoded else ""
        raise InvalidJson(f"is not valid JSON ({error.msg}, {line}column {error.colno})") from None
    except RecursionError:
        raise InvalidJson(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # Python refuses to read integers of thousands of digits
        raise InvalidJson("holds an integer with too many digits") from None
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise InvalidJson(f"is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(decoded) and _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise InvalidJson(r"holds half of a surrogate pair, such as \ud800, which is no text")
    return value


def read_object(file: Path, error: type[TltError], cure: str) -> dict[str, Any]:
    """The object a file holds; `error`, with what to do about it, where it holds none."""
    try:
        value = parse(file.read_bytes())
    except OSError as problem:
        raise error(f"{file} cannot be read ({problem.strerror}); {cure}") from None
    except InvalidJson as problem:
        raise error(f"{file} {problem}; {cure}") from None
    if not isinstance(value, dict):
        raise error(f"{file} holds {shown(value)}; expected an object; {cure}")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
