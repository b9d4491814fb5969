"""Rewards that compare with a reference: numbers, GSM8K's format, and mathematical expressions (math-verify).

A correct completion earns 1, any other 0. A completion that cannot be parsed is not correct. A reference that cannot be
parsed is a TaskError. Works on text only. `math` needs the extra of the same name; the others need no extra.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tlt.errors import TaskError

MARKER = "####"  # precedes the result in GSM8K
_BOXED = "\\boxed{"
_LIMIT_S = 2  # limit of one parse or comparison of math-verify: a policy may write 9^{9^{9^9}}

# A minus is a sign unless it follows an operand. A comma is accepted as a thousands separator only.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])-)?\$?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)")


def last_number(text: str) -> Decimal | None:
    """The last number in a text: `$1,000`, `-3`, `.5`; None if there is none."""
    found = _numbers(text)
    return found[-1] if found else None


def gsm8k_reference(answer: str) -> str | None:
    """The text after the last `####` of a GSM8K reference, without commas. None without the marker."""
    _, mark, result = answer.rpartition(MARKER)
    return result.strip().replace(",", "") if mark and result.strip() else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{…}`, the inner one if nested. None if there is none."""
    opened: list[tuple[int, bool]] = []  # per open brace: start of its content, and whether it is a \boxed
    last, content = -1, None
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:
            start, boxed = opened.pop()
            if boxed and start > last:
                last, content = start, text[start : brace.start()]
    return content


def exact(completion: str, reference: Any) -> float:
    """1 if the completion equals the reference, ignoring case and spaces, or its last number equals the reference."""
    wanted = _text(reference)
    if _plain(completion) == _plain(wanted):
        return 1.0
    number = _whole_number(wanted)
    return float(number is not None and last_number(completion) == number)


def gsm8k(completion: str, reference: Any) -> float:
    """1 if the first number after the last `####`, or without `####` the last number, equals the reference."""
    wanted = _text(reference)
    number = last_number(gsm8k_reference(wanted) or wanted)
    if number is None:
        raise TaskError(
            f"the reference is {reference!r}; the reward gsm8k expects a number, or text with `#### number`"
        )
    marked = _numbers(completion.rpartition(MARKER)[2]) if MARKER in completion else []
    return float((marked[0] if marked else last_number(completion)) == number)


def math_reward() -> Callable[[str, Any], float]:
    r"""The reward `math`: 1 if the last `\boxed{…}`, else math-verify's extraction, equals the reference."""
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError:
        raise TaskError(
            "the reward `math` needs math-verify, which is not installed; pip install 'tlt-rl[math]', "
            "or take the reward exact or gsm8k"
        ) from None

    def math(completion: str, reference: Any) -> float:
        wanted = _text(reference)
        gold = parse(wanted if "$" in wanted or _BOXED in wanted else f"{_BOXED}{wanted}}}", parsing_timeout=_LIMIT_S)
        if not gold:
            raise TaskError(f"the reference is {reference!r}; math-verify cannot read it as a number or an expression")
        boxed = last_boxed(completion)
        given = parse(completion if boxed is None else f"{_BOXED}{boxed}}}", parsing_timeout=_LIMIT_S)
        return float(verify(gold, given, timeout_seconds=_LIMIT_S))

    return math


def _text(reference: Any) -> str:
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise TaskError(f"the reference is {reference!r}; the built-in rewards expect text or a number")
    return str(reference)


def _numbers(text: str) -> list[Decimal]:
    return [_decimal(number) for number in _NUMBER.findall(text.replace("−", "-"))]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _whole_number(text: str) -> Decimal | None:
    found = _NUMBER.fullmatch(text.strip().replace("−", "-"))
    return _decimal(found[0]) if found else None


def _decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", number))
