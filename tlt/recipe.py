"""Recipes and flags: a RunConfig from TOML, then from Python values and `--section.key value`, and back to TOML.

An unexpected key, section, type or value is a ConfigError of one line that says where it came from and what was
expected. `to_toml` writes the resolved configuration and reads back to an equal one.
"""

import difflib
import inspect
import io
import json
import re
import textwrap
import tokenize
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError, shown, shown_names
from tlt.shipped import recipe_names, recipe_path

_LINE = 120  # characters of documented TOML, where values are short
RENAMED = {"spec.chooser": "spec.shape_policy", "spec.light": "spec.quantized"}  # old key → present key
REMOVED = {  # old key → what there is instead
    "drafting.share": "drafter training now follows a forecast; drafting.forced_share trains in any case",
    "drafting.cold_share": "drafter training now follows a forecast; drafting.forced_share trains in any case",
}
RETYPED = {"train.checkpoint_activations": {True: "always", False: "never"}}  # key → old value → present value

# ---- what there is to set


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting."""

    key: str  # dotted
    type: Any
    home: type[Any]  # the section that declares it


def knobs(section: type[Any] = RunConfig, prefix: str = "") -> Iterator[Knob]:
    """Every knob, in the order of this file."""
    for name, type_ in get_type_hints(section).items():
        if is_dataclass(type_):
            yield from knobs(type_, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield Knob(prefix + name, type_, section)


def knob_docs() -> dict[str, str]:
    """Dotted key → the comment beside the knob, with its range if it is a number."""
    comments = {home: _comments(home) for home in {knob.home for knob in knobs()}}
    docs = {}
    for knob in knobs():
        doc, numbers = comments[knob.home].get(knob.key.rpartition(".")[2], ""), number_range(knob)
        docs[knob.key] = f"{doc} ({numbers})" if numbers else doc
    return docs


def number_range(knob: Knob) -> str:
    """What the knob's section expects of it, as it says of numbers that are far too small and too large."""
    item = get_args(knob.type)[0] if get_origin(knob.type) is tuple else knob.type
    if item not in (int, float):
        return ""
    name, said = knob.key.rpartition(".")[2], []
    for number in (item(-1e30), item(1e30)):
        try:
            knob.home(**{name: number if item is knob.type else (number,)})
        except TltError as error:
            subject, _, expected = str(error).partition("; expected ")
            said += [expected] if subject.startswith(f"{name} is ") else []
    return "; ".join(dict.fromkeys(said))


def flat(config: RunConfig) -> dict[str, Any]:
    """Dotted key → value."""
    return {knob.key: attrgetter(knob.key)(config) for knob in knobs()}


@cache
def _comments(section: type[Any]) -> dict[str, str]:
    """Field → the comment behind it, and on the lines below it that hold nothing else."""
    names: dict[int, str] = {}  # line → the first name on it; of a comment's line the field it belongs to
    comments: dict[str, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(section)).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            names.setdefault(line, token.string)
        elif token.type == tokenize.COMMENT:
            goes_on = line not in names and names.get(line - 1) in comments
            name = names.setdefault(line, names[line - 1]) if goes_on else names.get(line, "")
            comments[name] = " ".join(filter(None, (comments.get(name), token.string.lstrip("# "))))
    return comments


# ---- reading

_INTEGERS = range(-(2**63), 2**63)  # of 64 bits: torch and numpy take no larger ones
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # no file can be called that, and half a character cannot be written
_TOML_ERRORS = (ValueError, RecursionError)  # the parser's own is a ValueError, as is one for thousands of digits


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value and where it came from: a recipe's path, a flag, overrides or a configuration."""

    value: Any
    origin: str


def load_config(
    recipe: str | Path | RunConfig | None = None,
    flags: Sequence[str] = (),
    *,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The recipe (a TOML file, a configuration, or the defaults), with overrides on top, and flags on top of both.

    `overrides` maps dotted keys to values, `{"run.steps": 3}`, or sections to tables, `{"run": {"steps": 3}}`.
    `flags` are those of the command line: `["--run.steps=3"]`.
    """
    remaining, rest = take_flags(flags)
    if rest:
        raise ConfigError(f"unexpected argument {shown(rest[0])}; settings are given as --section.key value")
    settings = _settings_of(recipe)
    given = _read_overrides(overrides or {}) | _read_flags(remaining)
    config: RunConfig = _build(RunConfig, "", settings | given)
    _refuse_unread(given, config)
    return config


def _refuse_unread(given: Mapping[str, _Setting], config: RunConfig) -> None:
    """A drafter that a flag names and that nobody would read. A recipe may name one: to decode without it, to compare,
    a flag for `spec.drafter` is enough."""
    path = given.get("spec.path")
    if path and path.value and not config.spec.learned:
        raise ConfigError(
            f"{path.origin}: spec.path is {path.value!r}; expected nothing, as spec.drafter is {config.spec.drafter}: "
            "set spec.drafter to eagle or both"
        )


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parts `--section.key value` from the rest; flags come back as `--section.key=value`. Stops at `--`."""
    types = {knob.key: knob.type for knob in knobs()}
    flags, rest, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, _ = argument.partition("=")
        if argument == "--":
            rest += [argument, *waiting]
            break
        if not re.fullmatch(r"--\w[\w-]*(\.[\w-]+)+", name):
            rest.append(argument)
        elif equals:
            flags.append(argument)
        else:
            flags.append(f"{name}={_take_value(name, types.get(RENAMED.get(name[2:], name[2:])), waiting)}")
    return flags, rest


def _present(key: str, origin: str) -> str:
    """The present key of one that was renamed: files and flags of the last version are still read."""
    present = RENAMED.get(key, key)
    if present != key:
        warnings.warn(
            f"{origin}: {key} is now {present}; the next version refuses the old key", FutureWarning, stacklevel=2
        )
    return present


def _is_removed(key: str, origin: str) -> bool:
    """Files and flags of the last version are still read; a knob that is gone changes nothing."""
    if key in REMOVED:
        warnings.warn(
            f"{origin}: {key} is ignored: {REMOVED[key]}; the next version refuses it", FutureWarning, stacklevel=2
        )
    return key in REMOVED


def _take_value(name: str, type_: Any, waiting: list[str]) -> str:
    switch = type_ is bool or (name[2:] in RETYPED and (not waiting or waiting[0].startswith("--")))
    if switch and (not waiting or waiting[0] not in ("true", "false")):
        return "true"
    if not waiting or waiting[0].startswith("--"):
        raise ConfigError(f"{shown_names([name])} needs a value: {name[:40]} VALUE")
    return waiting.pop(0)


def _present_value(key: str, value: Any, origin: str) -> Any:
    """The present value of a knob that was a switch: files and flags of the last version are still read."""
    if key not in RETYPED or type(value) is not bool:
        return value
    present, old = RETYPED[key][value], _toml_value(value)
    warnings.warn(
        f"{origin}: {key} {old} is now {present}; the next version refuses {old}", FutureWarning, stacklevel=2
    )
    return present


def nearest_key(key: str) -> str | None:
    """The knob that was probably meant; a key without its section is looked for in all of them."""
    keys = [knob.key for knob in knobs()]
    tails = {known.rpartition(".")[2]: known for known in reversed(keys)}
    if key in tails:
        return tails[key]
    match = difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    tail = difflib.get_close_matches(key.rpartition(".")[2], tails, n=1, cutoff=0.7)
    return match[0] if match else tails[tail[0]] if tail else None


def _unknown(key: str, origin: str) -> NoReturn:
    near = nearest_key(key)
    hint = f"did you mean {near}?" if near else "`tlt config` lists what there is"
    raise ConfigError(f"{shown_names([origin])}: unknown key {shown_names([key])}; {hint}")


def _settings_of(recipe: str | Path | RunConfig | None) -> dict[str, _Setting]:
    if recipe is None:
        return {}
    if isinstance(recipe, RunConfig):
        return {key: _Setting(value, "configuration") for key, value in flat(recipe).items()}
    if isinstance(recipe, str | Path):
        return _read_recipe(recipe_path(recipe))
    raise ConfigError(
        f"the recipe is {shown(recipe)}; expected the path of a TOML file or a RunConfig; "
        'single settings go into overrides, {"run.steps": 3}'
    )


def _read_overrides(overrides: Mapping[str, Any]) -> dict[str, _Setting]:
    origin = "overrides"
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f'overrides is {shown(overrides)}; expected a mapping, {{"run.steps": 3}}')
    types = {knob.key: knob.type for knob in knobs()}
    settings: dict[str, _Setting] = {}
    for given, value in overrides.items():
        key = _present(given, origin)
        if _is_removed(key, origin):
            continue
        if key in types:
            settings[key] = _Setting(_checked(key, types[key], value, origin), origin)
        elif "." in key:
            _unknown(key, origin)
        else:
            settings |= _flatten({key: value}, RunConfig, "", origin)
    return settings


def _read_recipe(path: Path) -> dict[str, _Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(recipe_names())
        raise ConfigError(f"{path}: no such recipe; expected a TOML file, or a recipe of tlt's own: {names}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; expected a TOML file") from None
    except _TOML_ERRORS as error:
        raise ConfigError(f"{path}: is not valid TOML: {_toml_problem(error)}") from None
    return dict(_flatten(table, RunConfig, "", str(path)))


def _toml_problem(error: Exception) -> str:
    if isinstance(error, tomllib.TOMLDecodeError):
        return " ".join(str(error).split())
    return "it is nested too deep" if isinstance(error, RecursionError) else "an integer has too many digits"


def _flatten(table: Mapping[str, Any], section: Any, prefix: str, origin: str) -> Iterator[tuple[str, _Setting]]:
    types = get_type_hints(section)
    for name, value in table.items():
        key = _present(prefix + name, origin)
        if _is_removed(key, origin):
            continue
        name = key.removeprefix(prefix)
        if name not in types:
            _unknown_name(key, name, value, types, prefix, origin)
        if is_dataclass(types[name]):
            if isinstance(value, types[name]):  # a section of Python
                value = {each.name: getattr(value, each.name) for each in fields(value)}
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}: {key} is {shown(value)}; expected a section, [{key}]")
            yield from _flatten(value, types[name], key + ".", origin)
        else:
            yield key, _Setting(_checked(key, types[name], value, origin), origin)


def _unknown_name(key: str, name: str, value: Any, siblings: Mapping[str, Any], prefix: str, origin: str) -> NoReturn:
    sections = [known for known, type_ in siblings.items() if is_dataclass(type_)]
    near = difflib.get_close_matches(name, sections, n=1)
    if isinstance(value, dict) and near:
        raise ConfigError(f"{origin}: unknown section [{shown_names([key])}]; did you mean [{prefix}{near[0]}]?")
    if isinstance(value, dict):
        raise ConfigError(f"{origin}: unknown section [{shown_names([key])}]; expected one of {', '.join(sections)}")
    _unknown(key, origin)


def _checked(key: str, type_: Any, value: Any, origin: str) -> Any:
    """The value as its knob's type, without guessing: only an int may stand for a float, and a list for a tuple."""
    value = _present_value(key, value, origin)
    if type_ is float and type(value) is int and value in _INTEGERS:
        value = float(value)
    if type_ is str and isinstance(value, Path):
        value = str(value)
    if get_origin(type_) is tuple and isinstance(value, list | tuple):
        return tuple(_checked(key, get_args(type_)[0], item, origin) for item in value)
    choices = get_args(type_) if get_origin(type_) is Literal else ()
    fits = value in choices if choices else type(value) is type_
    if fits and type_ is float:
        fits = isfinite(value)
    elif fits and type_ is int:
        fits = value in _INTEGERS
    elif fits and type_ is str and _NO_TEXT.search(value):
        raise ConfigError(f"{origin}: {key} is {shown(value)}; expected UTF-8 text without NUL")
    if not fits:
        expected = f"{_type_words(type_)}{_choice_hint(value, choices)}"
        raise ConfigError(f"{origin}: {key} is {shown(value)}; expected {expected}")
    return value


def _choice_hint(value: Any, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else ()
    return f"; did you mean {near[0]}?" if near else ""


_TYPE_WORDS = {
    int: "an integer of at most 64 bits",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
}


def _type_words(type_: Any) -> str:
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(get_args(type_))
    if get_origin(type_) is tuple:
        return "a list, each item " + _type_words(get_args(type_)[0])
    return _TYPE_WORDS[type_]


def _read_flags(flags: Sequence[str]) -> dict[str, _Setting]:
    types = {knob.key: knob.type for knob in knobs()}
    settings: dict[str, _Setting] = {}
    for flag in flags:
        name, _, text = flag.partition("=")
        key = _present(name[2:], name)
        if _is_removed(key, name):
            continue
        if key not in types:
            _unknown(key, name)
        value = _from_text(key, types[key], text, name)
        if get_origin(types[key]) is tuple and key in settings:
            value = settings[key].value + value
        settings[key] = _Setting(value, name)
    return settings


def _from_text(key: str, type_: Any, text: str, origin: str) -> Any:
    """A flag's text as its knob's type; a list is `a,b`, or TOML (`["a,b"]`) where an item holds a comma."""
    if get_origin(type_) is tuple:
        if text.startswith("["):
            try:
                items = tomllib.loads(f"items = {text}")["items"]
            except _TOML_ERRORS:
                raise ConfigError(f"{origin}: {key} is {shown(text)}; expected {_type_words(type_)}") from None
        else:
            items = [_from_text(key, get_args(type_)[0], item, origin) for item in text.split(",")] if text else []
        return _checked(key, type_, items, origin)
    try:
        kind = bool if key in RETYPED and text in ("true", "false") else type_
        value = _SCALARS[kind](text) if kind in _SCALARS else text
    except (ValueError, KeyError):
        raise ConfigError(f"{origin}: {key} is {shown(text)}; expected {_type_words(type_)}") from None
    return _checked(key, type_, value, origin)


_SCALARS: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}


def _build(section: type[Any], prefix: str, settings: Mapping[str, _Setting]) -> Any:
    types = get_type_hints(section)
    values: dict[str, Any] = {}
    for name, type_ in types.items():
        if is_dataclass(type_):
            values[name] = _build(type_, f"{prefix}{name}.", settings)  # type: ignore[arg-type]
        elif prefix + name in settings:
            values[name] = settings[prefix + name].value
    try:
        return section(**values)
    except TltError as error:  # a section checks itself and opens its message with the key
        key = prefix + str(error).partition(" ")[0]
        origin = settings[key].origin if key in settings else "configuration"
        raise ConfigError(f"{origin}: {prefix}{error}") from None


# ---- writing


def to_toml(config: RunConfig, documented: bool = False) -> str:
    """The resolved configuration as TOML, each knob explained if asked; reading it back gives an equal one."""
    docs = knob_docs() if documented else {}
    return "\n".join(_section_lines(config, "", docs)).lstrip("\n") + "\n"


def _section_lines(section: Any, prefix: str, docs: Mapping[str, str]) -> Iterator[str]:
    values = {f.name: getattr(section, f.name) for f in fields(section)}
    plain = {name: value for name, value in values.items() if not is_dataclass(value)}
    if plain:
        yield f"\n[{prefix.rstrip('.')}]"
    for name, value in plain.items():
        line, doc = f"{name} = {_toml_value(value)}", docs.get(prefix + name, "")
        if doc and len(line) + len("  # ") + len(doc) <= _LINE:
            yield f"{line}  # {doc}"
        else:
            yield from (f"# {part}" for part in textwrap.wrap(doc, _LINE - len("# ")))
            yield line
    for name in (name for name in values if name not in plain):
        yield from _section_lines(values[name], f"{prefix}{name}.", docs)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
