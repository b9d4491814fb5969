"""`tlt VERB --help`: what the verb does, its arguments, and every knob that it reads, with type, meaning and default.

Writes text from tables. Does not parse, and does not know what a verb does with its knobs.
"""

import textwrap
from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from tlt.config import RunConfig
from tlt.recipe import Knob, flat, knob_docs, knobs

_EPILOG = "A knob is a flag, --section.key VALUE, or a line of a recipe; `tlt config` prints them all as TOML."


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument as help shows it."""

    name: str  # an option begins with --
    meaning: str
    takes_value: bool = True
    optional: bool = False  # a position that may stay empty
    subjects: tuple[str, ...] = ()  # of which alone it is an argument; (): of all


def verb_help(
    prog: str, summary: str, arguments: Sequence[Argument], subjects: Mapping[str, str], sections: Sequence[str]
) -> str:
    """`subjects` are what the verb can be told to do, with their meanings, where it is not told yet; `sections` are
    prefixes of knobs."""
    parser = ArgumentParser(prog, epilog=_EPILOG if sections else None, formatter_class=_Wide, add_help=False)
    for argument in arguments:
        about = f"{', '.join(argument.subjects)}: " if argument.subjects and subjects else ""
        meaning = (about + argument.meaning).replace("%", "%%")
        if not argument.name.startswith("-"):
            many = {"nargs": "?"} if argument.optional else {}
            parser.add_argument(argument.name, help=meaning, metavar=argument.name.upper(), **many)  # type: ignore[arg-type]
        elif argument.takes_value:
            parser.add_argument(argument.name, help=meaning, metavar=argument.name.strip("-").upper())
        else:
            parser.add_argument(argument.name, help=meaning, action="store_true")
    knob = " [--section.key VALUE ...]" if sections else ""
    parser.usage = parser.format_usage().removeprefix("usage: ").strip().replace("%", "%%") + knob
    told = [f"  {prog} {name}: {meaning}" for name, meaning in subjects.items()]
    parser.description = "\n".join([_sentence(summary), *told])
    _add_knobs(parser, sections)
    return parser.format_help()


class _Wide(HelpFormatter):
    """Keeps the lines of a description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in text.splitlines())


def _add_knobs(parser: ArgumentParser, sections: Sequence[str]) -> None:
    docs, defaults = knob_docs(), flat(RunConfig())
    for section, members in _grouped(knob for knob in knobs() if _is_under(knob.key, sections)):
        about = (members[0].home.__doc__ or "").split("\n")[0]
        group = parser.add_argument_group(f"[{section}]", about.replace("%", "%%"))
        for knob in members:
            meaning = f"{docs[knob.key]}; default {_shown(defaults[knob.key])}".replace("%", "%%")
            group.add_argument(f"--{knob.key}", metavar=_kind(knob.type), help=meaning, default=SUPPRESS)


def _is_under(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _grouped(found: Iterable[Knob]) -> Iterable[tuple[str, list[Knob]]]:
    groups: dict[str, list[Knob]] = {}
    for knob in found:
        groups.setdefault(knob.key.rpartition(".")[0], []).append(knob)
    return groups.items()


def _kind(type_: Any) -> str:
    """The values that a knob takes, in a word."""
    if get_origin(type_) is Literal:
        return "{" + ",".join(get_args(type_)) + "}"
    if get_origin(type_) is tuple:
        word = _kind(get_args(type_)[0])
        return f"{word},{word},…"
    return {int: "N", float: "X", bool: "{true,false}"}.get(type_, "TEXT")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else '""'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
