"""Rewards: the built-in ones, and the user's function in verl's or TRL's calling convention, plain or async.

A returned value becomes a finite number, with the metrics told beside it, or a `Failed` with the reason, never a silent
zero. Owns the records that the run and its judging processes exchange. Does not know processes or time limits.
"""

import asyncio
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from os.path import dirname, isfile
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from tlt.errors import TaskError
from tlt.shipped import example_file
from tlt.tasks.math import exact, gsm8k, math_reward
from tlt.tasks.remote import RemoteReward, is_remote

FailureKind = Literal["raised", "timed out", "died", "no number"]
Function = Callable[..., Any]

VERL = "compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or {'score': number, …}"
TRL = "reward_func(prompts, completions, **columns) -> list of numbers"
_COMPLETION = {"verl": "solution_str", "trl": "completions"}  # convention → the parameter that identifies it
_LARGEST = 1e12  # limit of a reward's magnitude: float32 loses the squares and differences of larger values
_VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL_NAMES = ("prompts", "completions", "completion_ids")

_LONGEST = 4000  # characters kept from the end of a traceback

COMPARING: dict[str, Callable[[], Callable[[str, Any], float]]] = {  # with the reference
    "exact": lambda: exact,
    "gsm8k": lambda: gsm8k,
    "math": math_reward,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One completion to judge, in plain values."""

    prompt_id: str
    prompt: str | list[dict[str, str]]  # text, or a chat as messages {role, content}
    completion: str
    tokens: tuple[int, ...]  # of the completion
    reference: Any
    source: str  # the row's data_source, or the name of the file it comes from
    columns: Mapping[str, Any]  # of the prompt's row, without the prompt

    @property
    def reply(self) -> str | list[dict[str, str]]:
        """The completion in the prompt's form: text, or a chat of one message."""
        return self.completion if isinstance(self.prompt, str) else [{"role": "assistant", "content": self.completion}]


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why a completion has no reward."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward, and what its function told beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    applies: bool = True  # False: one of several rewards does not judge this completion


NOT_APPLICABLE = Scored(0.0, applies=False)


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to a judging process."""

    reward: str  # task.reward
    convention: str = "auto"  # task.reward_convention
    pattern: str = ""  # task.reward_format
    timeout_s: float = 10.0  # of a completion
    retries: int = 0
    one_of_several: bool = False  # None then says that the reward does not apply


@dataclass(frozen=True, slots=True)
class Ready:
    """The judging process has loaded its reward."""

    takes_groups: bool  # one call judges all completions of a prompt
    needs: tuple[str, ...]  # columns that are required parameters of the function


@dataclass(frozen=True, slots=True)
class Refused:
    """The judging process could not load its reward."""

    message: str


@dataclass(frozen=True, slots=True)
class Reward:
    """A loaded reward. `values` returns the function's value for each case."""

    values: Callable[[Sequence[Case]], Sequence[Any]]
    ready: Ready


def score(reward: Reward, cases: Sequence[Case]) -> tuple[Scored | Failed, ...]:
    """The reward of each case. Exceptions of the function propagate."""
    values = reward.values(cases)
    if len(values) != len(cases):
        said = f"the reward returned {len(values)} values for {len(cases)} completions; expected one each, in order"
        failed = Failed("no number", said)
        return (failed,) * len(cases)
    return tuple(scored_of(value) for value in values)


def open_reward(opening: Opening) -> Reward:
    """The reward that `task.reward` names: a built-in, FILE.py:FUNCTION, or a server."""
    reward = _opened(opening)
    if not opening.one_of_several:
        return reward
    return replace(
        reward, values=lambda cases: [NOT_APPLICABLE if value is None else value for value in reward.values(cases)]
    )


def _opened(opening: Opening) -> Reward:
    name = opening.reward
    if name in COMPARING:
        judge = COMPARING[name]()
        return Reward(lambda cases: [judge(case.completion, case.reference) for case in cases], Ready(False, ()))
    if name == "format":
        pattern = re.compile(opening.pattern)
        return Reward(
            lambda cases: [pattern.fullmatch(case.completion) is not None for case in cases], Ready(False, ())
        )
    if is_remote(name):
        remote = RemoteReward(name, opening.timeout_s, opening.retries)
        return Reward(lambda cases: remote.values([_sent(case) for case in cases]), Ready(True, ()))
    function = _load(name)
    return _as_verl(name, function) if _convention(name, function, opening.convention) == "verl" else _as_trl(function)


def _sent(case: Case) -> dict[str, Any]:
    """A case as a reward server gets it."""
    return {
        "prompt": case.prompt,
        "completion": case.completion,
        "tokens": len(case.tokens),
        "reference": case.reference,
        "data_source": case.source,
        "columns": dict(case.columns),
    }


def scored_of(value: Any) -> Scored | Failed:
    """A number, or a dictionary of which `score` is the reward and other numbers are metrics."""
    if isinstance(value, Scored):
        return value
    if not isinstance(value, Mapping):
        number = number_of(value)
        return number if isinstance(number, Failed) else Scored(number)
    if "score" not in value:
        return _no_number(value, "a number, or a dictionary with `score`")
    reward = number_of(value["score"])
    if isinstance(reward, Failed):
        return reward
    told = {str(name): number_of(other) for name, other in value.items() if name != "score"}
    return Scored(reward, {name: number for name, number in told.items() if isinstance(number, float)})


def number_of(value: Any) -> float | Failed:
    if isinstance(value, Failed):
        return value
    if isinstance(value, SupportsFloat):  # numbers, booleans, numpy and torch scalars; not text
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # an array or tensor of several, 10**400
            number = nan
        if abs(number) <= _LARGEST:
            return number
    return _no_number(value, f"a finite number, at most {_LARGEST:g} in size")


def _no_number(value: Any, expected: str) -> Failed:
    text = repr(value)
    return Failed("no number", f"the reward returned {text[:200]}{'…' * (len(text) > 200)}; expected {expected}")


# ---- the user's function


def _load(name: str) -> Function:
    file, _, attribute = name.rpartition(":")
    path = example_file(file)
    if not isfile(path):
        raise TaskError(
            f"task.reward {name}: no file {file}; expected FILE.py:FUNCTION, the file relative to {Path.cwd()}"
        )
    module_name = f"tlt_reward_{path.stem}"  # prefixed, so that a user's types.py does not replace the library's
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task.reward {name}: {file} is not a Python file; expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up
    sys.path += [str(path.resolve().parent), str(Path.cwd())]  # so that the file may import its neighbours
    spec.loader.exec_module(module)
    found = vars(module).get(attribute)
    if not callable(found):
        functions = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise TaskError(f"task.reward {name}: no function {attribute} in {file}; its functions are: {functions}")
    function: Function = found
    return function


def _convention(name: str, function: Function, requested: str) -> str:
    """The requested convention, or for "auto" the one that the parameter names identify. Raises if they disagree."""
    parameters = inspect.signature(function).parameters
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [kind for kind, completion in _COMPLETION.items() if completion in parameters]
    accepted = requested in named or (requested in _COMPLETION and keywords)
    fits = [requested] if accepted else named if requested == "auto" else []
    if len(fits) != 1:
        expected = {"verl": VERL, "trl": TRL}.get(requested, f"{VERL} (verl), or {TRL} (TRL)")
        raise TaskError(f"task.reward {name} has the signature {inspect.signature(function)}; expected {expected}")
    return fits[0]


def _as_verl(name: str, function: Function) -> Reward:
    """One completion per call. Calls of an async function run beside each other."""
    unknown = [needed for needed in _required(function) if needed not in _VERL_NAMES]
    if unknown:
        raise TaskError(f"task.reward {name} asks for {', '.join(unknown)}; expected {VERL}")

    def one(case: Case) -> Any:
        extra = case.columns.get("extra_info", case.columns)
        given = zip(_VERL_NAMES, (case.source, case.completion, case.reference, extra), strict=True)
        return function(**_accepted(function, dict(given)))

    if not inspect.iscoroutinefunction(function):
        return Reward(lambda cases: [one(case) for case in cases], Ready(False, ()))
    loop = asyncio.Runner()  # one for all calls, so that a session that the function keeps stays usable

    async def together(cases: Sequence[Case]) -> list[Any]:
        values = await asyncio.gather(*map(one, cases), return_exceptions=True)
        return [Failed("raised", users_part(value)) if isinstance(value, Exception) else value for value in values]

    return Reward(lambda cases: loop.run(together(cases)), Ready(True, ()))


def _as_trl(function: Function) -> Reward:
    """Several completions per call. Every column of the file is passed as a list."""
    loop = asyncio.Runner() if inspect.iscoroutinefunction(function) else None

    def all_of(cases: Sequence[Case]) -> Sequence[Any]:
        names = dict.fromkeys(name for case in cases for name in case.columns)
        columns = {name: [case.columns.get(name) for case in cases] for name in names}
        own = ([case.prompt for case in cases], [case.reply for case in cases], [list(case.tokens) for case in cases])
        called = function(**_accepted(function, columns | dict(zip(_TRL_NAMES, own, strict=True))))
        values = called if loop is None else loop.run(called)
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            return [_no_number(values, "a list with one number per completion")] * len(cases)
        return list(values)

    return Reward(all_of, Ready(True, tuple(name for name in _required(function) if name not in _TRL_NAMES)))


def users_part(error: BaseException) -> str:
    """The traceback, from the first frame of the user's code on."""
    frame = error.__traceback__
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).strip()[-_LONGEST:]


def _is_ours(file: str) -> bool:
    plumbing = (dirname(__file__), dirname(asyncio.__file__))
    return file.startswith("<frozen importlib") or dirname(file) in plumbing


def _required(function: Function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _accepted(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function's signature accepts."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
